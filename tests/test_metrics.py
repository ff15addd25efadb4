"""Metrics against scikit-learn, scipy, sacrebleu and published values."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelcenter.errors import InputError
from modelcenter.metrics import labels, table, texts
from modelcenter.metrics.suites import SUITES, average
from modelcenter.metrics.table import METRICS, check_packages, named

RANDOM = np.random.default_rng(0)
CLASSES = [(RANDOM.integers(0, n, 60), RANDOM.integers(0, n, 60)) for n in (2, 3, 7)]
ODD = [(np.zeros(5, int), np.array([0, 1, 0, 1, 1])), (np.array([0, 1, 1]), np.zeros(3, int)),
       (np.array([1, 2, 2]), np.array([2, 1, 1])), (np.array([3, 3, 0]), np.array([3, 0, 0]))]  # fmt: skip


@pytest.mark.parametrize(("found", "wanted"), CLASSES + ODD, ids=str)
def test_classes_as_scikit_learn(found: np.ndarray, wanted: np.ndarray) -> None:
    of = pytest.importorskip("sklearn.metrics")
    assert labels.accuracy(found, wanted) == pytest.approx(of.accuracy_score(wanted, found))
    assert labels.f1(found, wanted) == pytest.approx(of.f1_score(wanted == 1, found == 1, zero_division=0))
    for average_, ours in (("macro", labels.f1_macro), ("micro", labels.f1_micro)):
        assert ours(found, wanted) == pytest.approx(of.f1_score(wanted, found, average=average_, zero_division=0))
    assert labels.mcc(found, wanted) == pytest.approx(of.matthews_corrcoef(wanted, found))


def test_many_classes_take_the_memory_of_few() -> None:
    """Each was compared with each example: 100,000 of 5,000 classes took 1.4 GB and 6 s."""
    found, wanted = np.random.default_rng(1).integers(0, 2000, (2, 20_000))
    tracemalloc.start()
    try:
        several = labels.f1_macro(found, wanted)
        assert tracemalloc.get_traced_memory()[1] < 100 * 20_000
    finally:
        tracemalloc.stop()
    pairs = [(2 * int(((found == c) & (wanted == c)).sum()), int((found == c).sum() + (wanted == c).sum())) for c in range(2000)]
    assert several == pytest.approx(np.mean([right / there for right, there in pairs if there]))


def test_several_labels_as_scikit_learn() -> None:
    of = pytest.importorskip("sklearn.metrics")
    for n in (2, 5):
        found, wanted = (RANDOM.integers(0, 2, (30, n)) * (np.arange(n) != 1) for _ in range(2))
        wanted[:4] = found[:4]
        assert labels.accuracy(found, wanted) == pytest.approx(of.accuracy_score(wanted, found))
        for average_, ours in (("macro", labels.f1_macro), ("micro", labels.f1_micro)):
            assert ours(found, wanted) == pytest.approx(of.f1_score(wanted, found, average=average_, zero_division=0))
    assert labels.f1_micro(found * 0, wanted * 0) == 0 == labels.f1_macro(found * 0, wanted * 0)


def test_correlations_as_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for ties in (False, True):
        found, wanted = RANDOM.normal(size=40), RANDOM.normal(size=40)
        wanted = np.round(wanted + found) if ties else wanted + found
        assert labels.pearson(found, wanted) == pytest.approx(stats.pearsonr(found, wanted).statistic)
        assert labels.spearman(found, wanted) == pytest.approx(stats.spearmanr(found, wanted).statistic)
    for compute in (labels.pearson, labels.spearman):
        with pytest.warns(UserWarning, match="^all 2 values to predict are the same: there is no correlation, "):
            assert compute([1.0, 2.0], [3.0, 3.0]) == 0
        with pytest.warns(UserWarning, match="^all 2 predictions are the same"):
            assert compute([1.0, 1.0], [3.0, 4.0]) == 0


def test_classes_and_values_by_hand() -> None:
    """Where the two packages are not installed: 3 right of 5, tp 2, fp 1, fn 1, tn 1; ranks with a tie."""
    found, wanted = [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]
    assert labels.accuracy(found, wanted) == 0.6 == labels.f1_micro(found, wanted)
    assert labels.f1(found, wanted) == pytest.approx(2 / 3)
    assert labels.f1_macro(found, wanted) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert labels.mcc(found, wanted) == pytest.approx((2 * 1 - 1 * 1) / (3 * 3 * 2 * 2) ** 0.5)
    assert labels.mcc([0, 0], [0, 0]) == 0 and labels.f1([0], [0]) == 0
    assert labels.mse([1.0, 2.0], [2.0, 4.0]) == 2.5
    for many in (10, 1000):  # means of which are off by a last place
        with pytest.warns(UserWarning, match=f"^all {many:,} predictions are the same"):
            assert all(labels.pearson(np.full(many, x), np.full(many, 0.3)) == 0 for x in (1 / 3, 0.1, 0.7))
    assert labels.ranks([5.0, 1.0, 5.0, 9.0]).tolist() == [2.5, 1, 2.5, 4]
    assert labels.pearson([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]) == pytest.approx(3 / (2 * 14 / 3) ** 0.5)


@pytest.mark.parametrize(("odd", "of_ranks"), [(np.nan, np.nan), (np.inf, -0.2)])
def test_what_is_no_number_correlates_with_nothing(odd: float, of_ranks: float) -> None:
    """As scipy has it: infinite values have ranks, others have none. The 0 that there was is more than a correlation below it."""
    found, wanted = np.array([0.3, odd, 0.1, 0.5]), np.array([3.0, 1.0, 2.0, 4.0])
    assert np.isnan(labels.pearson(found, wanted)) and np.isnan(labels.pearson(wanted, found))
    assert labels.spearman(found, wanted) == pytest.approx(of_ranks, nan_ok=True)
    assert np.isnan(labels.spearman(np.full(4, np.nan), wanted))


def test_spans_of_tags() -> None:
    """The example of seqeval's own documentation, whose published F1 is 0.50, and the borders of CoNLL's script."""
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert labels.span_f1(found, wanted) == 0.5
    assert labels.spans(["I-A", "I-A", "I-B", "B-B", "I-A"]) == {(0, 2, "A"), (2, 3, "B"), (3, 4, "B"), (4, 5, "A")}
    assert labels.spans(["NN", "NN", "O"]) == {(0, 1, "NN"), (1, 2, "NN")}
    for b, i, e, s in ("BIES", "BMES", "BILU"):  # a span of three, one, one of two, one, and what goes on with nothing
        tags = [f"{b}-A", f"{i}-A", f"{e}-A", f"{s}-A", f"{b}-A", f"{e}-A", f"{s}-B", "O", f"{e}-A"]
        assert labels.spans(tags) == {(0, 3, "A"), (3, 4, "A"), (4, 6, "A"), (6, 7, "B"), (8, 9, "A")}
    assert labels.spans(["B", "I", "O", "B", "B", "I"]) == {(0, 2, ""), (3, 4, ""), (4, 6, "")}
    assert labels.span_f1([["O"]], [["O"]]) == 0


def test_squad_as_its_script() -> None:
    assert texts.normalised("The  Norman-conquest, of AN a\nEngland!") == "normanconquest of england"
    assert texts.squad_pair("the Denver Broncos", ["Denver Broncos", "Broncos"]) == (1, 1)
    em, f1 = texts.squad_pair("in the city of Paris", ["Paris", "city Paris"])
    assert em == 0 and f1 == pytest.approx(2 * 2 / (4 + 2))
    assert texts.squad_pair("", []) == (1, 1) and texts.squad_pair("Paris", []) == (0, 0) == texts.squad_pair("", ["Paris"])
    assert texts.squad_em(["a", "b c"], [["A."], ["c b"]]) == 0.5
    assert texts.squad_f1(["x", "b c"], [["y"], ["c b"]]) == texts.squad_f1(["x", "b c"], ["y", "c b"]) == 0.5
    assert table.of_texts(["loss", "squad_f1", "bleu"], ("loss", "texts")) == ["squad_f1", "bleu"]
    assert table.of_texts(["loss", "squad_f1"], ("loss", "answers")) == []  # what finds a span writes none


def test_texts() -> None:
    """The sentences of sacrebleu's README with their first references; which side is the reference matters."""
    found = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    wanted = ["The dog bit the man.", "It was not unexpected.", "The man bit him."]
    assert texts.exact_match([" a ", "b"], ["a", "c"]) == 0.5
    sacrebleu = pytest.importorskip("sacrebleu")
    assert texts.bleu(found, wanted) == sacrebleu.corpus_bleu(found, [wanted]).score != texts.bleu(wanted, found)
    assert texts.bleu(wanted, wanted) == pytest.approx(100)
    with pytest.warns(UserWarning, match="bleu: 1 of 2 references are in a script without spaces between words, and sacrebleu's"):
        assert texts.bleu(["他喜欢吃苹果。", "a"], ["他喜欢吃苹果。", "李明 said"]) < 1  # of which the first is right
    assert texts.chrf(found, wanted) == sacrebleu.corpus_chrf(found, [wanted]).score != texts.chrf(wanted, found)


