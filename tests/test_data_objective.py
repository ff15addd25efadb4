"""Examples and batches: which tokens are seen, which are predicted, and how often; refusals name the record."""

import pickle
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import zoo
from hypothesis import given
from hypothesis import strategies as st
from test_data_tokenizer import SPACED, spaced
from tokenizers.processors import TemplateProcessing

from modelcenter.data import encode
from modelcenter.data.collate import IGNORED, describe_sample, parts, runs
from modelcenter.data.config import DataConfig
from modelcenter.data.encode import Reader
from modelcenter.data.loader import Loader
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.objectives.lm import Blocks, fit
from modelcenter.data.objectives.mlm import Masked
from modelcenter.data.packing import Packed
from modelcenter.data.read import read_records
from modelcenter.data.record import Record, class_names
from modelcenter.data.tokenizer import CharTokenizer, Tokenizer
from modelcenter.data.tokenizer_open import load_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.train.evaluate import evaluate

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *"'.,:", *(f"##{c}" for c in LETTERS)]


def rows(*fields: dict[str, Any]) -> list[Record]:
    return [Record(f, "data.jsonl", k + 1) for k, f in enumerate(fields)]


def documents(*texts: str) -> list[Record]:
    return [Record({"text": t}, f"{k}.txt", None) for k, t in enumerate(texts)]


@pytest.fixture
def bpe() -> Tokenizer:
    return train_tokenizer([TEXT], 300)


@pytest.fixture(scope="module")
def roberta() -> Tokenizer:
    return train_tokenizer([TEXT], 300, "roberta")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(BERT))
    return load_tokenizer(folder)


def all_of(examples: Any, epoch: int = 0) -> list[Any]:
    return [examples.at(epoch, k) for k in range(len(examples))]


def plain(example: Any) -> Any:
    """Arrays as lists, which compare."""
    return [plain(part) for part in example] if isinstance(example, (tuple, list)) else np.asarray(example).tolist()


# ---- lm, blocks

@given(size=st.integers(2, 60), seq_len=st.integers(2, 20), seed=st.integers(0, 5), epoch=st.integers(0, 5),
       train=st.booleans())
def test_blocks_predict_each_token_once(size: int, seq_len: int, seed: int, epoch: int, train: bool) -> None:
    text = "".join(chr(0x4E00 + k) for k in range(size))  # each character once: an id says its place
    tokenizer = CharTokenizer.train([text])
    blocks = make_examples("lm", documents(text), tokenizer, DataConfig(seq_len=seq_len), seed=seed, train=train)
    predicted = []
    for ids, labels in all_of(blocks, epoch):
        assert len(ids) == len(labels) == seq_len and labels[0] == IGNORED
        for k in range(1, seq_len):
            if labels[k] != IGNORED:
                assert labels[k] == ids[k] == ids[k - 1] + 1, "predicted from what does not precede it"
                predicted.append(int(labels[k]))
    assert len(predicted) == len(set(predicted))
    missing = set(range(1, size)) - set(predicted)
    # With no room to spare, the token on which the ring was cut open is only an input in that epoch.
    assert len(missing) <= int(train and (size - 1) % (seq_len - 1) == 0)


def test_blocks_move_by_epoch_in_training_only() -> None:
    tokenizer = CharTokenizer.train([TEXT])
    def starts(train: bool) -> list[str]:
        blocks = make_examples("lm", documents(TEXT * 5), tokenizer, DataConfig(seq_len=16), train=train)
        return [tokenizer.decode(blocks.at(epoch, 0)[0]) for epoch in range(6)]
    assert len(set(starts(True))) > 3
    assert set(starts(False)) == {(TEXT * 5)[:16]}


@pytest.mark.parametrize("train", [True, False])
def test_texts_that_nobody_filled_in_are_counted(bert: Tokenizer, train: bool) -> None:
    """transformers reads such rows without a word; of a pair one text will do (TNEWS has headlines without keywords)."""
    data = DataConfig(pair_key="more", seq_len=16)
    some = [("a b", "c"), ("", ""), ("a", ""), (" \t\n", " "), ("", "b")]
    records = [Record({"text": a, "more": b, "label": k % 2}, "f.csv", k + 2) for k, (a, b) in enumerate(some)]
    use = "trained on" if train else "judged"
    with pytest.warns(UserWarning, match=rf"^2 of 5 pairs are empty \(first: f\.csv, line 3\): {use} as they are$"):
        examples = make_examples("classify", records, bert, data, train=train)
    assert len(examples) == 5 and examples.at(0, 1)[0].tolist() == [bert.cls_id, bert.sep_id, bert.sep_id]


@pytest.mark.parametrize(("train", "use"), [(True, "taught to write nothing"), (False, "judged as they are")])
def test_targets_that_nobody_filled_in_are_counted(bpe: Tokenizer, train: bool, use: str) -> None:
    some = rows({"source": "a", "target": "b"}, {"source": "c", "target": ""}, {"source": "d", "target": ""})
    with pytest.warns(UserWarning, match=rf"^2 of 3 targets \(target\) are empty: {use}$"):
        examples = make_examples("seq2seq", some, bpe, DataConfig(seq_len=8), train=train)
    assert examples.at(0, 1)[1].tolist() == [bpe.eos_id]


def test_documents_are_parted_by_the_end_of_text(bpe: Tokenizer) -> None:
    with pytest.warns(UserWarning, match=r"^1 of 3 texts \(text\) are empty: left out of what is judged$"):
        blocks = make_examples("lm", documents("a b", "", "c"), bpe, DataConfig(seq_len=64), train=False)
    assert isinstance(blocks, Blocks)
    assert blocks.tokens.flat(0, blocks.total).tolist() == [*bpe.encode("a b"), bpe.eos_id, *bpe.encode("c")]


