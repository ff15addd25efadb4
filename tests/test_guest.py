"""Ours in other people's programs: transformers' Trainer trains them as it trains transformers' model with the same weights."""

import copy
import json
import logging
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import zoo
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._pytree import tree_map

import modelcenter as mc
from modelcenter.layers.output import Output

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # theirs
SIZES = {"layers": 1, "dim": 32, "heads": 2, "vocab": 50, "positions": 8}
WORDS = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, "[MASK]": 3} | {f"w{n}": n for n in range(4, 128)}


def tokenizer() -> Any:
    raw = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # declared read-only, and set so in their examples
    named = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **named)


def records(task: str) -> list[dict[str, Any]]:
    """Rows of 5 to 13 tokens."""
    source, out = torch.Generator().manual_seed(2), []
    for n in range(16):
        ids = torch.randint(4, 128, (5 + n * 5 % 9,), generator=source).tolist()
        more = {"seq2seq": {"labels": ids[2:]}, "classify": {"label": n % 3}, "tag": {"labels": [k % 3 for k in ids]}}.get(task, {})
        out.append({"input_ids": ids, "attention_mask": [1] * len(ids), **more})
    return out


COLLATORS: dict[str, Callable[[Any, Any], Any]] = {
    "lm": lambda words, model: transformers.DataCollatorForLanguageModeling(words, mlm=False),
    "mlm": lambda words, model: transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4, seed=3),
    "seq2seq": lambda words, model: transformers.DataCollatorForSeq2Seq(words, model=model),
    "classify": lambda words, model: transformers.DataCollatorWithPadding(words),
    "tag": lambda words, model: transformers.DataCollatorForTokenClassification(words),
}


def quiet(kind: str, task: str) -> tuple[Any, mc.Model]:
    """Theirs and ours with the same weights and no dropout, each of its own."""
    case = zoo.Case(kind, "default", task)
    folder = zoo.reference(case)[1]
    none = {f.name: 0.0 for f in fields(case.family.Config) if "dropout" in f.name}  # type: ignore[arg-type]  # a dataclass
    ours = mc.load(folder, task=task, config=none)
    cls = type(zoo.reference(case)[0])
    return cls.from_pretrained(folder, config=cls.config_class.from_dict(ours.config.to_dict())), ours


def trainer(model: Any, task: str, where: Path, **asked: Any) -> Any:
    words = tokenizer()
    seq2seq = "predict_with_generate" in asked
    cls = transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer
    asks = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    metrics = asked.pop("compute_metrics", None)
    options: dict[str, Any] = dict(
        max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, seed=1,
    )  # fmt: skip
    arguments = asks(str(where), **options | asked)
    rows = records(task)
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows[:6]}
    out = cls(model=model, args=arguments, processing_class=words, data_collator=COLLATORS[task](words, model),
              compute_metrics=metrics, **data)  # fmt: skip
    out.remove_callback(transformers.PrinterCallback)
    return out


TOLD = ("loss", "grad_norm", "eval_loss", "eval_seen")


def curve(model: Any, task: str, where: Path, **asked: Any) -> list[float]:
    run = trainer(model, task, where, **asked)
    run.train()
    return [row[name] for row in run.state.log_history for name in TOLD if name in row]


def seen(found: Any) -> dict[str, float]:
    """What a metric is computed of, in one number."""
    assert not isinstance(found.predictions, tuple)
    return {"seen": float(abs(found.predictions).mean())}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
