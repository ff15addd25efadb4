"""Folders of sentence-transformers: poolings and dense layers are read, trained and written back; what is left out is said."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.checkpoint.sentence import read_modules
from modelcenter.errors import InputError
from modelcenter.layers.pick import POOLINGS
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def written(folder: Path, kind: str, modules: Any, mode: str) -> Path:
    """A model with the files that sentence-transformers 2 to 5 writes beside it."""
    zoo.pair(zoo.Case(kind, "default", "embed"))[1].save_pretrained(folder)
    if isinstance(modules, list):
        modules = [{"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
                   for n, name in enumerate(modules)]
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": 8, **{f"pooling_mode_{name}": name == mode for name in MODES}}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize(("kind", "modules", "mode", "said"), [
    ("bert", ["Transformer", "Pooling", "Normalize"], "mean_tokens", []),
    ("gpt2", ["Transformer", "Pooling"], "lasttoken", []),
    ("bert", ["Transformer", "Pooling", "LayerNorm", "Dense"], "mean_tokens",
     ["2_LayerNorm (LayerNorm) is not read", "3_Dense (Dense) is not read"]),
    ("bert", ["Transformer", "Pooling", "Normalize", "Dense"], "mean_tokens", ["3_Dense (Dense) is not read"]),
    ("gpt2", ["Transformer", "Pooling"], "mean_sqrt_len_tokens", ["1_Pooling/config.json says mean_sqrt_len_tokens"]),
    ("t5", ["Transformer", "Pooling", "Dense"], "max_tokens",
     ["1_Pooling/config.json says max_tokens, which is not there: mean, last, cls of the tokens' are", "2_Dense (Dense) is not"]),
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
    folder = written(tmp_path / "m", "bert", ["Transformer", "Normalize", "Pooling"], "mean_tokens")
    (folder / "1_Pooling").rename(folder / "2_Pooling")
    for said, pooling, unread in (
        ({"pooling_mode": "cls"}, "cls", []), ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, "mean", []),
        ({"pooling_mode_lasttoken": True}, "last", []), ({}, None, []),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None, ["cls_token and mean_tokens"]),
    ):
        (folder / "2_Pooling" / "config.json").write_text(json.dumps(said))
        found = read_modules(folder)
        assert (found.pooling, len(found.unread), bool(found.files)) == (pooling, len(unread), not unread)
        assert all(words in line for words, line in zip(unread, found.unread, strict=True))
    (folder / "2_Pooling" / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"2_Pooling/config.json: a JSON list; an object$"):
        read_modules(folder)


LAYERS = ({"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}, {},  # {}: a bias and tanh
          {"bias": True, "activation_function": "torch.nn.modules.activation.GELU"})  # fmt: skip
ACTS = (nn.Identity(), nn.Tanh(), nn.GELU())


def with_dense(folder: Path, kind: str, mode: str, *, suffix: str = "safetensors") -> tuple[Path, list[nn.Linear]]:
    """Three dense layers behind the pooling, and the reference's products."""
    written(folder, kind, ["Transformer", "Pooling", "Dense", "Dense", "Dense", "Normalize"], mode)
    config = json.loads((folder / "config.json").read_text())
    sizes, products = [next(config[key] for key in ("hidden_size", "d_model", "n_embd") if key in config), 12, 7, 9], []
    for n, (a, b, more) in enumerate(zip(sizes, sizes[1:], LAYERS, strict=False)):
        place = folder / f"{n + 2}_Dense"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"in_features": a, "out_features": b, **more}))
        products.append(nn.Linear(a, b, bias=more.get("bias", True)))
        tensors = {f"linear.{name}": p.detach() for name, p in products[-1].named_parameters()}
        if suffix == "bin":
            torch.save(tensors, place / "pytorch_model.bin")
        else:
            save_file(tensors, place / "model.safetensors")
    return folder, products


