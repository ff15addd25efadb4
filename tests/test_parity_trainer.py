"""The same recipe in `transformers.Trainer`: the same weights, data order and numbers give the same curve of losses, gradient
norms and rates, and the same weights at the end. Ours runs in micro-batches, theirs in whole batches unless a test says otherwise.

Two ways to the data. Either Trainer is fed what our loader made, or transformers' own tokenizers and collators read the records,
so that what is made of them is compared too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
import zoo
from test_train import MACHINE, TINY

import modelcenter as mc
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.optim.optimizers import trainable
from modelcenter.train.loop import Run, train
from modelcenter.train.metrics import read_rows
from modelcenter.train.prepare import prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import resolve

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:.* words have no token within")  # transformers cuts them in silence
STEPS, BATCH, MANY = 20, 8, 40
GPT = {**TINY, "positions": 64, "dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
BERT = {**TINY, "dropout": 0.0, "attn_dropout": 0.0, "head_dropout": 0.0}
# gated by a smooth function: a rounding that turns one of relu's units on or off moves a weight by a twentieth of a step
T5 = {"dim": 32, "hidden": 48, "heads": 2, "head_dim": 12, "layers": 2, "decoder_layers": 1, "dropout": 0.0}
WORDS = ["red", "green", "blue", "one", "two", "three", "small", "large", "apple", "pear", "runs", "sleeps", "under", "over", "a"]


def words(number: int, least: int, most: int) -> list[str]:
    """Some words, always the same for a number; how many differs much from one to the next."""
    many = least + number * 7 % (most + 1 - least)
    return [WORDS[(number * 3 + k * k + k * number) % len(WORDS)] for k in range(many)]


def text(number: int, least: int = 1, most: int = 12) -> str:
    return " ".join(words(number, least, most))


def asked(number: int) -> dict[str, Any]:
    """A question whose answer is a word of the context; some have none."""
    context = words(number, 6, 16)
    before = " ".join(context[: (at := number % len(context))])
    answer = {"text": [context[at]], "answer_start": [len(before) + bool(before)]}
    return {"question": f"which {context[at]}", "context": " ".join(context), "answers": answer}


RECORDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "lm": lambda n: {"text": text(n, 3, 30)},
    "rows": lambda n: {"prompt": text(n, 1, 4), "response": " " + text(n + 1, 1, 5)},
    "mlm": lambda n: {"text": text(n, 3, 30)},
    "classify": lambda n: {"text": f"{WORDS[n % 3]} {text(n)}", "label": n % 3},
    "pairs": lambda n: {"text": text(n, 1, 6), "other": f"{WORDS[n % 2]} {text(n + 5, 1, 6)}", "label": n % 2},
    "multilabel": lambda n: {"text": f"{WORDS[n % 3]} {text(n)}", "label": [*range(3)][n % 3 :]},
    "regress": lambda n: {"text": f"{WORDS[n % 7]} {text(n)}", "label": n % 7 / 2 - 1},
    "tag": lambda n: {"tokens": words(n, 1, 9), "tags": ["BIO"[len(word) % 3] for word in words(n, 1, 9)]},
    "qa": asked,
    "seq2seq": lambda n: {"source": text(n), "target": text(n + 1, 1, 6)},
    "span": lambda n: {"text": text(n, 3, 30)},
}


@dataclass(frozen=True)
class Case:
    """An objective on a tiny model of `preset`, in our recipe's keys beyond the common ones and in transformers' class."""

    records: str
    preset: str
    theirs: str
    config: dict[str, Any]
    task: str
    changes: dict[str, Any] = field(default_factory=dict)
    labels: int = 0

    @property
    def objective(self) -> str:
        return {"rows": "lm", "pairs": "classify"}.get(self.records, self.records)


BASE = "bert-base-uncased"
ROWS = {"data.seq_len": 64, "data.prompt_key": "prompt", "data.response_key": "response"}
CASES = {
    "blocks": Case("lm", "gpt2", "CausalLM", GPT, "lm"),
    "rows": Case("rows", "gpt2", "CausalLM", GPT, "lm", ROWS),
    "unpadded": Case("rows", "gpt2", "CausalLM", GPT, "lm", {**ROWS, "data.padding_free": True}),
    "padded": Case("rows", "gpt2", "CausalLM", GPT, "lm", {**ROWS, "data.padding_free": False}),
    "smoothed": Case("rows", "gpt2", "CausalLM", GPT, "lm", {**ROWS, "loss.label_smoothing": 0.2}),
    "packed": Case("lm", "gpt2", "CausalLM", GPT, "lm", {"data.packing": True, "batch": 4}),
    "mlm": Case("mlm", BASE, "MaskedLM", BERT, "mlm"),
    "classify": Case("classify", BASE, "SequenceClassification", BERT, "classify", labels=3),
    "pairs": Case("pairs", BASE, "SequenceClassification", BERT, "classify", {"data.pair_key": "other"}, labels=2),
    "multilabel": Case("multilabel", BASE, "SequenceClassification", BERT, "classify", labels=3),
    "regress": Case("regress", BASE, "SequenceClassification", BERT, "classify", labels=1),
    "tag": Case("tag", BASE, "TokenClassification", BERT, "tag", labels=3),
    "qa": Case("qa", BASE, "QuestionAnswering", BERT, "qa", {"data.stride": 4, "batch": 4}),
    "seq2seq": Case("seq2seq", "t5-v1_1-small", "Seq2SeqLM", T5, "seq2seq"),
    "span": Case("span", "t5-v1_1-small", "Seq2SeqLM", T5, "seq2seq"),
}  # fmt: skip


def spell(preset: str) -> Any:
    """A tokenizer of the preset's kind that knows some words whole and spells the others: [CLS] a [SEP] b [SEP] with segments, a
    beginning and an end of text, or, with sentinels, an end alone."""
    known = [word for word in WORDS if len(word) != 5]
    if preset == BASE:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = sorted(set("".join(WORDS)) | set("which"))
        vocab = {token: k for k, token in enumerate(dict.fromkeys([*special, *letters, *(f"##{c}" for c in letters), *known]))}
        raw = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        raw.post_processor = tokenizers.processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
        roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, model_input_names=inputs, **roles)
    raw = open_tokenizer("roberta:290", [" ".join(known)] * 2).raw
    ends = [(token, raw.token_to_id(token)) for token in ("<s>", "</s>")]
    single = "<s> $A </s>" if preset == "gpt2" else "$A </s>"
    raw.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ends)
    more = {"bos_token": "<s>"} if preset == "gpt2" else {"extra_special_tokens": [f"<extra_id_{k}>" for k in range(20)]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", **more)


def start(folder: Path, case: Case, **changes: Any) -> Recipe:
    """The recipe of `case` on 40 records and the weights that both sides start from, in `folder`/start."""
    records = [RECORDS[case.records](n) for n in range(MANY)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = spell(case.preset)
    names = {k: f"LABEL_{k}" for k in range(case.labels)} or None
    model = mc.build(case.preset, config={**case.config, "vocab": len(tokenizer)}, task=case.task, id2label=names, seed=1)
    with torch.no_grad():  # of ones and zeros a bug of norms or biases would not be seen
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    base = {
        "model": str(folder / "start"), "objective": case.objective, "data.path": str(folder / "data.jsonl"), "data.seq_len": 24,
        "optimizer.lr": 3e-4, "optimizer.weight_decay": 0.2, "optimizer.betas": [0.8, 0.95], "optimizer.eps": 1e-5,
        "schedule.name": "cosine", "schedule.warmup_steps": 5, "max_grad_norm": 0.5, "batch": BATCH, "micro_batch": 4,
        "precision": "fp32", "max_steps": STEPS, "logging_steps": 1, "output_dir": str(folder / "out"),
    }  # fmt: skip
    (folder / "base.yaml").write_text("{}\n")
    return load_recipe(folder / "base.yaml", {**base, **case.changes, **changes})


class Sequential(transformers.Trainer):
    """In the data's own order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Logs(transformers.TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "grad_norm" in logs:
            self.rows.append(logs)


