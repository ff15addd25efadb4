"""Tokenizers: the same ids as transformers for each kind of folder, lossless ones of our own, and refusals."""

import json
import math
import os
import pickle
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from modelcenter.data.config import DataConfig
from modelcenter.data.objective import make_examples
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import ROLES, CharTokenizer, ForeignTokenizer, Tokenizer
from modelcenter.data.tokenizer_open import load_tokenizer, open_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError, MissingError

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "Was it, though?\n\n\tIt's 3.50€; naïve café 中文 🙂\r\n",
         "def f(x):\n    return x ** 2  # squared\n", ""]
# This release shortens each of two texts to the limit before it looks which is longer, and its windows end there.
HASTY = tokenizers.__version__ == "0.23.2"
HARD = [*TEXTS, "[MASK] in <|endoftext|> the middle </s> [SEP]", "  leading", "trailing  ", "\x00\u2028\ufeff", "ÀÉ"]


def same_as_transformers(ours: Tokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for limit, second in ((None, HARD[1]), *([] if HASTY else [(9, HARD[1])]), (9, None)):
        pairs = [theirs(text, second, truncation=limit is not None, max_length=limit, return_token_type_ids=True) for text in HARD]
        wanted = [(pair["input_ids"], pair["token_type_ids"]) for pair in pairs]
        found = list(ours.encode_pairs([(text, second) for text in HARD], limit))
        assert [(ids, segments) for ids, segments, _ in found] == wanted
        assert [cut for *_, cut in found] == [len(theirs(text, second)["input_ids"]) > (limit or math.inf) for text in HARD]
        assert [ours.encode_pair(text, second, limit) for text in HARD] == wanted
    for text in HARD:
        for special in (True, False):
            assert ours.encode(text, special) == theirs(text, add_special_tokens=special)["input_ids"], (text, special)
        ids = ours.encode(text)
        for special in (True, False):
            assert ours.decode(ids, special) == theirs.decode(
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert list(ours.encode_all(HARD)) == [ours.encode(text, special=False) for text in HARD]
    assert {role: ours.id(role) for role in ROLES} == {role: getattr(theirs, f"{role}_token_id") for role in ROLES}
    assert ours.vocab_size == len(theirs) == len(ours)


def dump(file: Path, content: Any) -> None:
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def bert_folder(folder: Path, **config: Any) -> Path:
    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyzTÀ.,?;'", "the",
             "##he", "##s", "##e", "qu", "##ick", "中", "naive", "cafe", "\u2028", "fox"]
    dump(folder / "vocab.txt", "\n".join(words) + "\n")
    dump(folder / "config.json", {"model_type": "bert"})
    if config:
        dump(folder / "tokenizer_config.json", config)
    return folder


def gpt2_folder(folder: Path) -> Path:
    """vocab.json and merges.txt as old hub folders hold them, the end of text last."""
    made = json.loads(train_tokenizer(TEXTS, 300).raw.to_str())["model"]
    words = [t for t, _ in sorted(made["vocab"].items(), key=lambda item: item[1]) if t != "<|endoftext|>"]
    dump(folder / "vocab.json", {t: i for i, t in enumerate([*words, "<|endoftext|>"])})
    dump(folder / "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in made["merges"]))
    dump(folder / "config.json", {"model_type": "gpt2"})
    return folder


def spaced(form: str, texts: list[str]) -> Tokenizer:
    """Such as LLaMA's, that puts a space before every text: as transformers 4 wrote it, and as 5 does."""
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if form == "prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace("▁", form, split=False)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    raw.train_from_iterator([part for text in texts for part in text.split()], trainer)
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return Tokenizer(raw, {"unk": "<unk>", "bos": "<s>", "eos": "</s>"})


SPACED = ("prepend", "first", "always")


@pytest.mark.parametrize("form", SPACED)
def test_a_text_inside_another_has_no_space_that_it_does_not_say(form: str) -> None:
    tokenizer = spaced(form, TEXTS)
    for text in ("fox", " fox", "  the  fox", "(x"):
        ids = tokenizer.inside.encode(text, special=False)
        assert tokenizer.decode([*tokenizer.encode("The"), *ids]) == f"The{text}"
        assert (ids == tokenizer.encode(text, special=False)) == (form != "prepend" and text[0] == " ")
    for plain in (train_tokenizer(TEXTS, 300), CharTokenizer.train(TEXTS), by_words()):
        assert plain.inside is plain


def by_words() -> Tokenizer:
    """Such as T5's, which keeps no space of a text, and puts one before each word."""
    raw = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)], 0))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")])
    return Tokenizer(raw, {})


