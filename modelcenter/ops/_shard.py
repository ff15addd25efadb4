"""How an op runs on DTensors: every process runs it on its own shards, if the op's rule allows how they are sharded.

A rule names the dimensions of an op's arguments and results, as einsum does; `*` stands for any further ones, `-` for an argument
with no dimensions to name. Along a lower-case letter an op is computed shard by shard: every tensor that has the dimension must be
sharded along it; every tensor that lacks it is whole on every process, and its gradient is a sum over the processes; a result that
lacks it is such a sum itself. A dimension of size 1 that is larger elsewhere is broadcast, and counts as missing. A dimension with
a capital letter must not be sharded: otherwise the reference runs, for whose functions torch has rules. `seed` determines dropout:
it differs between shards with different values, and is the same for copies of the same values.

Each dimension of a mesh is handled by itself, so the rules hold on meshes with any number of them. Tensors that are placed
otherwise than the rule requires (a sum not yet computed, a whole bias where the rest is sharded along it) are redistributed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Names = tuple[str, ...]  # of the dimensions of one argument or result

BIASED, GATED = "* n, n -> * n", "*, * -> *"
RULES = {
    "gelu": BIASED, "gelu_tanh": BIASED, "gelu_cut": BIASED, "silu": BIASED, "relu": BIASED,
    "geglu": GATED, "geglu_tanh": GATED, "swiglu": GATED, "reglu": GATED,
    "layer_norm": "* D, D, D -> * D",
    "rms_norm": "* D, D -> * D",
    "add_layer_norm": "* D, * D, D, D, -, seed -> * D, * D",
    "add_rms_norm": "* D, * D, D, -, seed -> * D, * D",
    "dropout": "*, *, seed -> *",
    "rotary": "b s h D, b s h P, b s h P -> b s h D",
    "attention": "b S h D, b T h D, b T h D, b h S T, -, -, -, -, seed -> b S h D",
    "relative_attention": "b S h D, b T h D, b T h D, h N, b T, -, -, b C, -, -, -, -, -, -, seed -> b S h D",
    "embedding": "*, V d -> * d",
    "cross_entropy": "n V, n -> sum",
    "linear_cross_entropy": "n D, V D, V, n -> sum",
    "linear_nf4": "* D, o C, o G, o -> * o",
    "linear_int8": "* D, o D, o, o -> * o",
}  # fmt: skip
SEED, SUM, NONE = ("seed",), ("sum",), ("-",)
STEP = 0x9E3779B97F4A7C15  # odd, so that no two shards have one seed


PARSED = {op: [[tuple(one.split()) for one in side.split(",")] for side in rule.split("->")] for op, rule in RULES.items()}


def spelled(names: Names, dims: int) -> Names:
    """The names of `dims` dimensions, including those that the star stands for."""
    if names == SUM:
        return ()
    if "*" not in names:
        return names
    return *(f"*{i}" for i in range(dims - len(names) + 1)), *names[1:]


def on_shards(name: str, args: Sequence[Any], compute: Callable[..., Any]) -> Any:
    """The result of `compute`, the op `name` on plain tensors, for these arguments, some of them DTensors; NotImplemented if no
    rule fits."""
    inputs, outputs = PARSED.get(name, ([], []))
    inputs = [*inputs, *[NONE] * (len(args) - len(inputs))]
    inputs = [spelled(names, a.dim()) if isinstance(a, Tensor) else NONE for a, names in zip(args, inputs, strict=False)]
    cut = found(inputs, args)
    if cut is None:
        return NotImplemented
    results = compute(*[cut.own(a, names) for a, names in zip(args, inputs, strict=True)])
    if isinstance(results, Tensor):
        return cut.whole(results, outputs[0])
    return tuple([cut.whole(part, names) for part, names in zip(results, outputs, strict=True)])


def found(inputs: Sequence[Names], args: Sequence[Any]) -> "Cut | None":
    """How these arguments are sharded, if the rule allows it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sizes: dict[str, int] = {}
    spread: list[tuple[DTensor, Names]] = []
    for a, names in zip(args, inputs, strict=True):
        if names in (SEED, NONE):
            if names == NONE and isinstance(a, DTensor):
                return None
            continue
        if not isinstance(a, DTensor) or len(names) != a.dim():
            return None  # who mixes DTensors with others hears of it from torch
        spread.append((a, names))
        for letter, size in zip(names, a.shape, strict=True):
            if letter not in sizes or size > sizes[letter]:
                sizes[letter] = size
    if not spread:
        return None
    mesh = spread[0][0].device_mesh
    if mesh.get_coordinate() is None or any(a.device_mesh != mesh for a, _ in spread):
        return None

    cut = Cut(mesh, [None] * mesh.ndim, sizes)
    for i in range(mesh.ndim):
        for a, names in spread:
            place = a.placements[i]
            if type(place) is Shard:
                letter = cut.there(a, names)[place.dim]
                if letter.isupper():
                    return None
                cut.letters[i] = cut.letters[i] or letter or None
            elif not isinstance(place, Replicate) and not place.is_partial():
                return None
    for letter in {c for c in cut.letters if c}:
        shards = math.prod([mesh.size(i) for i in range(mesh.ndim) if cut.letters[i] == letter])
        lengths = {a.shape[names.index(letter)] for a, names in spread if letter in cut.there(a, names)}
        if len(lengths) > 1 and any(n % shards for n in lengths):
            return None  # heads that share keys must be cut where their keys are
    return cut


@dataclass
class Cut:
    """A mesh, the name of the dimension that is sharded along each of its dimensions, and the sizes of all named dimensions."""

    mesh: Any
    letters: list[str | None]
    sizes: dict[str, int]

    def there(self, a: Tensor, names: Names) -> Names:
        """The names of the dimensions of `a`, empty for those that are broadcast."""
        return tuple(["" if n == 1 != self.sizes[letter] else letter for letter, n in zip(names, a.shape, strict=True)])

    def placements(self, names: Names, lacking: Any) -> tuple[Any, ...]:
        """The placements of a tensor with these dimensions; `lacking`: the placement if it lacks the sharded one."""
        from torch.distributed.tensor import Replicate, Shard

        return tuple([Replicate() if c is None else Shard(names.index(c)) if c in names else lacking for c in self.letters])

    def own(self, a: Any, names: Names) -> Any:
        """This process's part of an argument."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if names == SEED:
            return self.seed(a.to_local() if isinstance(a, DTensor) else a)
        if not isinstance(a, DTensor):
            return a
        names = self.there(a, names)
        wanted = self.placements(names, Replicate())
        if a.placements != wanted:
            a = a.redistribute(placements=wanted)
        if hasattr(a._local_tensor, "wait"):  # on its way still; to wait for the result of to_local would lose its gradient
            a._local_tensor = a._local_tensor.wait()
        return a.to_local(grad_placements=self.placements(names, Partial()))

    def seed(self, seed: Tensor) -> Tensor:
        """A different one for each shard, by its number."""
        number = 0
        for i, letter in enumerate(self.letters):
            number = number if letter is None else number * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return seed + ((number * STEP + 2**63) % 2**64 - 2**63) if number else seed

    def whole(self, part: Tensor, names: Names) -> Tensor:
        """The result of which this process has a part."""
        from torch.distributed.tensor import DTensor, Partial

        names = spelled(names, part.dim())
        shape = torch.Size([self.sizes[letter] for letter in names])
        stride = tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])
        placements = self.placements(names, Partial())
        return DTensor.from_local(part.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=stride)
