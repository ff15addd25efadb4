"""Rotary frequencies and their spellings in config.json against transformers, value by value and refusal by refusal."""

import json
import math
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modelcenter.checkpoint.rope import KINDS, read, write
from modelcenter.errors import InputError
from modelcenter.layers import Rotary
from modelcenter.layers.rope import Dynamic, Linear, Llama3, LongRope, Plain, Yarn
from modelcenter.models.llama import LLaMAConfig

POSITIONS = 64
LENGTHS = (1, 16, 63, 64, 65, 100, 1000)
R = 16  # rotated channels
SHORT, LONG = tuple(1 + i / 8 for i in range(R // 2)), tuple(2.0**i for i in range(R // 2))
SCALINGS: dict[str, Plain] = {
    "plain": Plain(),
    "plain-5e5": Plain(theta=5e5),
    "linear": Linear(theta=300.0, factor=2.7),
    "dynamic": Dynamic(theta=300.0, factor=3.3, positions=POSITIONS),
    "yarn": Yarn(theta=300.0, factor=4.0, original=16),
    "yarn-betas": Yarn(theta=5e5, factor=3.3, original=50, beta_fast=9.0, beta_slow=2.0),
    "yarn-untruncated": Yarn(theta=300.0, factor=4.0, original=60, beta_fast=4.0, beta_slow=0.5, truncate=False),
    "yarn-narrow": Yarn(theta=300.0, factor=4.0, original=60, beta_fast=1.0, beta_slow=1.0, truncate=False),
    "yarn-attention": Yarn(theta=300.0, factor=4.0, original=16, attention_factor=0.7),
    "yarn-mscale": Yarn(theta=300.0, factor=40.0, original=16, mscale=0.707, mscale_all_dim=1.2),
    "yarn-half-mscale": Yarn(theta=300.0, factor=40.0, original=16, mscale=0.707),
    "llama3": Llama3(theta=5e5, factor=8.0, low=1.0, high=4.0, original=8192),
    "llama3-tiny": Llama3(theta=90.0, factor=3.3, low=1.5, high=3.0, original=32),
    "longrope": LongRope(theta=300.0, short=SHORT, long=LONG, original=32, positions=POSITIONS),
    "longrope-factor": LongRope(theta=300.0, short=SHORT, long=LONG, original=64, positions=POSITIONS, factor=5.0),
    "longrope-given": LongRope(
        theta=300.0, short=SHORT, long=LONG, original=32, positions=POSITIONS, factor=5.0, attention_factor=1.3
    ),
}


def theirs(rope: Plain, head_dim: int = R, **more: Any) -> LlamaConfig:
    """transformers' config of `rope`, from the keys that we write."""
    return LlamaConfig.from_dict({"max_position_embeddings": POSITIONS, "head_dim": head_dim, **write(rope), **more})


@pytest.mark.filterwarnings("ignore:`device` is deprecated:FutureWarning")  # transformers 5.17 says so of its own call
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_theirs_bit_for_bit(name: str) -> None:
    rope = SCALINGS[name]
    config = theirs(rope)
    kind = config.rope_parameters["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    assert type(rope) is KINDS[kind]
    for length in LENGTHS:
        found, factor = rope(R, length)
        wanted, their_factor = init(config, device="cpu", seq_len=length)
        assert found.dtype == torch.float32 and torch.equal(found, wanted), length
        assert factor == their_factor


@pytest.mark.parametrize("name", [n for n in SCALINGS if not n.startswith("plain")])
def test_frequencies_of_half_the_channels(name: str) -> None:
    rope = SCALINGS[name]
    config = theirs(rope, 2 * R)
    config.rope_parameters["partial_rotary_factor"] = 0.5
    for length in LENGTHS:
        wanted, _ = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device="cpu", seq_len=length)
        assert torch.equal(rope(R, length)[0], wanted)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_those_of_their_layer(name: str) -> None:
    """cos and sin at any positions; a fresh layer of theirs each time, because theirs remembers the longest input."""
    rope = SCALINGS[name]
    for length in LENGTHS:
        at = torch.arange(max(0, length - 9), length)[None]
        cos, sin = LlamaRotaryEmbedding(theirs(rope))(torch.zeros(1), at)
        found = Rotary(R, rope)(at, torch.float32)
        for mine, wanted in ((found.cos, cos), (found.sin, sin)):
            assert mine.shape == (1, at.size(1), 1, R // 2)
            # beyond its length their dynamic theta passes through fp32, which shows at late positions
            slack = 1e-6 * length if isinstance(rope, Dynamic) and length > POSITIONS else 1e-6
            assert (mine[:, :, 0] - wanted[..., : R // 2]).abs().max() <= slack


def test_an_input_does_not_depend_on_the_one_before() -> None:
    rope = SCALINGS["dynamic"]
    before = rope(R, 70)[0]
    rope(R, 1000)
    assert torch.equal(rope(R, 70)[0], before)


def test_padding_does_not_lengthen_a_text() -> None:
    """The longest position decides, wherever a row stands in a padded batch."""
    rotary = Rotary(R, SCALINGS["longrope"])
    short = rotary(torch.arange(32)[None], torch.float32)
    padded = rotary(torch.cat((torch.zeros(9, dtype=torch.long), torch.arange(32)))[None], torch.float32)
    assert torch.equal(padded.cos[:, 9:], short.cos)
    assert not torch.equal(rotary(torch.arange(33)[None], torch.float32).cos[:, :32], short.cos)


def test_angles_stay_wide() -> None:
    """Angles made in bf16 would be off by radians at 2000 positions."""
    found = Rotary(R, Plain())(torch.tensor([[2000]]), torch.bfloat16)
    assert found.cos.dtype == torch.float32 and abs(found.cos[0, 0, 0, 0].item() - math.cos(2000)) < 1e-6
    assert Rotary(R, Plain())(torch.tensor([[2000]]), torch.float64).cos.dtype == torch.float64


# Files as they are found: (config.json, what transformers makes of it is what we make of it)
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old": {"rope_theta": 500.0},
    "old-null": {"rope_theta": 500.0, "rope_scaling": None},
    "old-type": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "old-both-words": {"rope_theta": 500, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2}},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "new-outside": {"rope_theta": 700.0, "rope_parameters": {"rope_type": "default"}},
    "new-inside-first": {"rope_theta": 700.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "old-before-new": {
        "rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0},
    },
    "empty-old-before-new": {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "llama-3.1": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
    },
    "original-missing": {
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
    },
    "original-outside": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)},
    },
    "original-outside-first": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    },
    "yarn-with-extras": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True},
    },
    "whole-heads": {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_files_mean_what_they_mean_to_transformers(name: str) -> None:
    values = {"max_position_embeddings": POSITIONS, "head_dim": R, **FILES[name]}
    rope = read(values, 2048)
    for length in (16, 100):
        layer = LlamaRotaryEmbedding(LlamaConfig.from_dict(json.loads(json.dumps(values))))
        cos, _ = layer(torch.zeros(1), torch.arange(length)[None])
        found = Rotary(R, rope)(torch.arange(length)[None], torch.float32).cos[:, :, 0]
        assert (found - cos[..., : R // 2]).abs().max() < 1e-4
        assert rope(R, length)[1] == layer.attention_scaling


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_its_spelling(name: str) -> None:
    values = {"model_type": "llama", "max_position_embeddings": POSITIONS, "head_dim": R, **FILES[name]}
    config = LLaMAConfig.from_dict(values)
    again = config.to_dict()
    assert {k: again.get(k) for k in values} == values
    assert "rope_parameters" in again or "rope_parameters" not in values
    assert not {"rope_theta", "rope_scaling", "rope_parameters"} & (set(again) - set(values))
    assert LLaMAConfig.from_dict(again) == config


@pytest.mark.parametrize("name", SCALINGS)
def test_a_config_made_here_is_written_in_both_spellings(name: str) -> None:
    rope = SCALINGS[name]
    config = LLaMAConfig(positions=POSITIONS, head_dim=R, rope=rope)
    values = json.loads(json.dumps(config.to_dict()))
    assert LLaMAConfig.from_dict(values) == config
    without = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
    new = {k: v for k, v in values.items() if k not in without}
    old = {k: v for k, v in values.items() if k != "rope_parameters"}
    assert read(new, 2048) == read(old, 2048) == rope
    assert (values["rope_scaling"] is None) == (type(rope) is Plain) and values["rope_theta"] == rope.theta


CHANGES = [*product(FILES, ("plain-5e5", "llama3", "dynamic", "longrope", "yarn"))]


@pytest.mark.parametrize(("name", "new"), CHANGES)
def test_a_changed_scaling_replaces_the_one_of_the_file(name: str, new: str) -> None:
    from modelcenter.checkpoint.config import changed

    values = {"model_type": "llama", "max_position_embeddings": POSITIONS, "head_dim": R, **FILES[name]}
    config = changed(LLaMAConfig.from_dict(values), {"rope": SCALINGS[new]})
    assert LLaMAConfig.from_dict(json.loads(json.dumps(config.to_dict()))).rope == SCALINGS[new]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"rope_scaling": {"rope_type": "ntk"}}, r"rope_scaling.rope_type: 'ntk'; known: default, dyn.*, yarn"),
    "unknown-new": ({"rope_parameters": {"rope_type": "axial"}}, "rope_parameters.rope_type: 'axial'; known: default"),
    "no-word": ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type: \['linear'\]; known"),
    "no-mapping": ({"rope_scaling": "linear"}, "rope_scaling: 'linear' .str.; a mapping or null"),
    "by-layer": ({"rope_parameters": {"full": {"rope_type": "default"}}}, "one for all layers"),
    "no-factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing; rope type 'linear' needs it"),
    "null-factor": ({"rope_scaling": {"type": "dynamic", "factor": None}}, "rope_scaling.factor: missing"),
    "no-low": ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor: missing"),
    "no-long": ({"rope_scaling": {**LONGROPE, "long_factor": None}}, "long_factor: missing"),
    "small-factor": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor: 0.5; a number from 1"),
    "text-factor": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: '2' .str.; a number"),
    "bool-factor": ({"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor: True .bool."),
    "endless-factor": ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor: inf; a finite"),
    "theta": ({"rope_theta": 1.0}, "rope_theta: 1.0; a number above 1"),
    "theta-null": ({"rope_theta": None}, "rope_theta: None"),
    "theta-text": ({"rope_theta": "1e4"}, "rope_theta: '1e4' .str.; a number"),
    "theta-inside": ({"rope_parameters": {"rope_theta": -3}}, "rope_parameters.rope_theta: -3; a finite number"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5; only 1.0"),
    "partial-inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_f.*: 0.5"),
    "high": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor: 1.0; a number above low_freq"),
    "low": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0.0}}, "low_freq_factor: 0.0; a number"),
    "original": ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8.5}}, "embeddings: 8.5 .float."),
    "betas": ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0.5}}, "beta_fast: 0.5; at least beta_slow"),
    "temperature": ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0}}, "factor: 0; a number"),
    "truncate": ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate: 1 .int.; a bool"),
    "short": ({"rope_scaling": {**LONGROPE, "short_factor": [1.0, 2.0]}}, "short_factor: 2 numbers; 8, one"),
    "long": ({"rope_scaling": {**LONGROPE, "long_factor": [0.0] * 8}}, "long_factor: 0.0 among them"),
    "long-text": ({"rope_scaling": {**LONGROPE, "long_factor": ["1"] * 8}}, "long_factor: '1' .str.; a number"),
    "long-number": ({"rope_scaling": {**LONGROPE, "long_factor": 3}}, "long_factor: 3; a list of numbers"),
    "odd": ({"head_dim": 7}, "head_dim: 7; an even number"),
    "pair": ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "factor: 2.0; more than 2 channels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_that_names_file_and_key(name: str) -> None:
    values, found = REFUSED[name]
    with pytest.raises(InputError, match=found) as caught:
        LLaMAConfig.from_dict({"max_position_embeddings": POSITIONS, "head_dim": R, **values}, "x/config.json")
    text = str(caught.value)
    assert text.startswith("x/config.json: ") and "\n" not in text and len(text) <= 300


