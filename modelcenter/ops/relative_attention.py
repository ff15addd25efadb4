"""Attention with a bias for each distance: softmax(q k^T scale + bias[key - query]) v, and the gradient of the bias, in tiles that
store no scores (FlashAttention-2, Dao, 2023). T5's learned buckets (Raffel et al., 2019), ALiBi (Press et al., 2021) and CPM-Ant's,
which has a soft prompt before each text, are such biases.

Shapes: b batch, s queries, t keys, h heads, d head dim. q is b s h d, k and v are b t h d, as projections leave them. The queries
are the last s of the t positions, and `causal` hides what comes after each. `bias` (h by longest_q + longest_k - 1) holds what is
added to the score of a query and a key at index key - query + longest_k - 1, in these positions. `seen` (b t, bool): keys that
exist. `lengths_q` and `lengths_k` (n + 1 cumulative lengths from 0 to s and to t, int32, on the device of q) lay n sequences end to
end in one row (b = 1): each sees only itself; `longest_q` and `longest_k` are the longest ones' lengths, or s and t without
lengths. `context` (b by the sequences of a row, int32, on the device of q): with `causal`, all queries of a sequence see this many
of its first keys. `prompt`: this many first positions of every sequence are a segment of their own; `bias` then has two more
numbers per head, for a query in the prompt and a key after it, and for the reverse, whatever the distance. `reach`: all greater
distances, in either direction, use the bias of this distance, which gets the gradients of all of them; no bias beyond it is read
(0: all are). T5's buckets end there; tiles of scores beyond it cost about as much as without a bias. A row that sees nothing gives
zero. With a seed, probabilities are dropped, numbered as in attention.py.

On a GPU memory grows as s + t: besides the gradients, the backward holds one number per row and at most PARTS vectors per head.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ._kernels import call, expect, hopper, in_bf16, modern
from ._mode import exporting, fake, unseen
from ._op import Kernel, op, raw, wide
from .attention import one
from .dropout import draw, kept, share

Lengths = Tensor | None
PARTS = 256  # vectors that a head's bias gradient is first added up in: of as many blocks, however many queries there are
ROWS = 128  # queries of a block


def spread(bias: Tensor, s: int, t: int, longest_k: int, prompt: int = 0) -> Tensor:
    """The bias of each query and key (h s t): the row of query s - 1 - i begins i elements further on."""
    if not s:
        return bias[:, :0, None].expand(-1, 0, t)
    if exporting():  # `unfold` would make t a number
        found = bias[:, torch.arange(t, device=bias.device) - torch.arange(1 - s, 1, device=bias.device)[:, None] + (longest_k - t)]
    else:
        found = bias[:, longest_k - t : longest_k + s - 1].unfold(1, t, 1).flip(1)
    if not prompt:
        return found
    at = torch.arange(t - s, t, device=bias.device)[:, None], torch.arange(t, device=bias.device)
    own, other = (x < prompt for x in at)
    return torch.where(own == other, found, torch.where(own, bias[:, -2, None, None], bias[:, -1, None, None]))


def edges(longest_q: int, longest_k: int, reach: int) -> tuple[int, int]:
    """The indices of the first and the last number of the bias that are read; these also count for everything further away."""
    middle, last = longest_k - 1, max(0, longest_q + longest_k - 1) - 1
    return (max(0, middle - reach), min(last, middle + reach)) if reach else (0, last)


def within(bias: Tensor, longest_q: int, longest_k: int, reach: int) -> Tensor:
    """The bias, with the same number at all distances beyond `reach`."""
    low, high = edges(longest_q, longest_k, reach)
    at, count = torch.arange(bias.shape[1], device=bias.device), longest_q + longest_k - 1
    return bias[:, torch.where(at < count, at.clamp(low, high), at)] if reach and count > 0 else bias


def past(s: int, t: int, context: Tensor, device: torch.device) -> Tensor:
    """Which keys the last s of t positions see (b 1 s t): those up to themselves, and those of the `context` (b)."""
    at = torch.arange(t, device=device)
    behind = at <= torch.arange(t - s, t, device=device)[:, None]
    return (behind | (at < context[:, None, None]))[:, None]


def reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    context: Tensor | None, longest_q: int, longest_k: int, prompt: int, reach: int, scale: float, causal: bool,
    seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    check(q, k, v, bias, seen, longest_q, longest_k, prompt)
    ends_q = [0, q.shape[1]] if lengths_q is None else lengths_q.tolist()
    ends_k = [0, k.shape[1]] if lengths_k is None else lengths_k.tolist()
    span = -(-longest_k // 128) * 128
    keep = kept(torch.Size((q.shape[0], q.shape[2], q.shape[1], span)), seed, p, "relative_attention") if seed is not None else None
    bias = None if bias is None else within(wide(bias), longest_q, longest_k, reach)
    parts = [q[:, :0]]
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(ends_q), pairwise(ends_k), strict=True)):
        s, t = q1 - q0, k1 - k0
        mask = None if bias is None else spread(bias, s, t, longest_k, prompt)[None]
        here = None if seen is None else seen[:, None, None, k0:k1]
        if causal and context is not None:
            open_ = past(s, t, context[:, i], q.device)
            here = open_ if here is None else here & open_
        if here is not None:
            mask = here if mask is None else mask.masked_fill(~here, float("-inf"))
        left = keep[:, :, q0:q1, :t] if keep is not None else None
        parts.append(one(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], mask, scale, causal and context is None, left, p))
    return torch.cat(parts, 1)


def check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, longest_q: int, longest_k: int,
          prompt: int) -> None:  # fmt: skip
    """A ValueError, in the kernel's words, if torch's functions would have to broadcast or cut one for another."""
    name = "relative_attention"
    for what, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name}: {what}: {x.dim()} dimensions; wanted 4")
    expect(name, "v", v, k.shape)
    if bias is not None and bias.shape != (q.shape[2], max(0, longest_q + longest_k - 1) + 2 * (prompt > 0)):
        wanted = "(heads, longest_q + longest_k - 1), a number for each distance, and with a prompt two more"
        raise ValueError(f"{name}: bias: wanted {wanted}")
    if seen is not None:
        expect(name, "seen", seen, k.shape[:2], (torch.bool,))


ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? seen, Tensor? lengths_q, Tensor? lengths_k, Tensor? context, "
    "SymInt longest_q, SymInt longest_k, SymInt prompt, SymInt reach, float scale, bool causal, Tensor? seed, float p"
)


def dense(*args: Tensor | None) -> list[Tensor | None]:
    return [a.contiguous() if a is not None else None for a in args]


def packs(*args: Tensor) -> list[Tensor]:
    """The tensors as the kernels read them, 16 bytes at a time."""
    return [a if fake(a) or a.data_ptr() % 16 == 0 else a.clone() for a in (a.contiguous() for a in args)]


@raw(f"({ARGS}) -> (Tensor, Tensor)")
def relative_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    context: Tensor | None, longest_q: int, longest_k: int, prompt: int, reach: int, scale: float, causal: bool,
    seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and for each row (b h s, fp32) the logarithm to base 2 of its sum of e^score; infinite if it sees nothing."""
    q, k, v = packs(q, k, v)
    out, lse = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    given = dense(bias, seen, lengths_q, lengths_k, context)
    call("relative_attention", q, k, v, *given, longest_q, longest_k, prompt, reach, scale, causal, seed, p, out, lse)
    return out, lse


