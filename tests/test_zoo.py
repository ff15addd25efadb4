"""Every family against transformers on the same loud weights, and against itself: parity, padding, packing, dropout, round
trips, generation, presets. Parametrised over the registry: a new family file is tested with no further line."""

import copy
import dataclasses
import filecmp
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import torch
import torch.nn.functional as F
import zoo
from zoo import Case, cases, inputs, pair, real, scores, tiny, weighted

import modelcenter as mc
from modelcenter.registry import families, presets

CASES = cases()
FIRST = cases(all_tasks=False, all_variants=False)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # of the output's spread, and of the largest gradient


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} for {tuple(theirs.shape)}"
    spread = theirs.std().item()
    assert 0.05 < spread < 100, f"{what}: the reference says nothing, its spread is {spread}"
    worst = (ours - theirs).abs().max().item()
    assert worst <= tolerance * spread, f"{what}: off by {worst / spread:.1e} of the spread"


def reference(case: Case, dtype: torch.dtype, side: str, train: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Their scores, and the gradients of a sum of them."""
    theirs, args = pair(case, dtype)[0].train(train), inputs(case, side)
    with zoo.wide(dtype):
        wanted = scores(theirs(**zoo.theirs_only(case, theirs, args)))
        weighted(wanted, real(case, args, wanted)).backward()
    return wanted.detach(), {k: v.grad.clone() for k, v in theirs.named_parameters() if v.grad is not None}


def compare(case: Case, dtype: torch.dtype, side: str = "none", train: bool = False, change: Any = None) -> None:
    wanted, grads = reference(case, dtype, side, train)
    exact, exact_grads = (wanted, grads) if dtype == torch.float64 else reference(case, torch.float64, side, train)
    theirs, ours = pair(case, dtype)
    args = inputs(case, side)
    ours.train(train)
    if change is not None:
        change(ours)
    found = scores(ours(**args))
    kept = real(case, args, wanted)
    rounding = ((wanted - exact)[kept].abs().max() / exact[kept].std()).item()  # theirs; another order of sums has its own
    close(found[kept], wanted[kept], TOLERANCE[dtype] + rounding, str(case))
    weighted(found, kept).backward()
    largest = max(g.abs().max().item() for g in grads.values())
    mine = zoo.gradients_like_theirs(ours)
    assert set(mine) == set(grads) | (set(mine) & set(dict(theirs.named_parameters())))
    for name, grad in mine.items():
        wanted_grad = grads.get(name, torch.zeros_like(grad))
        rounding = (wanted_grad - exact_grads.get(name, 0)).abs().max().item()
        worst = (grad - wanted_grad).abs().max().item()
        assert worst <= TOLERANCE[dtype] * largest + rounding, f"gradient of {name}: off by {worst / largest:.1e} of the largest"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_gradients_in_double(case: Case) -> None:
    compare(case, torch.float64)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_logits_and_gradients_in_single(case: Case) -> None:
    compare(case, torch.float32)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", cases(all_variants=False), ids=str)
def test_padding(case: Case, side: str) -> None:
    if case.excused(f"padding-{side}"):
        pytest.skip("transformers' own is another one")
    compare(case, torch.float64, side)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_padding_equals_alone(case: Case) -> None:
    _, ours = pair(case)
    for side in ("right", "left"):
        args = inputs(case, side)
        out = scores(ours(**args))[1]
        mask = args["decoder_attention_mask" if case.seq2seq else "attention_mask"][1].bool()
        alone = {"input_ids": args["input_ids"][1:, args["attention_mask"][1].bool()]}
        if case.seq2seq:
            # a decoder with relative distances sees the same distances wherever its padding stands
            alone["decoder_input_ids"] = args["decoder_input_ids"][1:, mask]
        close(out[mask], scores(ours(**alone))[0], 1e-10, f"{case} {side}")


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_row_of_nothing_but_padding(case: Case) -> None:
    _, ours = pair(case)
    args = inputs(case)
    args["attention_mask"] = torch.ones_like(args["input_ids"])
    args["attention_mask"][1] = 0
    out = scores(ours(**args))
    assert out.isfinite().all()
    weighted(out[:1], torch.ones(1, dtype=torch.bool)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())
    plain = {k: v[:1] for k, v in inputs(case).items()}
    close(out[:1], scores(ours(**plain)), 1e-10, str(case))


@pytest.mark.parametrize("case", cases(all_variants=False), ids=str)
def test_dropout_has_their_places_and_rates(case: Case) -> None:
    with zoo.dropout_as_pattern():
        compare(case, torch.float64, train=True)
    _, ours = pair(case)
    quiet, args = scores(ours(**inputs(case))), inputs(case)
    ours.train()
    assert not torch.equal(scores(ours(**args)), quiet)


class Dropping(torch.nn.Module):
    """A dropout that somebody else wrote."""

    def __init__(self, p: float):
        super().__init__()
        self.rate = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.rate)


@pytest.mark.parametrize("how", ["hook", "hook before", "another module", "torch's"])
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_dropout_that_is_watched_or_replaced_is_called(case: Case, how: str) -> None:
    """With what it is to drop of, in the order of transformers' own: a pattern by place and rate says whether it is so. Attention's
    is called with the probabilities."""

    def change(model: torch.nn.Module) -> None:
        for parent in list(model.modules()):
            for name, dropout in list(parent.named_children()):
                if isinstance(dropout, torch.nn.Dropout):
                    p = dropout.p
                    if how.startswith("hook"):
                        dropout.p = 0.0
                        if how == "hook":
                            dropout.register_forward_hook(lambda layer, args, out, p=p: F.dropout(out, p))
                        else:
                            dropout.register_forward_pre_hook(lambda layer, args, p=p: F.dropout(args[0], p))
                    else:
                        setattr(parent, name, Dropping(p) if how == "another module" else torch.nn.Dropout(p))

    with zoo.dropout_as_pattern():
        compare(case, torch.float64, train=True, change=change)


@pytest.mark.parametrize("case", [c for c in FIRST if c.task != "classify"], ids=str)
def test_packed_equals_alone(case: Case) -> None:
    _, ours = pair(case)
    row, alone = zoo.packed(case)
    together = scores(ours(**row))
    apart = torch.cat([scores(ours(**a)) for a in alone], 1)
    close(together, apart, 1e-10, str(case))
    everything = torch.ones(together.shape[:2], dtype=torch.bool)
    weighted(together, everything).backward()
    packed = {n: p.grad.clone() for n, p in ours.named_parameters()}
    ours.zero_grad()
    weighted(apart, everything).backward()
    largest = max(p.grad.abs().max().item() for p in ours.parameters())
    for name, p in ours.named_parameters():
        assert (p.grad - packed[name]).abs().max() <= 1e-10 * largest, name


@pytest.mark.parametrize("case", [c for c in FIRST if c.kind in ("bloom", "gpt2", "llama")], ids=str)
def test_positions_that_begin_anew_are_sequences(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DataCollatorWithFlattening gives them and transformers reads them in training; but BLOOM's has no positions."""
    theirs, ours = pair(case)
    ids, at = inputs(case)["input_ids"][:1], torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])
    together = scores(ours(ids, position_ids=at))
    close(together, torch.cat([scores(ours(ids[:, a:b])) for a, b in ((0, 4), (4, 5), (5, 11))], 1), 1e-10, str(case))
    if case.kind != "bloom":
        monkeypatch.setattr(theirs.config, "use_cache", False)
        with zoo.wide(torch.float64):
            close(together, scores(theirs(ids, position_ids=at)), 1e-10, str(case))
        whole, mask = scores(ours(ids, position_ids=at, attention_mask=torch.ones_like(ids))), torch.ones_like(ids)
        with zoo.wide(torch.float64):
            close(whole, scores(theirs(ids, position_ids=at, attention_mask=mask)), 1e-10, str(case))
    with pytest.raises(mc.InputError, match=r"position_ids: begin anew within rows of a batch of 2; all sequences in one row"):
        ours(ids.repeat(2, 1), position_ids=at)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip_is_bit_for_bit(case: Case, tmp_path: Path) -> None:
    import transformers

    theirs, folder = zoo.reference(case)
    ours = mc.load(folder, task=case.task)
    assert not ours.load_report.new and not ours.load_report.ignored, ours.load_report
    assert ours.config == tiny(case.kind, case.variant, case.task), "config lost on the way"
    ours.save_pretrained(tmp_path / "out")
    before, after = Path(folder), tmp_path / "out"
    same = filecmp.cmp(before / "model.safetensors", after / "model.safetensors", shallow=False)
    assert same, "the files differ"
    assert json.loads((before / "config.json").read_text()) == json.loads((after / "config.json").read_text())
    cls = getattr(transformers, case.family.tasks[case.task].architecture)
    again, report = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    for key, value in again.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key].to(value.dtype)), key