@pytest.mark.parametrize("train", [True, False])
def test_examples_that_lose_an_end_are_counted(bpe: Tokenizer, train: bool) -> None:
    """Those of as many tokens as there is room for lose none."""
    letters, use = CharTokenizer.train(["abcdefgh"]), "trained on" if train else "judged"
    beyond, one = f"what lies beyond is not {use}", {"prompt_key": "text", "response_key": "more"}

    def told(objective: str, tokenizer: Tokenizer, *texts: dict[str, Any], **fields: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make_examples(objective, rows(*texts), tokenizer, DataConfig(**fields), train=train)
        return [str(one.message) for one in found]

    some: list[dict[str, Any]] = [{"text": "abcdef"[:n], "more": "gh", "label": n % 2} for n in (4, 5, 6)]
    longer = "are longer than data.seq_len"
    assert told("classify", letters, *some, seq_len=4) == [f"2 of 3 texts {longer} 4: {beyond}"]
    assert told("classify", letters, *some, seq_len=7, pair_key="more") == [f"1 of 3 pairs {longer} 7: {beyond}"]
    assert told("classify", letters, *some, seq_len=6) == told("lm", letters, *some, seq_len=8, **one) == []
    prompts, begin = "prompts with their responses are longer than data.seq_len", "the beginning of the prompt is not read"
    assert told("lm", letters, *some, seq_len=7, **one) == [f"1 of 3 {prompts} 7: {begin}"]
    assert told("lm", letters, *some, seq_len=2, **one) == [
        f"3 of 3 {prompts} 2: {begin}", f"3 of 3 responses (more) are longer than data.seq_len 2: {beyond}"]
    assert told("lm", letters, {"text": "a", "more": "gh"}, {"text": "", "more": "gh"}, seq_len=2, **one) == [
        f"1 of 2 responses (more) are longer than data.seq_len 2: {beyond}"]
    pairs = [{"source": "a", "target": "a b c d"[:n]} for n in (1, 3, 7)]
    assert told("seq2seq", bpe, *pairs, seq_len=8, target_len=2)[-1:] == [
        f"2 of 3 targets (target) are longer than data.target_len 2: {beyond}"]
    assert told("seq2seq", bpe, *({**pair, "source": pair["target"]} for pair in pairs), seq_len=2, target_len=8) == [
        f"2 of 3 sources (source) are longer than data.seq_len 2: {beyond}"]
    assert told("seq2seq", bpe, *pairs, seq_len=8) == []



def test_blocks_as_a_batch(bpe: Tokenizer) -> None:
    blocks = make_examples("lm", documents(TEXT * 9), bpe, DataConfig(seq_len=12))
    batch = blocks.collate(all_of(blocks)[:3])
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "input_ids": ((3, 12), torch.int64), "labels": ((3, 12), torch.int64)}


# ---- lm, prompt and response

def test_only_responses_are_trained_on(bpe: Tokenizer) -> None:
    data = DataConfig(prompt_key="q", response_key="a", seq_len=64)
    examples = make_examples("lm", rows({"q": "to be?", "a": "or not"}, {"q": "that", "a": "is"}), bpe, data)
    batch = examples.collate(all_of(examples))
    for row, (question, answer) in enumerate((("to be?", "or not"), ("that", "is"))):
        q, a = bpe.encode(question), [*bpe.encode(answer), bpe.eos_id]
        n = len(q) + len(a)
        width = batch["input_ids"].shape[1]
        assert batch["input_ids"][row, :n].tolist() == q + a
        assert batch["labels"][row].tolist() == [IGNORED] * len(q) + a + [IGNORED] * (width - n)
        assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (width - n)
    assert describe_sample(batch, bpe) == "to be?[[or not<|endoftext|>]]"
    packed = make_examples("lm", examples_records := rows({"q": "to be?", "a": "or not"}), bpe,
                           DataConfig(prompt_key="q", response_key="a", seq_len=64, packing=True))
    assert packed.collate(all_of(packed))["labels"][0].tolist() == [IGNORED] * len(bpe.encode("to be?")) + [
        *bpe.encode("or not"), bpe.eos_id]
    assert list(texts_of("lm", examples_records, data)) == ["to be?", "or not"]


@pytest.mark.parametrize("form", SPACED)
def test_a_response_goes_on_where_its_prompt_ends(form: str) -> None:
    """Where a tokenizer puts a space before a text, one that stood in the data was learned as two, and none as one."""
    tokenizer = spaced(form, [TEXT])
    said = [("to be:", " or not"), ("to be:", "or not"), ("that'", "is"), ("", "or not")]
    data = DataConfig(prompt_key="q", response_key="a", seq_len=64)
    examples = make_examples("lm", rows(*({"q": q, "a": a} for q, a in said)), tokenizer, data, vocab=tokenizer.vocab_size)
    for (q, a), (ids, labels) in zip(said, all_of(examples), strict=True):
        assert tokenizer.decode(ids) == q + a and ids[0] == tokenizer.bos_id
        assert ids[labels == IGNORED].tolist() == (tokenizer.encode(q) if q else [tokenizer.bos_id])
    assert all_of(examples)[3][0].tolist() == [*tokenizer.encode("or not"), tokenizer.eos_id]


@given(prompt=st.integers(0, 20), response=st.integers(1, 20), size=st.integers(2, 20), head=st.integers(0, 1))
def test_fit(prompt: int, response: int, size: int, head: int) -> None:
    head = min(head, prompt)
    p, r = list(range(100, 100 + prompt)), list(range(response))
    ids, known = fit(p, r, size, head)
    assert len(ids) == min(size, prompt + response)
    kept = len(ids) - sum(i < 100 for i in ids)
    assert ids == p[:head] + p[prompt - kept + head :] + r[: len(ids) - kept]
    assert kept >= min(prompt, 1) and (len(ids) - kept == response or kept <= 1)
    assert known == max(kept, 1)


@pytest.mark.parametrize(("template", "begins"), [("<s> $A", True), ("$A <s>", False), ("<s> $A <s>", True)])
def test_one_token_for_the_beginning_and_the_end_stands_where_the_template_puts_it(template: str, begins: bool) -> None:
    """Of an empty text it says only that there is one."""
    raw = train_tokenizer(["to be or not to be"], 280).raw
    raw.add_special_tokens(["<s>"])
    raw.post_processor = TemplateProcessing(template, None, [("<s>", raw.token_to_id("<s>"))])
    made = Tokenizer(raw, {"bos": "<s>", "eos": "<s>"})
    examples = make_examples("lm", [Record({"text": "to be"}, "f", 1)], made, DataConfig(packing=True, seq_len=20))
    assert examples.at(0, 0)[0][0].tolist() == [made.bos_id] * begins + made.encode("to be", special=False) + [made.eos_id]