def test_a_preset_s_name_is_known_as_it_is_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks: only a process that writes token files, which has a hub id by then, asks for no presets."""
    folder, asked = gpt2_folder(tmp_path), []

    def fetch(name: str, files: Any, presets: dict[str, str | None]) -> Path:
        asked.append(presets.get(name, name))
        return folder

    monkeypatch.setattr("modelcenter.data.tokenizer_open.fetch", fetch)
    monkeypatch.chdir(tmp_path)
    for spec in ("gpt2-13b", "somebody/words"):
        load_tokenizer(spec)
        open_tokenizer(spec, [])
    load_tokenizer("gpt2-13b", {})
    assert asked == ["cerebras/Cerebras-GPT-13B"] * 2 + ["somebody/words"] * 2 + ["gpt2-13b"]


@pytest.mark.parametrize("config", [
    {}, {"do_lower_case": False}, {"tokenizer_class": "BertTokenizer", "strip_accents": False},
    {"tokenize_chinese_chars": False, "mask_token": "fox"}])
def test_bert_wordpiece(tmp_path: Path, config: dict[str, Any]) -> None:
    ours = load_tokenizer(bert_folder(tmp_path, **config))
    assert type(ours) is Tokenizer
    same_as_transformers(ours, tmp_path)
    ours.save(tmp_path / "saved")
    same_as_transformers(load_tokenizer(tmp_path / "saved"), tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(HARD[1]) == ours.encode(HARD[1])


@pytest.mark.parametrize("config", [None, {"model_max_length": 1024}, {"add_prefix_space": True},
                                    {"add_bos_token": True},
                                    {"pad_token": {"__type": "AddedToken", "content": "<pad>"}}])
def test_gpt2_bpe(tmp_path: Path, config: dict[str, Any] | None) -> None:
    gpt2_folder(tmp_path)
    if config is not None:
        dump(tmp_path / "tokenizer_config.json", config)
    ours = load_tokenizer(tmp_path)
    same_as_transformers(ours, tmp_path)
    ours.save(tmp_path / "saved")
    same_as_transformers(load_tokenizer(tmp_path / "saved"), tmp_path / "saved")
    # tokenizer.json alone, as gpt2's own folder: the end of text is known by its usual spelling
    if config is None:
        (tmp_path / "saved" / "tokenizer_config.json").unlink()
        assert load_tokenizer(tmp_path / "saved").eos_id == ours.eos_id == ours.vocab_size - 1


def test_a_text_to_go_on_with_has_no_end() -> None:
    """A prompt that a template had ended was gone on with as another text."""
    for kind in ("roberta", "bpe"):
        tokenizer = train_tokenizer(TEXTS, 400, kind)
        for text in ("The fox", "The end</s>", "The end<|endoftext|>"):
            plain = tokenizer.encode(text, special=False)
            assert tokenizer.begin(text) == ([tokenizer.bos_id] if kind == "roberta" else []) + plain
    assert CharTokenizer.train(["abc"]).begin("ab") == [0, 1]


def test_habits_of_transformers_tokenizer_are_kept(tmp_path: Path) -> None:
    """A text for BERT was no longer cut after it was fine-tuned, and a prompt padded on the other side."""
    from transformers import AutoTokenizer

    habits = {"model_max_length": 5, "padding_side": "left", "truncation_side": "left"}
    load_tokenizer(bert_folder(tmp_path, **habits)).save(tmp_path / "saved")
    load_tokenizer(tmp_path / "saved").save(tmp_path / "again")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "again"))
    assert {key: getattr(theirs, key) for key in habits} == habits
    assert len(theirs("a b c d e f g", truncation=True)["input_ids"]) == 5


@pytest.mark.parametrize(("make", "config"), [
    (bert_folder, {}), (bert_folder, {"do_lower_case": False}), (gpt2_folder, {}), (gpt2_folder, {"add_prefix_space": True}),
    (bert_folder, {"tokenizer_class": "DistilBertTokenizerFast"}),
    (bert_folder, {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}),
])
def test_a_saved_folder_is_opened_without_a_class_and_has_the_same_ids(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """Beside the model's config.json, by which transformers would look for a class that goes by settings of its own."""
    from transformers import AutoTokenizer

    dump(make(tmp_path) / "tokenizer_config.json", config)
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    shutil.copy(tmp_path / "config.json", tmp_path / "saved")
    before, after = (AutoTokenizer.from_pretrained(str(folder)) for folder in (tmp_path, tmp_path / "saved"))
    for text in HARD:
        assert dict(after(text, HARD[1])) == dict(before(text, HARD[1])) and after(text)["input_ids"] == before(text)["input_ids"]
        assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])


