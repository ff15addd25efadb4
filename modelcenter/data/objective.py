"""What an objective declares, all objectives by name, and the examples of one.

Each objective is a file in `objectives/`; adding a file there adds an objective. Its examples are an object with a `len`, their
`lengths` in tokens, `at(epoch, index)`, which returns the example that these two numbers (and the seed) determine, `collate`, which
makes a batch from a list of examples, and `pack`, which makes one without padding. Labels are IGNORED where nothing is predicted.
Causal models shift labels, so the first of a sequence is IGNORED too: the labels that are not ignored are exactly the predictions.
Recipes are checked with this file, which does not import torch.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from ..errors import counted, nearest, refuse
from ..metrics.table import Of
from .collate import Batch, describe_sample
from .config import DataConfig
from .examples import Examples, Packable
from .indexed import Tokens
from .packing import Packed, Unpadded
from .record import Mixture, Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .encode import Reader
    from .tokenizer import Tokenizer

Names = tuple[str, ...]
Frame = tuple[list[int], list[int]]  # the ids before and behind a document
COMMON = (
    "path", "eval_path", "eval_fraction", "format", "header", "seq_len", "packing", "padding_free", "group_by_length", "shuffle",
)  # fmt: skip


class Objective(ABC):
    """What one objective declares."""

    name: ClassVar[str]
    task: ClassVar[str]  # the head of the model
    keys: ClassVar[Names]  # of `DataConfig`, what it reads beside COMMON
    metrics: ClassVar[Names] = ()  # always told
    of: ClassVar[tuple[Of, ...]] = ("loss",)  # what there is to compute metrics of
    classes: ClassVar[bool] = True  # are what its labels name: they may be smoothed
    named: ClassVar[bool] = False  # are names that records hold, or their numbers
    packs: ClassVar[bool] = True  # examples may stand side by side
    together: ClassVar[bool] = False  # the examples of a forward have a part in one another's loss

    def verify(self, data: DataConfig) -> None:
        """Refuse settings with which there would be no examples, before a file is opened."""
        return None

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        """Every text that is read from a record, to train a tokenizer on."""
        yield record.text(data.text_key, "data.text_key")

    @abstractmethod
    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Examples:
        """The examples of `records`; see `make_examples`, whose `seed`, `train` and `names` are those of `read`."""

    def frame(self, read: "Reader") -> Frame:
        """What is put around a document: the beginning-of-text token, if the tokenizer's own template has one, and the end-of-text
        token."""
        return read.bos, read.eos

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        """The names of the labels that occur in the records, in order; None if there are no labels. `known`: the names of a model
        that is only evaluated; these are the answer if the records have no others, by name or number."""
        return None

    def target_len(self, data: DataConfig) -> int:
        """The most tokens of a target, where that is a text of its own."""
        return data.target_len or data.seq_len

    def settle(self, config: Any) -> Mapping[str, Any]:
        """Refuse a model whose config.json says that it is for something else. Returns the keys that it must contain from now
        on."""
        return {}

    def ends(self, tokenizer: "Tokenizer") -> tuple[int, ...]:
        """The ids that end a text of a model trained in this way, besides the end-of-text token."""
        return ()

    def mixed(self, sources: Sequence[Examples]) -> None:
        """Refuse sources of a mixture whose examples cannot stand in one batch."""
        return None

    def unlike(self, found: Examples, held_out: Examples) -> str:
        """What the held-out last part of the data lacks and the rest has, if that is unlikely to be chance; empty otherwise."""
        return ""

    def targets(self, labels: "Tensor") -> "Tensor":
        """The labels of a batch with which predictions are compared, one each."""
        return labels

    def told(self, logits: "Tensor") -> "Tensor":
        """What the scores predict, in the shape of the labels."""
        return logits.argmax(-1)

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        """The first sample of a batch as text."""
        return describe_sample(batch, tokenizer, names)


class Asked(ABC):
    """Examples that are parts of questions: windows of a context, or answers to choose from."""

    of: list[int]  # the number of the question that an example is a part of, in order

    @property
    @abstractmethod
    def references(self) -> list[list[str]]:
        """The right answers to each question."""

    @abstractmethod
    def answers(self, scores: "Sequence[NDArray[np.float64]]") -> list[str]:
        """The answer to each question, from the scores (n, 2) of every example in order."""

    def parted(self, rows: Sequence[Any]) -> list[list[Any]]:
        """Values per example, grouped by question."""
        out: list[list[Any]] = [[] for _ in range(self.of[-1] + 1)]
        for number, row in zip(self.of, rows, strict=True):
            out[number].append(row)
        return out


OBJECTIVES: dict[str, Objective] = {}
T = TypeVar("T", bound=type[Objective])


def register(cls: T) -> T:
    """Register an objective under its name."""
    OBJECTIVES[cls.name] = cls()
    return cls


def objectives() -> dict[str, Objective]:
    """Every objective by name, sorted: each file of `objectives/` is imported, and registers its own."""
    from . import objectives as folder

    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
    return dict(sorted(OBJECTIVES.items()))


def find_objective(name: str) -> Objective:
    """The objective of that name. A step asks several times, so the folder is searched only for a name that is not known yet."""
    known = OBJECTIVES if name in OBJECTIVES else objectives()
    if name not in known:
        refuse(None, "objective", repr(name), nearest(name, known))
    return known[name]


def make_examples(name: str, records: Sequence[Record], tokenizer: "Tokenizer", data: DataConfig, *, vocab: int | None = None,
                  seed: int = 0, train: bool = True, names: Sequence[str] | None = None, segments: bool = True
                  ) -> Examples:
    """The examples of `records` for an objective. If `data` says so, those to train on are packed, or batches come without padding.

    `vocab` is the size of the model's vocabulary (an id outside it is refused by file and line). `names` are the labels' names, by
    default those of `records`. `segments`: whether the model has any. Without `train` the examples come in order and padded, and
    the blocks of a stream do not move from epoch to epoch.
    """
    from .encode import Reader
    from .loader import Chain

    objective = find_objective(name)
    objective.verify(data)
    if not len(records):
        refuse(None, "data.path", "no record", "data with at least one record")
    names = tuple(names or objective.names(records, data) or ())
    if isinstance(records, Mixture) and (train or any(isinstance(source, Tokens) for source in records.sources)):
        sources = [source for source in records.sources if len(source)]
        each = partial(make_examples, vocab=vocab, seed=seed, train=train, names=names, segments=segments)
        objective.mixed(made := [each(name, source, tokenizer, data) for source in sources])
        return Chain(made)
    found = objective.examples(records, Reader(tokenizer, vocab, train, segments, seed, names), data)
    if not len(found):  # articles and passages may be without questions
        refuse(records[0].file, "objective", f"{name} finds no example in {counted(len(records), 'record')}", "one at least")
    if not train or not objective.packs:
        return found  # a metric compares them one by one
    whole = cast(Packable, found)
    return Packed(whole) if data.packing else Unpadded(whole) if data.padding_free else found


def texts_of(name: str, records: Sequence[Record], data: DataConfig) -> Iterator[str]:
    """Every text that an objective reads, to train a tokenizer on."""
    objective = find_objective(name)
    return (text for record in records for text in objective.texts(record, data))
