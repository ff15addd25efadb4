"""Every metric by name: what it is computed from, and whether higher is better. Torch-free."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from ..errors import nearest, refuse, refuse_missing
from . import labels, texts

Of = Literal["loss", "classes", "values", "sets", "tags", "texts", "answers", "questions"]


@dataclass(frozen=True)
class Metric:
    """A metric, computed by `compute(found, wanted)`; those that follow from the loss are computed with it and have None."""

    of: tuple[Of, ...]  # any of them
    more: bool = True  # is better
    compute: Callable[[Any, Any], float] | None = None
    package: str | None = None  # that computes it, and that the installation may lack


ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
METRICS: dict[str, Metric] = {
    "loss": Metric(("loss",), more=False),
    "perplexity": Metric(("loss",), more=False),
    "bits_per_byte": Metric(("loss",), more=False),
    "accuracy": Metric(("classes", "sets"), compute=labels.accuracy),
    "f1": Metric(("classes",), compute=labels.f1),
    "f1_macro": Metric(("classes", "sets"), compute=labels.f1_macro),
    "f1_micro": Metric(("classes", "sets"), compute=labels.f1_micro),
    "mcc": Metric(("classes",), compute=labels.mcc),
    "pearson": Metric(("values",), compute=labels.pearson),
    "spearman": Metric(("values",), compute=labels.spearman),
    "mse": Metric(("values",), more=False, compute=labels.mse),
    "span_f1": Metric(("tags",), compute=labels.span_f1),
    "question_em": Metric(("questions",), compute=labels.question_em),
    "exact_match": Metric(("texts",), compute=texts.exact_match),
    "bleu": Metric(("texts",), compute=texts.bleu, package="sacrebleu"),
    "chrf": Metric(("texts",), compute=texts.chrf, package="sacrebleu"),
    **{kind.lower(): Metric(("texts",), compute=partial(texts.rouge, kind), package="rouge_score") for kind in ROUGE},
    "squad_em": Metric(("answers", "texts"), compute=texts.squad_em),
    "squad_f1": Metric(("answers", "texts"), compute=texts.squad_f1),
}


def check(name: str, objective: str, of: Sequence[Of], key: str) -> None:
    """Refuse a metric that is unknown, or that cannot be computed `of` what the objective's evaluation gives."""
    if name not in METRICS:
        refuse(None, key, repr(name), nearest(name.removeprefix("eval_"), METRICS))  # as rows and Trainer call them
    if set(METRICS[name].of).isdisjoint(of):
        refuse(None, key, f"{name} with objective {objective}", f"one of {', '.join(named(of))}")


def check_packages(names: Iterable[str]) -> None:
    """Refuse a metric whose package is not installed, before a run reaches its first evaluation."""
    for name in names:
        if (package := METRICS[name].package) is not None and find_spec(package) is None:
            installed = f"pip install {package.replace('_', '-')}, or leave the metric out"
            refuse_missing(None, name, f"{package} is not installed", installed)


def of_texts(names: Iterable[str], of: Sequence[Of]) -> list[str]:
    """The metrics among `names` for which a model must generate texts, if texts are what is compared."""
    return [name for name in names if "texts" in of and "texts" in METRICS[name].of]


def named(of: Sequence[str]) -> list[str]:
    """The metrics that can be computed from what there is."""
    return [name for name, metric in METRICS.items() if not set(metric.of).isdisjoint(of)]