def test_a_model_that_reads_no_segments_is_given_none(tmp_path: Path) -> None:
    """Where its config.json alone says which it is, as in the hub's own folder."""
    from transformers import AutoTokenizer, DistilBertTokenizer

    dump(bert_folder(tmp_path) / "config.json", {"model_type": "distilbert"})
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    load_tokenizer(tmp_path / "saved").save(tmp_path / "again")
    wanted = dict(DistilBertTokenizer.from_pretrained(str(tmp_path))("the fox", HARD[1]))
    assert wanted.keys() == {"input_ids", "attention_mask"}
    assert dict(AutoTokenizer.from_pretrained(str(tmp_path / "again"))("the fox", HARD[1])) == wanted


@pytest.mark.parametrize("said", [
    {"tokenizer_config.json": {"additional_special_tokens": ["<x0>", "<x1>"], "do_lower_case": False}},
    {"tokenizer_config.json": {"extra_special_tokens": ["<x0>", {"content": "<x1>", "__type": "AddedToken"}]}},
    {"special_tokens_map.json": {"additional_special_tokens": ["<x0>", "<x1>"]}},
], ids=["config", "extra", "map"])  # fmt: skip
def test_special_tokens_of_no_role_are_kept(said: dict[str, Any], tmp_path: Path) -> None:
    """transformers took T5's <extra_id_0> for text in what was trained."""
    from transformers import AutoTokenizer

    as_json(bert_folder(tmp_path))
    for name, content in said.items():
        dump(tmp_path / name, content)
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    load_tokenizer(tmp_path / "saved").save(tmp_path / "again")
    before, after = (AutoTokenizer.from_pretrained(str(folder)) for folder in (tmp_path, tmp_path / "again"))
    assert sorted(after.all_special_ids) == sorted(before.all_special_ids) and len(after) == len(before)
    text = "the <x1> fox"
    assert after(text)["input_ids"] == before(text)["input_ids"] == load_tokenizer(tmp_path / "again").encode(text)
    assert after.decode(after(text)["input_ids"], skip_special_tokens=True).split() == ["the", "fox"]
    kept = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert kept.get("do_lower_case") == said.get("tokenizer_config.json", {}).get("do_lower_case")


@pytest.mark.parametrize("files", [
    {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}, "added_tokens.json": {"<|extratoken_1|>": 1}},
    {"tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"}},
    {"tokenizer.json": json.loads(tokenizers.Tokenizer(models.BPE({}, [])).to_str())},
], ids=["class", "t5", "json"])  # fmt: skip
def test_a_folder_without_a_vocabulary_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    """transformers makes a tokenizer of it all the same, which knows no word; GPT-J's folder was copied without its vocabulary."""
    for name, content in files.items():
        dump(tmp_path / name, content)
    with pytest.raises(MissingError, match=rf"^{tmp_path}: tokenizer: no vocabulary, only special tokens; tokenizer.json in it, "):
        load_tokenizer(tmp_path)


def test_words_may_all_be_added(tmp_path: Path) -> None:
    """Nucleotides, for one."""
    raw = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    raw.add_tokens(list("ACGT"))
    raw.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("ACGT") == [1, 2, 3, 4]


def test_added_tokens(tmp_path: Path) -> None:
    """GPT-J's way to a vocabulary of a round size."""
    gpt2_folder(tmp_path)
    size = load_tokenizer(tmp_path).vocab_size
    dump(tmp_path / "added_tokens.json", {f"<|extratoken_{k}|>": size + k for k in (1, 0, 2)})
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == size + 3 and ours.encode("<|extratoken_1|>") == [size + 1]


