"""Folders of sentence-transformers: what of theirs a model here leaves out is said."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import zoo

import modelcenter as mc
from modelcenter.checkpoint.sentence import otherwise
from modelcenter.errors import InputError

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def written(folder: Path, kind: str, modules: Any, mode: str) -> Path:
    """A model with the files that sentence-transformers 2 to 5 writes beside it."""
    zoo.pair(zoo.Case(kind, "default", "embed"))[1].save_pretrained(folder)
    if isinstance(modules, list):
        modules = [{"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
                   for n, name in enumerate(modules)]
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 8, **{f"pooling_mode_{name}": name == mode for name in MODES}}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize(("kind", "modules", "mode", "said"), [
    ("bert", ["Transformer", "Pooling", "Normalize"], "mean_tokens", []),
    ("gpt2", ["Transformer", "Pooling"], "lasttoken", []),
    ("t5", ["Transformer", "Pooling", "Dense", "Normalize"], "mean_tokens", ["2_Dense (Dense) is not read"]),
    ("bert", ["Transformer", "Pooling"], "cls_token", ["1_Pooling/config.json says cls_token: vectors here are the mean"]),
    ("gpt2", ["Transformer", "Pooling"], "mean_tokens", ["1_Pooling/config.json says mean_tokens: vectors here are the last"]),
])  # fmt: skip
def test_what_is_left_out_is_said(kind: str, modules: list[str], mode: str, said: list[str], tmp_path: Path) -> None:
    folder = written(tmp_path / "m", kind, modules, mode)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        mc.load(folder, task="embed")
    assert len(heard) == len(said) and all(wanted in str(one.message) for wanted, one in zip(said, heard, strict=True))
    if kind != "t5":  # of which an encoder alone was saved
        mc.load(folder, task="backbone")  # which has no vectors of texts: not a word, or pytest makes it an error


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"modules.json: not a list of modules; what sentence-transformers writes"):
        mc.load(written(tmp_path / "m", "bert", {"a": 1}, ""), task="embed")


def test_the_pooling_may_stand_elsewhere_and_in_one_word(tmp_path: Path) -> None:
    """modules.json says where it is; `pooling_mode` wins over the flags, as in sentence-transformers' own class."""
    folder = written(tmp_path / "m", "bert", ["Transformer", "Other", "Pooling"], "mean_tokens")
    (folder / "1_Pooling").rename(folder / "2_Pooling")
    for said, heard in (({"pooling_mode": "cls"}, ["cls"]), ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, []),
                        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ["cls_token and mean_tokens"])):
        (folder / "2_Pooling" / "config.json").write_text(json.dumps(said))
        wanted = ["1_Other (Other) is not read: vectors are those before it"]
        wanted += [f"2_Pooling/config.json says {words}: vectors here are the mean of the tokens'" for words in heard]
        assert list(otherwise(folder, "mean")) == wanted
    (folder / "2_Pooling" / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"2_Pooling/config.json: a JSON list; an object is wanted"):
        list(otherwise(folder, "mean"))