@raw(f"({ARGS}, Tensor out, Tensor lse, Tensor grad, bool wanted, bool beside=False) -> (Tensor, Tensor, Tensor, Tensor)")
def relative_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    context: Tensor | None, longest_q: int, longest_k: int, prompt: int, reach: int, scale: float, causal: bool,
    seed: Tensor | None, p: float,
    out: Tensor, lse: Tensor, grad: Tensor, wanted: bool, beside: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and, if requested (otherwise empty), of the bias. `beside`: with as many queries as keys, the first
    three lie side by side in memory, row by row, so that the products before them can read them as one matrix (ops/linear.py)."""
    q, k, v, grad = packs(q, k, v, grad)
    given = dense(bias, seen, lengths_q, lengths_k, context)
    inner, whole = torch.empty_like(lse), None
    if beside and q.shape == k.shape:
        whole = q.new_empty((*q.shape[:2], 3, *q.shape[2:]))
        dq, dk, dv = whole.unbind(2)
    else:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sequences = q.shape[0] if lengths_q is None else lengths_q.shape[0] - 1
    parts = min(PARTS, sequences * -(-longest_q // ROWS))
    partial, dbias = None, q.new_empty((0,), dtype=torch.float32)
    if wanted and bias is not None:
        low, high = edges(longest_q, longest_k, reach)
        numbers = high - low + 1 + 2 * (prompt > 0)
        partial, dbias = bias.new_zeros((bias.shape[0], parts, numbers)), bias.new_empty(bias.shape)
    rest = (longest_q, longest_k, prompt, reach, scale, causal, seed, p, out, lse, grad, inner)
    made = (dq, dk, dv, None) if whole is None else (None, None, None, whole)
    found = (*made, parts, partial, dbias if partial is not None else None)
    call("relative_attention_backward", q, k, v, *given, *rest, *found)
    return dq, dk, dv, dbias


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    return *args, *outs, args[3] is not None and args[3].requires_grad


def backward(grad: Tensor, *rest: Any) -> Sequence[Tensor | None]:
    *args, out, lse, wanted = rest
    beside = unseen()  # a compiler takes results for memory of their own
    dq, dk, dv, dbias = relative_attention_backward(*args, out, lse, grad, wanted, beside)
    return dq, dk, dv, dbias if wanted else None, *(None,) * 12


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> bool:
    if q.dtype == torch.float32 or not (q.dtype == k.dtype == v.dtype) or (bias is not None and bias.dtype != torch.float32):
        return False
    d = q.shape[3]
    fits = q.dtype == torch.float16 or in_bf16(q.get_device())
    return bool(d) and d % 8 == 0 and d <= 128 and q.shape[2] == k.shape[2] and fits and share(rest[-1] if rest else 0.0)


def covers(q: Tensor) -> bool:
    """Whether the kernel takes q (b h s d) with keys and values of its dtype and heads, without a bias."""
    return relative_attention.fast(q) and takes(*[q.transpose(1, 2)] * 3, None)


def packed_by(q: Tensor, k: Tensor, v: Tensor, p: float) -> str:
    """The fastest attention for packed sequences without a bias (b h s|t d, half precision) on their GPU: `ours` or torch's
    `flash`; `none` if neither can. Ours also does dropout, and is faster than flash on Hopper (benchmarks/README.md)."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return "none"
    index, d = q.get_device(), q.shape[3]
    ours = covers(q) and q.shape[1] == k.shape[1]
    flash = not p and torch.backends.cuda.is_flash_attention_available() and modern(index) and d % 8 == 0 and d <= 256
    return "ours" if ours and (not flash or hopper(index)) else "flash" if flash else "none"