def as_json(folder: Path) -> Path:
    """The same with a tokenizer.json in place of its vocabulary."""
    (made := load_tokenizer(folder)).raw.save(str(folder / "tokenizer.json"))
    assert type(made) is Tokenizer
    for name in ("vocab.txt", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("make", [bert_folder, gpt2_folder], ids=["bert", "gpt2"])
@pytest.mark.parametrize("json_", [False, True], ids=["vocabulary", "json"])
@pytest.mark.parametrize("files", [
    {"added_tokens.json": {"<new>": 0, "[E1]": 1}}, {"tokenizer_config.json": {"additional_special_tokens": ["<new>", "[E1]"]}},
    {"added_tokens.json": {"<new>": 0}, "special_tokens_map.json": {"additional_special_tokens": ["[E1]"]}},
    {"tokenizer_config.json": {"added_tokens_decoder": {"1": {"content": "[E1]", "lstrip": True, "special": True},
                                                        "0": {"content": "<new>", "single_word": True, "normalized": False}}}},
    {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<new>", "sound_token": "[E1]"}}},
], ids=["legacy", "additional", "both", "decoder", "extra"])  # fmt: skip
def test_tokens_beside_the_vocabulary_are_kept_whole(make: Any, json_: bool, files: dict[str, Any], tmp_path: Path) -> None:
    """What BERT's tokenizers of old saved, to name one: a word that somebody had added was cut into letters."""
    from transformers import AutoTokenizer

    make(tmp_path)
    size = load_tokenizer(as_json(tmp_path) if json_ else tmp_path).vocab_size
    for name, said in files.items():
        if name == "added_tokens.json":
            said = {token: size + k for token, k in said.items()}
        if "added_tokens_decoder" in said:
            said = {"added_tokens_decoder": {str(size + int(k)): token for k, token in said["added_tokens_decoder"].items()}}
        dump(tmp_path / name, said)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.vocab_size == len(theirs) == size + 2
    text = "the <new> fox, a<new> and [E1] [e1]<new>."
    assert ours.encode(text) == theirs(text)["input_ids"] and {size, size + 1} <= set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), True, clean_up_tokenization_spaces=False)
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(text) == ours.encode(text)


@pytest.mark.parametrize(("file", "content", "said"), [
    ("added_tokens.json", {"<new>": 900}, "id 900 for '<new>', which becomes number"),
    ("added_tokens.json", {"<new>": "a"}, "without a text and an id each"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": "<new>"}}}, "id 900 for '<new>'"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"900": "<new>"}}, "without a text and an id each"),
    ("tokenizer_config.json", {"added_tokens_decoder": ["<new>"]}, "without a text and an id each"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": "<new>", "lstrip": "no"}}}, "not a tokenizer"),
    ("tokenizer_config.json", {"additional_special_tokens": [3]}, "additional_special_tokens: 3; tokens, as text"),
])  # fmt: skip
def test_added_tokens_that_cannot_be_are_refused(file: str, content: Any, said: str, tmp_path: Path) -> None:
    dump(bert_folder(tmp_path) / file, content)
    with pytest.raises(InputError, match=said):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("make", "before", "config"), [
    (bert_folder, {}, {"do_lower_case": False}), (bert_folder, {"do_lower_case": False}, {}),
    (bert_folder, {}, {"tokenizer_class": "BertTokenizerFast", "strip_accents": False}),
    (bert_folder, {}, {"tokenize_chinese_chars": False}),
    (bert_folder, {"do_lower_case": False}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    (gpt2_folder, {}, {"add_prefix_space": True}),
    (gpt2_folder, {"add_prefix_space": True}, {"tokenizer_class": "GPT2TokenizerFast"}),
])  # fmt: skip
def test_a_class_takes_its_settings_from_the_config(make: Any, before: dict[str, Any], config: dict[str, Any],
                                                    tmp_path: Path) -> None:
    """Where tokenizer.json says otherwise: transformers' classes go by tokenizer_config.json, or by their own defaults."""
    from transformers import AutoTokenizer

    make(tmp_path)
    dump(tmp_path / "tokenizer_config.json", before)
    dump(as_json(tmp_path) / "tokenizer_config.json", config)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert [ours.encode(text) for text in HARD] == [theirs(text)["input_ids"] for text in HARD]


def test_bert_s_own_names_of_its_marks(tmp_path: Path) -> None:
    same_as_transformers(load_tokenizer(bert_folder(tmp_path, unk_token="q", cls_token="fox", sep_token="the")), tmp_path)


def test_beginning_of_text_from_the_config(tmp_path: Path) -> None:
    """LLaMA's folders: tokenizer.json with a template, which counts for more than add_bos_token."""
    made = train_tokenizer(TEXTS, 300, "roberta")
    made.raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)])
    made.save(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for extra in ({}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}):
        dump(tmp_path / "tokenizer_config.json", {**config, **extra})
        same_as_transformers(load_tokenizer(tmp_path), tmp_path)
        assert load_tokenizer(tmp_path).encode("a")[0] == 0


