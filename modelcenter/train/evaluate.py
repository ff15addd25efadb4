"""What counts as a target, and the evaluation of a model on a set of examples.

Shapes: b sequences, s tokens, v vocabulary or labels.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.loader import Blank, Loader
from ..data.objective import Asked, Objective, find_objective
from ..data.tokenizer import Tokenizer
from ..layers.block import at_rest
from ..layers.onto import onto
from ..layers.output import Output
from ..metrics.table import METRICS, Of, of_texts
from ..ops.cross_entropy import IGNORE, ignored
from ..parallel.device import home_of
from ..parallel.ranks import ALONE, Ranks
from ..parallel.watch import beat

Arguments = Mapping[str, Any]  # a batch of the loader: the model's keyword arguments, tensors and a few numbers
NOTHING = "no targets: nothing in the evaluation data is to be predicted, so every number is nan; give others: data.eval_path=FILE"


def on_device(batch: Arguments, device: torch.device) -> dict[str, Any]:
    """`batch` with its tensors on `device`; the copy does not wait for what the device is doing."""
    return {key: onto(value, device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def count_tokens(batch: Arguments, task: str) -> int:
    """The number of tokens that the model reads, including a decoder's targets; neither padding nor placeholders for missing
    samples count."""
    if isinstance(batch, Blank):
        return 0
    tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
    return int(tokens) + (int((batch["labels"] != IGNORE).sum()) if find_objective(task).task == "seq2seq" else 0)


def count_targets(batch: Arguments, task: str) -> int:
    """The number of predictions over which the model's loss on `batch` sums."""
    return int(known(batch["labels"], find_objective(task)).sum())


def known(labels: Tensor, objective: Objective) -> Tensor:
    """Which of the labels that predictions stand against are there: the others only fill up, or are not to be learned."""
    targets = objective.targets(labels)
    return targets != ignored(targets)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Arguments], task: str, metrics: Sequence[str] = (),
             text_bytes: int | None = None, tags: Sequence[str] = (), asked: Asked | None = None,
             ranks: Ranks = ALONE) -> dict[str, float]:
    """Returns `eval_loss`, the mean over all target tokens of `batches`; `eval_targets`, their number; what the objective `task`
    always reports; and `metrics`, each as eval_NAME: shares of one, correlations, perplexities, bits.

    `text_bytes`: the length (UTF-8) of the text that the targets of `lm` are, for bits per byte. `tags`: the names of the labels of
    `tag`. `asked`: the examples of `batches` in order, if they are parts of questions. Several `ranks` take the batches in turn
    (`Loader.once`), and all get the results.

    The model is left in the mode that it was in. Of a set without targets every number is nan.
    """
    objective, device = find_objective(task), home_of(model)
    total, targets, told = 0.0, 0, Told(objective)
    with at_rest(model):
        for batch in batches:
            beat(step=True)
            here = on_device(batch, device)
            out = model(**here, num_items_in_batch=1)  # one item: the sum over targets, whatever their number
            total += float(out.loss)
            targets += count_targets(batch, task)
            told.add(out, here)
            del out  # its logits make room for the next
    total, targets = ranks.sum(total, targets)
    predicted, right, parts = (ranks.joined(rows) for rows in (told.predicted, told.right, told.parts))
    total = total if targets else math.nan
    loss = total / max(1, targets)
    results = {"eval_loss": loss, "eval_targets": targets}
    names = [*objective.metrics, *metrics]
    if "perplexity" in names:
        results["eval_perplexity"] = math.exp(min(loss, 700.0))  # beyond e^709 a float overflows
    if text_bytes and task == "lm":
        results["eval_bits_per_byte"] = total / math.log(2) / text_bytes
    for name in names:
        of, compute = METRICS[name].of, METRICS[name].compute
        if compute is not None and (predicted or parts):
            results[f"eval_{name}"] = compute(*sides(of, predicted, right, parts, tags, asked)) if targets else math.nan
    return results


@dataclass
class Told:
    """What a model predicts on a set besides its loss, and what is right: a list with one entry per batch."""

    objective: Objective
    predicted: list[list[Tensor]] = field(default_factory=list)
    right: list[list[Tensor]] = field(default_factory=list)
    parts: list[list[Tensor]] = field(default_factory=list)  # scores of each part of a question

    def add(self, out: Output, batch: Arguments) -> None:
        """What the model put `out` for `batch`."""
        objective, predicted, right, parts = self.objective, list[Tensor](), list[Tensor](), list[Tensor]()
        if "answers" in objective.of:
            there = known(batch["labels"], objective)  # without what only fills a rank's piece up
            scores = torch.stack((out.start_logits, out.end_logits), -1) if out.logits is None else out.logits  # choices
            parts += scores[there].double().cpu()
        if not {"classes", "values", "sets"}.isdisjoint(objective.of):
            told = objective.told(out.logits)
            for row, labels in rows_of(told, batch) if "tags" in objective.of else ((told, batch["labels"]),):
                there = known(labels, objective)
                predicted.append(row[there].float().cpu())
                right.append(labels[there].float().cpu())
        for rows, mine in ((self.predicted, predicted), (self.right, right), (self.parts, parts)):
            rows.append(mine)