RECOMPUTE = min({"activation_checkpointing", "gradient_checkpointing"} & {f.name for f in fields(transformers.TrainingArguments)})
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accumulated": ("llama", "lm", {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    "recomputed": ("llama", "lm", {RECOMPUTE: True, "train_sampling_strategy": "group_by_length"}),
    "smoothed": ("llama", "lm", {"label_smoothing_factor": 0.1}),
    "evaluated": ("bloom", "lm", EVALUATED | {"compute_metrics": seen}),
    "masked": ("bert", "mlm", EVALUATED | {"prediction_loss_only": True}),
    "classified": ("gpt2", "classify", EVALUATED | {"compute_metrics": seen}),
    "tagged": ("bert", "tag", EVALUATED | {"compute_metrics": seen}),
    "smoothed pairs": ("t5", "seq2seq", {"label_smoothing_factor": 0.1}),
    "written": ("t5", "seq2seq", EVALUATED | {"predict_with_generate": True, "generation_max_length": 12, "compute_metrics": seen}),
    "written by beams": ("t5", "seq2seq", EVALUATED | {
        "predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": 3, "compute_metrics": seen}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_trainer_trains_ours_as_theirs(name: str, tmp_path: Path) -> None:
    kind, task, asked = RUNS[name]
    theirs, ours = (curve(model, task, tmp_path, **asked) for model in quiet(kind, task))
    assert len(theirs) >= 6 and ours == pytest.approx(theirs, rel=1e-4)


def test_trainer_counts_the_targets_of_gpt2(tmp_path: Path) -> None:
    """It knows by a class' name that nobody predicts a row's first token, and GPT2LMHeadModel does not say so: theirs is divided by
    a target a row too many."""
    theirs, ours = quiet("gpt2", "lm")
    options = {"max_steps": 1, "per_device_train_batch_size": 16}
    tokens = sum(len(row["input_ids"]) for row in records("lm"))
    found, wanted = (curve(model, "lm", tmp_path, **options)[0] for model in (ours, theirs))
    assert found == pytest.approx(wanted * tokens / (tokens - 16), rel=1e-4)


@pytest.mark.parametrize(("kind", "task"), [("gpt2", "lm"), ("t5", "seq2seq"), ("llama", "lm")])
def test_trainer_resumes_ours(kind: str, task: str, tmp_path: Path) -> None:
    """To the bit, from a file with one name for tied weights; the best model is read back at the end."""
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    weights = []
    for run in ("whole", "cut"):
        _, model = quiet(kind, task)
        trainer(model, task, tmp_path / run, **saved).train()
        if run == "cut":
            (tmp_path / run / "checkpoint-4").rename(tmp_path / "gone")
            _, model = quiet(kind, task)
            trainer(model, task, tmp_path / run, **saved).train(resume_from_checkpoint=True)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    _, model = quiet(kind, task)
    run = trainer(model, task, tmp_path / "best", **saved, load_best_model_at_end=True, learning_rate=0.05)
    run.train()
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric)
    with pytest.raises(mc.InputError, match=r"Trainer's weights, by names of ours; .*load_state_dict"):
        mc.load(tmp_path / "cut" / "checkpoint-2")


def test_tied_weights_have_one_name_and_answer_to_two() -> None:
    model, other = (mc.build("gpt2", config=SIZES, seed=seed) for seed in (0, 1))
    state = model.state_dict()
    assert "head.out.weight" not in state and state.keys() == model.shapes.keys()
    for given in (state, {**state, "head.out.weight": state["embed.tokens.weight"]}):
        other.load_state_dict({name: torch.zeros_like(t) for name, t in given.items()})
        other.load_state_dict(given)
        assert other.head.out.weight is other.embed.tokens.weight and torch.equal(other.head.out.weight, model.head.out.weight)
    other.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    assert other.head.out.weight is other.embed.tokens.weight
    outer, copied = torch.nn.Sequential(model), torch.nn.Sequential(other)
    assert "0.embed.tokens.weight" in outer.state_dict() and "0.head.out.weight" not in outer.state_dict()
    copied.load_state_dict(outer.state_dict())
    for given in (model.state_dict(), {**model.state_dict(), "head.out.weight": torch.zeros(50, 32)}):
        new = torch.nn.Sequential(mc.build("gpt2", config=SIZES, device="meta"))
        new.load_state_dict({f"0.{name}": t.clone() for name, t in given.items()}, assign=True)
        assert new[0].head.out.weight is new[0].embed.tokens.weight and new[0].head.out.weight.requires_grad
        assert torch.equal(new[0].head.out.weight, model.head.out.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({name: t for name, t in state.items() if name != "embed.tokens.weight"})
    other.head.out.weight = torch.nn.Parameter(torch.zeros(50, 32))
    other.tie_weights()
    assert other.head.out.weight is other.embed.tokens.weight
    other.head.out.weight = torch.nn.Parameter(torch.ones(50, 32))  # untied by hand: two tensors, two names
    assert torch.equal(other.state_dict()["head.out.weight"], torch.ones(50, 32))


def test_tied_weights_stay_tied_on_their_way_from_meta() -> None:
    model = mc.build("gpt2", config=SIZES, seed=0)
    outer, state = torch.nn.Sequential(model), {name: t.clone() for name, t in model.state_dict().items()}
    for away in (outer.to("meta"), outer.to_empty(device="cpu")):
        assert model.head.out.weight is model.embed.tokens.weight
        assert len(list(away.parameters())) == len(state)
    model.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in state.items())
    model.head.out.weight = torch.nn.Parameter(torch.ones(50, 32))  # untied by hand, it stays so
    assert model.to("meta").head.out.weight is not model.embed.tokens.weight


