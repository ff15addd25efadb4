"""Attention: softmax(q k^T scale + mask) v (Vaswani et al., 2017), in tiles that store no scores (FlashAttention-2, Dao, 2023).

Shapes: b batch, s queries, t keys, h heads, d head dim. q is b s h d, k and v are b t kv d, kv dividing h (Ainslie et al., 2023),
as projections leave them. The mask (1|b 1|h 1|s t) is boolean, true where a key is seen, or a bias to be added, with a gradient.
The queries are the last s of the t positions; `causal` hides what comes after each. `lengths_q` and `lengths_k` (n + 1 cumulative
lengths, on the CPU) lay n sequences end to end in one row (b = 1): each sees itself alone, and the mask is indexed by the position
within the sequence. A row that sees nothing gives zero. With a seed, probabilities are dropped: the one of row r of b h s and of
key j has the number r * span + j, span being the longest sequence's keys rounded up to 128.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ._kernels import FLOATS, call, expect, finite, shown
from ._op import Kernel, op, raw, wide
from .dropout import draw, factor, kept, share

Lengths = Tensor | None


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    scale: float, causal: bool, seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    check(q, k, v)
    ends_q, ends_k = sequences(q, k, lengths_q, lengths_k)
    longest_q, longest = (max([0, *(b - a for a, b in pairwise(ends))]) for ends in (ends_q, ends_k))
    if mask is not None:
        check_mask(mask, q.shape[0], q.shape[2], longest_q, longest, lengths_q is not None)
    finite("attention", "scale", scale)
    span = -(-longest // 128) * 128
    keep = kept(torch.Size((q.shape[0], q.shape[2], q.shape[1], span)), seed, p, "attention") if seed is not None else None
    parts = [q[:, :0]]
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        s, t = rows.stop - rows.start, keys.stop - keys.start
        part = mask[:, :, : s if mask.shape[2] > 1 else 1, :t] if mask is not None else None
        left = keep[:, :, rows, :t] if keep is not None else None
        parts.append(one(q[:, rows], k[:, keys], v[:, keys], part, scale, causal, left, p))
    return torch.cat(parts, 1)


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A ValueError, in the kernel's words, if torch's functions would have to broadcast or cut one for another."""
    expect("attention", "q", q)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"attention: q and k have {q.dim()} and {k.dim()} dimensions; wanted 4")
    if v.shape != k.shape:
        raise ValueError(f"attention: v: shape {shown(v.shape)}; wanted {shown(k.shape)}")
    heads, kv = q.shape[2], k.shape[2]
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError("attention: q and k differ in their batch or head dim")
    if heads % kv if kv else heads:
        raise ValueError(f"attention: {heads} heads are no multiple of {kv}")


def check_mask(mask: Tensor, b: int, heads: int, s: int, t: int, packed: bool) -> None:
    """The same for the mask. Of packed sequences, whose longest has s queries and t keys, it may hold more."""
    expect("attention", "mask", mask, None, (*FLOATS, torch.bool))
    if mask.dim() != 4:
        raise ValueError(f"attention: the mask has {mask.dim()} dimensions; wanted 4")
    batch, each, rows, keys = mask.shape
    fits = rows in (1, s) and keys in (1, t) if not packed else (rows == 1 or rows >= s) and (keys == 1 or keys >= t)
    if batch not in (1, b) or each not in (1, heads) or not fits:
        raise ValueError("attention: the mask does not fit: wanted (1|b, 1|heads, 1|s, t)")


def sequences(q: Tensor, k: Tensor, lengths_q: Lengths, lengths_k: Lengths) -> tuple[list[int], list[int]]:
    """Where the sequences in q and in k begin and end. A ValueError, in the kernel's words, if the lengths are not theirs."""
    if (lengths_q is None) != (lengths_k is None):
        raise ValueError("attention: lengths_q and lengths_k go together")
    if lengths_q is None or lengths_k is None:
        return [0, q.shape[1]], [0, k.shape[1]]
    if len(q) != 1:
        raise ValueError(f"attention: packed sequences are one row; this is a batch of {len(q)}")
    if lengths_q.dim() != 1 or not len(lengths_q) or lengths_q.shape != lengths_k.shape:
        raise ValueError("attention: lengths_q and lengths_k: one more than there are sequences, in both")
    for name, lengths in (("lengths_q", lengths_q), ("lengths_k", lengths_k)):
        expect("attention", name, lengths, None, (torch.int64, torch.int32))
    both: tuple[list[int], list[int]] = lengths_q.tolist(), lengths_k.tolist()
    for ends, n in zip(both, (q.shape[1], k.shape[1]), strict=True):
        if any(b < a for a, b in pairwise(ends)):
            raise ValueError("attention: cumulative lengths must not fall")
        if ends[0] != 0 or ends[-1] != n:
            raise ValueError(f"attention: cumulative lengths must go from 0 to {n}")
    return both


def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, keep: Tensor | None, p: float) -> Tensor:
    """Attention without packing; which probabilities dropout keeps is given."""
    group = q.shape[2] // max(1, k.shape[2])
    q_, k_, v_ = (wide(x).transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    score = q_ @ k_.mT * scale
    s, t = score.shape[-2:]
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
    if causal:
        score = score.masked_fill(torch.ones(s, t, dtype=torch.bool, device=q.device).triu(1 + t - s), float("-inf"))
    blind = (score == float("-inf")).all(-1, keepdim=True)
    weight = score.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    if keep is not None:
        weight = torch.where(keep, weight * factor(p), 0)
    return (weight @ v_).transpose(1, 2).to(q.dtype)


ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? lengths_q, Tensor? lengths_k, "
    "float scale, bool causal, Tensor? seed, float p"
)


