"""Names: one table of parameter names and layouts, read in both directions.

A row `(theirs, ours, verb)` names a module on both sides and covers all its parameters; `{}` stands for a layer's index. The verb
says how their tensor becomes ours, and back. `Split`, the default: their rows are those of ours, one after another, so that a
single name is a rename. `T`: the same, stored transposed. `PerHead`: rows are interleaved head by head. Loading never holds more
than the part of a tensor that is asked for: every verb maps a region of ours to regions of theirs (`trace`), whether these are read
or written.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # one slice with start and stop for every dimension


class Lazy(Protocol):
    """A tensor that is stored elsewhere, and is read region by region."""

    @property
    def shape(self) -> Shape: ...
    def __getitem__(self, region: Region) -> Tensor: ...


def everything(shape: Shape) -> Region:
    return tuple(slice(0, n) for n in shape)


class Part(NamedTuple):
    """Where some of the requested elements are stored: in `region` of `source`, transposed if `turned`. The first of them is the
    element `at` of the request."""

    source: Lazy
    region: Region
    at: Shape
    turned: bool


def trace(tensor: Lazy, region: Region) -> Iterator[Part]:
    """Where the elements of `region` are stored, whatever views `tensor` is made of."""
    if isinstance(tensor, View):
        yield from tensor.trace(region)
    else:
        yield Part(tensor, region, (0,) * len(region), False)


class View:
    """A tensor that is stored as parts of other tensors."""

    @property
    def shape(self) -> Shape:
        raise TypeError(f"{type(self).__name__} has no shape")

    def trace(self, region: Region) -> Iterator[Part]:
        """See the function."""
        raise TypeError(f"{type(self).__name__} is stored nowhere")

    def __getitem__(self, region: Region) -> Tensor:
        whole, sizes = None, [r.stop - r.start for r in region]
        for part in self.trace(region):
            found = part.source[part.region]
            found = found.mT if part.turned else found
            if list(found.shape) == sizes:
                return found
            whole = found.new_empty(sizes) if whole is None else whole
            whole[tuple(slice(a, a + n) for a, n in zip(part.at, found.shape, strict=True))] = found
        return torch.empty(sizes, dtype=torch.float32, device="cpu") if whole is None else whole


@dataclass(frozen=True)
class Rows(View):
    """Rows start to stop of `whole`."""

    whole: Lazy
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.whole.shape[1:])

    def trace(self, region: Region) -> Iterator[Part]:
        first, *rest = region
        yield from trace(self.whole, (slice(self.start + first.start, self.start + first.stop), *rest))


@dataclass(frozen=True)
class Transposed(View):
    """The transpose of a matrix."""

    whole: Lazy

    @property
    def shape(self) -> Shape:
        return self.whole.shape[::-1]

    def trace(self, region: Region) -> Iterator[Part]:
        for part in trace(self.whole, region[::-1]):
            yield part._replace(at=part.at[::-1], turned=not part.turned)


@dataclass(frozen=True)
class HeadRows(View):
    """Every `parts`-th group of `head_dim` rows, from group `at` on."""

    whole: Lazy
    at: int
    parts: int
    head_dim: int

    @property
    def shape(self) -> Shape:
        return (self.whole.shape[0] // self.parts, *self.whole.shape[1:])

    def trace(self, region: Region) -> Iterator[Part]:
        first, *rest = region
        row = first.start
        while row < first.stop:  # head by head: what lies between is another's
            head, within = divmod(row, self.head_dim)
            stop = min(first.stop, (head + 1) * self.head_dim)
            start = (head * self.parts + self.at) * self.head_dim + within
            for part in trace(self.whole, (slice(start, start + stop - row), *rest)):
                yield part._replace(at=(part.at[0] + row - first.start, *part.at[1:]))
            row = stop


class Split:
    """Their tensor stacks the rows of ours, one after another."""

    @property
    def rows(self) -> "Split":
        """The same for a matrix that is stored as (out, in) whatever the verb says about their weight, like those of adapters."""
        return self

    def parts(self, whole: Lazy, shapes: Sequence[Shape]) -> list[Lazy]:
        """Our tensors, of these shapes, as parts of theirs; nothing is read."""
        if len(shapes) == 1:
            return [whole]
        ends = [sum(s[0] for s in shapes[: i + 1]) for i in range(len(shapes))]
        return [Rows(whole, end - shape[0], end) for end, shape in zip(ends, shapes, strict=True)]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse: their tensor, made of ours."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of their tensor."""
        return (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()


class Transpose(Split):
    """`Split` of a matrix that the checkpoint stores as (in, out)."""

    @property
    def rows(self) -> Split:
        return SPLIT

    def parts(self, whole: Lazy, shapes: Sequence[Shape]) -> list[Lazy]:
        return super().parts(Transposed(whole) if len(whole.shape) == 2 else whole, shapes)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return super().whole(parts).mT if parts[0].dim() == 2 else super().whole(parts)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return super().shape(shapes)[::-1]


@dataclass(frozen=True)
class PerHead(Split):
    """Their tensor interleaves ours head by head: for each head it holds a group of rows from each of ours in turn."""

    heads: int

    def parts(self, whole: Lazy, shapes: Sequence[Shape]) -> list[Lazy]:
        return [HeadRows(whole, i, len(shapes), shape[0] // self.heads) for i, shape in enumerate(shapes)]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([p.unflatten(0, (self.heads, -1)) for p in parts], 1).flatten(0, 2)


SPLIT, T = Split(), Transpose()
Row = tuple[str, str | tuple[str, ...]] | tuple[str, str | tuple[str, ...], Split]


class Entry(NamedTuple):
    """One of their tensors and the parameters of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    verb: Split


class Names:
    """The table of one model: `rows` as above. `prefix` is the part of their names that the file of a bare backbone omits."""

    def __init__(self, rows: Iterable[Row], prefix: str = ""):
        self.rows = [
            Entry(theirs, (ours,) if isinstance(ours, str) else ours, verb[0] if verb else SPLIT)
            for theirs, ours, *verb in rows
        ]
        self.prefix = prefix

    def under(self, prefix: str) -> "Names":
        """The same table for a file in which the backbone has another prefix."""
        out, old = Names((), prefix), self.prefix
        out.rows = [row._replace(theirs=re.sub(f"^{re.escape(old)}", prefix, row.theirs)) for row in self.rows]
        return out

    def entries(self, ours: Iterable[str], *, bare: bool = False) -> Iterator[Entry]:
        """An entry for every tensor of theirs that holds a parameter among `ours`; with `bare` their names have no prefix."""
        keys = list(ours)
        for row in self.rows:
            pattern = re.compile(re.escape(row.ours[0]).replace(r"\{\}", r"(\d+)") + r"(\.\w+)?")
            for key in keys:
                if match := pattern.fullmatch(key):
                    index, leaf = match.groups()[:-1], match.groups()[-1] or ""
                    theirs = row.theirs.format(*index) + leaf
                    parts = tuple(name.format(*index) + leaf for name in row.ours)
                    yield Entry(theirs.removeprefix(self.prefix) if bare else theirs, parts, row.verb)

    def load(self, theirs: Callable[[str], Lazy], ours: Mapping[str, Shape], *, bare: bool = False) -> dict[str, Lazy]:
        """Their tensors under our names and in our layout; nothing is read yet."""
        out: dict[str, Lazy] = {}
        for entry in self.entries(ours, bare=bare):
            parts = entry.verb.parts(theirs(entry.theirs), [ours[name] for name in entry.ours])
            out |= zip(entry.ours, parts, strict=True)
        return out

    def save(
        self, ours: Mapping[str, Callable[[], Tensor]], shapes: Mapping[str, Shape], *, bare: bool = False
    ) -> Iterator[tuple[str, Shape, Callable[[], Tensor]]]:
        """(their name, shape, how to make it) for every tensor. The caller makes and writes one at a time."""
        for entry in self.entries(ours, bare=bare):

            def make(entry: Entry = entry) -> Tensor:
                return entry.verb.whole([ours[name]() for name in entry.ours]).contiguous()

            yield entry.theirs, entry.verb.shape([shapes[name] for name in entry.ours]), make
