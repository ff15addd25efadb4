"""Predictions against labels: classes, values, and spans of tags. n examples; every result is a fraction between 0 and 1, an error
or a correlation."""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MARKS = ("B", "I", "M", "E", "L", "S", "U")  # before a tag's kind, of a span
Numbers = Sequence[float] | NDArray[np.float64]


def accuracy(found: Numbers, wanted: Numbers) -> float:
    """The share of predictions that are right; with several labels (n, labels) all must be."""
    right = np.asarray(found) == np.asarray(wanted)
    return float(np.mean(right.reshape(len(right), -1).all(1)))


def counts(found: Numbers, wanted: Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """For each class that occurs on either side, or each of several labels (n, labels): how often it was correctly predicted,
    predicted, and wanted."""
    f, w = np.asarray(found), np.asarray(wanted)
    if f.ndim == 2:
        return ((f * w) == 1).sum(0).astype(float), (f == 1).sum(0).astype(float), (w == 1).sum(0).astype(float)
    classes, which = np.unique(np.concatenate([f, w]), return_inverse=True)
    f, w = np.split(which, [len(f)])
    right, at, there = (np.bincount(x, minlength=len(classes)).astype(float) for x in (f[f == w], f, w))
    return right, at, there


def ratio(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a / b, zero where b is zero."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def question_em(found: Sequence[Numbers], wanted: Sequence[Numbers]) -> float:
    """The share of questions whose answers are all judged correctly: MultiRC's EM (Wang et al., 2019)."""
    return sum(list(f) == list(w) for f, w in zip(found, wanted, strict=True)) / len(found)


def f1(found: Numbers, wanted: Numbers) -> float:
    """The harmonic mean of precision and recall of class 1, as GLUE's MRPC and QQP use it, and over all answers MultiRC's F1a."""
    f, w = np.asarray(found) == 1, np.asarray(wanted) == 1
    return float(2 * (f & w).sum() / (f.sum() + w.sum())) if f.any() or w.any() else 0.0


def f1_macro(found: Numbers, wanted: Numbers) -> float:
    """The mean of the classes' F1."""
    right, at, there = counts(found, wanted)
    return float(ratio(2 * right, at + there).mean())


def f1_micro(found: Numbers, wanted: Numbers) -> float:
    """F1 over all decisions together; with one class per example this is the accuracy."""
    right, at, there = (x.sum() for x in counts(found, wanted))
    return float(2 * right / (at + there)) if at + there else 0.0


def mcc(found: Numbers, wanted: Numbers) -> float:
    """Matthews' correlation, for any number of classes (Gorodkin, 2004, equation 8); 0 if either side is constant."""
    right, at, there = counts(found, wanted)
    n = there.sum()
    over = right.sum() * n - at @ there
    under = float((n**2 - at @ at) * (n**2 - there @ there))
    return float(over / under**0.5) if under > 0 else 0.0


def mse(found: Numbers, wanted: Numbers) -> float:
    """The mean squared error."""
    return float(np.mean((np.asarray(found, float) - np.asarray(wanted, float)) ** 2))


def pearson(found: Numbers, wanted: Numbers) -> float:
    """Pearson's correlation; 0 if either side is constant, which is said, nan if any value is not finite."""
    f, w = (np.asarray(x, float) for x in (found, wanted))
    if not np.isfinite([f, w]).all():
        return float("nan")
    if not np.ptp(f) or not np.ptp(w):  # their mean may be off by a last place, and two such errors would correlate
        same = "predictions" if not np.ptp(f) else "values to predict"
        if len(f) > 1:
            warnings.warn(f"all {len(f):,} {same} are the same: there is no correlation, and it is told as 0", stacklevel=2)
        return 0.0
    f, w = f - f.mean(), w - w.mean()
    under = float(np.sqrt(f @ f) * np.sqrt(w @ w))
    return float(f @ w / under) if under > 0 else 0.0


def spearman(found: Numbers, wanted: Numbers) -> float:
    """Spearman's correlation: Pearson's of the ranks, where equal values share the mean of their ranks."""
    return pearson(ranks(found), ranks(wanted))


def ranks(values: Numbers) -> NDArray[np.float64]:
    _, which, count = np.unique(given := np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    shared: NDArray[np.float64] = (last - (count - 1) / 2)[which]
    return np.where(np.isnan(given), np.nan, shared)  # which would otherwise be the highest


def spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """(start, stop, kind) of the spans that B-, I- and O tags mark, with or without a kind. As in CoNLL's own script, a span begins
    with a B, or with an I that does not continue a span of its kind; an E ends a span, and an S is one alone; in other schemes M
    stands for I, L for E and U for S. Any other tag is a span of one."""
    found: set[tuple[int, int, str]] = set()
    start, kind, open_ = 0, None, False
    for at, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        goes_on = open_ and mark in ("I", "M", "E", "L") and name == kind
        if kind is not None and not goes_on:
            found.add((start, at, kind))
        if not goes_on:
            start, kind = at, None if tag == "O" else name if name or mark in MARKS else tag
        open_ = mark in ("B", "I", "M")
    return found


def span_f1(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float:
    """F1 of whole spans over all sequences of tags, as reported for CoNLL 2003."""
    pairs = [(spans(f), spans(w)) for f, w in zip(found, wanted, strict=True)]
    right, all_ = sum(len(f & w) for f, w in pairs), sum(len(f) + len(w) for f, w in pairs)
    return 2 * right / all_ if all_ else 0.0