@raw(
    f"({ARGS}) -> (Tensor, Tensor)",
    devices=("cpu",),
)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    scale: float, causal: bool, seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and for each row (2 b h s, fp32) its largest score and 1 over the sum of e^(score - that)."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    mask, lengths_q, lengths_k = (a.contiguous() if a is not None else None for a in (mask, lengths_q, lengths_k))
    out, stats = torch.empty_like(q), q.new_empty((2, q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    call("attention", q, k, v, mask, lengths_q, lengths_k, scale, causal, seed, p, out, stats)
    return out, stats


@raw(
    f"({ARGS}, Tensor out, Tensor stats, Tensor grad, bool wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    devices=("cpu",),
)
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths_q: Lengths, lengths_k: Lengths,
    scale: float, causal: bool, seed: Tensor | None, p: float, out: Tensor, stats: Tensor, grad: Tensor, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and, if requested (otherwise empty), of the mask, in fp32."""
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    mask, lengths_q, lengths_k = (a.contiguous() if a is not None else None for a in (mask, lengths_q, lengths_k))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dmask = q.new_zeros(mask.shape if wanted and mask is not None else (0,), dtype=torch.float32)
    found = dq, dk, dv, dmask if wanted else None
    call("attention_backward", q, k, v, mask, lengths_q, lengths_k, scale, causal, seed, p, out, stats, grad, *found)
    return dq, dk, dv, dmask


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    mask = args[3]
    return *args, *outs, mask is not None and mask.requires_grad, None if mask is None else mask.dtype


def backward(grad: Tensor, *rest: Any) -> Sequence[Tensor | None]:
    *args, out, stats, wanted, dtype = rest
    dq, dk, dv, dmask = attention_backward(*args, out, stats, grad, wanted)
    return dq, dk, dv, dmask.to(dtype) if wanted else None, *(None,) * 6


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> bool:
    if not q.dim() == k.dim() == 4 or (mask is not None and (mask.dim() != 4 or mask.shape[3] == 1 != k.shape[1])):
        return False  # the kernel does not spread one key's mask over all
    return q.dtype == k.dtype == v.dtype and share(rest[-1])


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def qkv(b: int, s: int, t: int, h: int, kv: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
        return some(b, s, h, d), some(b, t, kv, d), some(b, t, kv, d)

    def seen(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) < 0.6

    seed = draw(torch.device(device))
    whole: tuple[Any, ...] = (None, None, None)
    yield *qkv(1, 1, 1, 1, 1, 1), *whole, 1.0, False, None, 0.0
    yield *qkv(2, 3, 5, 2, 1, 3), *whole, 0.4, True, None, 0.0
    yield *qkv(2, 3, 4, 2, 2, 2), some(1, 2, 3, 4), None, None, 1.0, False, seed, 0.3
    yield *qkv(2, 0, 3, 2, 2, 4), *whole, 1.0, False, None, 0.0
    yield *qkv(2, 3, 0, 2, 2, 4), *whole, 1.0, False, None, 0.0
    yield *qkv(1, 5, 3, 2, 2, 17), *whole, 0.3, True, None, 0.0  # more queries than keys: the first see nothing
    yield *qkv(2, 50, 50, 4, 2, 40), *whole, 0.1, True, None, 0.0
    yield *qkv(2, 7, 131, 2, 2, 20), seen(2, 1, 1, 131), None, None, 0.2, False, seed, 0.1
    yield *qkv(2, 9, 9, 2, 2, 8), seen(2, 1, 9, 9) & seen(2, 1, 9, 1), None, None, 0.4, False, seed, 1.0
    yield *qkv(2, 9, 20, 4, 2, 8), seen(1, 4, 9, 20), None, None, 0.4, True, None, 0.0
    yield *qkv(3, 7, 19, 4, 2, 8), some(3, 1, 7, 19), None, None, 0.4, False, None, 0.0
    yield *qkv(2, 7, 19, 4, 2, 8), some(1, 4, 1, 19), None, None, 0.4, True, None, 0.0
    yield *qkv(1, 3, 1100, 2, 1, 24), *whole, 0.2, False, None, 0.0
    yield *qkv(1, 50, 600, 1, 1, 128), *whole, 0.1, True, None, 0.0
    ends_q, ends_k = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in ((5, 0, 1, 9), (7, 2, 1, 20)))
    yield *qkv(1, 15, 30, 4, 2, 16), None, ends_q, ends_k, 0.25, False, seed, 0.2
    yield *qkv(1, 15, 15, 4, 2, 16), some(1, 4, 9, 9), ends_q.long(), ends_q.long(), 0.25, True, None, 0.0
    yield *qkv(2, 70, 70, 3, 3, 64), *whole, 0.125, True, None, 0.0


kernel = Kernel(attention_forward, saved, backward, takes=takes, devices=("cpu",), compiled=("cpu",))
attention = op("attention", reference, cases, kernel)