def built(case: Case, **changes: Any) -> Any:
    """A model that no file holds, of the tiny config with these `changes`."""
    from modelcenter.checkpoint.load import fill
    from modelcenter.layers.initial import initial
    from modelcenter.place import place
    from modelcenter.skeleton import skeleton

    config = dataclasses.replace(tiny(case.kind, case.variant, case.task), **changes)
    ours = skeleton(case.family, config, case.task, torch.float32)
    place(ours, None, None)
    fill(ours, initial(ours, ours.shapes, 0, lambda name, shape: 0.3))
    return ours


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_built_here_opens_in_transformers(case: Case, tmp_path: Path) -> None:
    import transformers

    ours = built(case)
    ours.eval().save_pretrained(tmp_path)
    cls = getattr(transformers, case.family.tasks[case.task].architecture)
    theirs, report = cls.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    args = {name: value[:1] for name, value in inputs(case).items()}
    # a loud T5 makes 1e-4 of fp32's roundings, theirs as ours; LLaMA's angles are fp32 in a file that is
    dtype, tolerance = (torch.float64, 1e-10) if case.seq2seq else (torch.float32, 2e-5)
    with zoo.wide(dtype):
        close(scores(ours.to(dtype)(**args)), scores(theirs.to(dtype).eval()(**args)), tolerance, str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_are_found_without_storage(case: Case) -> None:
    """A forward on `meta` says what one on a CPU would: scores, and of labels a loss, in training too; there with dropout in its
    default form alone, whose bits are drawn there by some hundred calls."""
    _, ours = pair(case)
    bare = mc.load(zoo.reference(case)[1], task=case.task, device="meta")
    for part in bare.modules() if case.variant != "default" else ():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    args = inputs(case)
    wanted = scores(ours(**args)).shape
    there = {name: value.to("meta") for name, value in args.items()}
    assert scores(bare(**there)).shape == wanted
    if case.task in ("lm", "mlm", "seq2seq", "tag"):
        for train in (False, True):
            found = bare.train(train)(**there, labels=there["decoder_input_ids" if case.seq2seq else "input_ids"])
            assert found.loss.is_meta and found.loss.shape == ()


@pytest.mark.parametrize("case", [c for c in CASES if c.task not in ("backbone", "embed")], ids=str)
def test_a_folder_is_loaded_with_the_head_that_it_names(case: Case) -> None:
    _, folder = zoo.reference(case)
    ours = mc.load(folder)
    assert ours.task == case.task and not ours.load_report.new and not ours.load_report.ignored


@pytest.mark.parametrize("kind", sorted(families()))
def test_no_head_is_made_of_another_tasks(kind: str) -> None:
    """A tagger's is called `classifier` in BERT's files as a classifier's is, and `score` in LLaMA's: `architectures` says whose it
    is. A head of as many labels, or scores, would do for both."""
    heads = [case for case in CASES if (case.kind, case.variant) == (kind, "default") and case.task not in ("backbone", "embed")]
    for of in heads:
        _, folder = zoo.reference(of)
        for case in heads:
            ours = mc.load(folder, task=case.task)
            theirs = {name for row in ours.tasks[case.task].rows if not row[0].startswith(ours.prefix) for name in [row[1]]}
            new = {name for name in ours.shapes if name.rpartition(".")[0] in theirs or name in theirs}
            assert not ours.load_report.new if of == case else new <= set(ours.load_report.new), f"{case} from {of}"


@pytest.mark.parametrize("kind", sorted(families()))
def test_a_family_called_with_a_config_says_how_models_are_made(kind: str) -> None:
    family = families()[kind]
    preset = next(iter(family.presets))
    with pytest.raises(mc.InputError, match=rf"mc.{family.__name__}: .*mc.build\('{preset}'.*mc.{family.__name__}.from_pretrained"):
        family(tiny(kind))
    assert mc.build(preset, config={"layers": 1}, device="meta").head is not None


@pytest.mark.parametrize("kind", sorted(families()))
def test_no_field_is_left_at_its_default(kind: str) -> None:
    unseen = sorted(zoo.unseen(kind))
    assert not unseen, f"tests/variants.py has no form of {kind} that changes {unseen}: a field that is never moved may be unwired"


@pytest.mark.parametrize("case", [c for c in CASES if c.task in ("lm", "seq2seq")], ids=str)
def test_greedy_generation_token_for_token(case: Case) -> None:
    theirs, ours = pair(case)
    seen = set()
    for side in ("none", "left"):
        args = {k: v for k, v in inputs(case, side).items() if k in ("input_ids", "attention_mask")}
        with zoo.wide(torch.float64):
            wanted = theirs.generate(**args, max_new_tokens=24, do_sample=False)
        found = ours.generate(**args, max_new_tokens=24, eos_token_id=[], pad_token_id=0)
        assert found.tolist() == wanted.tolist()
        seen |= set(wanted[:, -24:].flatten().tolist())
    assert len(seen) > 5, "the reference repeats itself: little was compared"


SEARCHES = {
    "beams-2": {"num_beams": 2}, "beams-4": {"num_beams": 4, "num_return_sequences": 3},
    "short": {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True},
    "long": {"num_beams": 4, "length_penalty": 2.0, "num_return_sequences": 4},
    "never": {"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
    "never-short": {"num_beams": 3, "length_penalty": -0.5, "early_stopping": "never"},
    "early": {"num_beams": 2, "early_stopping": True, "num_return_sequences": 2},
    "penalties": {"num_beams": 3, "repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "greedy": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "suppress_tokens": [3, 5]},
    "forced": {"num_beams": 2, "forced_eos_token_id": 9, "min_length": 6},
    "padding-0": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -1.0, "pad_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("case", [c for c in FIRST if c.task in ("lm", "seq2seq")], ids=str)
def test_searches_token_for_token(case: Case) -> None:
    """Beams, penalties and lengths, a padded row among them; the ids that end a row are ones that the model says."""
    theirs, ours = pair(case)
    args = {k: v for k, v in inputs(case, "left").items() if k in ("input_ids", "attention_mask")}
    common = {"max_new_tokens": 9, "pad_token_id": 3}
    free = ours.generate(**args, **common, eos_token_id=[], num_beams=4)[:, -9:]
    ends = [int(free[0, 3]), int(free[1, 5])]
    different, cut = set(), 0
    for name, options in SEARCHES.items():
        with zoo.wide(torch.float64):
            wanted = theirs.generate(**args, eos_token_id=ends, do_sample=False, **common | options)
        found = ours.generate(**args, eos_token_id=ends, **common | options)
        assert found.tolist() == wanted.tolist(), name
        different.add(str(wanted[:: options.get("num_return_sequences", 1)].tolist()))
        cut += int((wanted == 3).any())
    assert len(different) > 3 and cut > 3, "the searches say nothing"


@pytest.mark.parametrize("case", [c for c in FIRST if c.task in ("lm", "seq2seq", "mlm")], ids=str)
def test_losses(case: Case) -> None:
    if case.excused("losses"):
        pytest.skip("transformers' own is another one")
    theirs, ours = pair(case)
    args = inputs(case)
    labels = (args["decoder_input_ids"] if case.seq2seq else args["input_ids"]).clone()
    labels[0, 2:4] = -100
    if case.seq2seq:
        del args["decoder_input_ids"]
    with zoo.wide(torch.float64):
        wanted = theirs(**args, labels=labels).loss
        wanted.backward()
    found = ours(**args, labels=labels)
    assert found.logits is not None and abs(found.loss - wanted) < 1e-10
    reference = {k: p.grad for k, p in theirs.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in reference.values())
    # in training the logits are never whole: same loss and gradients (dropout as the identity)
    ours.train()
    for module in ours.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trained = ours(**args, labels=labels)
    assert trained.logits is None and abs(trained.loss - wanted) < 1e-10
    trained.loss.backward()
    for name, grad in zoo.gradients_like_theirs(ours).items():
        assert (grad - reference[name]).abs().max() <= 1e-10 * largest, name
    for none in (None, torch.tensor(0)):  # as Trainer counts them
        ours.zero_grad()
        nothing = ours(**args, labels=torch.full_like(labels, -100), num_items_in_batch=none)
        nothing.loss.backward()
        assert nothing.loss == 0 and not any(p.grad.any() for p in ours.parameters() if p.grad is not None)
    items = ours(**args, labels=labels, num_items_in_batch=7).loss
    n = (labels[:, 1:] if case.task == "lm" else labels).ne(-100).sum()
    assert abs(items - wanted * n / 7) < 1e-10


class Scores(torch.nn.Module):
    """A model that gives nothing but logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(ids, mask, decoder_input_ids=target).logits


@pytest.mark.parametrize("case", [Case("bert", "default", "mlm"), Case("gpt2", "default", "classify"),
                                  *(Case(kind, "default", "lm") for kind in ("llama", "bloom", "cpmant")),
                                  Case("t5", "default", "seq2seq")], ids=str)
def test_an_exported_program_takes_batches_of_other_sizes(case: Case) -> None:
    """torch.export keeps as a number whatever is asked for as one (`len`, `Size.numel`): it is then for one shape alone; and what
    is decided by a size, such as which attention is faster, bounds it."""
    _, ours = zoo.pair(case, torch.float32)
    given = zoo.inputs(case, "left")
    args = tuple(given[name] for name in ("input_ids", "attention_mask", "decoder_input_ids") if name in given)
    texts, tokens, targets = torch.export.Dim("texts"), *(torch.export.Dim(name, max=500) for name in ("tokens", "targets"))
    sizes = ({0: texts, 1: tokens}, {0: texts, 1: tokens}, {0: texts, 1: targets})[: len(args)]
    with torch.no_grad():
        program = torch.export.export(Scores(ours), args, dynamic_shapes=sizes, strict=False).module()
        long = [torch.cat([x] * 9, 1) for x in args] if case.kind not in ("bert", "gpt2") else args  # which have 64 positions
        for more in ([x[:, 2:] for x in args], [torch.cat((x, x[1:])) for x in args], long):
            assert (program(*more) - Scores(ours)(*more)).abs().max() < 1e-5


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_whole_model_trains_as_one_graph(case: Case) -> None:
    """torch.compile(fullgraph=True): nothing asks for a number that the labels hold. A block a stack, which is traced as others
    like it are, where the last is none of a kind of its own, as BERT's, and the first finds no bias for others, as T5's."""
    depth = {"bert": {"layers": 2}, "t5": {"layers": 1, "decoder_layers": 2}, "mt5": {"layers": 1, "decoder_layers": 1}}
    model = built(case, **depth.get(case.kind, {"layers": 1})).train()
    zoo.loud(model)
    for module in model.modules():
        vars(module).update({key: 0.0 for key in ("p", "dropout") if isinstance(vars(module).get(key), float)})
    args = {"input_ids": inputs(case)["input_ids"]}
    labels = args["input_ids"].masked_fill(args["input_ids"] % 3 != 1, -100)
    model(**args, labels=labels).loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**args, labels=labels).loss.backward()
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert (p.grad - wanted[name]).abs().max() < 1e-5 * largest, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", [Case("bert", "default", "mlm"), Case("llama", "default", "lm")], ids=str)
def test_a_traced_program_takes_batches_of_other_sizes(case: Case) -> None:
    _, ours = zoo.pair(case, torch.float32)
    first, other = inputs(case, "left"), inputs(case, "left", seed=9)
    run = Scores(ours)
    args = [torch.cat((x, x[1:]))[:, 2:] for x in (other["input_ids"], other["attention_mask"])]
    with torch.no_grad():
        program = torch.jit.trace(run, (first["input_ids"], first["attention_mask"]), check_trace=False)
        assert (program(*args) - run(*args)).abs().max() < 1e-4


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("case", cases(all_tasks=False, all_variants=False), ids=str)
def test_a_hook_on_any_module_is_obeyed(case: Case, train: bool) -> None:
    """Also on one that an op does together with what stands beside it."""
    _, ours = pair(case, torch.float32)
    args = inputs(case)
    args["labels"] = args["decoder_input_ids" if case.seq2seq else "input_ids"]
    for part in ours.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    named = {name: m for name, m in ours.train(train).named_modules() if any(True for _ in m.parameters(recurse=False))}
    quiet = ours(**args).loss.item()
    for name, part in named.items():
        own = list(part.parameters(recurse=False))
        if any(p is q for p in own for other in named.values() if other is not part for q in other.parameters(recurse=False)):
            continue  # a tied table is read in two ways
        with torch.no_grad():
            torch._foreach_mul_(own, 1.5)
            wanted = ours(**args).loss.item()
            torch._foreach_div_(own, 1.5)
        hook = part.register_forward_hook(lambda part, given, out: out * 1.5)
        found = ours(**args).loss.item()
        hook.remove()
        assert abs(found - wanted) <= 1e-5 * quiet + 1e-3 * abs(wanted - quiet), name


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_hidden_states(case: Case) -> None:
    theirs, ours = pair(case)
    args = inputs(case)
    with zoo.wide(torch.float64):
        out = theirs(**args, output_hidden_states=True)
    wanted = out.get("hidden_states") or out.get("decoder_hidden_states")
    found = ours(**args, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        close(a, b, 1e-10, f"{case} layer {i}")


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_embeddings_grow_and_shrink(case: Case) -> None:
    _, ours = pair(case)
    before = ours.get_input_embeddings().weight.detach().clone()
    args = {k: v.clamp(max=90) for k, v in inputs(case).items()}
    old = scores(ours(**args))
    ours.resize_token_embeddings(150)
    new = scores(ours(**args))
    assert torch.equal(ours.get_input_embeddings().weight[:128], before[:128]) and ours.config.vocab == 150
    if new.shape != old.shape:
        assert new.size(-1) == 150
        close(new[..., :128], old, 1e-10, str(case))
    ours.resize_token_embeddings(100)
    assert scores(ours(**args)).shape[-1] in (100, old.shape[-1])
    assert ours.get_input_embeddings().num_embeddings == 100
    assert all(m.out_features == len(m.weight) for m in ours.modules() if isinstance(m, torch.nn.Linear))


def test_models_go_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the process that makes them: a mutant's, or a rank's that was forked, ends without cleaning up."""
    ends: list[Callable[[], object]] = []
    monkeypatch.delenv("ZOO")
    conftest.pytest_configure(SimpleNamespace(add_cleanup=ends.append))  # type: ignore[arg-type]
    home = Path(os.environ["ZOO"])
    _, folder = zoo.reference.__wrapped__(cases()[0])
    assert Path(folder).parent == home
    conftest.pytest_configure(SimpleNamespace(add_cleanup=ends.append))  # type: ignore[arg-type]  # of a worker of the session
    assert len(ends) == 2 and Path(os.environ["ZOO"]) == home
    for end in reversed(ends):
        end()
    assert not home.exists() and "ZOO" not in os.environ


def test_a_vocabulary_is_padded_to_a_multiple() -> None:
    theirs, ours = pair(FIRST[0])
    theirs = copy.deepcopy(theirs)  # it is that of other tests too
    for asked in ((140, 64), (128, 64), (150, None)):
        theirs.resize_token_embeddings(*asked)
        assert len(ours.resize_token_embeddings(*asked).weight) == len(theirs.get_input_embeddings().weight) == ours.config.vocab
    for odd in ((0, None), (140, 0), (140.0, None)):
        with pytest.raises(mc.InputError, match="a whole number, 1 or more"):
            ours.resize_token_embeddings(*odd)


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_have_the_published_size(name: str) -> None:
    model = mc.build(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == presets()[name][1].parameters


@pytest.mark.parametrize("case", [c for c in CASES if c.task == "classify"], ids=str)
def test_packed_sequences_are_classified_one_by_one(case: Case) -> None:
    _, ours = pair(case)
    row, alone = zoo.packed(case)
    close(scores(ours(**row)), torch.cat([scores(ours(**a)) for a in alone]), 1e-10, str(case))


@pytest.mark.parametrize("field", ["layers", "vocab"])
@pytest.mark.parametrize("kind", sorted(families()))
def test_a_config_that_asks_for_less_than_the_file_holds_is_refused(kind: str, field: str, tmp_path: Path) -> None:
    """What `strict=False` hid from the predecessors' users: a file of three layers read as two."""
    case = next(c for c in FIRST if c.kind == kind)
    _, folder = zoo.reference(case)
    key = next(k.split("|")[0] for k, f in case.family.Config.hf.keys.items() if f == field)
    values = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, key: values[key] - 1}))
    (tmp_path / "model.safetensors").write_bytes(Path(folder, "model.safetensors").read_bytes())
    with pytest.raises(mc.InputError, match={"layers": "unexpected", "vocab": "has shape"}[field]):
        mc.load(tmp_path, task=case.task)


@pytest.mark.parametrize(("config", "said"), [
    ({"layers": 1, "dropout": 0.0}, r"unexpected.*; the model that config\.json with config\.layers=1 describes has no .*; "),
    ({"layers": 9}, r"missing.*; the model needs these \d+ tensors with config\.layers=9; "),
    ({"vocab": 7}, r"has shape \[\d+, \d+\]; config\.json with config\.vocab=7 gives \[7, \d+\]; "),
], ids=["fewer", "more", "narrower"])  # fmt: skip
def test_what_the_caller_puts_over_a_config_is_not_blamed_on_its_file(config: dict[str, Any], said: str) -> None:
    case = next(c for c in FIRST if c.kind == "gpt2")
    with pytest.raises(mc.InputError, match=said + r"leave that out, or begin anew \(init=random, mc\.build\)$"):
        mc.load(zoo.reference(case)[1], task=case.task, config=config)


def test_a_dtype_stays_what_it_is_in_the_file(tmp_path: Path) -> None:
    for name in ("bf16", "fp16", "fp32", "fp64"):
        ours = mc.load(zoo.reference(FIRST[0])[1], dtype=name)
        ours.save_pretrained(tmp_path / name)
        again = mc.load(tmp_path / name)
        kind = next(ours.parameters()).dtype
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
        for key, value in ours.named_parameters():
            assert again.get_parameter(key).dtype == value.dtype == kind and torch.equal(again.get_parameter(key), value)


def test_weights_of_several_dtypes_are_saved_in_theirs(tmp_path: Path) -> None:
    """As transformers does: fp32 norms of a model in bf16, say."""
    theirs, folder = zoo.reference(Case("gpt2", "default", "lm"))
    ours = mc.load(folder, dtype="bf16")
    ours.decoder.blocks[0].attn_norm.float()
    ours.decoder.blocks[1].attn.k.float()  # which a file holds as one with two others
    ours.save_pretrained(tmp_path / "out")
    again = mc.load(tmp_path / "out")
    assert all(torch.equal(p.float(), again.get_parameter(name)) for name, p in ours.named_parameters())
    opened = type(theirs).from_pretrained(tmp_path / "out", dtype=torch.float32)
    args = inputs(Case("gpt2", "default", "lm"))
    assert (opened(**args).logits - again(**args).logits).abs().max() < 1e-5


def test_of_several_dtypes_in_a_file_the_widest_is_taken(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, folder = zoo.reference(FIRST[0])
    tensors = load_file(Path(folder, "model.safetensors"))
    first = min(tensors)
    save_file({k: v if k == first else v.half() for k, v in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes(Path(folder, "config.json").read_bytes())
    assert next(mc.load(tmp_path).parameters()).dtype == torch.float32


def test_the_loss_of_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training the logits are made a chunk at a time; three chunks here, the last one short."""
    _, ours = pair(Case("gpt2", "default", "lm"))
    ids = inputs(Case("gpt2", "default", "lm"))["input_ids"]
    whole = ours(ids, labels=ids).loss
    wanted = torch.autograd.grad(whole, list(ours.parameters()))
    monkeypatch.setattr(sys.modules["modelcenter.ops.linear_cross_entropy"], "CHUNK", 8)
    for module in ours.train().modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    loss = ours(ids, labels=ids).loss
    assert abs(loss - whole) < 1e-12
    for a, b in zip(torch.autograd.grad(loss, list(ours.parameters())), wanted, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_initial_weights_follow_the_seed_and_the_name() -> None:
    sizes = {"vocab": 20, "positions": 8, "dim": 16, "heads": 2}
    shallow, deep, other = (mc.build("gpt2", config={**sizes, "layers": n}, seed=s) for n, s in ((1, 0), (2, 0), (1, 1)))
    drawn = {n: p for n, p in shallow.named_parameters() if p.std() > 0}
    assert len(drawn) == 8
    attn = deep.decoder.blocks[1].attn  # section 2.3 of GPT-2: what writes into the stream is 1 / sqrt(2 layers) as large
    assert 0.4 < (attn.o.weight.std() / attn.q.weight.std()).item() < 0.6
    for name, value in drawn.items():
        if not name.endswith(("attn.o.weight", "ffn.down.weight")):  # their spread depends on the depth
            assert torch.equal(deep.get_parameter(name), value), "another model's same parameter"
        assert not torch.equal(other.get_parameter(name), value), "another seed"
        assert not any(o is not value and o.shape == value.shape and torch.equal(o, value) for o in drawn.values())


HEADED = [(c, kind) for c in cases(all_variants=False) for kind in ("classes", "values", "several", "tags", "answers")
          if c.task == {"tags": "tag", "answers": "qa"}.get(kind, "classify")]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), HEADED, ids=lambda x: str(x))
def test_losses_of_task_heads(case: Case, kind: str, tmp_path: Path) -> None:
    """Labels that are classes, numbers, several at once, a tag a token, an answer's ends: loss and gradients."""
    import transformers

    theirs, _ = zoo.reference(case)
    config, source = theirs.config, torch.Generator().manual_seed(3)
    n = 1 if kind == "values" else config.num_labels
    problem = {"classes": "single_label_classification", "values": "regression", "several": "multi_label_classification"}.get(kind)
    names = {i: str(i) for i in range(n)}
    changed = type(config).from_dict({**config.to_dict(), "num_labels": n, "problem_type": problem, "id2label": names})
    changed._attn_implementation = "eager"
    model = type(theirs)(changed).eval()
    zoo.loud(model)
    model.save_pretrained(tmp_path)
    ours, args = mc.load(tmp_path, task=case.task, dtype=torch.float64), inputs(case, "right")
    model.to(torch.float64)
    assert isinstance(model, getattr(transformers, case.family.tasks[case.task].architecture))
    labels = {
        "classes": torch.tensor([1, 2]), "values": torch.tensor([0.5, -100.0], dtype=torch.float64),
        "several": torch.tensor([[1.0, 0, 1], [0, 0, 1]], dtype=torch.float64),
        "tags": torch.randint(0, n, (2, 11), generator=source).masked_fill(args["attention_mask"] == 0, -100), "answers": None,
    }[kind]  # fmt: skip
    ends = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])}
    said = ends if labels is None else {"labels": labels}
    args = inputs(case) if labels is None else args  # their loss takes padding for a place where an answer may start
    mine = labels if labels is not None else torch.stack(list(said.values()), 1)
    with zoo.wide(torch.float64):
        wanted = model(**zoo.theirs_only(case, model, args), **said).loss
        wanted.backward()
    found = ours(**args, labels=mine).loss
    found.backward()
    assert abs(found - wanted) < 1e-10 * max(1, wanted.item())
    reference = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in reference.values())
    for name, grad in zoo.gradients_like_theirs(ours).items():
        assert (grad - reference.get(name, 0)).abs().max() <= 1e-10 * largest, name
    items = ours(**args, labels=mine, num_items_in_batch=1).loss / 2  # two sequences
    if kind != "tags":
        assert abs(items - wanted) < 1e-10 * max(1, wanted.item())


def test_arguments_of_another_type_are_one_line() -> None:
    folder = zoo.reference(next(c for c in CASES if str(c) == "gpt2-default-lm"))[1]
    options: dict[str, object]
    for options, line in (
        ({"dtype": 3}, "dtype: 3; "), ({"config": 3}, "config: a int; a mapping of what"),
        ({"adapter": "lora"}, "adapter: 'lora'; mc.AdapterConfig"), ({"num_labels": -1, "task": "classify"}, "num_labels: -1; "),
        ({"num_labels": 1.5, "task": "classify"}, r"num_labels: 1.5 \(float\); a whole number"),
    ):
        with pytest.raises(mc.InputError, match=line):
            mc.load(folder, **options)
    with pytest.raises(mc.InputError, match="generation_config: 3; a mapping of options, or"):
        mc.load(folder).generate(torch.ones(1, 2, dtype=torch.long), generation_config=3)


def test_a_head_of_other_labels_is_refused_with_the_way_around_it(tmp_path: Path) -> None:
    for kind in ("bert", "gpt2"):
        case = next(c for c in CASES if str(c) == f"{kind}-default-classify")
        folder = zoo.reference(case)[1]
        with pytest.raises(mc.InputError, match=r"has shape \[3, 32\]; the labels here need \[5, 32\]; modelcenter convert"):
            mc.load(folder, num_labels=5)
        mc.load(folder, task="backbone").save_pretrained(tmp_path / kind)  # what convert does
        ours = mc.load(tmp_path / kind, task="classify", num_labels=5)
        assert all(name.startswith("head.out") for name in ours.load_report.new) and len(ours.config.labels) == 5


def test_labels_that_do_not_fit_the_head_are_refused(tmp_path: Path) -> None:
    case = next(c for c in CASES if str(c) == "bert-default-classify")
    ids = inputs(case)["input_ids"]
    for problem, labels, words in (("regression", torch.tensor([1, 0]), "classes are trained as single_label"),
                                   ("regression", torch.rand(2, 3), "'regression' with 3 labels"),
                                   ("single_label_classification", torch.rand(2, 3), "'single_label_class.* with 3")):  # fmt: skip
        ours = mc.load(zoo.reference(case)[1])
        ours.config = dataclasses.replace(ours.config, file={**ours.config.file, "problem_type": problem})
        with pytest.raises(mc.InputError, match=words):
            ours(ids, labels=labels)