def test_lengths_in_the_file_do_not_cut_examples(tmp_path: Path) -> None:
    """Sentence-transformers' files hold their truncation and padding."""
    raw = train_tokenizer(TEXTS, 300).raw
    raw.enable_truncation(4)
    raw.enable_padding(length=6)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode(TEXTS[0])) > 20
    assert len(load_tokenizer(tmp_path).encode("a")) == 1


def test_sentencepiece_and_cpm_ant_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("rjieba")
    words = ["<pad>", "<unk>", "<s>", "</s>", "<d>", "</d>", "</_>", "</n>", "的", "中文", "a", "b", "ab"]
    dump(tmp_path / "vocab.txt", "\n".join(words) + "\n")
    dump(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CpmAntTokenizer"})
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, ForeignTokenizer)
    same_as_transformers(ours, tmp_path)
    before = ours.encode("ab 中文\n")
    ours.save(tmp_path / "saved")
    assert ours.encode("ab 中文\n") == before == load_tokenizer(tmp_path / "saved").encode("ab 中文\n")


def test_merges_of_sentencepiece_by_score(tmp_path: Path) -> None:
    """LLaMA's model, whose runs of spaces have low numbers and the lowest scores; transformers 5.23 merges them first."""
    sentencepiece, proto = pytest.importorskip("sentencepiece"), pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    text = TEXTS[0].replace(" ", "  ").lower()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 9), model_prefix=str(tmp_path / "tokenizer"), vocab_size=330, model_type="bpe",
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity", hard_vocab_limit=False,
        minloglevel=2)
    model = proto.ModelProto()
    model.ParseFromString((file := tmp_path / "tokenizer.model").read_bytes())
    pieces = list(model.pieces)
    at = next(k for k, piece in enumerate(pieces) if piece.type == 1)
    last = [proto.ModelProto.SentencePiece(piece="▁" * n, score=-1e9, type=1) for n in (2, 4)]
    del model.pieces[:]
    model.pieces.extend([*pieces[:at], *last, *(piece for piece in pieces[at:] if set(piece.piece) != {"▁"} or piece.piece == "▁")])
    file.write_bytes(model.SerializeToString())
    dump(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(file))
    for said in ("the  quick   brown    fox", "a" + " " * 9 + "dog", "the fox"):
        assert ours.encode(said) == [theirs.bos_id(), *theirs.encode(said)]
    assert "</s>" in ours.vocabulary and ours.encode("the</s>")[-1] == ours.eos_id
    ours.save(tmp_path / "saved")
    same_as_transformers(load_tokenizer(tmp_path / "saved"), tmp_path / "saved")