def reference(products: list[nn.Linear], states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """sentence-transformers' Pooling, Dense and Normalize: of the docstrings of its classes."""
    real = mask[..., None].to(states)
    pooled = {"mean_tokens": (states * real).sum(1) / real.sum(1).clamp(min=1e-9), "cls_token": states[:, 0],
              "lasttoken": states[torch.arange(len(states)), mask.sum(1) - 1]}[mode]  # fmt: skip
    for product, act in zip(products, ACTS, strict=True):
        pooled = act(product(pooled))
    return nn.functional.normalize(pooled, p=2, dim=1)


@pytest.mark.parametrize(("kind", "mode", "suffix"), [("t5", "mean_tokens", "safetensors"), ("bert", "cls_token", "bin"),
                                                      ("gpt2", "mean_tokens", "safetensors"), ("bert", "lasttoken", "safetensors")])
def test_dense_layers_are_read_trained_and_written_back(kind: str, mode: str, suffix: str, tmp_path: Path) -> None:
    folder, products = with_dense(tmp_path / "m", kind, mode, suffix=suffix)
    model = mc.load(folder, task="embed", dtype=torch.float32)
    ids = torch.randint(5, 40, (3, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask[2, 2:] = 0
    out = model(ids, attention_mask=mask)
    torch.testing.assert_close(out.embeddings, reference(products, out.last_hidden_state, mask, mode), atol=1e-6, rtol=1e-5)

    before = copy.deepcopy(model.head.dense)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    model(ids, attention_mask=mask).embeddings[:, 0].sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before.parameters(), model.head.dense.parameters(), strict=True))

    model.save_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")  # over itself
    names = ["modules.json", *(f"{n}_{what}/config.json" for n, what in enumerate(("Pooling", *["Dense"] * 3), 1))]
    assert all((tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes() for name in names)
    for n, layer in enumerate(model.head.dense, 2):
        kept = load_file(tmp_path / "out" / f"{n}_Dense" / "model.safetensors")
        assert {name: p.tolist() for name, p in layer.named_parameters()} == {name: t.tolist() for name, t in kept.items()}
    again = mc.load(tmp_path / "out", task="embed")
    assert torch.equal(again(ids, attention_mask=mask).embeddings, model.eval()(ids, attention_mask=mask).embeddings)


@pytest.mark.parametrize(("change", "said"), [
    ({"activation_function": "torch.nn.modules.activation.Thanh"}, r"2_Dense/config.json: activation_function: torch.nn.*Tanh"),
    ({"activation_function": "mine.Tanh"}, r"activation_function: mine.Tanh; .* of torch.nn"),
    ({"in_features": 5}, r"2_Dense/config.json: in_features: 5; \d+, as wide as what it is given"),
    ({"out_features": "a"}, r"2_Dense/config.json: out_features: 'a' \(str\); a whole number"),
    ({"out_features": 2**62}, r"2_Dense/config.json: out_features: 4611686018427387904; a size from 1 to 2147483647"),
    ({"bias": "no"}, r"2_Dense/config.json: bias: 'no'; true or false"),
    ({"bias": True}, r"2_Dense: linear.bias: no such tensor"),
    ({"out_features": 11}, r"2_Dense: linear.weight: has shape \[12, \d+\]; config.json gives \[11, \d+\]"),
])  # fmt: skip
def test_a_dense_layer_that_is_not_as_said_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder, _ = with_dense(tmp_path / "m", "bert", "mean_tokens")
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=said):
        mc.load(folder, task="embed")


def test_modules_are_folders_inside(tmp_path: Path) -> None:
    """Any plain name will do, as sentence-transformers takes them all; what is elsewhere is not read."""
    folder = written(tmp_path / "m", "bert", ["Transformer", "Pooling"], "cls_token")
    rows = json.loads((folder / "modules.json").read_text())

    def placed(place: str) -> None:
        (folder / "modules.json").write_text(json.dumps([rows[0], {**rows[1], "path": place}]))

    (folder / "1_Pooling").rename(folder / "pool.ing")
    placed("pool.ing")
    model = mc.load(folder)
    model.save_pretrained(tmp_path / "out")
    assert model.head.pick is mc.load(tmp_path / "out").head.pick is POOLINGS["cls"]

    (tmp_path / "outside").mkdir()
    (folder / "pool.ing" / "config.json").rename(tmp_path / "outside" / "config.json")
    with pytest.raises(InputError, match=r"pool.ing/config.json: no such file"):  # the mean, it would be otherwise
        mc.load(folder)
    (folder / "link").symlink_to(tmp_path / "outside")
    placed("link")
    with pytest.raises(InputError, match=r"link/config.json: a link out of its folder, to .*outside/config.json"):
        mc.load(folder)
    for place in ("../outside", str(tmp_path / "outside"), "..", ""):
        placed(place)
        with pytest.raises(InputError, match=rf"modules.json: path: '{place}'; the plain name of a folder"):
            mc.load(folder)


def test_a_dense_layer_s_weights_are_no_codes(tmp_path: Path) -> None:
    folder, products = with_dense(tmp_path / "m", "bert", "mean_tokens")
    save_file({"linear.weight": products[0].weight.detach().to(torch.int8)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(InputError, match=r"2_Dense/model.safetensors: linear.weight: int8; weights in fp16, bf16, fp32 or fp64"):
        mc.load(folder, task="embed")


def test_a_classifier_over_a_model_of_vectors_is_a_classifier(tmp_path: Path) -> None:
    folder, _ = with_dense(tmp_path / "m", "bert", "mean_tokens")
    mc.load(folder, task="classify", num_labels=3).save_pretrained(folder)
    assert mc.load(folder).task == "classify" and not (folder / "modules.json").exists()


def test_a_tensor_that_a_dense_layer_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder, products = with_dense(tmp_path / "m", "bert", "mean_tokens")
    save_file({"linear.weight": products[0].weight.detach(), "linear.bias": torch.ones(12)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(InputError, match=r"2_Dense: linear.bias: unexpected; the layer that config.json describes"):
        mc.load(folder, task="embed")


@pytest.mark.parametrize(("kind", "mode"), [("bert", "mean_tokens"), ("gpt2", "lasttoken"), ("t5", "mean_tokens")])
def test_a_model_trained_from_no_such_folder_says_what_its_vectors_are(kind: str, mode: str, tmp_path: Path) -> None:
    """Or sentence-transformers would take the mean, and `mc.load` a backbone or a language model."""
    model = zoo.pair(zoo.Case(kind, "default", "embed"))[1]
    model.save_pretrained(tmp_path / "m")
    modules = json.loads((tmp_path / "m" / "modules.json").read_text())
    assert [(m["path"], m["type"].rpartition(".")[2]) for m in modules] == [
        ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]  # fmt: skip
    pooling = json.loads((tmp_path / "m" / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == [f"pooling_mode_{mode}"]
    assert pooling["pooling_mode_mean_tokens"] is (mode == "mean_tokens")  # whose absence is true to older versions
    assert pooling["word_embedding_dimension"] == model.config.dim
    ids = torch.randint(5, 40, (3, 6))
    again = mc.load(tmp_path / "m")
    assert again.task == "embed" and torch.equal(again(ids).embeddings, model.eval()(ids).embeddings)
    again.save_pretrained(tmp_path / "n")
    assert (tmp_path / "n" / "modules.json").read_bytes() == (tmp_path / "m" / "modules.json").read_bytes()
    if kind != "t5":
        mc.load(tmp_path / "m", task="backbone").save_pretrained(tmp_path / "b")
        assert not (tmp_path / "b" / "modules.json").exists()


@pytest.mark.parametrize(("kind", "mode"), [("bert", "cls_token"), ("gpt2", "lasttoken"), ("t5", "mean_tokens")])
def test_vectors_through_an_adapter_come_back(kind: str, mode: str, tmp_path: Path) -> None:
    """Its folder says what is made of the tokens, as the base's or the run's own head does, and so does what it is merged into."""
    base = written(tmp_path / "base", kind, ["Transformer", "Pooling"], mode)
    model = mc.load(base, adapter=mc.AdapterConfig(name="lora", rank=2))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p) if p.requires_grad else 0
    model.save_pretrained(tmp_path / "a")
    for said in ("modules.json", "1_Pooling/config.json"):
        (base / said).unlink()
    ids = torch.randint(5, 40, (3, 6))
    wanted = model(ids).embeddings
    again = mc.load(tmp_path / "a")
    assert again.task == "embed" and torch.equal(again(ids).embeddings, wanted)
    mc.merge_adapter(again).save_pretrained(tmp_path / "m")
    assert torch.allclose(mc.load(tmp_path / "m")(ids).embeddings, wanted, atol=1e-5)
    if kind != "t5":
        mc.load(tmp_path / "a", task="backbone").save_pretrained(tmp_path / "a")
        assert not (tmp_path / "a" / "modules.json").exists()


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("type_", ["FEATURE_EXTRACTION", None])
def test_an_adapter_of_peft_on_a_model_of_vectors(kind: str, type_: str | None, tmp_path: Path) -> None:
    """peft's type is that of a backbone too: which of the two it is for, its base says."""
    base = written(tmp_path / "base", kind, ["Transformer", "Pooling"], "mean_tokens")
    cls = {"bert": transformers.BertModel, "gpt2": transformers.GPT2Model, "t5": transformers.T5EncoderModel}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own: how transposed matrices are stored
        theirs = peft.get_peft_model(cls.from_pretrained(base), peft.LoraConfig(target_modules="all-linear", task_type=type_))
    theirs.save_pretrained(tmp_path / "a")
    ids = torch.randint(5, 40, (3, 6))
    found, wanted = mc.load(tmp_path / "a"), mc.load(base)(ids).embeddings
    assert found.task == "embed" and torch.allclose(found(ids).embeddings, wanted, atol=1e-5)
    if kind != "t5":
        (base / "modules.json").unlink()
        assert mc.load(tmp_path / "a").task == "backbone"
