"""Tensors without storage whose bytes and work are counted: the life of each storage, and each call's arithmetic and the bytes that
it reads and writes."""

import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..ops._mode import on_gpu

Kind = Literal["weights", "optimizer", "gradients", "activations", "loss", "temporary", "gathered", "workspaces", "fragments"]
KINDS: dict[Kind, str] = {
    "weights": "weights and buffers", "optimizer": "optimizer: moments, copies, averages", "gradients": "gradients",
    "activations": "activations and the batch", "loss": "logits and loss", "temporary": "temporary, in backward and update",
    "gathered": "weights and gradients under way", "workspaces": "workspaces of cuBLAS", "fragments": "allowance for fragments",
}  # fmt: skip
LASTING: tuple[Kind, ...] = ("weights", "optimizer", "gradients")  # there whatever the batch
SEEN: tuple[Kind, ...] = (*LASTING, "activations", "loss", "temporary")  # what a rehearsal sees
Moments = Mapping[str, Sequence[Counter[Kind]]]  # phase -> at each of its moments, the bytes of each kind


def highest(moments: Moments) -> Counter[Kind]:
    """The bytes of each kind at the moment that needs the most."""
    return max((moment for some in moments.values() for moment in some), key=Counter.total)


@contextmanager
def compiler_left_out() -> Iterator[None]:
    """While this lasts `torch._dynamo` is its settings, classes of names and a `disable` that has nothing to do, which are all that
    a FakeTensorMode wants of it: to import the compiler takes more than a second."""
    name = "torch._dynamo"
    parts = [name, f"{name}.config", f"{name}.source"]
    if name in sys.modules:
        yield
        return
    found: list[Any] = []

    def disable(function: Any, *_: Any, **__: Any) -> Any:
        found.append(function)
        return function

    bare, source = (ModuleType(part) for part in parts[::2])
    vars(source)["__getattr__"] = kind_of_name
    vars(bare).update(disable=disable, source=source)  # a view's names are asked of the first
    sys.modules.update({name: bare, parts[2]: source})
    try:
        bare.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        importlib.import_module(parts[1])
        yield
    finally:  # whoever wants the compiler imports it whole, and is asked again what it is to leave alone
        for part in parts:
            sys.modules.pop(part, None)
        for function in found:
            vars(function).pop("__dynamo_disable", None)


def kind_of_name(kind: str) -> type[str]:
    """What a compiler would call a tensor by, a view by two of them; for dunder names AttributeError."""
    if kind.startswith("__"):
        raise AttributeError(kind)
    return type(kind, (str,), {"__new__": lambda cls, *names: str.__new__(cls, ".".join(names))})


class Work(NamedTuple):
    """One call: its arithmetic in a dtype, and the bytes that it must read and write; for a `sum`, those that tensor-parallel ranks
    add up. `times`: how much longer it takes than a matrix product with as much arithmetic."""

    kind: Literal["matmul", "attention", "move", "sum"]
    dtype: str
    flops: int
    bytes: int
    times: float = 1.0


