"""Fill-in-the-middle: nothing of a document is lost, the parts stand as published, as often as asked."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_tokenizer import SPACED, spaced
from tokenizers.processors import TemplateProcessing

from modelcenter.data.collate import IGNORED
from modelcenter.data.config import DataConfig
from modelcenter.data.encode import Reader
from modelcenter.data.indexed import Tokens
from modelcenter.data.objective import make_examples
from modelcenter.data.objectives.fim import MARKS, rearranged
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError

TEXT = "def f(x):\n    return x + 1  # naïve 中文 🙂\n" * 4
PRE, SUF, MID = "<fim_prefix>", "<fim_suffix>", "<fim_middle>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer("fim:330", [TEXT])


def put_back(shown: str) -> tuple[str, str]:
    """The kind and the text of a rearranged document, by the published forms."""
    if not shown.startswith(PRE):
        return "plain", shown
    if shown.startswith(PRE + SUF):
        suffix, rest = shown.removeprefix(PRE + SUF).split(MID)
        return ("spm", rest + suffix)  # what stands behind the middle's mark is the prefix and the middle
    prefix, rest = shown.removeprefix(PRE).split(SUF)
    suffix, middle = rest.split(MID)
    return "psm", prefix + middle + suffix


@given(text=st.text(st.sampled_from("ab \n(é中🙂"), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_nothing_is_lost(text: str, seed: int) -> None:
    tokenizer = train_tokenizer([], 270, "fim")
    for spm in (0.0, 1.0):
        data = DataConfig(fim_rate=1.0, fim_spm_rate=spm)
        marks = [tokenizer.token_to_id(mark) for mark in (PRE, SUF, MID)]
        ids = rearranged(Record({}, "f", 1), text, Reader(tokenizer, None), data, marks, np.random.default_rng(seed))  # type: ignore[arg-type]
        kind, whole = put_back(tokenizer.decode(ids, special=True))
        assert whole == text and (kind == "spm" if spm else kind in ("psm", "spm"))
        assert [ids.count(mark) for mark in marks] == [1, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("form", SPACED)
@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_parts_have_no_spaces_of_their_own(form: str, spm: float) -> None:
    """Where a tokenizer puts a space before a text: Code Llama's authors leave it out before the middle and the suffix. Nor is a
    part a text of its own in the tokenizer's template."""
    tokenizer = spaced(form, [TEXT])
    tokenizer.raw.add_special_tokens([PRE, SUF, MID])
    marks = [tokenizer.token_to_id(mark) for mark in (PRE, SUF, MID)]
    tokenizer.raw.post_processor = TemplateProcessing(single=f"$A {MID}", special_tokens=[(MID, marks[2])])
    text, data = "def f(x): return x + 1", DataConfig(fim_rate=1.0, fim_spm_rate=spm)
    for seed in range(30):
        read, random = Reader(tokenizer, None), np.random.default_rng(seed)
        ids = rearranged(Record({}, "f", 1), text, read, data, marks, random)  # type: ignore[arg-type]
        assert [ids.count(mark) for mark in marks] == [1, 1, 1]  # type: ignore[arg-type]
        pre, suf, mid = (ids.index(mark) for mark in marks)  # type: ignore[arg-type]
        whole = ids[mid + 1 :] + ids[suf + 1 : mid] if spm else ids[pre + 1 : suf] + ids[mid + 1 :] + ids[suf + 1 : mid]
        assert tokenizer.decode(whole).lstrip() == text