def theirs(folder: Path, case: Case, recipe: Recipe, data: Sequence[Any], collate: Callable[[Any], Any], size: int,
           accumulation: int = 1, **more: Any) -> tuple[list[dict[str, Any]], Any]:
    """(rows, trainer) of `recipe` by Trainer over `data`, `size` of them a batch; the model is in trainer.model."""
    schedules = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "theirs"), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=recipe.max_steps,
        learning_rate=recipe.optimizer.lr, weight_decay=recipe.optimizer.weight_decay, adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1], adam_epsilon=recipe.optimizer.eps, max_grad_norm=recipe.max_grad_norm,
        lr_scheduler_type=schedules[recipe.schedule.name], warmup_steps=recipe.schedule.warmup_steps,
        label_smoothing_factor=recipe.loss.label_smoothing, remove_unused_columns=False, dataloader_pin_memory=False, **more,
    )  # fmt: skip
    model = getattr(transformers, f"AutoModelFor{case.theirs}").from_pretrained(folder / "start")
    if case.records in ("regress", "multilabel"):
        model.config.problem_type = {"regress": "regression", "multilabel": "multi_label_classification"}[case.records]
    logs = Logs()
    trainer = Sequential(model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[logs])
    trainer.remove_callback(transformers.PrinterCallback)
    with mock.patch("gc.collect"):  # before each run, a tenth of its time
        trainer.train()
    return logs.rows, trainer


