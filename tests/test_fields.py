"""Every key of transformers' config, one at a time at another value, on the same weights: what changes their function changes ours
alike, or is refused by name. The keys that a family here never speaks of are walked as well as those that it models."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from zoo import Case, inputs, scores

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.registry import families

APART = {  # what says nothing of the function
    "architectures", "transformers_version", "model_type", "_name_or_path", "dtype", "label2id", "return_dict",
    "chunk_size_feed_forward",  # the same in pieces, for each of which the pattern of dropout begins anew
    "is_encoder_decoder",  # without it T5's decoder there looks for its memory in the cache of its own tokens
}  # fmt: skip
OLD = {  # keys of former days, of other families, and second names
    "position_embedding_type": "relative_key", "pruned_heads": {"0": [1]}, "partial_rotary_factor": 0.5, "sliding_window": 4,
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout": 0.45, "classifier_dropout": 0.45, "rope_theta": 77.0,
    "rope_scaling": {"type": "linear", "factor": 3.0}, "num_labels": 5,
    "is_causal": (True, False),  # each; their masks follow it, though no config declares it
}  # fmt: skip
WORDS = {"relu": "gelu", "gated-gelu": "relu"}


def others(value: Any) -> Iterator[Any]:
    """What a key may hold in place of this value."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1 if isinstance(value, int) else value + 0.0625
    elif isinstance(value, str):
        yield WORDS.get(value, "relu")
    elif value is None:
        yield from (7, 0.35)


def changes(known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in known.items():
        yield from ((key, other) for other in others(value) if key not in APART)
    yield from ((key, one) for key, value in OLD.items() for one in (value if isinstance(value, tuple) else (value,)))


def output(model: torch.nn.Module, args: dict[str, Any]) -> torch.Tensor:
    """With dropout, as a pattern."""
    with zoo.dropout_as_pattern(), zoo.wide(torch.float64), torch.no_grad():
        return scores(model.train()(**args))


def theirs_of(model: Any, text: str, args: dict[str, Any]) -> torch.Tensor | None:
    """What a model of that config.json computes with the weights of `model`; None if there is none."""
    try:
        config = type(model).config_class.from_dict(json.loads(text))
        config._attn_implementation = "eager"
        made = type(model)(config).double()
        made.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        return output(made, args)
    except Exception:
        return None


CASES = [Case(kind, "default", task) for kind, family in sorted(families().items())
         for task in dict.fromkeys((next(iter(family.tasks)), "tag")) if task in family.tasks]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_key_changes_it_changes_here_or_is_refused(case: Case, tmp_path: Path) -> None:
    theirs, folder = zoo.reference(case)
    held, args, changed = json.loads((Path(folder) / "config.json").read_text()), inputs(case), set[str]()
    shutil.copy(Path(folder) / "model.safetensors", tmp_path)
    plain = theirs_of(theirs, json.dumps(held), zoo.theirs_only(case, theirs, args))
    assert plain is not None
    for key, value in changes(type(theirs).config_class().to_dict() | held):
        text = json.dumps(held | {key: value})
        (tmp_path / "config.json").write_text(text)
        wanted = theirs_of(theirs, text, zoo.theirs_only(case, theirs, args))
        try:
            ours = mc.load(tmp_path, task=case.task, dtype=torch.float64)
            found = output(ours, args)
        except InputError as error:
            assert key in str(error) or wanted is None, f"{key}={value}: {error}"
            continue
        if wanted is None or ours.load_report.new:  # a head of its own, where the file has none: that was told
            continue
        worst = (found - wanted).abs().max()
        assert worst < 1e-6 * wanted.std(), f"{key}={value} makes another function there, and not here: {worst}"
        changed |= {key} if not torch.equal(wanted, plain) else set()
    assert len(changed) >= 2, f"the walk changes nothing but {changed}"


@pytest.mark.parametrize("kind, asked", [("gpt2", False), ("llama", False), ("bloom", False), ("bert", True), ("t5", True),
                                         ("t5", False), ("mt5", True)])  # fmt: skip
def test_another_direction_is_refused_and_none_is_written(kind: str, asked: bool) -> None:
    """Their scaled-dot-product attention, unlike the eager one of the walk, follows `true` in encoders, too."""
    config = families()[kind].Config
    with pytest.raises(InputError, match=rf"^config\.json: is_causal: {asked}; a file without it"):
        config.from_dict({"is_causal": asked}, "config.json")
    assert "is_causal" not in config().to_dict()