@pytest.mark.parametrize(("template", "begins"), [("$A <s>", False), ("<s> $A", True), ("<s> $A <s>", True)])
def test_a_tokenizer_is_asked_in_its_own_words(template: str, begins: bool) -> None:
    """It may know no others, and no unknown one."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "C": 1, "G": 2}))
    raw.add_special_tokens(["<s>"])
    raw.post_processor = TemplateProcessing(template, None, [("<s>", 0)])
    assert Tokenizer(raw, {"bos": "<s>", "eos": "<s>"}).puts_bos == begins


def test_a_prompt_that_is_cut_keeps_the_beginning_of_text() -> None:
    """As transformers' truncation on the left does: LLaMA has seen no text without."""
    made = train_tokenizer(["to be or not to be"], 300)
    made.raw.add_special_tokens(["<s>"])
    made.raw.post_processor = TemplateProcessing("<s> $A", None, [("<s>", made.raw.token_to_id("<s>"))])
    both = Tokenizer(made.raw, {"bos": "<s>", "eos": "<|endoftext|>"})
    data = DataConfig(prompt_key="q", response_key="a", seq_len=12)
    ids, labels = make_examples("lm", rows({"q": "to be or not " * 9, "a": "to be"}), both, data).at(0, 0)
    answer, asked = [*both.encode("to be", special=False), both.eos_id], both.encode("to be or not " * 9, special=False)
    assert ids.tolist() == [both.bos_id, *asked[-(11 - len(answer)) :], *answer]
    assert labels.tolist() == [IGNORED] * (12 - len(answer)) + answer


# ---- lm, packing

def test_packing_keeps_each_token_once_and_never_crosses() -> None:
    letters = np.random.default_rng(0)
    texts = ["".join(letters.choice(list("abcdef "), n)) for n in letters.integers(1, 70, 40)]
    tokenizer = train_tokenizer([], 257)
    packed = make_examples("lm", documents(*texts), tokenizer, DataConfig(seq_len=32, packing=True))
    assert isinstance(packed, Packed)
    loader = Loader(packed, packed.collate, batch=3)
    found: list[list[int]] = []
    for batch in loader.once():
        ids, labels, bounds = batch["input_ids"], batch["labels"], batch["cu_seq_lens_q"]
        assert ids.shape == labels.shape == batch["position_ids"].shape == (1, int(bounds[-1]))
        assert bounds.dtype == torch.int32 and torch.equal(bounds, batch["cu_seq_lens_k"]) and bounds[0] == 0
        assert batch["max_length_q"] == batch["max_length_k"] == int(bounds.diff().max()) <= 32
        for a, b in pairwise(bounds.tolist()):
            assert labels[0, a] == IGNORED, "a sequence predicted from the one before"
            assert labels[0, a + 1 : b].tolist() == ids[0, a + 1 : b].tolist()
            assert batch["position_ids"][0, a:b].tolist() == list(range(b - a))
            found.append(ids[0, a:b].tolist())
    whole = [[*tokenizer.encode(t), 0] for t in texts]
    assert sorted(found) == sorted(d[k : k + 32] for d in whole for k in range(0, len(d), 32))


# ---- mlm

def test_masking_follows_transformers(bert: Tokenizer) -> None:
    """15 %, of these 80/10/10, each within four standard deviations, as for their collator on the same blocks."""
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    masked = make_examples("mlm", documents(TEXT * 300), bert, DataConfig(seq_len=64))
    assert isinstance(masked, Masked)
    batch = masked.collate(all_of(masked))
    original = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    torch.manual_seed(0)
    theirs = DataCollatorForLanguageModeling(BertTokenizerFast(vocab={t: i for i, t in enumerate(BERT)}))(
        [{"input_ids": row[mask.bool()].tolist()} for row, mask in zip(original, batch["attention_mask"], strict=True)])
    assert torch.equal(theirs["attention_mask"], batch["attention_mask"])
    special = torch.isin(original, torch.tensor(sorted(bert.special_ids)))
    for out in (batch, theirs):
        chosen = out["labels"] != IGNORED
        assert not (chosen & special).any() and torch.equal(out["labels"][chosen], original[chosen])
        assert torch.equal(out["input_ids"][~chosen], original[~chosen])
        n, total = int(chosen.sum()), int((~special).sum())
        seen = out["input_ids"][chosen]
        hidden, kept = int((seen == bert.mask_id).sum()), int((seen == original[chosen]).sum())
        for share, count, size in ((0.15, n, total), (0.8, hidden, n), (0.1, kept, n), (0.1, n - hidden - kept, n)):
            assert abs(count - share * size) < 4 * (size * share * (1 - share)) ** 0.5 + 0.01 * size
    assert (batch["labels"] != IGNORED).any(1).all()
    drawn = batch["input_ids"][(batch["input_ids"] != original) & (batch["input_ids"] != bert.mask_id)]
    assert {*drawn.tolist()} == {*range(bert.vocab_size)} - bert.special_ids, "any word, and nothing that is none"


def test_masks_depend_on_epoch_and_index_alone(bert: Tokenizer) -> None:
    one, two = (make_examples("mlm", documents(TEXT * 9), bert, DataConfig(seq_len=32), seed=5) for _ in range(2))
    torch.manual_seed(3)
    forward, backward = plain(all_of(one)), plain([two.at(0, k) for k in reversed(range(len(two)))][::-1])
    assert forward == backward != plain(all_of(one, 1))
    assert forward != plain(all_of(make_examples("mlm", documents(TEXT * 9), bert, DataConfig(seq_len=32), seed=6)))
    assert plain(pickle.loads(pickle.dumps(one)).at(0, 1)) == forward[1]  # noqa: S301


