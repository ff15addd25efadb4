"""The cross entropy of x @ weight^T * scale + bias, without ever holding all of those logits.

One chunk of rows at a time, its logits are computed, turned into their own gradient in place (csrc/cross_entropy), and multiplied
into the gradients of x and of the weight, all in the forward; so nothing is computed twice and nothing of the size of the logits is
saved (Hsu et al., 2024: "Liger Kernel"). The backward only multiplies by the gradient of the loss: in place, in fp32, and if that
is 1 without touching memory; only the device knows its value. Labels as in ops/cross_entropy.

Only inputs that need a gradient get one. That of the weight is summed over the chunks in fp32, which costs up to 128 MB more for a
bf16 weight on CUDA (77 for GPT-2's). A larger one, such as that of a vocabulary of 131072 x 4096 (1.1 GB more), is rounded after
each chunk: the error is 1.5 times that of one product with 4 chunks, and 1.9 times with 8. In fp16 the gradient of the logits is
stored multiplied by 256, as the small probabilities of a large vocabulary would vanish otherwise. Under autocast the products are
computed in its dtype, and a weight is cast once for all chunks; on a CPU without units for low precision they are computed in fp32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._kernels import call
from ._mode import autocast_dtype, fake, kept_graph, on_gpu, real, unseen, without_autocast
from ._op import OPS, Kernel, Op, look, raw
from ._tied import whole
from .cross_entropy import IGNORE, cross_entropy, summed
from .linear import formed_in, multiply

CHUNK = 1024  # rows of logits that the reference holds at a time: 1024 x 50257 in fp32 are 206 MB
X, WEIGHT, BIAS = 1, 2, 4  # bits of `grads`
BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # a chunk's logits; on CUDA in 16 bits, for fewer rows in fp32 cost 5 % of the time
FEWEST = 1024  # rows of a chunk on CUDA: with each the sum of the weight's gradient is read and written, which is as much as
# multiplying 700 rows (one H200, 16384 x 1024 x 250880: 57.5 ms with 512 rows, 48.8 with 1024, 46.3 with 2048)


def chunked(scores: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, smoothing: float, z: float) -> Tensor:
    """The summed loss of scores(x) (n vocab), computed a chunk of rows at a time, and each chunk again in the backward."""

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(scores(x), labels, smoothing, z)  # type: ignore[no-any-return]  # an op is called as Any

    if len(x) <= CHUNK:
        return part(x, labels)
    parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.stack([checkpoint(part, *both, use_reentrant=False, preserve_rng_state=False) for both in parts]).sum()


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float = 1.0, smoothing: float = 0.0,
              z: float = 0.0, grads: int = 7, dtype: torch.dtype | None = None) -> Tensor:
    """`grads` only affects speed, and has no effect here."""
    formed_in_fp32 = not torch.compiler.is_compiling() and formed_in(x, dtype) != (dtype or x.dtype)
    if formed_in_fp32:  # a compiler makes products of its own, those of the layers before among them
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()

    def scores(x: Tensor) -> Tensor:
        with without_autocast(x.device) if formed_in_fp32 else nullcontext():
            return F.linear(x if scale == 1.0 else x * scale, weight, bias)

    return chunked(scores, x, labels, smoothing, z)


@raw("(Tensor x, Tensor weight, Tensor? bias, Tensor labels, float scale=1.0, float smoothing=0.0, float z=0.0, "
     "int grads=7, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor, Tensor)")
def linear_cross_entropy_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float = 1.0, smoothing: float = 0.0, z: float = 0.0,
    grads: int = 7, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the gradients of x, weight and bias for a gradient of 1; those not in `grads` are empty. A gradient may have a
    wider dtype than its tensor."""
    cuda, vocab = on_gpu(x), weight.size(0)
    kind = formed_in(x, dtype)
    own = kind if cuda else torch.float32  # the dtype of dx: on a CPU memory is not worth a rounding
    chunk, stride = rows_of_a_chunk(x, vocab, kind)
    of_weight = summed_in(weight, kind, len(x) > chunk)
    dx = x.new_empty(x.shape if grads & X else 0, dtype=own)
    dweight = x.new_empty(weight.shape if grads & WEIGHT else 0, dtype=of_weight)
    dbias = x.new_zeros(vocab if grads & BIAS and bias is not None else 0, dtype=torch.float32)
    losses = x.new_empty(len(x), dtype=torch.float32)
    if not real(x):
        return summed(losses), dx, dweight, dbias

    into, kept = dx, labels
    if not cuda:  # where it costs nothing to know them, the rows that have a label
        kept = (labels != IGNORE).nonzero().squeeze(1)
        if len(kept) < len(x):
            x, labels, losses = x[kept], labels[kept], losses[: len(kept)]
            dx = dx.new_empty(x.shape if grads & X else 0)
    w, b, labels = aligned(weight.to(kind).contiguous()), None if bias is None else bias.to(kind), labels.contiguous()
    up = 256.0 if kind == torch.float16 else 1.0
    pieces = even_pieces(vocab) if cuda else [slice(0, vocab)]
    room = x.new_empty(min(chunk, len(x)), stride, dtype=kind)
    room[:, vocab:] = 0  # with an odd vocabulary oneDNN's product in bf16 multiplies the number behind a row by 0: a NaN stays one
    for start in range(0, len(x), chunk):
        rows = slice(start, min(start + chunk, len(x)))
        part, held = aligned(x[rows].to(kind)), room[: rows.stop - start]
        logits = held[:, :vocab]
        for piece in pieces:
            if b is None:
                multiply(logits[:, piece], part, w[piece].t(), 0.0, scale)
            else:
                torch.addmm(b[piece], part, w[piece].t(), alpha=scale, out=logits[:, piece])
        if not grads:
            call("cross_entropy", held, labels[rows], vocab, smoothing, z, losses[rows], None)
            continue
        call("cross_entropy_both", held, labels[rows], vocab, smoothing, z, up, losses[rows])
        for i, piece in enumerate(pieces):
            if grads & X:
                multiply(dx[rows], logits[:, piece], w[piece], 1.0 if i else 0.0, scale / up)
            if grads & WEIGHT:
                multiply(dweight[piece], logits[:, piece].t(), part, 1.0 if start else 0.0, scale / up)
        if len(dbias):
            dbias.add_(logits.sum(0, dtype=torch.float32), alpha=1 / up)
    if not len(x):
        dweight.zero_()
    if dx is not into and grads & X:
        dx = into.zero_().index_copy_(0, kept, dx)
    return summed(losses), dx, dweight, dbias