@pytest.mark.parametrize("legacy", [{}, {"legacy": True}, {"legacy": False}], ids=str)
def test_llama_s_file_counts_as_it_stands(legacy: dict[str, bool], tmp_path: Path) -> None:
    """As the weights have learned it, whatever transformers' class makes of its vocabulary."""
    made = spaced("prepend", TEXTS)
    made.save(tmp_path)
    dump(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", **legacy})
    ours = load_tokenizer(tmp_path)
    for text in (" fox", "fox</s>dog", "</s> the", "the  fox"):
        assert ours.encode(text) == made.encode(text)
    assert ours.decode(ours.encode("fox</s>dog")) == "fox dog" and ours.decode(ours.encode(" fox")) == " fox"


def test_characters(tmp_path: Path) -> None:
    text = "".join(TEXTS)
    ours = open_tokenizer("char", TEXTS)
    assert ours.encode(text) == [sorted(set(text)).index(c) for c in text]
    assert ours.decode(ours.encode(text)) == text and ours.vocab_size == len(set(text))
    assert [ours.id(role) for role in ROLES] == [None] * 7 and ours.special_ids == set()
    with pytest.raises(InputError, match="character 2: 'Ω' is not in the vocabulary"):
        ours.encode("abΩ")
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, CharTokenizer) and again.encode(text) == ours.encode(text)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs(text)["input_ids"] == ours.encode(text) == ours.raw.encode(text).ids
    assert theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize("kind, size", [("bpe", 400), ("roberta", 400), ("span", 400)])
def test_trained(tmp_path: Path, kind: Any, size: int) -> None:
    ours, again = train_tokenizer(TEXTS, size, kind), train_tokenizer(TEXTS, size, kind)
    assert ours.raw.to_str() == again.raw.to_str() and ours.vocab_size <= size
    ours.save(tmp_path)
    same_as_transformers(load_tokenizer(tmp_path), tmp_path)
    assert [load_tokenizer(tmp_path).encode(t) for t in HARD] == [ours.encode(t) for t in HARD]
    assert pickle.loads(pickle.dumps(ours)).encode(HARD[1]) == ours.encode(HARD[1])  # noqa: S301


def test_byte_level_loses_nothing() -> None:
    ours = train_tokenizer(TEXTS, 300)
    letters = random.Random(0)
    for _ in range(50):
        text = "".join(chr(letters.choice((letters.randrange(32, 0xD800), 10, 9, 32, 0x1F600))) for _ in range(20))
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<|endoftext|>") == [0] == [ours.eos_id] == [ours.bos_id]
    assert ours.pad_id is None


def test_sentinels_stand_behind_padding_and_the_end() -> None:
    ours = open_tokenizer("span:400", TEXTS)
    assert (ours.pad_id, ours.eos_id, ours.unk_id) == (0, 1, 2)
    assert [ours.token_to_id(f"<extra_id_{k}>") for k in range(100)] == list(range(3, 103))
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0] and ours.bos_id is None


@pytest.mark.parametrize("spec, said", [
    ("bpe", "; a size: bpe:8000"), ("bpe:many", "; a size: bpe"), ("bpe:100", "at least 257"),
    ("roberta:260", "at least 261"), ("span:358", "at least 359"), ("./none", "no such folder"), ("a/b/c", "no such folder"),
    ("gpt2:300", "of your text .bpe:300, .* or gpt2, with the size that it has"),
    ("bert:260", "of your text .bpe:260, roberta:261, .* or bert-base-uncased, with the size that it has"),
    ("wordpiece:9000", "of your text .bpe:9000, .* or a preset's name, with the size that it has")])
def test_bad_specifications(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        open_tokenizer(spec, TEXTS)


def test_a_models_folder_that_is_not_there() -> None:
    with pytest.raises(MissingError, match=r"\./none: model: no such folder; an existing folder, a preset or a hub id$"):
        load_tokenizer("./none", {"gpt2": "openai-community/gpt2"})


def test_a_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match="nobody/nothing: offline, and nobody/nothing is neither a folder nor cached; unset HF"):
        load_tokenizer("nobody/nothing")
    presets = {"gpt2": "openai-community/gpt2", "unpublished": None}
    with pytest.raises(MissingError, match=r"gpt22: offline, .*; did you mean the preset 'gpt2'\?"):
        load_tokenizer("gpt22", presets)
    with pytest.raises(MissingError, match=r"gpt2: offline, and openai-community/gpt2 is neither a folder nor cached; .*r$"):
        load_tokenizer("gpt2", presets)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no tokenizer file in it; .* tokenizer=NAME$"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="empty text"):
        open_tokenizer("char", [""])