def test_one_token_is_always_masked_and_blocks_are_framed(bert: Tokenizer) -> None:
    data = DataConfig(seq_len=3, mlm_probability=1e-9)
    examples = make_examples("mlm", documents("ab", "c"), bert, data)
    for ids, _ in all_of(examples):
        assert (ids[0], ids[-1], len(ids)) == (bert.cls_id, bert.sep_id, 3)
    a, b = bert.encode("ab", special=False)
    [c] = bert.encode("c", special=False)
    # The block that holds nothing but the [SEP] between the documents has nothing to predict.
    assert [plain(labels) for _, labels in all_of(examples)] == [[IGNORED, x, IGNORED] for x in (a, b, IGNORED, c)]


# ---- seq2seq

def test_pairs(roberta: Tokenizer) -> None:
    data = DataConfig(source_prefix="say: ", seq_len=12, target_len=5)
    records = rows({"source": "to be", "target": "or"}, {"source": TEXT, "target": TEXT})
    examples = make_examples("seq2seq", records, roberta, data)
    batch = examples.collate(all_of(examples))
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
    source = roberta.encode("say: to be")
    assert batch["input_ids"][0].tolist() == source + [roberta.pad_id] * (12 - len(source))
    assert batch["attention_mask"].sum(1).tolist() == [len(source), 12]
    eos = roberta.eos_id
    target = [*roberta.encode("or", special=False), eos]
    assert batch["labels"][0].tolist() == target + [IGNORED] * (5 - len(target))
    assert batch["labels"][1].tolist() == [*roberta.encode(TEXT, special=False)[:4], eos]
    assert batch["input_ids"][1, -1] == eos
    assert describe_sample(batch, roberta) == "<s>say: to be</s>\n  target: [[or</s>]]"
    assert list(texts_of("seq2seq", records, data))[:2] == ["to be", "or"]


def test_a_source_ends_in_the_end_of_text_whatever_the_template(bpe: Tokenizer) -> None:
    to, be, text = (bpe.encode(each) for each in ("to", "be", TEXT))
    records = rows({"source": "to", "target": "be"}, {"source": TEXT, "target": TEXT})
    examples = make_examples("seq2seq", records, bpe, DataConfig(seq_len=6))
    assert plain(examples.at(0, 0)) == [[*to, 0], [*be, 0]]
    assert plain(examples.at(0, 1)) == [[*text[:5], 0]] * 2


@pytest.mark.parametrize("kind", ["bpe", "roberta", "span"])
@pytest.mark.parametrize("objective", ["seq2seq", "span"])
def test_a_model_is_asked_with_sources_as_it_was_trained_on(objective: str, kind: str, tmp_path: Path) -> None:
    """A tokenizer that was made here for an encoder-decoder put no end of text behind what `generate`, or transformers, gave it."""
    made = train_tokenizer([TEXT], 400, kind)
    if objective == "span":
        made.raw.add_tokens([f"<extra_id_{k}>" for k in range(9)])
    row = {"text": TEXT, "source": "to be", "target": "or"}
    for _ in range(2):  # what ends already is left as it is
        examples = make_examples(objective, rows(row), made, DataConfig(seq_len=32))
    source = plain(examples.at(0, 0))[0] if objective == "seq2seq" else made.encode("to be")
    made.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = [made.encode("to be"), theirs("to be")["input_ids"], load_tokenizer(tmp_path).encode("to be")]
    assert found == [source] * 3 and source.count(made.eos_id) == 1 and source[-1] == made.eos_id and not made.segmented
    assert made.encode_pair("to", "be")[0].count(made.eos_id) >= 2 and made.decode(source) == "to be"


# ---- classify

def test_classes_by_number_and_by_name(bert: Tokenizer) -> None:
    for values, names in ((["1", "0", "1"], ("LABEL_0", "LABEL_1")), ([2, 0, 1], ("LABEL_0", "LABEL_1", "LABEL_2")),
                          (["yes", "no", "yes"], ("no", "yes"))):
        records = rows(*({"text": "a b", "label": v} for v in values))
        examples = make_examples("classify", records, bert, DataConfig())
        assert examples.names == names == find_objective("classify").names(records, DataConfig())
        wanted = [names.index(v) if v in names else int(v) for v in values]
        batch = examples.collate(all_of(examples))
        assert batch["labels"].tolist() == wanted and batch["labels"].dtype == torch.int64
    held = make_examples("classify", rows({"text": "a", "label": "yes"}), bert, DataConfig(), names=("no", "yes"))
    assert held.at(0, 0)[2] == 1


def test_labels_that_are_known_need_not_all_occur() -> None:
    known, plain_names = ("neg", "neu", "pos"), ("LABEL_0", "LABEL_1", "LABEL_2")
    for values, names, found in ((["pos", "pos"], known, known), ([2, 2], known, known), ([0, 2], plain_names, plain_names),
                                 (["2", "0"], known, known), ([1, 0], known, known), ([1, 0], (), plain_names[:2]),
                                 (["no", "pos"], known, ("no", "pos")), ([0, 1, 2, 3], known, (*plain_names, "LABEL_3"))):
        assert find_objective("classify").names(rows(*({"label": v} for v in values)), DataConfig(), names) == found, values
    listed = rows({"label": ["pos"]}, {"label": []})
    assert find_objective("multilabel").names(listed, DataConfig(), known) == known
    tagged = rows({"tokens": ["a"], "tags": ["pos"]})
    assert find_objective("tag").names(tagged, DataConfig(), known) == known
    with pytest.raises(InputError, match="only the label pos"):
        find_objective("tag").names(tagged, DataConfig())
    for values, words in (([2, 2], "numbers from 0 on"), (["pos"], "only the label pos"), ([3], "numbers from 0 on")):
        with pytest.raises(InputError, match=words):
            find_objective("classify").names(rows(*({"label": v} for v in values)), DataConfig(), known if values == [3] else ())


