"""Texts against references. BLEU and chrF are sacrebleu's, ROUGE is rouge_score's: extras, imported where they are used;
`table.check_packages` says which of them is missing."""

import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib import import_module

Texts = Sequence[str]
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]{5}")  # Thai to Han


def exact_match(found: Texts, wanted: Texts) -> float:
    """The share of texts that equal the reference, ignoring spaces around them."""
    return sum(f.strip() == w.strip() for f, w in zip(found, wanted, strict=True)) / len(found)


def normalised(text: str) -> str:
    """As SQuAD's own script: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_pair(found: str, wanted: str | Sequence[str]) -> tuple[float, float]:
    """(exact match, F1 of words), each against the best-matching reference; no references mean that there is no answer. As in the
    evaluation script of SQuAD 2.0 (Rajpurkar et al., 2018), references that consist of nothing but articles are left out."""
    wanted = [w for w in ([wanted] if isinstance(wanted, str) else wanted) if normalised(w)] or [""]
    f = normalised(found).split()
    best = 0.0
    for reference in wanted:
        w = normalised(reference).split()
        same = sum((Counter(f) & Counter(w)).values())
        best = max(best, 2 * same / (len(f) + len(w)) if f and w else float(f == w))
    return float(any(normalised(found) == normalised(w) for w in wanted)), best


def squad_em(found: Texts, wanted: Sequence[str | Sequence[str]]) -> float:
    return sum(squad_pair(f, w)[0] for f, w in zip(found, wanted, strict=True)) / len(found)


def squad_f1(found: Texts, wanted: Sequence[str | Sequence[str]]) -> float:
    return sum(squad_pair(f, w)[1] for f, w in zip(found, wanted, strict=True)) / len(found)


def bleu(found: Texts, wanted: Texts) -> float:
    """sacrebleu's corpus BLEU (Post, 2018) with its defaults, 0 to 100: what papers quote."""
    if whole := sum(UNSPACED.search(w) is not None for w in wanted):
        said = f"bleu: {whole} of {len(wanted)} references are in a script without spaces between words"
        warnings.warn(f"{said}, and sacrebleu's default takes what spaces separate for one word; chrf reads letters", stacklevel=2)
    return float(import_module("sacrebleu").corpus_bleu(list(found), [list(wanted)]).score)


def chrf(found: Texts, wanted: Texts) -> float:
    """sacrebleu's corpus chrF2 (Popovic, 2015), 0 to 100."""
    return float(import_module("sacrebleu").corpus_chrf(list(found), [list(wanted)]).score)


def rouge(kind: str, found: Texts, wanted: Texts) -> float:
    """The mean F1 of rouge_score (Lin, 2004) with its stemmer, 0 to 100; rougeLsum treats lines as sentences."""
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=True)
    if mute := sum(bool(w.strip()) and not re.search("[a-z0-9]", w.lower()) for w in wanted):
        said = f"{kind}: {mute} of {len(wanted)} references have no letter of a to z and no digit"
        warnings.warn(f"{said}, which is all that rouge_score reads: they count 0; chrf reads all", stacklevel=2)
    total = sum(float(scorer.score(w, f)[kind].fmeasure) for f, w in zip(found, wanted, strict=True))
    return 100 * total / len(found)
