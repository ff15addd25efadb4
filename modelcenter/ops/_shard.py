"""How an op is done on DTensors: by every process on its own shards, where the op's rule allows the way they are cut.

A rule names the dimensions of an op's arguments and results, as einsum does; `*` stands for any further ones, `-` for an argument
with no dimensions to name. What is cut along a small letter is computed shard by shard: all that has the dimension must be cut
along it, all that lacks it is whole on every process, with a gradient that is a sum over the processes; a result that lacks it is
such a sum itself. A dimension of size 1 that is larger elsewhere is broadcast, and so not there. A capital may not be cut: then
the reference is asked, for whose functions torch has rules. `seed` is what dropout is a function of: it is changed from shard to
shard, and so the same where the values are and another where they differ.

Every dimension of a mesh stands for itself, so the rules hold on meshes of any. What is placed otherwise than the rule wants (a sum
not yet made, a bias that is whole beside what is cut along it) is redistributed.
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
    """The names of `dims` dimensions, those under the star too."""
    if names == SUM:
        return ()
    if "*" not in names:
        return names
    return *(f"*{i}" for i in range(dims - len(names) + 1)), *names[1:]


def on_shards(name: str, args: Sequence[Any], compute: Callable[..., Any]) -> Any:
    """What `compute`, the op `name` on plain tensors, gives for these arguments, some of them DTensors; NotImplemented where no
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
    """How these arguments are cut, if the rule allows it."""
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
    """A mesh, the name of what is cut along each of its dimensions, and the sizes of all that has a name."""

    mesh: Any
    letters: list[str | None]
    sizes: dict[str, int]

    def there(self, a: Tensor, names: Names) -> Names:
        """The names, with none where `a` is broadcast."""
        return tuple(["" if n == 1 != self.sizes[letter] else letter for letter, n in zip(names, a.shape, strict=True)])

    def placements(self, names: Names, lacking: Any) -> tuple[Any, ...]:
        """Of what has these dimensions; `lacking`: where it has not the one that is cut."""
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
        """Another one for each shard, by its number."""
        number = 0
        for i, letter in enumerate(self.letters):
            number = number if letter is None else number * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return seed + ((number * STEP + 2**63) % 2**64 - 2**63) if number else seed

    def whole(self, part: Tensor, names: Names) -> Tensor:
        """The result that this process has a part of."""
        from torch.distributed.tensor import DTensor, Partial

        names = spelled(names, part.dim())
        shape = torch.Size([self.sizes[letter] for letter in names])
        stride = tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])
        placements = self.placements(names, Partial())
        return DTensor.from_local(part.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=stride)
