"""Weights in 4 or 8 bits, and the linear layer on them, whose weight is frozen: what QLoRA trains an adapter on.

A code stands for a level between -1 and 1; a weight is its level times the scale of its group, the group's largest magnitude.

NF4 (Dettmers et al., 2023, "QLoRA", appendix E): 16 levels, the quantiles of a normal distribution, a scale for every 64 weights of
a row. Two codes a byte, the earlier weight in the high half; where rows are a multiple of 64 long these are bitsandbytes' bytes.
4.5 bits a weight. Groups end with their row, so a matrix can be cut by rows anywhere, and by columns at multiples of 64.

int8 (Dettmers et al., 2022, "LLM.int8()"): the levels q / 127, -127 <= q <= 127, a scale for every row. Finer scales help 8 bits
little, and with one scale per row the sum of a product needs only be multiplied by it at the end.

The code is that of the nearest level; a tie goes to the lower level (NF4) or the even code (int8). A group whose scale would be
below 2^-119 is all zeros. A group with a NaN or an infinity has that as its scale and no finite weight. Weights that were
dequantised to fp32, or to their original dtype, quantise to the same codes and scales.

A product with up to 8 rows (decoding) reads only the codes, a quarter or a half of the bytes of a bf16 weight, and rounds no
weight; nor does its gradient, for which the weight is dequantised in fp32. Any other product dequantises the weight into a buffer,
once in the forward and once in the backward, and multiplies with torch's product: the extra memory is that of one weight in the
dtype of the product, for as long as the product takes. On a GPU a product in 16 bits is several times slower where rows are no
multiple of 8 long. There the weight and the activations are filled up with zeros, which takes a copy of the codes and one of the
activations for as long.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import FLOATS, call, expect, served, shown
from ._mode import on_gpu, transformed, without_autocast
from ._op import Kernel, op, raw, unknown, wide
from .linear import formed_in

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
GROUP = 64  # NF4 weights to a scale
TINY = 2.0**-119  # a smaller scale is 0: 1/127 of it would be subnormal
ZERO = 7  # NF4's code of 0
FEW = 8  # rows of activations for which the codes are read in the product itself
UNIT = 8  # 16-bit numbers in the 16 bytes that a GPU's product reads at once
SMALL = 1 << 17  # weights below this are multiplied as fast as they are filled up


def steps(like: Tensor) -> Tensor:
    """127 on the device of `like`: to divide by a Python number, torch on CUDA multiplies by its rounded reciprocal."""
    return torch.full((), 127.0, dtype=like.dtype, device=like.device)


def scales_of(groups: Tensor) -> Tensor:
    """The largest magnitude along the last axis."""
    most = groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])
    return torch.where(most < TINY, 0.0, most)


def divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales).unsqueeze(-1)


def quantize_nf4_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    cols = x.shape[-1]
    groups = F.pad(x.float(), (0, -cols % GROUP)).unflatten(-1, (-(-cols // GROUP), GROUP))
    scales = scales_of(groups)
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=x.device)
    relative = (groups / divisor(scales)).double()  # double: the middle of two levels is no fp32 number
    relative = relative.nan_to_num(nan=-1.0).contiguous()
    codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2).flatten(-2)[..., : cols + cols % 2].to(torch.uint8)
    if cols % 2:
        codes[..., -1] = ZERO
    return codes[..., ::2] << 4 | codes[..., 1::2], scales


def dequantize_nf4_reference(codes: Tensor, scales: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    check(codes, scales, cols)
    levels = torch.tensor(LEVELS, dtype=scales.dtype, device=codes.device)
    index = torch.stack((codes >> 4, codes & 15), -1).flatten(-2)[..., :cols]
    return (levels[index.int()] * scales.repeat_interleave(GROUP, -1)[..., :cols]).to(dtype)


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    scales = scales_of(x)
    codes = torch.round(x / torch.where(scales == 0, 1.0, scales / steps(scales)).unsqueeze(-1)).nan_to_num(nan=0.0)
    return codes.to(torch.int8), scales


def dequantize_int8_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    check(codes, scales)
    return (codes.to(scales.dtype) / steps(scales) * scales.unsqueeze(-1)).to(dtype)


def check(codes: Tensor, scales: Tensor, cols: int | None = None) -> None:
    """A ValueError in the kernels' words unless these belong together; `cols`: NF4's, how many weights a row has."""
    name = "dequantize_int8" if cols is None else "dequantize_nf4"
    expect(name, "codes", codes, None, (torch.int8 if cols is None else torch.uint8,))
    if not codes.dim():
        raise ValueError(f"{name}: codes: a number; wanted a tensor")
    if cols is not None and codes.shape[-1] != (cols + 1) // 2:
        raise ValueError(f"{name}: codes: wanted (.., cols / 2), rounded up")
    wanted = (*codes.shape[:-1], *(() if cols is None else (-(-cols // GROUP),)))
    if scales.shape != wanted:
        raise ValueError(f"{name}: scales: shape {shown(scales.shape)}; wanted {shown(wanted)}")


@raw("(Tensor x) -> (Tensor, Tensor)")
def quantize_nf4_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    *rows, cols = x.shape
    codes = x.new_empty((*rows, (cols + 1) // 2), dtype=torch.uint8)
    scales = x.new_empty((*rows, (cols + GROUP - 1) // GROUP), dtype=torch.float32)
    call("quantize_nf4", x.contiguous(), codes, scales)
    return codes, scales


@raw("(Tensor codes, Tensor scales, SymInt cols, ScalarType dtype) -> Tensor")
def dequantize_nf4_forward(codes: Tensor, scales: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    out = codes.new_empty((*codes.shape[:-1], cols), dtype=dtype)
    call("dequantize_nf4", codes.contiguous(), cols, scales.contiguous(), out)
    return out


@raw("(Tensor x) -> (Tensor, Tensor)")
def quantize_int8_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    call("quantize_int8", x.contiguous(), codes, scales)
    return codes, scales


@raw("(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor")
def dequantize_int8_forward(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out = codes.new_empty(codes.shape, dtype=dtype)
    call("dequantize_int8", codes.contiguous(), scales.contiguous(), out)
    return out


def taken(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the kernels take these tensors, with floats in `dtype`; what an op leaves to its reference is left to theirs."""
    return dtype in FLOATS and served(tensors[0], dtype) and not (any(map(unknown, tensors)) or transformed())