@pytest.mark.parametrize(("kind", "task"), [("bert", "mlm"), ("t5", "seq2seq"), ("gpt2", "lm")])
def test_gradients_of_each_row(kind: str, task: str) -> None:
    """By vmap, as tools for differential privacy and influence take them."""
    _, model = quiet(kind, task)
    rows = torch.randint(4, 128, (3, 9), generator=torch.Generator().manual_seed(1))
    held = {name: p.detach() for name, p in model.train().named_parameters()}

    def loss(held: Any, row: torch.Tensor) -> Any:
        return torch.func.functional_call(model, held, (), {"input_ids": row[None], "labels": row[None]}).loss

    found = torch.vmap(torch.func.grad(loss), (None, 0), randomness="different")(held, rows)
    for n, row in enumerate(rows):
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][n], p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "task"), [("gpt2", "lm"), ("t5", "seq2seq"), ("cpmant", "lm")])
def test_several_models_at_once_and_forward_derivatives(kind: str, task: str) -> None:
    """Though the kernel of attention that torch takes on a CPU gives no gradient of a mask, a learned bias, and no forward
    derivatives at all."""
    _, model = quiet(kind, task)
    rows = torch.randint(4, 128, (2, 9), generator=torch.Generator().manual_seed(1))

    def loss(held: Any) -> Any:
        return torch.func.functional_call(model, held, (), {"input_ids": rows, "labels": rows}).loss

    several = [model.train(), copy.deepcopy(model)]
    with torch.no_grad():
        for p in several[1].parameters():
            p *= 1.1
    stacked, _ = torch.func.stack_module_state(several)
    losses = torch.vmap(loss)(stacked)
    losses.sum().backward()
    for n, one in enumerate(several):
        wanted = one(input_ids=rows, labels=rows).loss
        torch.testing.assert_close(losses[n], wanted)
        wanted.backward()
        for name, p in one.named_parameters():
            torch.testing.assert_close(stacked[name].grad[n], p.grad, rtol=1e-4, atol=1e-4)
    held = {name: p.detach() for name, p in model.named_parameters()}
    way = {name: p.cos() for name, p in held.items()}
    slope = torch.func.jvp(loss, (held,), (way,))[1]
    torch.testing.assert_close(slope, sum((p.grad * way[name]).sum() for name, p in model.named_parameters()), rtol=1e-4, atol=1e-4)


def test_recompute_is_turned_on_and_off() -> None:
    _, model = quiet("gpt2", "lm")
    ids, found, on = torch.arange(6)[None], [], model.gradient_checkpointing_enable
    for change in (lambda: None, on, on, model.gradient_checkpointing_disable):
        change()
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        found.append((model.is_gradient_checkpointing, model.embed.tokens.weight.grad.clone()))
    assert [now for now, _ in found] == [False, True, True, False]
    assert all(torch.equal(gradient, found[0][1]) for _, gradient in found)
    assert not any("forward" in vars(part) for part in model.modules())
    with pytest.raises(mc.InputError, match=r"^activation_checkpointing_enable\(offload\): True; False: every block"):
        model.activation_checkpointing_enable(offload=True)


