"""Rows that teach an encoder what is a sentence: good ones, and each again with a fault of grammar, as linguists mark them:
agreement, verb forms, case, words that lack, are too many, or stand elsewhere. A classifier of these is a good start for CoLA.

    python examples/disturbed.py accept.jsonl corpus.txt blimp/data/*.jsonl     # rows {"text": ..., "label": 1 or 0}
    python examples/disturbed.py accept.jsonl corpus.txt --without cola.val.jsonl      # whose `text` is to be judged: no such row
    modelcenter train classify model=... data.path=accept.jsonl

A text gives its sentences of 4 to 22 words, each once; a .jsonl file is of pairs that are such already, as BLiMP's (Warstadt et
al., 2020) `sentence_good` and `sentence_bad`. Some faults make another sentence that is none the worse: most labels are right.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

EACH_OTHER = (
    "is are/was were/has have/does do/isn't aren't/wasn't weren't/doesn't don't/hasn't haven't/am is/be been/been being/go went/"
    "goes gone/this these/that those/he him/she her/they them/we us/i me/his him/her hers/their them/my me/himself themselves/"
    "herself himself/himself him/themselves them/much many/little few/some any/never ever/each all/every all/a some/man men/"
    "woman women/child children/person people/who which/who what/that what/which where/if that/because although/and that/more most/"
    "than that/yet already/too either"
)  # fmt: skip
KINDS = [words.split() for words in (
    "the a an this that these those my your his her its our their some any every each no",
    "of in on at to for with by from about into over under after before through between against without during",
    "is are was were be been being has have had do does did will would can could may might must should shall to not",
    "i you he she it we they him them us me himself herself themselves itself there",
    "who whom what which where when why how whose that whether",
)]  # fmt: skip
BEFORE_A_STEM = {*KINDS[2][13:], "don't", "doesn't", "didn't", "won't", "wouldn't", "can't", "couldn't", "do"}  # will, to ...
SMALL = {word for kind in KINDS for word in kind} | {"and", "or", "but", "if", "as", "than", "so", "because"}
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|\d[\d,.]*|[^\sA-Za-z\d]")
INSTEAD: dict[str, list[str]] = {}
for pair in EACH_OTHER.split("/"):
    one, other = pair.split()
    INSTEAD.setdefault(one, []).append(other)
    INSTEAD.setdefault(other, []).append(one)


def forms(word: str) -> list[str]:
    """Other forms of what may be a verb or a noun, some of which are none."""
    if word.endswith("ing") and len(word) > 5:
        return [word[:-3], word[:-3] + "ed", word[:-3] + "e"]
    if word.endswith("ed") and len(word) > 4:
        return [word[:-2], word[:-1], word[:-2] + "ing", word[:-2] + "s"]
    if word.endswith("s") and not word.endswith("ss") and len(word) > 3:
        return [word[:-1], word[:-1] + "ing"]
    if not word.isalpha() or len(word) < 3 or word in SMALL:
        return []
    silent = word.endswith("e")
    return [word + "s", word + ("d" if silent else "ed"), (word[:-1] if silent else word) + "ing"]


def fault(words: list[str], draw: random.Random) -> list[str]:
    """`words` with one fault; as they are, where the kind of fault that was drawn has no place."""
    out, kind = list(words), draw.random()
    small = draw.choice(KINDS)
    there = [n for n, word in enumerate(words) if word in small]
    at = draw.randrange(len(words))
    if kind < 0.20:  # agreement, case, quantity
        if places := [n for n, word in enumerate(words) if word in INSTEAD]:
            at = draw.choice(places)
            out[at] = draw.choice(INSTEAD[words[at]])
    elif kind < 0.38:  # a form, behind a modal as often as not
        places = [n for n, word in enumerate(words) if forms(word) and word not in SMALL]
        bare = [n for n in places if n and words[n - 1] in BEFORE_A_STEM]
        if places:
            at = draw.choice(bare if bare and draw.random() < 0.5 else places)
            out[at] = draw.choice(forms(words[at]))
    elif kind < 0.50:  # a small word lacks
        if there:
            del out[draw.choice(there)]
    elif kind < 0.58:  # any word lacks
        del out[at]
    elif kind < 0.66:  # one too many
        out.insert(at, draw.choice(small))
    elif kind < 0.72:  # another of its kind
        if there:
            out[draw.choice(there)] = draw.choice(small)
    elif kind < 0.82:  # neighbours change places
        out[at : at + 2] = reversed(out[at : at + 2])
    elif kind < 0.96:  # a word stands elsewhere
        word = out.pop(at)
        out.insert(draw.randrange(len(words)), word)
    elif len(words) > 5:  # what comes last lacks
        del out[-draw.randint(1, 3) :]
    return out


def disturbed(sentence: str, draw: random.Random) -> str | None:
    """The sentence with a fault, one in five with two, in lower case between spaces; None where none was found."""
    words = [word.lower() for word in WORD.findall(sentence)]
    end = [words.pop()] if words and words[-1] in ".?!" else []
    for _ in range(8 if len(words) > 2 else 0):
        found = fault(words, draw)
        found = fault(found, draw) if len(found) > 2 and draw.random() < 0.2 else found
        if found != words:
            return " ".join(found + end)
    return None


def sentences(text: str) -> Iterator[str]:
    """Those of 4 to 22 words that begin like one and end like one, each once."""
    seen = set()
    for sentence in re.split(r"\n+|(?<=[.?!])\s+(?=[A-Z])", text):
        if 4 <= len(sentence.split()) <= 22 and sentence[-1] in ".?!" and sentence[0].isupper() and sentence not in seen:
            seen.add(sentence)
            yield sentence


def pairs(file: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(good, bad)"""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        for line in text.splitlines():
            row = json.loads(line)
            yield row["sentence_good"], row["sentence_bad"]
        return
    for sentence in sentences(text):
        if (bad := disturbed(sentence, draw)) is not None:
            yield sentence, bad


def letters(sentence: str) -> str:
    """By which two are the same: letters and digits, in lower case."""
    return re.sub(r"[\W_]", "", sentence.lower())


def main(out: str, *files: str) -> int:
    names, judged = list(files), set[str]()
    if "--without" in names:
        at = names.index("--without")
        lines = [line for name in names[at + 1 :] for line in Path(name).read_text(encoding="utf-8").splitlines()]
        judged = {letters(json.loads(line)["text"]) for line in lines}
        del names[at:]
    draw = random.Random(0)
    found = [(text, label) for name in names for good, bad in pairs(Path(name), draw) for text, label in ((good, 1), (bad, 0))]
    rows = [{"text": text, "label": label} for text, label in found if letters(text) not in judged]
    draw.shuffle(rows)
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} rows" + (f"; {len(found) - len(rows)} left out" if judged else ""))
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 3:
        sys.exit("usage: disturbed.py OUT.jsonl TEXT ... [--without ROWS.jsonl ...]")
    try:
        sys.exit(main(*sys.argv[1:]))
    except OSError as error:
        sys.exit(f"error: {error}")