def sooner(q: Tensor, k: Tensor, v: Tensor, causal: bool, p: float) -> bool:
    """Whether, without a bias, ours trains at least as fast as the kernel that torch chooses, whose backward sums in a different
    order each time: on Hopper, with around 512 queries (b h s d) to all keys (b h t d), or up to 1024 to those before them, if
    there are two heads of a sequence for every multiprocessor (benchmarks/README.md)."""
    trains = torch.is_grad_enabled() and q.requires_grad
    if p or not trains or not q.is_cuda or not covers(q) or not q.dtype == k.dtype == v.dtype:
        return False
    b, h, s, d = q.shape
    t = k.shape[2]
    fits = 320 < s == t <= 1024 if causal else 320 < s <= 512 and 128 <= t <= 512
    return fits and d == 64 and h == k.shape[1] and b * h >= 256 and hopper(q.get_device())


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    kind = torch.promote_types(dtype, torch.float32)
    seed = draw(torch.device(device))

    def some(b: int, s: int, t: int, h: int, d: int, biased: bool = True, constants: int = 0) -> tuple[Tensor | None, ...]:
        q, k, v = (torch.randn(b, n, h, d, device=device, dtype=dtype) for n in (s, t, t))
        return q, k, v, torch.randn(h, max(0, s + t - 1) + constants, device=device, dtype=kind) if biased else None

    def seen(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) < 0.6

    def known(*counts: list[int]) -> Tensor:
        return torch.tensor(counts, dtype=torch.int32, device=device)

    none = None, None, None, None
    yield *some(1, 1, 1, 1, 8), *none, 1, 1, 0, 0, 1.0, False, None, 0.0
    yield *some(2, 0, 3, 2, 8), *none, 0, 3, 0, 0, 1.0, False, None, 0.0
    yield *some(2, 3, 0, 2, 8), *none, 3, 0, 0, 0, 1.0, False, None, 0.0
    yield *some(2, 70, 70, 2, 16), *none, 70, 70, 0, 0, 0.2, True, None, 0.0
    yield *some(1, 9, 5, 2, 40), *none, 9, 5, 0, 0, 0.2, True, None, 0.0  # more queries than keys: the first see nothing
    yield *some(2, 33, 150, 2, 64), seen(2, 150), *none[1:], 33, 150, 0, 0, 0.125, False, seed, 0.1
    yield *some(1, 140, 20, 1, 80), *none, 140, 20, 0, 0, 0.1, False, seed, 1.0
    yield *some(1, 40, 131, 1, 96), *none, 40, 131, 0, 0, 0.1, True, seed, 0.3
    yield *some(1, 65, 66, 1, 128, False), seen(1, 66), *none[1:], 65, 66, 0, 0, 0.1, False, None, 0.0
    yield *some(2, 7, 9, 1, 32), torch.zeros(2, 9, dtype=torch.bool, device=device), *none[1:], 7, 9, 0, 0, 0.1, False, None, 0.0
    yield *some(2, 70, 70, 2, 80, True, 2), seen(2, 70), None, None, known([40], [0]), 70, 70, 32, 0, 0.1, True, None, 0.0
    yield *some(2, 70, 70, 2, 64, False), seen(2, 70), None, None, known([40], [0]), 70, 70, 0, 0, 0.125, True, seed, 0.1
    yield *some(1, 30, 100, 2, 16, True, 2), *none, 30, 100, 72, 0, 0.2, False, seed, 0.1  # more keys than queries
    yield *some(1, 260, 200, 2, 64), *none, 260, 200, 0, 20, 0.125, False, None, 0.0  # most tiles are further than what is read
    yield *some(1, 170, 230, 1, 80, True, 2), *none, 170, 230, 40, 9, 0.125, True, seed, 0.1
    lengths = ((5, 0, 1, 9, 30), (7, 2, 1, 20, 30))
    ends_q, ends_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in lengths)
    q, k, v, _ = some(1, 45, 60, 2, 64)
    ends, context = (ends_q, ends_k), known([3, 9, 0, 15, 30])
    yield q, k, v, torch.randn(2, 59, device=device, dtype=kind), None, *ends, None, 30, 30, 0, 0, 0.25, False, seed, 0.2
    yield q, k, v, torch.randn(2, 61, device=device, dtype=kind), seen(1, 60), *ends, context, 30, 30, 8, 0, 0.25, True, None, 0.0


kernel = Kernel(relative_attention_forward, saved, backward, takes=takes, devices=("cuda",))
relative_attention = op("relative_attention", reference, cases, kernel)