def quantize_nf4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (.. cols) as codes (.. cols/2, uint8) and scales (.. cols/64, fp32), sizes rounded up."""
    x = x.detach() if x.dtype in FLOATS else x.detach().float()
    made: tuple[Tensor, Tensor] = (quantize_nf4_forward if taken(x.dtype, x) else quantize_nf4_reference)(x)
    return made


def dequantize_nf4(codes: Tensor, scales: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The weights (.. cols) in `dtype`, rounded once."""
    fast = taken(dtype, codes, scales)
    weight: Tensor = (dequantize_nf4_forward if fast else dequantize_nf4_reference)(codes, scales, cols, dtype)
    return weight


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (.. cols) as codes (.. cols, int8) and scales (.., fp32)."""
    x = x.detach() if x.dtype in FLOATS else x.detach().float()
    made: tuple[Tensor, Tensor] = (quantize_int8_forward if taken(x.dtype, x) else quantize_int8_reference)(x)
    return made


def dequantize_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights (.. cols) in `dtype`, rounded once."""
    fast = taken(dtype, codes, scales)
    weight: Tensor = (dequantize_int8_forward if fast else dequantize_int8_reference)(codes, scales, dtype)
    return weight


def linear_nf4_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    fit_nf4(x, codes, scales, bias)
    weight = dequantize_nf4_reference(codes, wide(scales), x.shape[-1], unrounded(x))
    return linear(x, weight, bias)


def linear_int8_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    fit_int8(x, codes, scales, bias)
    return linear(x, dequantize_int8_reference(codes, wide(scales), unrounded(x)), bias)