def batches(recipe: Recipe) -> list[dict[str, Any]]:
    """What our loader makes of the recipe, a micro-batch an item, under transformers' names."""
    setup = prepare(*(resolved := resolve(recipe, MACHINE))[:1], MACHINE, resolved[1])
    steps = setup.loader.steps(micro_batch=resolved[0].micro_batch)
    found = [batch for _ in range(recipe.max_steps or 0) for batch in next(steps)[1]]
    return [named(batch, recipe.objective) for batch in found]


def named(batch: dict[str, Any], objective: str) -> dict[str, Any]:
    if objective != "qa":
        return batch
    first, last = batch["labels"].unbind(-1)
    return {**{key: value for key, value in batch.items() if key != "labels"}, "start_positions": first, "end_positions": last}


def the_only(rows: list[Any]) -> Any:
    (row,) = rows
    return row


def ours(recipe: Recipe) -> tuple[list[dict[str, Any]], Run]:
    run = train(recipe, MACHINE)
    return [row for row in read_rows(run.output_dir / "metrics.jsonl") if "loss" in row], run


def same(case: Case, found: tuple[list[dict[str, Any]], Run], wanted: tuple[list[dict[str, Any]], Any]) -> None:
    """The curves are one to 1e-4, the rates exactly, and the weights."""
    rows, run = found
    their_rows, trainer = wanted
    assert len(rows) == len(their_rows) == run.step
    first, last = (sum(row["loss"] for row in some) / 5 for some in (their_rows[:5], their_rows[-5:]))
    assert last < first - 0.02  # there was something to learn
    for step, (a, b) in enumerate(zip(rows, their_rows, strict=True), 1):
        assert a["lr"] == pytest.approx(b["learning_rate"], rel=1e-12, abs=0), f"step {step}"
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-4), f"step {step}"
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-3, abs=1e-5), f"step {step}"
    assert max(row["grad_norm"] for row in rows) > 0.5  # which clips
    model = type(trainer.model).from_pretrained(run.output_dir / "model")
    for (name, p), (_, q) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")


OF_OURS = ("blocks", "packed", "mlm", "span")


@pytest.mark.parametrize("name", OF_OURS)
def test_what_our_loader_makes(name: str, tmp_path: Path) -> None:
    """Of which they have no like: blocks at every offset, bins of whole documents, masks that are a function of the seed."""
    case = CASES[name]
    recipe = start(tmp_path, case)
    same(case, ours(recipe), theirs(tmp_path, case, recipe, batches(replace(recipe, micro_batch=recipe.batch)), the_only, 1))


# ---- what transformers' own tokenizers and collators make --------------------------------------------------------------