def rows_of_a_chunk(x: Tensor, vocab: int, kind: torch.dtype) -> tuple[int, int]:
    """How many rows of logits are held at a time, and how many elements apart they begin: so many that every row is aligned for the
    matrix units, which with an odd vocabulary it would not be."""
    stride = -(-vocab // 64) * 64
    rows = max(FEWEST, BYTES["cuda"] // (stride * 2)) if on_gpu(x) else max(1, BYTES["cpu"] // (stride * kind.itemsize))
    return rows // 128 * 128 or rows, stride


def summed_in(weight: Tensor, kind: torch.dtype, several: bool) -> torch.dtype:
    """The dtype of the gradient of the weight, the sum of one product per chunk or of `several`."""
    if not on_gpu(weight) or not weight.dtype == kind == torch.bfloat16:
        return torch.float32
    return torch.float32 if several and weight.numel() * 4 <= BYTES["cuda"] else torch.bfloat16


def even_pieces(vocab: int) -> list[slice]:
    """The vocabulary split into the remainder beyond a multiple of 8, and that multiple: on an H200 products with GPT-2's 50257
    columns take eight times as long as with 50256. The small piece comes first, so that adding it to the gradient of x rounds
    nothing large."""
    even = vocab // 8 * 8
    return [slice(even, vocab), slice(0, even)] if 1024 <= even < vocab else [slice(0, vocab)]


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy that is aligned for the matrix units: on a GPU a product with a misaligned one takes five times as long."""
    return x.clone() if x.is_cuda and not fake(x) and x.data_ptr() % 16 else x


@raw("(Tensor x, Tensor factor) -> Tensor")
def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor (fp32, no dimensions), computed in fp32. torch would round the factor to x's dtype first."""
    out = x.clone()
    call("scale", out, factor)
    return out


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, weight, bias, *_ = args
    _, dx, dweight, dbias = outs
    grads = args[7] if len(args) > 7 else X | WEIGHT | BIAS
    return dx, dweight, dbias, grads, x.dtype, weight.dtype, None if bias is None else bias.dtype


def backward(grad: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor, grads: int, of_x: torch.dtype, of_weight: torch.dtype,
             of_bias: torch.dtype | None) -> Sequence[Tensor | None]:
    def times(total: Tensor, dtype: torch.dtype) -> Tensor:
        if unseen() and look((grad, total))[1] and not kept_graph():
            call("scale", total, grad)  # nobody reads it again: no second tensor of the weight's size
            return total.detach().to(dtype)
        out: Tensor = scaled(total, grad)
        return out.to(dtype)

    if grads & WEIGHT and dweight.is_cpu:
        whole(1)
    return (
        times(dx, of_x) if grads & X else None,
        times(dweight, of_weight) if grads & WEIGHT else None,
        times(dbias, of_bias) if grads & BIAS and of_bias is not None else None,
        *[None] * 6,
    )


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float = 1.0, smoothing: float = 0.0,
          z: float = 0.0, grads: int = 7, dtype: torch.dtype | None = None) -> bool:
    """Other calls go to torch's function, which runs or refuses them."""
    same = dtype is not None or (x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype))
    shaped = x.dim() == weight.dim() == 2 and x.size(1) == weight.size(1) and labels.shape == x.shape[:1] and weight.size(0) > 0
    fits = same and shaped and 0 <= smoothing <= 1
    return fits and labels.dtype == torch.int64 and (bias is None or bias.shape == weight.shape[:1])


class LinearCrossEntropy(Op):
    """Called without the last two arguments, which follow from what surrounds the call."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: float) -> Any:
        scale, smoothing, z = (*rest, *(1.0, 0.0, 0.0)[len(rest) :])
        grads = 0
        if torch.is_grad_enabled():
            grads = X * x.requires_grad + WEIGHT * weight.requires_grad + BIAS * (bias is not None and bias.requires_grad)
        return super().__call__(x, weight, bias, labels, scale, smoothing, z, grads, autocast_dtype(x.device))


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for n, dim, vocab in ((1, 1, 1), (0, 4, 3), (3, 5, 7), (40, 64, 129)):
        x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in ((n, dim), (vocab, dim), (vocab,)))
        weight /= dim**0.5
        labels = torch.randint(vocab, (n,), device=device)
        yield x, weight, None, labels
        yield x, weight, bias, labels.masked_fill(labels % 3 == 0, IGNORE)
        yield x, weight, bias, labels, 0.5, 0.1, 1e-3
        yield x, weight, None, torch.full_like(labels, IGNORE)


linear_cross_entropy = OPS["linear_cross_entropy"] = LinearCrossEntropy(
    "linear_cross_entropy", reference, cases, Kernel(linear_cross_entropy_forward, saved, backward, takes=takes)
)