class Tally(FakeTensorMode):
    """A mode of tensors without storage that counts, by kind, the bytes alive at the moments of each phase, and the work done.

    `chosen`: for a mask of so many elements, how many are not zero; in any other mask all are. Every other number that depends on
    values is taken to be 1, and every condition on values to be false.
    """

    def __init__(self, chosen: Mapping[int, int] | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.chosen = chosen or {}
        self.known: dict[int, tuple[Any, int, Kind]] = {}
        self.now: Counter[Kind] = Counter()
        self.kind: Kind = "weights"
        self.phase = "before"
        self.moments: dict[str, list[tuple[int, ...]]] = {}
        self.work: Counter[Work] = Counter()
        self.calls = 0  # that a host makes
        self.inside = False  # of a call: how torch finds its shapes is of no interest

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch's compiler would be imported, for two seconds, and asked at every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two calls of three
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if kwargs and "out" in kwargs:  # nothing is made; torch does not know all of them
            self.did(func, args, kwargs, kwargs["out"])
            return kwargs["out"]
        if func is torch.ops.aten.add.Tensor and goes_on(args[0]):
            func = torch.ops.aten.add_.Tensor
        wide = kwargs.get("dtype") if kwargs and func is torch.ops.aten.sum.dim_IntList else None
        if wide is not None and wide != args[0].dtype and not on_gpu(args[0]):
            args[0].new_empty(args[0].shape, dtype=wide)  # a CPU sums a copy
        if func is torch.ops.aten.nonzero.default:
            size = args[0].numel()
            out = args[0].new_empty((self.chosen.get(size, size), args[0].dim()), dtype=torch.int64)
        elif func.overloadpacket in PRODUCTS and func._overloadname == "dtype":  # torch 2.11 takes it for the one without
            left, right = args[PRODUCTS[func.overloadpacket]], args[PRODUCTS[func.overloadpacket] + 1]
            out = left.new_empty((*left.shape[:-1], right.size(-1)), dtype=args[-1])
        else:
            inside, self.inside = self.inside, True
            try:
                out = self.dispatch(func, types, args, kwargs or {})  # FakeTensorMode's own imports torch's compiler
            finally:
                self.inside = inside
        if self.inside or func.namespace == "prim":
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        self.did(func, args, kwargs, out)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            size = storage.nbytes()
            self.known[key] = (weakref.ref(storage, partial(self.forget, key)), size, self.kind)
            self.now[self.kind] += size
            self.look()

    def look(self) -> None:
        """Record this moment, and forget those in which every kind was smaller."""
        moment, seen = tuple(self.now[kind] for kind in SEEN), self.moments.setdefault(self.phase, [])
        if seen and all(a <= b for a, b in zip(seen[-1], moment, strict=True)):
            seen.pop()
        seen.append(moment)

    def enter(self, phase: str, kind: Kind | None = None) -> None:
        """Begin a phase. New storage is of that kind from now on."""
        self.phase = phase
        self.kind = kind or self.kind
        self.look()

    def name(self, tensor: Tensor | None, kind: Kind) -> None:
        """Give a storage its kind afterwards."""
        if tensor is not None and (key := tensor.untyped_storage()._cdata) in self.known:
            reference, size, before = self.known[key]
            self.known[key] = (reference, size, kind)
            self.now[before] -= size
            self.now[kind] += size

    def forget(self, key: int, _: Any) -> None:
        _, size, kind = self.known.pop(key)
        self.now[kind] -= size

    def did(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count a call of one of torch's operators."""
        name, packet = func._schema.name, func.overloadpacket
        self.calls += 1
        if func.is_view or "empty" in name or name in NOTHING or func.namespace == "modelcenter":
            return  # our own ops are kernels, which are counted below
        if packet in PRODUCTS:
            left = args[PRODUCTS[packet]]
            self.work[Work("matmul", named(left), 2 * out.numel() * left.size(-1), bytes_of((args, out)))] += 1
            if out is args[0] and (kwargs or {}).get("beta", 1):  # a sum goes on: its tiles are read and written between products
                self.work[Work("move", "", 0, 2 * bytes_of(out))] += 1
        elif "scaled_dot_product" in name or "_efficient_attention" in name:
            back = "backward" in name
            q, k, v = args[back : 3 + back]
            given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
            more = bool(given.get("dropout_p")) + any(isinstance(given.get(name), Tensor) for name in ("attn_bias", "attn_mask"))
            self.attended(q, k, v, bool(given.get("is_causal")), back, bytes_of((args, out)), more)
        elif any("embedding" in part or "index" in part or "gather" in part for part in (name,)):
            self.work[Work("move", named(out), 0, 2 * bytes_of(out))] += 1  # of a table only rows are read
        else:
            like = "new_" in name or name.endswith("_like")  # of which nothing is read
            size = bytes_of(out) if like else bytes_of((args, kwargs, None if func._schema.is_mutable else out))
            if name not in WRITTEN:
                pairs = zip(func._schema.arguments, args, strict=False)
                size += bytes_of([x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write])
            self.work[Work("move", "", 0, size)] += 1

    def kernel(self, name: str, args: Sequence[Any]) -> None:
        """Count a call of one of our kernels."""
        self.calls += 1
        size = bytes_of(args)
        forward = name.removesuffix("_backward")
        if forward in ATTENTION:
            q, k, v = (x.transpose(1, 2) for x in args[:3])
            ends, causal, p = ATTENTION[forward]
            more = (args[3] is not None) + bool(args[p])
            self.attended(q, k, v, bool(args[causal]), name != forward, size, more, args[ends : ends + 2])
            return
        if name == "adamw":  # what is updated is read and written, gradients are read
            size = 2 * size - bytes_of(args[2])
        elif name == "adafactor_step":
            size += bytes_of(args[1])
        elif name == "embedding":
            size = 2 * bytes_of(args[2])
        elif name == "cross_entropy_both" or (name == "gated_backward" and args[4] is None):
            size *= 2  # in place
        self.work[Work("move", "", 0, size)] += 1

    def attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, back: bool, size: int, more: int = 0,
                 ends: Sequence[Any] = ()) -> None:
        """Count attention of q (b h s d) to k and v: two products forward, five backward, and half of each if causal. `more`: what
        else is done to each score: a bias that is added, dropout."""
        parts = ends[0].numel() - 1 if ends and ends[0] is not None else 1  # packed sequences, alike: their bounds are fakes
        pairs = q.size(-2) * k.size(-2) / parts
        flops = 2 * prod(q.shape[:-2]) * pairs * (q.size(-1) + v.size(-1))
        part = 0.5 if causal else 1.0
        seen = pairs / q.size(-2) / KEYS * part  # tiles of keys that a query sees
        times = (1 + (SCORE + more * MORE) / q.size(-1)) * (seen + causal / 2 + AROUND) / seen if q.itemsize < 4 else FULL
        flops = int(flops * (2.5 if back else 1) * part)
        self.work[Work("attention", named(q), flops, size, round(times, 4))] += 1


# Attention's kernels on an H200, forward and backward, of 64 and 128 channels and 512 to 8192 keys take within 9 % of this: for
# each score as long as SCORE channels of the products, and as MORE each for a bias and a chance to be dropped; keys come in tiles
# of KEYS, of which one on a causal diagonal is computed whole, and AROUND of them are for what is before the first and after all.
SCORE, MORE, KEYS, AROUND = 57, 60, 128, 1.6
FULL = 1.65  # times as long as the products that are seen in fp32, whose units are slower: 1.5 to 1.8 of them, of the same shapes
ATTENTION = {"attention": (4, 7, 9), "relative_attention": (5, 13, 15)}  # where our kernels have lengths, `causal` and `p`
NOTHING = {"aten::detach", "aten::_unsafe_view", "aten::alias", "aten::lift_fresh", "aten::resize_",
           "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"}  # sums are counted by themselves
WRITTEN = {"aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_"}  # and not read before
PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten._addmm_activation: 1, torch.ops.aten.bmm: 0,
            torch.ops.aten.baddbmm: 1}  # where a matrix is  # fmt: skip


def goes_on(total: Tensor) -> bool:
    """Whether autograd, which calls a mode, adds a gradient to a sum that nothing else holds: to a plain tensor it does so in
    place, to one of a subclass never. It calls from where it was started, or from a thread of its own."""
    caller = sys._getframe(1).f_back
    alone = torch._C._storage_Use_Count(total.untyped_storage()._cdata) == 2  # the tensor's, and of what asks
    return alone and (caller is None or caller.f_code.co_name == "_engine_run_backward")


def named(tensor: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(tensor.dtype, "fp32")


def bytes_of(tree: Any) -> int:
    """Of all tensors in it, each once; of one that is spread out, what is there."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors.values())