@pytest.mark.parametrize("objective", ["classify", "multilabel", "tag"])
def test_numbers_are_not_places_in_the_alphabet(bert: Tokenizer, objective: str) -> None:
    """In which entailment would be 1, where everybody means that by 0. Those of a data set's own order, or of a model's, are."""
    def made(*values: Any) -> list[Record]:
        return rows(*({"text": "a", "tokens": ["a"], "tags": [v], "label": v if objective == "classify" else [v]} for v in values))

    trained = made("entailment", "neutral", "contradiction", "neutral")
    names = find_objective(objective).names(trained, DataConfig())
    assert names == ("contradiction", "entailment", "neutral")
    make_examples(objective, trained, bert, DataConfig(), names=names)
    key = "tags" if objective == "tag" else "label"
    for value in (0, "2"):
        with pytest.raises(InputError, match=f"line 2: {key}: {value!r} is a number, where the data to train on have names"):
            make_examples(objective, made("neutral", value), bert, DataConfig(), names=names)
        make_examples(objective, made("neutral", value), bert, DataConfig(), names=tuple(map(str, names)))  # a model's
    own = find_objective(objective).names(made(*class_names(["no", "yes"])), DataConfig())
    make_examples(objective, made(1), bert, DataConfig(), names=own)
    for value in ("no", "LABEL_3"):  # of a model that has numbers for its classes
        with pytest.raises(InputError, match=f"line 2: {key} has '{value}'; a number: this model's classes are the numbers 0 to 2"):
            find_objective(objective).names(made("LABEL_1", value), DataConfig(), ("LABEL_0", "LABEL_1", "LABEL_2"))


@pytest.mark.parametrize(("objective", "labels", "kind"), [
    ("classify", 3, "regression"), ("choice", 2, "multi_label_classification"), ("coreference", 2, "regression"),
    ("regress", 1, "single_label_classification"), ("multilabel", 3, "single_label_classification"),
])  # fmt: skip
def test_a_model_that_has_learned_another_loss_is_refused(objective: str, labels: int, kind: str) -> None:
    """Before a run begins, not in its first step."""
    config = replace(zoo.tiny("bert"), labels=tuple("abc"[:labels]), file={"problem_type": kind})
    with pytest.raises(InputError, match=rf"config\.json: problem_type: '{kind}'"):
        find_objective(objective).settle(config)


@pytest.mark.parametrize("objective", ["classify", "multilabel", "tag"])
def test_no_label_has_a_number_below_0(objective: str) -> None:
    records = rows(*({"label": str(n), "tokens": ["a"], "tags": [n]} for n in (-1, 0, 1)))
    with pytest.raises(InputError, match=r"(label|tags): the labels \[-1, 0, 1\]; numbers from 0 on"):
        find_objective(objective).names(records, DataConfig())


def test_classes_that_a_data_set_numbers_keep_their_numbers(bert: Tokenizer, tmp_path: Path) -> None:
    """GLUE's F1 is of class 1, "equivalent", though that comes first in the alphabet; a class that does not occur is one too."""
    datasets = pytest.importorskip("datasets")
    one, some = datasets.ClassLabel(names=["not_equivalent", "equivalent"]), datasets.ClassLabel(names=["O", "B-X", "A"])
    text = datasets.Value("string")
    kinds = datasets.Features({"text": text, "label": one, "tokens": datasets.Sequence(text), "tags": datasets.Sequence(some)})
    data = {"text": ["a", "b"], "label": [1, 0], "tokens": [["a", "b"], ["a"]], "tags": [[1, 0], [0]]}
    datasets.Dataset.from_dict(data, features=kinds).save_to_disk(tmp_path)
    records = read_records(str(tmp_path))
    assert find_objective("classify").names(records, DataConfig()) == ("not_equivalent", "equivalent")
    examples = make_examples("classify", records, bert, DataConfig())
    assert [examples.at(0, k)[2] for k in range(2)] == data["label"]
    for objective, key in (("tag", "tags_key"), ("multilabel", "label_key")):
        assert find_objective(objective).names(records, DataConfig(**{key: "tags"})) == ("O", "B-X", "A")
    tagged = make_examples("tag", records, bert, DataConfig())
    assert [[n for n in tagged.at(0, k)[1].tolist() if n != IGNORED] for k in range(2)] == data["tags"]


def test_true_and_false_are_two_classes(bert: Tokenizer) -> None:
    records = rows({"text": "a", "label": True}, {"text": "b", "label": False})
    assert find_objective("classify").names(records, DataConfig()) == ("LABEL_0", "LABEL_1")
    examples = make_examples("classify", records, bert, DataConfig())
    assert [examples.at(0, k)[2] for k in range(2)] == [1, 0]


def test_pairs_of_texts_are_cut_like_transformers(bert: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bert.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    data = DataConfig(text_key="s1", pair_key="s2", seq_len=20)
    pairs = [("to be", "or not to be"), (TEXT, "a b"), ("a", TEXT), (TEXT, TEXT)]
    records = rows(*({"s1": a, "s2": b, "label": k % 2} for k, (a, b) in enumerate(pairs)))
    examples = make_examples("classify", records, bert, data)
    batch = examples.collate(all_of(examples))
    wanted = theirs([a for a, _ in pairs], [b for _, b in pairs], truncation=True, max_length=20, padding=True,
                    return_token_type_ids=True, return_tensors="pt")
    assert set(theirs("a", "b")) == {"input_ids", "attention_mask", "token_type_ids"}  # what a model of pairs is asked with
    bert.save(tmp_path, segments=False)  # beside a model to which they are words
    assert set(AutoTokenizer.from_pretrained(str(tmp_path))("a", "b")) == {"input_ids", "attention_mask"}
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[key], wanted[key]), key
    single = make_examples("classify", records, bert, DataConfig(text_key="s1"))
    assert "token_type_ids" not in single.collate(all_of(single))
    assert "label: LABEL_1" in describe_sample(examples.collate([examples.at(0, 1)]), bert, examples.names)


# ---- multilabel