def test_a_config_is_read_by_their_names() -> None:
    config = mc.build("gpt2", config=SIZES).config
    assert (config.vocab_size, config.n_embd, config.hidden_size) == (50, 32, 32)
    assert (config.num_hidden_layers, config.num_attention_heads) == (1, 2)
    assert config.max_position_embeddings == config.n_positions == 8
    assert config.get_text_config() is config and not config.is_encoder_decoder and config.pad_token_id is None
    assert mc.build("t5-small", device="meta").config.is_encoder_decoder
    config.pad_token_id, config.use_cache = 7, False
    assert config.pad_token_id == config.to_dict()["pad_token_id"] == 7
    with pytest.raises(mc.InputError, match=r"^pad_token_id: 'x'; the id of a token, or null$"):
        config.pad_token_id = "x"


def test_tensorboard_is_told_the_config(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ours = quiet("gpt2", "lm")[1]
    trainer(ours, "lm", tmp_path, max_steps=1, report_to=["tensorboard"]).train()
    assert json.loads(ours.config.to_json_string()) == ours.config.to_dict()


def test_generation_config_is_theirs_and_is_heard(tmp_path: Path) -> None:
    theirs, ours = quiet("gpt2", "lm")
    ids = torch.arange(5, 11)[None]
    for model in (theirs, ours):
        model.generation_config.max_new_tokens = 7
        model.generation_config.repetition_penalty = 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = theirs.generate(ids)
    assert torch.equal(ours.generate(ids), wanted) and wanted.shape == (1, 13)
    assert ours.generate(ids, max_new_tokens=2).shape == (1, 8) and ours.can_generate()
    ours.save_pretrained(tmp_path)
    assert torch.equal(mc.load(tmp_path).generate(ids), wanted)
    ours.generation_config = transformers.GenerationConfig(max_new_tokens=3)
    assert ours.generate(ids).shape == (1, 9)


def test_an_output_holds_what_is_there() -> None:
    out = Output(loss=torch.ones(()), logits=None)
    assert list(out) == ["loss"] and out["logits"] is None and out.logits is None and len(out.to_tuple()) == 1
    with pytest.raises(KeyError):
        out["nothing"]


@dataclass
class Theirs(transformers.utils.ModelOutput):
    loss: Any = None
    logits: Any = None
    last_hidden_state: Any = None


def test_what_is_set_in_an_output_is_seen_by_every_way() -> None:
    """As in transformers' ModelOutput, of which Trainer reads outputs["loss"]. None takes a key away."""
    loss, logits = torch.ones(()), torch.ones(2, 3)

    def change(out: Any) -> Any:
        out.loss = out.loss + 6
        out["logits"] = out.logits * 2
        out.last_hidden_state = out.logits
        return out

    theirs = change(Theirs(loss=loss, logits=logits))
    for made in (change, torch.compile(change, backend="eager", fullgraph=True)):
        out = made(Output(loss=loss, logits=logits))
        for again in (out, copy.copy(out), pickle.loads(pickle.dumps(out)), tree_map(lambda t: t, out)):  # noqa: S301
            assert type(again) is Output and vars(again) == {} and list(again) == list(theirs)
            assert again["loss"] == again.loss == again[0] == theirs.loss == theirs["loss"] == 7
            assert torch.equal(again.logits, theirs.logits) and torch.equal(again[2], theirs.logits)
    out.logits = None
    out["last_hidden_state"] = None
    assert list(out) == ["loss"] and out.logits is None and out["logits"] is None and len(out.to_tuple()) == 1
    out.note = "mine"
    assert out.note == copy.copy(out).note == "mine" and "note" not in out


def test_answers_are_evaluated_as_starts_and_ends(tmp_path: Path) -> None:
    """What Trainer hands to a metric are the two tensors that transformers' model gives."""
    given = {"input_ids": [5, 6, 7, 8, 9], "attention_mask": [1] * 5, "start_positions": 1, "end_positions": 3}
    found = []
    for model in quiet("bert", "qa"):
        asked = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True,
                                               label_names=["start_positions", "end_positions"])  # fmt: skip
        found.append(transformers.Trainer(model=model, args=asked).predict([given] * 3))
    for theirs, ours in zip(found[0].predictions, found[1].predictions, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    assert found[1].metrics["test_loss"] == pytest.approx(found[0].metrics["test_loss"], rel=1e-5)


# ---- trl ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "task"), [("llama", "lm"), ("t5", "seq2seq")])
def test_the_model_without_its_head(kind: str, task: str) -> None:
    """trl's trainers compute losses of its hidden states and the head's matrix, in a forward that they put into the model."""
    theirs, ours = quiet(kind, task)
    ids, gradients = torch.randint(4, 128, (2, 9), generator=torch.Generator().manual_seed(1)), []
    asked = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "t5" else {})}
    plain = ours.train()(**asked).logits
    ours.forward = lambda **asked: ours.base_model(**asked, use_cache=False).last_hidden_state  # type: ignore[method-assign]
    hidden = ours(**asked)
    torch.testing.assert_close(ours.get_output_embeddings()(hidden * ours.head.scale), plain)
    for logits in (plain, ours.head.logits(hidden)):
        ours.zero_grad()
        logits.logsumexp(-1).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in ours.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])
    assert ours.task == task and "logits" not in ours.base_model(**asked) and hasattr(ours.head, "out")
    ours.add_model_tags(["trl"])
    theirs.add_model_tags(["trl"])