def of_rows(tokenizer: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    prompt, response = (tokenizer(record[key], add_special_tokens=False).input_ids for key in ("prompt", "response"))
    ids = [tokenizer.bos_token_id, *prompt, *response, tokenizer.eos_token_id]
    return [{"input_ids": ids, "labels": [-100] * (1 + len(prompt)) + ids[1 + len(prompt) :]}]


def of_texts(tokenizer: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    label = record["label"]
    label = [float(k in label) for k in range(3)] if isinstance(label, list) else label
    return [{**tokenizer(record["text"], record.get("other"), truncation=True, max_length=24), "label": label}]


def of_words(tokenizer: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    found = tokenizer(record["tokens"], is_split_into_words=True, truncation=True, max_length=24)
    where = found.word_ids()
    first = [w is not None and (k == 0 or where[k - 1] != w) for k, w in enumerate(where)]
    return [{**found, "labels": ["BIO".index(record["tags"][w]) if f else -100 for f, w in zip(first, where, strict=True)]}]


def of_questions(tokenizer: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    """As in transformers' example of question answering."""
    found = tokenizer(record["question"], record["context"], truncation="only_second", max_length=24, stride=4,
                      return_overflowing_tokens=True, return_offsets_mapping=True)
    if found["offset_mapping"][-1][-2][1] != len(record["context"].rstrip()):
        pytest.skip("tokenizers before 0.23.3 lose the last windows of a pair")
    begin, features = record["answers"]["answer_start"][0], []
    end = begin + len(record["answers"]["text"][0])
    for k, offsets in enumerate(found["offset_mapping"]):
        context = [i for i, side in enumerate(found.sequence_ids(k)) if side == 1]
        first, last = context[0], context[-1]
        if offsets[first][0] > begin or offsets[last][1] < end:
            first = last = 0
        else:
            first = max(i for i in context if offsets[i][0] <= begin)
            last = min(i for i in context if offsets[i][1] >= end)
        inputs = {key: found[key][k] for key in ("input_ids", "token_type_ids", "attention_mask")}
        features.append({**inputs, "start_positions": first, "end_positions": last})
    return features


def of_pairs(tokenizer: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    return [tokenizer(record["source"], text_target=record["target"], truncation=True, max_length=24)]


Maker = tuple[Callable[[Any, dict[str, Any]], list[dict[str, Any]]], Callable[[Any], Any]]
PREPARED: dict[str, Maker] = {
    "rows": (of_rows, lambda tokenizer: transformers.DataCollatorForSeq2Seq(tokenizer)),
    "smoothed": (of_rows, lambda tokenizer: transformers.DataCollatorForSeq2Seq(tokenizer)),
    "unpadded": (of_rows, lambda tokenizer: transformers.DataCollatorWithFlattening()),
    "classify": (of_texts, transformers.DataCollatorWithPadding),
    "pairs": (of_texts, transformers.DataCollatorWithPadding),
    "multilabel": (of_texts, transformers.DataCollatorWithPadding),
    "regress": (of_texts, transformers.DataCollatorWithPadding),
    "tag": (of_words, transformers.DataCollatorForTokenClassification),
    "qa": (of_questions, lambda tokenizer: transformers.default_data_collator),
    "seq2seq": (of_pairs, lambda tokenizer: transformers.DataCollatorForSeq2Seq(tokenizer)),
}


@pytest.mark.parametrize("name", PREPARED)
def test_what_transformers_makes_of_the_records(name: str, tmp_path: Path) -> None:
    """Their own accumulation too, where it is right: a causal model's loss is divided by all targets of a step. Their loss of
    question answering takes padding for places: one window at a time."""
    case = CASES[name]
    recipe = start(tmp_path, case, **{"data.shuffle": False})
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "start")
    make, collator = PREPARED[name]
    data = [feature for n in range(MANY) for feature in make(tokenizer, RECORDS[case.records](n))]
    data = (data * (1 + STEPS * BATCH // len(data)))[: STEPS * recipe.batch]  # Trainer's last batch of an epoch would be smaller
    size = {"qa": 1, "rows": 2}.get(name, recipe.batch)
    many = recipe.batch // size
    same(case, ours(recipe), theirs(tmp_path, case, recipe, data, collator(tokenizer), size, many))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_OURS, *PREPARED])
def test_fifty_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STEPS", 50)
    (test_what_transformers_makes_of_the_records if name in PREPARED else test_what_our_loader_makes)(name, tmp_path)


# ---- accumulation, evaluation, weight decay ----------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "parts"), [(24, (1, 2, 3, 4, 6, 8)), (35, (1, 5, 7))], ids=["24", "35"])
def test_accumulation_changes_nothing(batch: int, parts: tuple[int, ...], tmp_path: Path) -> None:
    """Rows whose numbers of targets differ by an order of magnitude: to the rounding of fp32 one curve and one model."""
    recipe = start(tmp_path, CASES["rows"], batch=batch, micro_batch=batch, max_steps=6)
    found = []
    for count in parts:
        rows, run = ours(replace(recipe, micro_batch=batch // count, output_dir=str(tmp_path / str(count))))
        found.append((rows, torch.cat([p.detach().flatten() for p in run.model.parameters()])))
    (one, weights), *others = found
    for rows, more in others:
        for a, b in zip(one, rows, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        torch.testing.assert_close(more, weights, rtol=0, atol=1e-6)


def test_where_their_epochs_end(tmp_path: Path) -> None:
    """What docs/from-modelcenter.md says of 3 epochs of 100 examples in batches of 8, which Trainer reads in two forwards."""

    class Line(torch.nn.Linear):
        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": super().forward(x).square().mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path / "theirs"), num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
    data: Any = [{"x": torch.ones(2)}] * 100
    assert transformers.Trainer(Line(2, 1), arguments, train_dataset=data).train().global_step == 39
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words", "label": "x"}\n{"text": "more", "label": "y"}\n' * 50)
    (tmp_path / "r.yaml").write_text(f"data: {{path: {tmp_path / 'rows.jsonl'}, seq_len: 16}}\nobjective: classify\n")
    small = {"config": TINY, "model": "gpt2", "init": "random", "tokenizer": "char", "output_dir": str(tmp_path / "ours")}
    recipe, device = resolve(load_recipe(tmp_path / "r.yaml", {**small, "batch": 8, "num_epochs": 3}), MACHINE)
    assert prepare(recipe, MACHINE, device).steps == 38


def test_where_their_accumulation_is_no_mean(tmp_path: Path) -> None:
    """BERT's and T5's classes leave the number of targets unread and Trainer takes it for used: it adds the parts' means up."""
    case = CASES["mlm"]
    recipe = start(tmp_path, case, max_steps=1, batch=8, micro_batch=2)
    (mine,), _ = ours(recipe)
    (row,), _ = theirs(tmp_path, case, recipe, batches(recipe), the_only, 1, 4)
    assert row["loss"] == pytest.approx(4 * mine["loss"], rel=0.2)


@pytest.mark.parametrize("name", ["blocks", "rows", "mlm", "classify", "multilabel", "regress", "tag", "qa", "seq2seq", "span"])
def test_evaluation_is_that_of_one_batch(name: str, tmp_path: Path) -> None:
    """Ours comes in batches of 4 and is a mean over all targets. Trainer's is a mean of batches' means: it is given one."""
    case = CASES[name]
    recipe = start(tmp_path, case, **{"data.eval_path": str(tmp_path / "data.jsonl"), "max_steps": 1})
    _, run = ours(recipe)
    resolved, device = resolve(replace(recipe, batch=1000, micro_batch=1 if name == "qa" else 1000), MACHINE)
    judge = prepare(resolved, MACHINE, device).evaluation
    assert judge is not None
    data = [named(batch, recipe.objective) for batch in judge.loader.once()]
    assert len(data) == 1 or name == "qa"
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
                                               per_device_eval_batch_size=1, dataloader_pin_memory=False)
    model = getattr(transformers, f"AutoModelFor{case.theirs}").from_pretrained(run.output_dir / "model")
    found = transformers.Trainer(model=model, args=arguments, data_collator=the_only).evaluate(data)  # type: ignore[arg-type]
    assert run.metrics["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("case", zoo.cases(all_variants=False), ids=str)
def test_weight_decay_is_of_the_same_parameters(case: zoo.Case) -> None:
    """For every family and head; tables of biases are biases, although they are matrices."""
    model, ours = zoo.pair(case, torch.float32)
    once = {name for name, _ in model.named_parameters()}  # a tied one by its first name
    wanted = once & set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    for _, parameter, decays in trainable(ours):
        parameter.grad = torch.full_like(parameter, float(decays))
    assert {name for name, grad in zoo.gradients_like_theirs(ours).items() if grad.any()} == wanted