def sides(of: Sequence[Of], predicted: Sequence[Tensor], right: Sequence[Tensor], parts: Sequence[Tensor],
          tags: Sequence[str], asked: Asked | None) -> tuple[Any, Any]:
    """What a metric `of` that kind compares: what the model says, and what is right."""
    if "answers" in of:
        assert asked is not None
        return asked.answers([part.reshape(-1, 2).numpy() for part in parts]), asked.references
    if "questions" in of:
        assert asked is not None
        return asked.parted(torch.cat([*predicted]).tolist()), asked.parted(torch.cat([*right]).tolist())
    if "tags" in of:
        return [[tags[int(i)] for i in row] for row in predicted], [[tags[int(i)] for i in row] for row in right]
    return torch.cat([*predicted]).float().numpy(), torch.cat([*right]).float().numpy()


def rows_of(told: Tensor, batch: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    """The predictions and the labels of each sequence, packed or not."""
    bounds = batch.get("cu_seq_lens_q")
    if bounds is None:
        return zip(told, batch["labels"], strict=True)
    cuts = bounds[1:-1].tolist()
    return zip(told[0].tensor_split(cuts), batch["labels"][0].tensor_split(cuts), strict=True)


@dataclass(frozen=True)
class Evaluation:
    """How a run's model is evaluated. `references`: the wanted texts of the loader's examples in order, if a metric is about texts.
    They are compared with what the model writes with the options `generation`."""

    loader: Loader
    task: str
    metrics: tuple[str, ...] = ()
    text_bytes: int | None = None
    tokenizer: Tokenizer | None = None
    references: Sequence[str] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    ranks: Ranks = ALONE

    def __call__(self, model: nn.Module, tell: Callable[[int, int], None] = lambda done, of: None,
                 heed: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Do what `evaluate` does. `tell` is called with how many texts are written so far: each takes as many steps as it has
        tokens. `heed` is called before each batch, of texts too; what it raises ends the evaluation."""
        results = evaluate(model, heeding(self.loader.once(), heed), self.task, self.metrics, self.text_bytes, self.tags,
                           self.loader.examples if isinstance(self.loader.examples, Asked) else None, self.ranks)
        if texts := of_texts(self.metrics, find_objective(self.task).of):
            written = self.written(model, tell, heed)
            for name in texts:
                compute = METRICS[name].compute
                assert compute is not None
                results[f"eval_{name}"] = compute(written, list(self.references))
        return results

    @property
    def size(self) -> dict[str, float]:
        """The size of the evaluation: the number of examples, and of the questions to which they belong."""
        examples = self.loader.examples
        asked = {"eval_questions": len(examples.references)} if isinstance(examples, Asked) else {}
        return {"eval_examples": len(examples), **asked}

    def undefined(self) -> list[str]:
        """A line for each metric that the labels leave undefined, whatever the model predicts; it is reported as 0 then."""
        labels, asked = getattr(self.loader.examples, "labels", None), {*find_objective(self.task).metrics, *self.metrics}
        if not isinstance(labels, array) or labels.typecode != "q" or not len(labels):
            return []
        there, names = set(labels), dict(enumerate(self.tags))
        same = ", ".join(names.get(label, str(label)) for label in there)
        lines = [f"mcc: 0, because undefined: all {len(labels)} labels are {same}"] if "mcc" in asked and len(there) == 1 else []
        lines += [f"f1: 0, because no label is {names.get(1, 1)}, whose F1 it is"] if "f1" in asked and 1 not in there else []
        return lines

    def written(self, model: Any, tell: Callable[[int, int], None] = lambda done, of: None,
                heed: Callable[[], None] = lambda: None) -> list[str]:
        """The texts that the model generates for each example. All ranks generate all texts: they share each forward, so none may
        end its texts before the others."""
        assert self.tokenizer is not None
        out: list[str] = []
        whole = replace(self.loader, rank=0, world=1, batch=self.loader.batch // self.loader.world)
        for batch in heeding(whole.once(), heed):
            here = on_device(batch, home_of(model))
            ids = model.generate(here["input_ids"], here["attention_mask"], tokenizer=self.tokenizer, **self.generation)
            out += [self.tokenizer.decode(row[1:]) for row in ids.tolist()]  # the start token is no text
            beat(step=True)
            tell(len(out), len(self.references))
        return out


def heeding(batches: Iterable[Arguments], heed: Callable[[], None]) -> Iterator[Arguments]:
    """`batches`, with a call before each."""
    for batch in batches:
        heed()
        yield batch


def stream_bytes(texts: Iterable[str], tokenizer: Tokenizer) -> int:
    """How many bytes (UTF-8) a model predicts of a stream of `texts`: all but those of the first token, unless a beginning of text
    stands before it."""
    size = 0
    for text in texts:
        if not size and text and not tokenizer.puts_bos:
            start = text[:1000]
            many = len(tokenizer.encode(start, special=False))
            size -= len(text[: tokenizer.offset(start, 1)].encode()) if many > 1 else len(start.encode())
        size += len(text.encode())
    return size