def test_where_packed_sequences_begin_may_be_said_twice() -> None:
    """As transformers' and trl's collators say it, with `seq_idx` beside what is read here."""
    rows = [{"input_ids": list(range(n, 2 * n))} for n in (5, 9)]
    batch = transformers.DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    _, model = quiet("llama", "lm")
    wanted = model(**{name: value for name, value in batch.items() if name != "seq_idx"}).loss
    assert "seq_idx" in batch and torch.equal(model(**batch).loss, wanted)
    few = {name: batch[name] for name in ("input_ids", "position_ids", "labels", "seq_idx")}
    assert torch.equal(model(**few).loss, wanted)
    with pytest.raises(mc.InputError, match=r"^forward\(seq_idx\): no such argument; position_ids, which begin anew"):
        model(batch["input_ids"], seq_idx=batch["seq_idx"])


# ---- peft --------------------------------------------------------------------------------------------------------------


def steps(model: Any, config: Any, labels: torch.Tensor | None = None) -> tuple[Any, list[float]]:
    """peft's model after three steps, and their losses. Its first values are drawn, so a seed is set."""
    torch.manual_seed(0)
    ids = torch.randint(4, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    tuned = peft.get_peft_model(model, config)
    optimizer, losses = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.1), []
    for _ in range(3):
        loss = tuned.train()(input_ids=ids, labels=ids if labels is None else labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return tuned.eval(), losses


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize("kind", ["llama", "t5", "bert"])
def test_peft_trains_ours_as_theirs(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Saved, loaded onto another of ours, merged, and the merged model opened by transformers."""
    task = {"llama": "lm", "t5": "seq2seq", "bert": "mlm"}[kind]
    names = {"llama": ("q_proj", "v_proj"), "t5": ("q", "v"), "bert": ("query", "value")}[kind]
    theirs, ours = quiet(kind, task)
    _, wanted = steps(theirs, peft.LoraConfig(target_modules=list(names), r=4, **options))
    tuned, found = steps(ours, peft.LoraConfig(target_modules=["q", "v"], r=4, **options))
    assert found == pytest.approx(wanted, rel=1e-5) and found[2] < found[0]
    ids = torch.arange(5, 12)[None]
    asked = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "t5" else {})}
    logits = tuned(**asked).logits
    tuned.save_pretrained(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(quiet(kind, task)[1], str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(again(**asked).logits, logits)
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    opened = type(theirs).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(opened(**asked).logits, logits, rtol=1e-4, atol=1e-4)


def test_peft_is_told_to_train_a_new_head() -> None:
    theirs, ours = quiet("bert", "classify")
    labels, words = torch.tensor([0, 2]), {"task_type": "SEQ_CLS", "r": 4}
    _, wanted = steps(theirs, peft.LoraConfig(target_modules=["query", "value"], **words), labels)
    folder = zoo.reference(zoo.Case("bert", "default", "mlm"))[1]
    with pytest.warns(UserWarning, match=r"^head: drawn at random, and not trained; .*modules_to_save=\['head'\]"):
        steps(mc.load(folder, task="classify", num_labels=3), peft.LoraConfig(target_modules=["q", "v"], **words), labels)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, found = steps(ours, peft.LoraConfig(target_modules=["q", "v"], modules_to_save=["head"], **words), labels)
    assert not [w for w in said if "head" in str(w.message)]
    assert found[2] < found[0] and found[0] == pytest.approx(wanted[0], rel=1e-5)


def test_peft_and_tied_weights(tmp_path: Path) -> None:
    """It leaves the head out of "all-linear" of its own models alone, and trains a head whole beside the embedding."""
    everything = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 4}
    with pytest.warns(UserWarning, match=r"^head.out: the embedding's own matrix; .*exclude_modules=\['head.out'\]"):
        steps(quiet("gpt2", "lm")[1], peft.LoraConfig(**everything))
    tuned, _ = steps(quiet("gpt2", "lm")[1], peft.LoraConfig(**everything, exclude_modules=["head.out"]))
    ids = torch.arange(5, 12)[None]
    logits = tuned(input_ids=ids).logits
    torch.testing.assert_close(tuned.merge_and_unload()(ids).logits, logits, rtol=1e-4, atol=1e-4)
    tuned, _ = steps(quiet("gpt2", "lm")[1], peft.LoraConfig(target_modules=["q"], modules_to_save=["head"], task_type="CAUSAL_LM"))
    assert tuned.generate(input_ids=ids, max_new_tokens=3).shape == (1, 10)
    with pytest.raises(mc.InputError, match=r"^head.out.weight: no longer embed.tokens.weight"):
        tuned.merge_and_unload().save_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_peft_trains_rows_of_a_tied_matrix(kind: str, tmp_path: Path) -> None:
    """Those of the head too, whose scores they are; also where the folder's config.json leaves it to the class that it is tied."""
    task, name = {"t5": "seq2seq"}.get(kind, "lm"), {"llama": "embed_tokens", "gpt2": "wte", "t5": "shared"}[kind]
    rows = list(range(20, 60))
    theirs, _ = quiet(kind, task)
    _, wanted = steps(theirs, peft.TrainableTokensConfig(target_modules=[name], token_indices=rows))
    words = {} if kind == "llama" else {"tie_word_embeddings": None}  # without the word LLaMA is not tied
    folder = zoo.rewritten(zoo.Case(kind, "default", task), tmp_path / "model", **words)
    none = {f.name: 0.0 for f in fields(zoo.families()[kind].Config) if "dropout" in f.name}  # type: ignore[arg-type]  # a dataclass
    tuned, found = steps(mc.load(folder, config=none), peft.TrainableTokensConfig(target_modules=["tokens"], token_indices=rows))
    assert found == pytest.approx(wanted, rel=1e-5) and found[2] < found[0]
    ids = torch.arange(18, 27)[None]
    asked = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "t5" else {})}
    logits = tuned(**asked).logits
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = mc.load(tmp_path / "merged")
    assert not merged.load_report.new and merged.head.out.weight is merged.embed.tokens.weight
    torch.testing.assert_close(merged(**asked).logits, logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_one_of_two_tied_layers_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"^embed.tokens: the head's own matrix; .*exclude_modules=\['embed.tokens'\]"):
        steps(quiet("gpt2", "lm")[1], peft.LoraConfig(target_modules=["tokens", "q"], r=4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*own matrix")
        steps(quiet("gpt2", "lm")[1], peft.TrainableTokensConfig(target_modules=["tokens"], token_indices=[5, 6]))


def test_a_prompt_of_peft_is_not_passed_over() -> None:
    theirs, ours = quiet("gpt2", "lm")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    (_, wanted), (tuned, found) = (steps(model, config) for model in (theirs, ours))
    assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(mc.InputError, match=r"^generate: peft's prompt before the text"):
        tuned.generate(input_ids=torch.arange(5, 12)[None])
    assert ours.generate(torch.arange(5, 12)[None], max_new_tokens=1).shape == (1, 8)  # ours alone goes on as ever


@pytest.mark.parametrize(("kind", "task", "name"), [
    ("gpt2", "lm", "text-generation"), ("bert", "mlm", "fill-mask"), ("bert", "classify", "text-classification"),
    ("bert", "tag", "token-classification"),
], ids=str)
def test_a_pipeline_takes_ours(kind: str, task: str, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "w5 [MASK] w33" if task == "mlm" else "w5 w9 w33"
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("transformers.pipelines.base"), "callHandlers", said.append)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False} if task == "lm" else {}
    wanted, found = (transformers.pipeline(name, model=model, tokenizer=tokenizer(), device="cpu")(text, **asked)
                     for model in quiet(kind, task))  # fmt: skip
    for one, other in zip(wanted, found, strict=True):
        for key, value in one.items():
            assert other[key] == (pytest.approx(float(value), rel=1e-4) if key == "score" else value)
    assert [record for record in said if "not supported" in record.getMessage()] == []
    transformers.pipeline("text-classification" if task == "tag" else "token-classification", model=quiet(kind, task)[1],
                          tokenizer=tokenizer(), device="cpu")  # fmt: skip
    assert "is not supported for" in said[-1].getMessage()


def test_a_pipeline_without_a_mask_says_so() -> None:
    pipe = transformers.pipeline("fill-mask", model=quiet("bert", "mlm")[1], tokenizer=tokenizer(), device="cpu")
    assert "'input_modalities': 'text'" in repr(pipe)
    with pytest.raises(transformers.pipelines.PipelineException, match=r"No mask_token \(\[MASK\]\) found"):
        pipe("w5 w9")


def test_a_collator_for_pairs_takes_a_causal_model() -> None:
    """It has a model make a decoder's ids from labels, if the model has the method for it."""
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    (_, causal), (_, pairs) = quiet("gpt2", "lm"), quiet("t5", "seq2seq")
    assert "decoder_input_ids" not in transformers.DataCollatorForSeq2Seq(tokenizer(), model=causal)(rows)
    found = transformers.DataCollatorForSeq2Seq(tokenizer(), model=pairs)(rows)["decoder_input_ids"]
    assert found[:, 1:].tolist() == [[5, 6], [8, 0]]


@pytest.mark.parametrize("adapter", [None, mc.AdapterConfig(name="lora", rank=2)], ids=["whole", "adapter"])
def test_a_tokenizer_that_is_there_stays(adapter: Any, tmp_path: Path) -> None:
    source, changed, other = (tmp_path / name for name in ("source", "changed", "other"))
    mc.build("gpt2", config=SIZES | {"vocab": 128}).save_pretrained(source)
    tokenizer().save_pretrained(source)
    model, words = mc.load(source, adapter=adapter), transformers.AutoTokenizer.from_pretrained(source)
    words.add_tokens(["<new>"])
    model.resize_token_embeddings(129)
    words.save_pretrained(changed)
    for _ in range(2):  # into the tokenizer's folder, and over the model's own
        model.save_pretrained(changed)
        assert len(transformers.AutoTokenizer.from_pretrained(changed)) == mc.load(changed).config.vocab == 129
    model.save_pretrained(other)
    assert (other / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    model.companions = {"tokenizer.json": b"{}"}  # as a run gives its own
    model.save_pretrained(changed)
    assert (changed / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("told", [None, "CAUSAL_LM"])
def test_a_folder_of_peft_by_our_names_says_who_opens_it(told: str | None, tmp_path: Path) -> None:
    tuned = peft.get_peft_model(quiet("gpt2", "lm")[1], peft.LoraConfig(target_modules=["q"], r=4, task_type=told))
    tuned.save_pretrained(tmp_path)
    with pytest.raises(mc.InputError, match=r": trained by peft on a model of this package, .*; peft.PeftModel.from_pretrained\("):
        mc.load(tmp_path)