def broken(change: Any) -> str:
    content = json.loads(train_tokenizer(TEXTS, 260).raw.to_str())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize("content", [
    "", "{}", "[]", "{", '{"model": 3}', "version https://git-lfs.github.com/spec/v1\n", "[" * 5000,
    broken(lambda c: c["model"]["merges"].append(["a", "zzzz"])),
    broken(lambda c: c["model"].update(vocab={"a": -1})),
    broken(lambda c: c.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated",
                                             "invert": False})),
    broken(lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
    broken(lambda c: c.update(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}], "pair": [],
        "special_tokens": {}})),
])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str, capfd: pytest.CaptureFixture[str]) -> None:
    dump(tmp_path / "tokenizer.json", content)
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)
    os.write(2, b"open again")
    assert capfd.readouterr().err == "open again"


@pytest.mark.parametrize("file, content, said", [
    ("merges.txt", "#version: 0.2\na b c\n", "two tokens a line"), ("merges.txt", "a zzzz\n", "not a tokenizer"),
    ("vocab.json", "[1]", "not a vocabulary"), ("vocab.json", '{"a": "b"}', "not a vocabulary"),
    ("tokenizer_config.json", "[]", "a JSON list; an object")])
def test_broken_companions(tmp_path: Path, file: str, content: str, said: str) -> None:
    gpt2_folder(tmp_path)
    dump(tmp_path / file, content)
    with pytest.raises(InputError, match=said):
        load_tokenizer(tmp_path)


def test_what_is_no_text_and_what_are_not_the_ids_of_one_are_refused() -> None:
    plain = train_tokenizer(TEXTS, 260)
    for ours in (plain, CharTokenizer.train(TEXTS), ForeignTokenizer(plain.raw, "theirs")):
        for text in (3, None, ["a"]):
            with pytest.raises(InputError, match=f"^text: a {type(text).__name__}; one text, as a str"):
                ours.encode(text)  # type: ignore[arg-type]  # what is refused
        for ids, found in (([[1, 2]], r"\[\[1, 2\]\]"), (3, "3"), (["a"], r"\['a'\]"), ([1.5], r"\[1.5\]"), ([1, -100], "-100")):
            with pytest.raises(InputError, match=f"^ids: {found}; "):
                ours.decode(ids)  # type: ignore[arg-type]  # what is refused
    assert plain.decode([]) == ""


def test_a_tokenizer_without_unknown(tmp_path: Path) -> None:
    """A word-level vocabulary that lacks a word is found at the text, not at the load."""
    tokenizers.Tokenizer(models.WordLevel({"hello": 0, "there": 1})).save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.encode("hello") == [0]
    said = r"'bye' cannot be encoded \(WordLevel error: Missing \[UNK\].*\); a tokenizer with a token for unknown words"
    for cut in (found.encode, found.encode_places, lambda text: list(found.encode_all(["hello", text])),
                lambda text: found.encode_pair("hello", text), lambda text: list(found.windows("hello", text, 8, 1)),
                lambda text: found.encode_words(["hello", text], 8)):  # fmt: skip
        with pytest.raises(InputError, match=rf"^{tmp_path}/tokenizer\.json: {said}"):
            cut("bye")  # type: ignore[operator]  # of several kinds
    some = [Record({"text": text, "label": 0}, "f", line) for line, text in enumerate(("hello", "there", "bye", "hello"), 1)]
    for objective in ("lm", "classify"):
        with pytest.raises(InputError, match=f"^f: line 3: {said}"):
            make_examples(objective, some, found, DataConfig(path="x", seq_len=8), names=("a", "b"))


def test_nobodys_home_is_no_folder() -> None:
    with pytest.raises(MissingError, match=r"^~nobody-is-called-so/x: tokenizer: no such folder"):
        load_tokenizer("~nobody-is-called-so/x")


def test_half_a_surrogate_pair_is_no_text() -> None:
    for found in (train_tokenizer(["a"], 300), CharTokenizer.train(["a"])):
        with pytest.raises(InputError, match=r"^text: half a surrogate pair at character 1; valid Unicode"):
            found.encode("a\ud800")


def test_characters_of_a_corpus_that_fits_in_no_memory() -> None:
    class Text(str):
        pass

    alive: list[Any] = []

    def texts() -> Iterator[str]:
        for k in range(9):
            assert sum(there() is not None for there in alive) < 2
            text = Text(f"a{k}")
            alive.append(weakref.ref(text))
            yield text

    assert len(CharTokenizer.train(texts())) == 10