def test_several_labels(bert: Tokenizer) -> None:
    """The matrix as scikit-learn makes it, and evaluation: the loss of transformers, its F1 by scikit-learn."""
    from sklearn.metrics import f1_score
    from sklearn.preprocessing import MultiLabelBinarizer

    for values in ([["b", "a"], [], ["c"], ["a", "a"]], [[2, 0], [], [1], [2]], ["b, a", "", "c", "a"], ["2,0", "", "1", "2"],
                   ['["b", "a"]', "[]", '["c"]', '["a"]'], ["[2, 0]", "[]", "[1]", "[2]"]):  # as a table holds them
        records = rows(*({"text": "a b", "label": v} for v in values))
        examples = make_examples("multilabel", records, bert, DataConfig())
        lists = [re.findall(r"\w", v) if isinstance(v, str) else v for v in values]
        matrix = MultiLabelBinarizer().fit_transform([set(map(str, one)) for one in lists])
        batch = examples.collate(all_of(examples))
        assert batch["labels"].tolist() == matrix.tolist() and batch["labels"].dtype == torch.float32
    shown = find_objective("multilabel").sample(batch, bert, examples.names)
    assert shown.endswith("\n  labels: LABEL_0, LABEL_2")
    theirs, _ = zoo.reference(zoo.Case("bert", "default", "classify"))
    ours = zoo.pair(zoo.Case("bert", "default", "classify"))[1]
    assert ours.config.num_labels == 3
    ours.config = replace(ours.config, file={**ours.config.file, **find_objective("multilabel").settle(ours.config)})
    theirs.double().config.problem_type = "multi_label_classification"
    ids = {"input_ids": batch["input_ids"] % 90, "attention_mask": batch["attention_mask"]}
    ids["input_ids"][:, 1] = torch.arange(4) + 5
    with torch.no_grad():
        wanted = theirs(**ids, labels=batch["labels"].double())
        found = evaluate(ours, [{**ids, "labels": batch["labels"].double()}], "multilabel", ["accuracy"])
    assert found["eval_loss"] == pytest.approx(float(wanted.loss), rel=1e-6) and found["eval_targets"] == 4
    there = (wanted.logits > 0).int().numpy()
    assert 0 < there.sum() < there.size
    for kind in ("micro", "macro"):
        assert found[f"eval_f1_{kind}"] == pytest.approx(f1_score(matrix, there, average=kind, zero_division=0))
    assert found["eval_accuracy"] == (matrix == there).all(1).mean()