def test_positions_of_a_scaling_and_of_the_config_are_one_number() -> None:
    from modelcenter.checkpoint.config import changed

    config = LLaMAConfig(positions=POSITIONS, head_dim=R, rope=SCALINGS["dynamic"])
    with pytest.raises(InputError, match=r"config\.positions: 128; 64, as Dynamic has it"):
        changed(config, {"positions": 128})
    both = changed(config, {"positions": 128, "rope": Dynamic(theta=300.0, factor=3.3, positions=128)})
    assert LLaMAConfig.from_dict(both.to_dict()) == both


def test_frequencies_are_brought_to_a_device_once_unless_a_length_changes_them() -> None:
    """And what a dispatch mode sees is nobody else's: tensors without values would be, too."""
    at = torch.arange(100)[None]
    for rope in SCALINGS.values():
        rotary, short = Rotary(R, rope), at[:, :16]
        if not rope.by_length:
            with torch._subclasses.FakeTensorMode() as mode:
                rotary(mode.from_tensor(short), torch.float32)
        assert not rotary.known
        fresh = [Rotary(R, rope)(p, torch.float64) for p in (short, at, short)]
        found = [rotary(p, torch.float64) for p in (short, at, short)]
        assert all(torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin) for a, b in zip(fresh, found, strict=True))
        assert [key[1] for key in rotary.known] == ([] if rope.by_length else [torch.float64])
        assert rotary(at, torch.bfloat16).cos.dtype == torch.float32
        if not rope.by_length:
            assert rotary.turning(short, torch.float32)[0] is rotary.turning(at, torch.float32)[0]
    assert not Rotary(R, Plain()).state_dict()
