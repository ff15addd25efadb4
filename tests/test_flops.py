"""torch's counter of operations on models with our ops: transformers' model with attention in steps, and counts by hand."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import modelcenter as mc
from modelcenter import ops
from modelcenter.ops import _flops

KERNELS = ops.attention.fast(torch.zeros(1))
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"layers": 2, "dim": 64, "heads": 2, "positions": 80, "vocab": 96}),
    "llama-2-7b": ("LlamaForCausalLM", {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocab": 96}),
    "t5-small": ("T5ForConditionalGeneration", {"layers": 2, "dim": 64, "heads": 2, "hidden": 96, "vocab": 96}),
}


def counted(function: Any, *args: Any, **named: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        out = function(*args, **named)
    return counter.get_total_flops(), out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tokens", [20, 80])  # for torch's attention, and for ours
@pytest.mark.parametrize("preset", SIZES)
def test_a_model_does_what_transformers_does(preset: str, tokens: int, tmp_path: Any) -> None:
    """In a backward, attention in tiles forms its scores once more, as torch counts its own: but not where a bias has a gradient
    and torch's is asked."""
    name, config = SIZES[preset]
    ours = mc.build(preset, config=config)
    ours.save_pretrained(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path, attn_implementation="eager")
    ids, found = torch.randint(4, 90, (2, tokens)), []
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if preset == "t5-small" else {})}
    for model in (ours.eval(), theirs.eval()):
        forward, out = counted(model, **given)
        found.append((forward, counted(out.logits.sum().backward)[0]))
    width, tiled = 64, 2
    if preset == "t5-small":
        width, tiled = ours.config.heads * ours.config.head_dim, 6 if tokens > 64 and KERNELS else 2
    angles = 2 * tokens * 8 if preset == "llama-2-7b" else 0  # transformers up to 5.17 forms them by a product
    assert found[1][0] - found[0][0] in (0, angles)
    assert found[0][1] == found[1][1] + tiled * 2 * 2 * tokens * tokens * width


def random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_ops_by_hand() -> None:
    """Of an op's forward and its backward. Of packed sequences each sees itself alone; a loss has its gradients in its forward."""
    ends_q, ends_k = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 30], dtype=torch.int32)
    q, k, v = random(1, 10, 4, 8), random(1, 30, 2, 8), random(1, 30, 2, 8)
    pairs, labels = 4 * (3 * 5 + 7 * 25), torch.randint(50, (6,))
    x, weight, frozen = random(6, 8), random(50, 8), torch.randn(50, 8)
    nf4, int8 = ops.quantize_nf4(torch.randn(5, 64)), ops.quantize_int8(torch.randn(5, 64))
    table: list[tuple[Any, tuple[Any, ...], int, int]] = [
        (ops.attention, (q, k, v, None, ends_q, ends_k, 0.3, False, None, 0.0), 2 * 2 * 8 * pairs, 5 * 2 * 8 * pairs),
        (ops.attention, (q, k, v, None, None, None, 0.3, True, None, 0.0), 2 * 2 * 8 * 4 * 300, 5 * 2 * 8 * 4 * 300),
        (ops.linear_cross_entropy, (x, weight, None, labels), 3 * 2 * 6 * 8 * 50, 0),
        (ops.linear_cross_entropy, (x, frozen, None, labels), 2 * 2 * 6 * 8 * 50, 0),
        (ops.linear_cross_entropy, (x.detach(), frozen, None, labels), 2 * 6 * 8 * 50, 0),
        (ops.linear_nf4, (random(2, 3, 64), *nf4, None), 2 * 6 * 64 * 5, 2 * 6 * 64 * 5),
        (ops.linear_int8, (random(2, 7, 64), *int8, None), 2 * 14 * 64 * 5, 2 * 14 * 64 * 5),
    ]
    for op, args, forward, backward in table:
        if not op.fast(torch.zeros(1)):
            continue  # a reference's steps are counted by torch
        found, out = counted(op, *args)
        assert found == forward, op.name
        assert not out.requires_grad or counted(out.sum().backward)[0] == backward, op.name


def test_ops_of_a_gpu_by_hand() -> None:
    """Called on tensors without values; lengths without values are one sequence."""
    with torch.device("meta"):
        q, lengths = torch.empty(1, 10, 2, 8, dtype=torch.float16), torch.empty(3, dtype=torch.int32)
        args = q, q, q, None, None, lengths, lengths, None, 7, 7, 0, 0, 0.3, True, None, 0.0
    forward, (out, lse) = counted(torch.ops.modelcenter.relative_attention_forward, *args)
    assert forward == 2 * 2 * 100 * 2 * 8
    assert counted(torch.ops.modelcenter.relative_attention_backward, *args, out, lse, out, False)[0] == 5 * 2 * 100 * 2 * 8
    x, w = torch.randn(6, 8), torch.randn(5, 8)
    assert counted(torch._addmm_activation, torch.zeros(5), x, w.t())[0] == 2 * 6 * 8 * 5


@pytest.mark.parametrize("first", ["modelcenter.ops", _flops.COUNTER])
def test_whoever_is_imported_first(first: str) -> None:
    """And ours does not import torch's, which is slow where there is triton."""
    code = f"""
import importlib, sys
importlib.import_module("{first}")
assert ("{_flops.COUNTER}" in sys.modules) is ("{first}" == "{_flops.COUNTER}"), "imported"
import importlib.util, modelcenter.ops
importlib.util.find_spec("{_flops.COUNTER}")  # who looks and does not import
from torch.utils.flop_counter import flop_registry
import torch
assert torch.ops.modelcenter.attention_forward in flop_registry, "not told"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