def test_the_published_forms(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """StarCoder's own example of a prompt, and the paper's order of the other kind (Bavarian et al., 2022, section 3)."""
    text = "def hello():\n    print('x')\n"
    cuts = (text.index("    print"), text.index("\n", 13))

    class Drawn:
        def __init__(self, spm: bool) -> None:
            self.numbers = iter([0.0, 0.0 if spm else 0.9])

        def random(self) -> float:
            return next(self.numbers)

        def integers(self, low: int, high: int, n: int) -> Any:
            assert (low, high, n) == (0, len(text) + 1, 2)
            return np.array(cuts[::-1])

    said = {}
    for spm in (False, True):
        marks = [tokenizer.token_to_id(mark) for mark in (PRE, SUF, MID)]
        draw: Any = Drawn(spm)
        ids = rearranged(Record({}, "f", 1), text, Reader(tokenizer, None), DataConfig(), marks, draw)  # type: ignore[arg-type]
        said[spm] = tokenizer.decode(ids, special=True)
    assert said[False] == "<fim_prefix>def hello():\n<fim_suffix>\n<fim_middle>    print('x')"
    assert said[True] == "<fim_prefix><fim_suffix>\n<fim_middle>def hello():\n    print('x')"


@pytest.mark.parametrize("packing", [False, True], ids=["blocks", "packed"])
def test_rates_and_all_documents(tokenizer: Tokenizer, packing: bool) -> None:
    texts = [TEXT[k % 40 : k % 40 + 30 + k % 17] for k in range(600)]
    records = [Record({"text": text}, "f", n) for n, text in enumerate(texts, 1)]
    data = DataConfig(seq_len=200, packing=packing, fim_rate=0.6, fim_spm_rate=0.25)
    examples = make_examples("fim", records, tokenizer, data, seed=3, train=False)
    parts = [examples.at(0, k) for k in range(len(examples))]
    stream = [i for ids, labels in parts for i in (ids if packing else ids[1 if parts[0][0] is not ids else 0 :]).tolist()]
    found = [put_back(text) for text in tokenizer.decode(stream, special=True).split("<|endoftext|>")[:600]]
    assert [text for _, text in found[:-1]] == texts[:-1]  # behind the last the blocks begin again
    share = [sum(kind == name for kind, _ in found) / 600 for name in ("plain", "psm", "spm")]
    for part, wanted in zip(share, (0.4, 0.45, 0.15), strict=True):
        assert abs(part - wanted) < 4 * (wanted * (1 - wanted) / 600) ** 0.5
    assert all((labels[1:] == ids[1:]).all() for ids, labels in parts[:3]) and parts[0][1][0] == IGNORED
    again, other = (make_examples("fim", records, tokenizer, data, seed=seed, train=False) for seed in (3, 4))
    assert again.at(1, 1)[0].tolist() == parts[1][0].tolist() != other.at(0, 1)[0].tolist()
    plain = make_examples("fim", records, tokenizer, replace(data, fim_rate=0.0), train=False)
    usual = make_examples("lm", records, tokenizer, DataConfig(seq_len=200, packing=packing), train=False)
    assert plain.lengths.tolist() == usual.lengths.tolist() and plain.at(0, 1)[0].tolist() == usual.at(0, 1)[0].tolist()


def test_the_marks_of_every_family_are_known() -> None:
    for marks in MARKS:
        made = train_tokenizer([], 270, "bpe")
        made.raw.add_special_tokens(list(marks))
        data = DataConfig(fim_rate=1.0, fim_spm_rate=0.0, packing=True)
        examples = make_examples("fim", [Record({"text": "abc"}, "f", 1)], made, data, train=False)
        ids = examples.at(0, 0)[0].tolist()
        assert [i for i in ids if i >= 257] == [made.token_to_id(mark) for mark in marks] and ids[0] == made.token_to_id(marks[0])


def test_refusals(tokenizer: Tokenizer, tmp_path: Any) -> None:
    records = [Record({"text": "abc"}, "f", 1)]
    with pytest.raises(InputError, match="objective: fim with a tokenizer that has no marks for it; <fim_prefix>, <fim_suffix>"):
        make_examples("fim", records, train_tokenizer([], 270, "bpe"), DataConfig())
    with pytest.raises(InputError, match="no token in all texts"):
        make_examples("fim", [Record({"text": ""}, "f", 1)], tokenizer, DataConfig())
    bare = train_tokenizer([], 300, "bpe")
    bare.raw.add_special_tokens([PRE, SUF, MID])
    with pytest.warns(UserWarning), pytest.raises(InputError, match="fim, whose marks have ids up to 259"):
        make_examples("fim", records, bare, DataConfig(), vocab=258)
    held: Any = Tokens.__new__(Tokens)
    held.files, held.first, held.last = [type("File", (), {"file": "a.bin", "bounds": np.array([0, 2]), "total": 2})()], 0, 2
    held.ends = np.array([2])
    with pytest.raises(InputError, match=r"a\.bin: objective: fim with token files"):
        make_examples("fim", held, tokenizer, DataConfig())