def fit(name: str, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, kind: torch.dtype, width: int,
        *groups: int) -> None:  # fmt: skip
    """A ValueError unless x is multiplied by rows of `width` codes, each with its scales. The reference and the kernels alike call
    this, as they read the same in different ways."""
    if not x.is_floating_point():
        expect(name, "x", x)
    if codes.dtype != kind:
        expect(name, "codes", codes, None, (kind,))
    if codes.shape[1:] != (width,):
        raise ValueError(f"{name}: codes: shape {shown(codes.shape)}; wanted (rows, {width}) for x of {x.shape[-1]} columns")
    rows = codes.shape[0]
    if scales.shape != (rows, *groups):
        expect(name, "scales", scales, (rows, *groups), (scales.dtype,))
    if bias is not None and bias.shape != (rows,):
        expect(name, "bias", bias, (rows,), (bias.dtype,))


def fit_nf4(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    fit("linear_nf4", x, codes, scales, bias, torch.uint8, (x.shape[-1] + 1) // 2, -(-x.shape[-1] // GROUP))


def fit_int8(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    fit("linear_int8", x, codes, scales, bias, torch.int8, x.shape[-1])


def unrounded(x: Tensor) -> torch.dtype:
    """The dtype in which references and gradients multiply `x`: few rows in at least fp32, as the kernels that read codes do."""
    return torch.promote_types(x.dtype, torch.float32) if math.prod(x.shape[:-1]) <= FEW else formed_in(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, computed in the dtype of the weight and returned in that of x, whatever autocast says."""
    with without_autocast(x.device):
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, cols: int) -> Tensor:
    """`linear`, by a weight of which `rows` x `cols` are real and the rest zeros (`even`)."""
    if weight.shape == (rows, cols):
        return linear(x, weight, bias)
    bias = None if bias is None else resized(bias.to(weight.dtype), weight.shape[0])
    return resized(linear(resized(x, weight.shape[1]), weight, bias), rows)


def resized(x: Tensor, cols: int, rows: int | None = None) -> Tensor:
    """`x` (.. n) in rows of `cols`, cut or with zeros behind, and if it is a matrix, with so many of them."""
    if cols == x.shape[-1] and rows in (None, x.shape[0]):
        return x
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    count = flat.shape[0] if rows is None else rows
    out = flat.new_empty(count, cols)
    call("resize", flat, count, cols, out)
    return out if rows is not None else out.view(*x.shape[:-1], cols)


def even(codes: Tensor, cols: int, dtype: torch.dtype) -> tuple[int, int]:
    """The sizes with which a weight goes into a product in `dtype`: on a GPU such that rows begin at multiples of 16 bytes. Else it
    takes five times as long (8-bit weights, 8192 x 4099 x 14336, one H200: 7.3 ms, and 1.6)."""
    slow = on_gpu(codes) and dtype.itemsize == 2 and codes.shape[0] * cols >= SMALL
    by = UNIT if slow else 1
    return -(-codes.shape[0] // by) * by, -(-cols // by) * by


def weight_nf4(codes: Tensor, scales: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight for `product`. What a code of 0 in a row's last group stands for is multiplied by zeros; in rows that were not
    there the scales are zero."""
    rows, wide = even(codes, cols, dtype)
    if (rows, wide) != (codes.shape[0], cols):
        check(codes, scales, cols)
        codes, scales = resized(codes, -(-wide // 2), rows), resized(scales, scales.shape[1], rows)
    weight: Tensor = dequantize_nf4_forward.direct(codes, scales, wide, dtype)
    return weight


def weight_int8(codes: Tensor, scales: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The same."""
    rows, wide = even(codes, cols, dtype)
    if (rows, wide) != codes.shape:
        check(codes, scales)
        codes, scales = resized(codes, wide, rows), resized(scales, rows)
    weight: Tensor = dequantize_int8_forward.direct(codes, scales, dtype)
    return weight


def few(name: str, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The product that reads the codes. The kernel of a CPU reads and writes fp32."""
    kind = torch.float32 if x.device.type == "cpu" else x.dtype
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).to(kind).contiguous()
    out = flat.new_empty(flat.shape[0], codes.shape[0])
    call(name, flat, codes.contiguous(), scales.contiguous(), None if bias is None else bias.to(kind).contiguous(), out)
    return out.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


@raw("(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
def linear_nf4_forward(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    fit_nf4(x, codes, scales, bias)
    if math.prod(x.shape[:-1]) <= FEW:
        return few("product_nf4", x, codes, scales, bias)
    return product(x, weight_nf4(codes, scales, x.shape[-1], formed_in(x)), bias, codes.shape[0], x.shape[-1])


@raw("(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
def linear_int8_forward(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    fit_int8(x, codes, scales, bias)
    if math.prod(x.shape[:-1]) <= FEW:
        return few("product_int8", x, codes, scales, bias)
    return product(x, weight_int8(codes, scales, codes.shape[1], formed_in(x)), bias, *codes.shape)


@raw("(Tensor grad, Tensor codes, Tensor scales, SymInt cols) -> Tensor")
def linear_nf4_backward(grad: Tensor, codes: Tensor, scales: Tensor, cols: int) -> Tensor:
    return product(grad, weight_nf4(codes, scales, cols, unrounded(grad)).t(), None, cols, codes.shape[0])


@raw("(Tensor grad, Tensor codes, Tensor scales, SymInt cols) -> Tensor")
def linear_int8_backward(grad: Tensor, codes: Tensor, scales: Tensor, cols: int) -> Tensor:
    return product(grad, weight_int8(codes, scales, cols, unrounded(grad)).t(), None, cols, codes.shape[0])


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, codes, scales, bias = args
    wanted = bias is not None and bias.requires_grad
    return codes, scales, x.shape[-1], bias.dtype if wanted else None, x if scales.requires_grad else None


def summed(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The gradient of the bias."""
    return None if dtype is None else grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t().float() @ x.reshape(-1, x.shape[-1]).float()


def nf4_backward(
    grad: Tensor, codes: Tensor, scales: Tensor, cols: int, bias: torch.dtype | None, x: Tensor | None
) -> Sequence[Tensor | None]:
    of_scales = None
    if x is not None:  # for who trains the scales: rare, so in steps
        parts = of_weight(grad, x) * dequantize_nf4_forward(codes, torch.ones_like(scales), cols, torch.float32)
        of_scales = F.pad(parts, (0, -cols % GROUP)).unflatten(-1, (scales.shape[-1], GROUP)).sum(-1)
    return linear_nf4_backward(grad, codes, scales, cols), None, of_scales, summed(grad, bias)


def int8_backward(
    grad: Tensor, codes: Tensor, scales: Tensor, cols: int, bias: torch.dtype | None, x: Tensor | None
) -> Sequence[Tensor | None]:
    of_scales = None
    if x is not None:
        of_scales = (of_weight(grad, x) * dequantize_int8_forward(codes, torch.ones_like(scales), torch.float32)).sum(-1)
    return linear_int8_backward(grad, codes, scales, cols), None, of_scales, summed(grad, bias)


def takes(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    return x.dim() > 0 and codes.dim() == 2 and scales.dtype == torch.float32


# of x, rows, cols
SHAPES = (
    ((1,), 1, 1), ((), 4, 9), ((0,), 5, 7), ((3,), 5, 7), ((2, 5), 9, 65), ((8,), 33, 192), ((17,), 24, 130), ((4, 64), 64, 256),
)  # fmt: skip


def cases(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape, rows, cols in SHAPES:
        codes, scales = quantize(torch.randn(rows, cols, device=device))
        x, bias = torch.randn(*shape, cols, device=device, dtype=dtype), torch.randn(rows, device=device, dtype=dtype)
        yield x, codes, scales, bias
        yield x, codes, scales, None


linear_nf4 = op(
    "linear_nf4", linear_nf4_reference, partial(cases, quantize_nf4),
    Kernel(linear_nf4_forward, saved, nf4_backward, takes=takes),
)  # fmt: skip
linear_int8 = op(
    "linear_int8", linear_int8_reference, partial(cases, quantize_int8),
    Kernel(linear_int8_forward, saved, int8_backward, takes=takes),
)  # fmt: skip