def test_labels_that_are_likely_to_be_one_are_told() -> None:
    """As hands write them; classes that a data set names itself are meant."""
    classify, data = find_objective("classify"), DataConfig()
    kind = "differ in spaces, capitals or Unicode spelling alone"
    for labels, found in ((["Not  so", "Pos", "not so", "pos", "pos "], f"'Not  so' and 'not so' {kind}, as do others:"),
                          (["Pos", "neg", "pos", "pos "], f"'Pos' and 'pos' and 'pos ' {kind}:"),
                          (["pos", "pos\u200b"], rf"'pos' and 'pos\\u200b' {kind}:"),
                          (["e\u0301", "\xe9"], rf"'e\\u0301' and '\\xe9' {kind}:")):  # é, as two programs write it
        with pytest.warns(UserWarning, match=f"^data.jsonl: label: {found} each is a label of its own$"):
            assert classify.names(rows(*({"text": "a", "label": label} for label in labels)), data) == tuple(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for names in (class_names(["us", "US"]), ["a b", "a-b", "ab"]):
            assert classify.names(rows(*({"text": "a", "label": label} for label in names)), data) == tuple(names)


@pytest.mark.parametrize("name", ["nan", "None", "-"])
def test_a_label_that_is_likely_to_stand_for_none_is_told(name: str) -> None:
    """As tables hold it where nobody filled one in; to a model that has such a class it is one."""
    data, said = DataConfig(), "is a label of its own: leave it out of the data if it stands for none"
    for objective, key, made in (("classify", "label", str), ("multilabel", "label", str), ("tag", "tags", lambda label: [label])):
        some = rows(*({"tokens": ["a"], key: made(label)} for label in ("0", name, "1", name)))
        with pytest.warns(UserWarning, match=rf"^data\.jsonl: {key}: '{name}' \(2 times, first in line 2\) {said}$"):
            assert find_objective(objective).names(some, data) == tuple(sorted(["0", "1", name]))
        assert find_objective(objective).names(some, data, ("0", name, "1")) == ("0", name, "1")


def test_labels_with_another_mark_between_them_are_told() -> None:
    """In a list they are meant."""
    names, data = find_objective("multilabel").names, DataConfig()
    for text in ("x;y", "x | y"):
        with pytest.warns(UserWarning, match=rf"^data\.jsonl: line 2: label: '{re.escape(text)}' is one label: commas part labels"):
            names(rows({"label": "x"}, {"label": text}), data)
    assert names(rows({"label": ["x;y"]}, {"label": '["x|y"]'}), data) == ("x;y", "x|y")
    for text in ("('x', 'y')", "{'x'}", "(1, 2)", "['x' 'y']"):
        with pytest.raises(InputError, match=rf"line 1: label is {re.escape(text)}, text that is not JSON .*; its JSON, as "):
            names(rows({"label": text}, {"label": "x"}), data)
    assert names(rows({"label": "(x)"}, {"label": "f(x)"}), data) == ("(x)", "f(x)")


def test_a_number_of_each_label_is_no_list_of_them(bert: Tokenizer) -> None:
    """As other tools want them: taken for the numbers 0 and 1, nearly all texts had the same two labels."""
    for each in ([0, 1, 0], "1,1,0", "[0, 0]", [True, False, True]):
        said = "line 2: label is .*, a 0 or a 1 for each label; the names or the numbers of those that apply"
        with pytest.raises(InputError, match=said):
            make_examples("multilabel", rows({"text": "a", "label": [0, 1]}, {"text": "a", "label": each}), bert, DataConfig())
    for first, second in ((0, 1), ("0", "1"), (False, True)):  # of two labels, none of them twice: each would apply to all texts
        each = [{"text": "a", "label": value} for value in ([first, second], [second, first], [first, second])]
        for few in (each, each[:1]):
            with pytest.raises(InputError, match=r"line 1: label is .*, a 0 or a 1 for each label; the names or the"):
                make_examples("multilabel", rows(*few), bert, DataConfig(), names=("no", "yes") if few != each else None)
        for more in ([first], [], [second]):
            assert len(make_examples("multilabel", rows(*each, {"text": "a", "label": more}), bert, DataConfig())) == 4
        assert len(make_examples("multilabel", rows(*each), bert, DataConfig(), names=("a", "b", "c"))) == 3
    assert len(make_examples("multilabel", rows(*[{"text": "a", "label": "no, yes"}] * 2), bert, DataConfig())) == 2


# ---- the sample that is shown

def test_describe(bpe: Tokenizer, bert: Tokenizer) -> None:
    data = DataConfig(seq_len=len(bpe.encode("to be or")))
    blocks = make_examples("lm", documents("to be or"), bpe, data, train=False)
    shown = describe_sample(blocks.collate(all_of(blocks)), bpe)
    assert shown.replace("[[", "").replace("]]", "") == "to be or" and shown.count("[[") == 1 and shown.endswith("]]")
    packed = make_examples("lm", documents("to", "be or"), bpe, DataConfig(seq_len=64, packing=True))
    assert describe_sample(packed.collate(all_of(packed)), bpe).endswith("<|endoftext|>]]")
    masked = make_examples("mlm", documents(TEXT), bert, DataConfig(seq_len=16, mlm_probability=0.9))
    shown = describe_sample(masked.collate(all_of(masked)[:1]), bert)
    assert "[[[MASK] -> " in shown
    ids = masked.at(0, 0)[0].tolist()
    assert "".join(parts(ids, range(len(ids) + 1), bert)) == bert.decode(ids, special=True)  # with the spaces that are there
    half = len(bert.encode("to be", special=False))
    whole = bert.encode("to be or", special=False)
    assert runs(whole, [k >= half for k in range(len(whole))], bert) == "to be[[ or]]"


# ---- refusals

@pytest.mark.parametrize("objective, fields, data, said", [
    ("lm", {"txt": "a"}, {}, "line 1: no field 'text'; did you mean 'txt'"),
    ("lm", {"prompt": "a", "response": "b"}, {}, "names the field; such rows are for finetune with data.prompt_key"),
    ("lm", {"messages": []}, {}, "data.text_key names the field; such rows are for the recipe instruct"),
    ("chat", {"prompt": "a", "response": "b"}, {"chat_template": "plain"}, "data.messages_key names the field; such rows are "),
    ("lm", {"instruction": "a", "output": "b"}, {}, "such rows are for the recipe instruct"),
    ("classify", {"text": "a", "label": ["x"]}, {}, "multilabel for lists"),
    ("lm", {"text": ""}, {}, "no token in all texts"),
    ("lm", {"text": ""}, {"packing": True}, "no token in all texts"),
    ("lm", {"q": "a"}, {"prompt_key": "q"}, "data.response_key: absent"),
    ("lm", {"q": "a", "a": ""}, {"prompt_key": "q", "response_key": "a"}, "line 1: a has no token"),
    ("mlm", {"text": "a"}, {}, "no mask token"),
    ("seq2seq", {"source": "a"}, {}, "line 1: no field 'target'"),
    ("classify", {"text": "a", "label": None}, {}, "label is null; the name"),
    ("classify", {"text": "a", "label": ""}, {}, "label is ''; the name or the number of a class"),
    ("classify", {"text": "a", "label": 0}, {}, "only the label LABEL_0"),
    ("classify", {"text": "a", "label": 3}, {}, r"the labels \[3\]"),
    ("mlmm", {"text": "a"}, {}, "did you mean 'mlm'"),
    ("multilabel", {"text": "a", "label": ["x"]}, {}, r"only the label x"),
    ("multilabel", {"text": "a", "label": ["x", 1]}, {}, "line 1: label has 1; a name, as elsewhere"),
    ("multilabel", {"text": "a", "label": []}, {}, "no label; two labels at least"),
    ("multilabel", {"text": "a", "label": "['x', 'y']"}, {}, r"label is \['x', 'y'\], text that is not JSON .*; its JSON"),
    ("multilabel", {"text": "a", "label": 1.5}, {}, "label is '1.5'; a list of labels"),
    ("multilabel", {"text": "a", "label": [0, 10**7]}, {}, "0000]; numbers from 0 on, below 10,000,000"),
    ("tag", {"tokens": ["a", "b"], "tags": [0, 10**7]}, {}, "0000]; numbers from 0 on, below 10,000,000"),
    ("regress", {"text": "a", "label": 10**400}, {}, "label is 1000"),
    ("regress", {"text": "a", "label": -1e300}, {}, "label is -1e.300; a number, at most 3.4e.38 from 0"),  # -inf in fp32
])
def test_refusals(bpe: Tokenizer, objective: Any, fields: dict[str, Any], data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        make_examples(objective, rows(fields), bpe, DataConfig(**data))
    assert "\n" not in str(error.value)


def test_span_needs_something_that_stays() -> None:
    """With a share of 1 no number of tokens fills a source: it was looked for without end."""
    for key, value, said in (("mlm_probability", 1.0, "1.0, which leaves a source"), ("seq_len", 2, "2; 3 at least")):
        with pytest.raises(InputError, match=rf"^data\.{key}: {said}"):
            find_objective("span").verify(DataConfig(**{key: value}))


def test_more_refusals(bpe: Tokenizer, bert: Tokenizer) -> None:
    for train, whose in ((True, ""), (False, " of the evaluation data")):
        with pytest.raises(InputError, match=rf"data\.path: 1 tokens in all{whose}; at least two"):
            make_examples("lm", documents("a"), bpe, DataConfig(seq_len=8), train=train)
    with pytest.raises(InputError, match="no record"):
        make_examples("lm", [], bpe, DataConfig())
    with pytest.raises(InputError, match="without an end of text"):
        make_examples("seq2seq", rows({"source": "a", "target": "b"}), bert, DataConfig())
    with pytest.raises(InputError, match=r"data\.seq_len: 2; room"):
        make_examples("mlm", documents("a"), bert, DataConfig(seq_len=2))
    with pytest.raises(InputError, match=r"data\.seq_len: 2; room"):
        make_examples("classify", rows({"text": "a", "label": 0}, {"text": "a", "label": 1}), bert,
                      DataConfig(seq_len=2, pair_key="text"))
    two = DataConfig(text_key="s", label_key="y")
    with pytest.raises(InputError, match=r"data.jsonl: line 1: y: 'maybe' is no label that was trained; known: no, yes"):
        make_examples("classify", rows({"s": "a", "y": "maybe"}), bert, two, names=("no", "yes"))
    with pytest.raises(InputError, match=r"line 1: y: 2 is no label that was trained; 0 to 1 are known"):
        make_examples("classify", rows({"s": "a", "y": 2}), bert, two, names=("LABEL_0", "LABEL_1"))
    for odd in (None, 0.5, 1.0, [1]):
        with pytest.raises(InputError, match=r"line 3: y is .*; the name or the number of a class; objective=regress"):
            make_examples("classify", rows(*({"s": "a", "y": y} for y in (0, 1, odd))), bert, two)
    with pytest.raises(InputError, match=r"line 2: y has 1; a name"):
        make_examples("classify", rows({"s": "a", "y": "no"}, {"s": "a", "y": 1}), bert, two)
    with pytest.raises(InputError, match="line 1: no token in its text"):
        make_examples("classify", rows({"s": "", "y": 0}, {"s": "a", "y": 1}), bpe, two)


def test_ids_that_the_model_lacks_are_named(bpe: Tokenizer) -> None:
    high = bpe.encode(TEXT, special=False)
    place = high.index(max(high))
    offset = bpe.offset(TEXT, place)
    vocab = max(high)
    with pytest.warns(UserWarning, match=f"{bpe.vocab_size} tokens where the model has {vocab}"), \
            pytest.raises(InputError, match=rf"0.txt: character {offset}: token {place} .* has id {vocab}, the model"):
        make_examples("lm", documents(TEXT), bpe, DataConfig(), vocab=vocab)
    with pytest.warns(UserWarning), pytest.raises(InputError, match=rf"line 2: character {offset}, token {place}"):
        make_examples("classify", rows({"text": "z", "label": 0}, {"text": TEXT, "label": 1}), bpe, DataConfig(),
                      vocab=vocab)
    with pytest.warns(UserWarning):  # a warning alone where the data holds none
        make_examples("lm", documents("zzz"), bpe, DataConfig(), vocab=vocab)
    make_examples("lm", documents(TEXT), bpe, DataConfig(), vocab=bpe.vocab_size)
    with pytest.raises(InputError, match="a special token has id"):
        make_examples("lm", documents("a"), train_tokenizer([TEXT], 300, "roberta"), DataConfig(), vocab=2)
    pieces = {"[UNK]": 0, "to": 1, "be": 2, "[CLS]": 3, "[SEP]": 4}
    raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    raw.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    last = Tokenizer(raw, {"cls": "[CLS]", "sep": "[SEP]"})
    with pytest.warns(UserWarning), pytest.raises(InputError, match=r"line 1: a token has id 4, the model 3 tokens"):
        make_examples("classify", rows({"text": "to be", "label": 0}, {"text": "be", "label": 1}), last, DataConfig(), vocab=3)


@pytest.mark.parametrize("portion", [1, 12, 1 << 20])
def test_texts_are_encoded_many_at_a_time_and_told_apart(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PORTION", portion)
    texts = ["one fox", "", "two", "three foxes jump", "é", ""]
    for tokenizer in (train_tokenizer(texts, 300), CharTokenizer.train(texts)):
        found = Reader(tokenizer, None).encode_all(zip(rows(*({"text": text} for text in texts)), texts, strict=True))
        assert [(record.line, ids) for record, ids in found] == [
            (number, tokenizer.encode(text, special=False)) for number, text in enumerate(texts, 1)]
    with pytest.raises(InputError, match=r"line 4: character 12, 'j' is not in the vocabulary"):
        make_examples("lm", rows(*({"text": text} for text in texts)), CharTokenizer.train(["onetwfxhrs "]), DataConfig())


@pytest.mark.filterwarnings("ignore:1 of 3 targets .* are empty")
@pytest.mark.parametrize("portion", [1, 12, 1 << 20])
def test_pairs_are_encoded_many_at_a_time_and_told_apart(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PORTION", portion)
    both = [("one fox", "two"), ("two", ""), ("foxes jump", "foxes")]
    fields = [{"a": first, "b": second, "label": label} for label, (first, second) in enumerate(both)]
    texts = [f"{row['a']} {row['b']}" for row in fields]
    tokenizer, calls = train_tokenizer(texts, 300, "roberta"), []
    encode_pairs = tokenizer.encode_pairs
    monkeypatch.setattr(tokenizer, "encode_pairs", lambda pairs, limit: calls.append(len(pairs)) or encode_pairs(pairs, limit))
    wanted = [tokenizer.encode_pair(str(row["a"]), str(row["b"]), 8)[0] for row in fields]
    calls.clear()
    pairs = DataConfig(text_key="a", pair_key="b", seq_len=8)
    found: Any = make_examples("classify", rows(*fields), tokenizer, pairs, names=("x", "y", "z"))
    assert [(list(ids), label) for ids, _, label in (found.at(0, k) for k in range(3))] == list(zip(wanted, range(3), strict=True))
    assert calls == {1: [1, 1, 1, 1], 12: [2, 1, 1], 1 << 20: [3, 1]}[portion]  # and one to see whether there are segments
    texts = DataConfig(source_key="a", target_key="b", seq_len=8)
    found = make_examples("seq2seq", rows(*fields), tokenizer, texts)
    assert [[list(ids) for ids in found.at(0, k)] for k in range(3)] == [
        [tokenizer.encode_pair(str(row["a"]), None, 8)[0], [*tokenizer.encode(str(row["b"]), False), tokenizer.eos_id]]
        for row in fields]
    with pytest.raises(InputError, match=r"line 3: character 6, 'j' is not in the vocabulary"):
        make_examples("classify", rows(*fields), CharTokenizer.train(["onetwfxs "]), pairs, names=("x", "y", "z"))


def test_a_character_that_training_lacked_is_named_by_file_and_offset() -> None:
    tokenizer = CharTokenizer.train(["abc"])
    with pytest.raises(InputError, match=r"e.txt: character 102: 'Z' is not in the vocabulary"):
        make_examples("lm", [Record({"text": "abZ"}, "e.txt", None, start=100)], tokenizer, DataConfig())
    with pytest.raises(InputError, match=r"data.jsonl: line 1: character 2, 'Z' is not"):
        make_examples("lm", rows({"text": "abZ"}), tokenizer, DataConfig())