def test_rouge() -> None:
    """rouge_score's README: `The quick brown fox jumps over the lazy dog` and `The quick brown dog jumps on the log.`"""
    pytest.importorskip("rouge_score")
    pair = ["The quick brown dog jumps on the log."], ["The quick brown fox jumps over the lazy dog"]
    assert METRICS["rouge1"].compute(*pair) == pytest.approx(100 * 0.70588235)
    assert METRICS["rougel"].compute(*pair) == pytest.approx(100 * 0.58823529)
    with pytest.warns(UserWarning, match="rouge1: 1 of 2 references have no letter of a to z and no digit"):
        assert METRICS["rouge1"].compute(["中文", "a"], ["中文", "a"]) == 50


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("sacrebleu", "rouge_score"):
        monkeypatch.setitem(sys.modules, package, None)
    check_packages(["accuracy", "exact_match"])
    with pytest.raises(InputError, match=r"^bleu: sacrebleu is not installed; pip install sacrebleu, or leave the metric out$"):
        check_packages(["accuracy", "bleu"])
    with pytest.raises(InputError, match=r"^rouge1: rouge_score is not installed; pip install rouge-score"):
        check_packages(["rouge1"])


def write(folder: Path, task: str, **metrics: float) -> None:
    (folder / task).mkdir(parents=True)
    rows = [{"environment": {}}, {"step": 1, "eval_loss": 9.0}, {"step": 2, "eval_loss": 1.0} | metrics, {"step": 2, "loss": 1.0}]
    (folder / task / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_benchmark_s_average(tmp_path: Path) -> None:
    """BERT-base on GLUE's development sets as published with transformers' example, whose mean is of single tasks."""
    published = {"cola": (56.53,), "sst2": (92.32,), "mrpc": (88.85, 84.07), "stsb": (88.64, 88.48), "qqp": (87.49, 90.71),
                 "mnli": (83.91,), "qnli": (90.66,), "rte": (65.70,), "wnli": (56.34,)}  # fmt: skip
    for task, values in published.items():
        write(tmp_path, task, **{f"eval_{m}": v / 100 for m, v in zip(SUITES["glue"][task], values, strict=True)})
    found = average("glue", tmp_path)
    assert found["tasks"]["mrpc"] == pytest.approx(86.46) and found["missing"] == []
    assert found["score"] == pytest.approx((56.53 + 92.32 + 86.46 + 88.56 + 89.10 + 83.91 + 90.66 + 65.70 + 56.34) / 9)


@pytest.mark.parametrize(("published", "score"), [  # Wang et al., 2019, table 3: the most frequent class, BERT, BERT++, people
    ((62.3, (21.7, 48.4), 50.0, (61.1, 0.3), (33.4, 32.5), 50.3, 50.0, 65.1), 47.1),
    ((77.4, (75.7, 83.6), 70.6, (70.0, 24.1), (72.0, 71.3), 71.7, 69.6, 64.4), 69.0),
    ((79.0, (84.7, 90.4), 73.8, (70.0, 24.1), (72.0, 71.3), 79.0, 69.6, 64.4), 71.5),
    ((89.0, (95.8, 98.9), 100.0, (81.8, 51.9), (91.7, 91.3), 93.6, 80.0, 100.0), 89.8),
], ids=["frequent", "bert", "bert++", "people"])  # fmt: skip
def test_superglue_s_published_averages(published: tuple[Any, ...], score: float, tmp_path: Path) -> None:
    for (task, metrics), values in zip(SUITES["superglue"].items(), published, strict=True):
        values = values if isinstance(values, tuple) else (values,)
        write(tmp_path, task, **{f"eval_{m}": v / 100 for m, v in zip(metrics, values, strict=True)})
    found = average("superglue", tmp_path)
    assert found["missing"] == [] and found["score"] == pytest.approx(score, abs=0.051)  # it is told to a tenth


def test_a_benchmark_with_gaps(tmp_path: Path) -> None:
    write(tmp_path, "rte", eval_accuracy=0.5)
    assert average("superglue", tmp_path) == {
        "suite": "superglue", "tasks": {"rte": 50.0}, "score": 50.0,
        "missing": ["boolq", "cb", "copa", "multirc", "record", "wic", "wsc"]}  # fmt: skip
    write(tmp_path, "cb", eval_accuracy=0.5)
    for suite, folder, words in (("superglue", tmp_path, "cb/metrics.jsonl: eval_f1_macro: missing"),
                                 ("glu", tmp_path, "did you mean 'glue'"), ("glue", tmp_path / "cb", "no run in it"),
                                 ("glue", tmp_path / "x", "no such folder")):  # fmt: skip
        with pytest.raises(InputError, match=words):
            average(suite, folder)
    (tmp_path / "cb" / "metrics.jsonl").write_text('{"eval_loss": 1, "eval_accuracy": 0.5, "eval_f1_macro": null}\n')
    with pytest.raises(InputError, match=r"cb/metrics\.jsonl: eval_f1_macro: null, for it was not finite"):
        average("superglue", tmp_path)


def test_a_benchmark_judges_the_model_that_is_kept(tmp_path: Path) -> None:
    """Which is that of the last step, unless the recipe keeps the best."""
    (tmp_path / "rte").mkdir()
    rows = [{"step": k, "eval_loss": 1.0, "eval_accuracy": value, "best_step": 2} for k, value in ((1, 0.5), (2, 0.75), (3, 0.625))]
    (tmp_path / "rte" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for best, score in (("null", 62.5), ("accuracy", 75.0)):
        (tmp_path / "rte" / "recipe.yaml").write_text(f"best: {best}\n")
        assert average("glue", tmp_path)["tasks"] == {"rte": score}


def test_the_table_is_whole() -> None:
    assert {m for tasks in SUITES.values() for metrics in tasks.values() for m in metrics} <= set(METRICS)
    assert all((metric.compute is None) == (metric.of == ("loss",)) for metric in METRICS.values())
    assert named(["values"]) == ["pearson", "spearman", "mse"]
