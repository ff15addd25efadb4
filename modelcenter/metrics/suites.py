"""Averages over the tasks of a benchmark, from a folder of runs.

GLUE: Wang et al., 2018, table 1; SuperGLUE: Wang et al., 2019, table 1. If a task has two metrics, its score is their mean, and the
benchmark's score is the mean over all of its tasks, without GLUE's diagnostics.
"""

import json
from pathlib import Path
from typing import Any

from ..config import read_recipe
from ..errors import nearest, refuse, refuse_missing

SUITES: dict[str, dict[str, tuple[str, ...]]] = {
    "glue": {
        "cola": ("mcc",), "sst2": ("accuracy",), "mrpc": ("f1", "accuracy"), "stsb": ("pearson", "spearman"),
        "qqp": ("f1", "accuracy"), "mnli": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",), "wnli": ("accuracy",),
    },
    "superglue": {
        "boolq": ("accuracy",), "cb": ("f1_macro", "accuracy"), "copa": ("accuracy",), "multirc": ("f1", "question_em"),
        "record": ("squad_f1", "squad_em"), "rte": ("accuracy",), "wic": ("accuracy",), "wsc": ("accuracy",),
    },
}  # fmt: skip


def average(suite: str, folder: Path) -> dict[str, Any]:
    """`{"suite", "tasks": {task: score}, "missing": [...], "score"}`, 0 to 100, of the runs `folder`/TASK.

    A run's metrics are in metrics.jsonl; the evaluation of the model that it has written counts. `score` is the mean of the tasks
    that are there: it is the benchmark's score only if none is missing.
    """
    if suite not in SUITES:
        refuse(None, "suite", repr(suite), nearest(suite, SUITES))
    if not folder.is_dir():
        refuse_missing(folder, None, "no such folder", "a folder with a run for each task")
    scores: dict[str, float] = {}
    for task, metrics in SUITES[suite].items():
        file = folder / task / "metrics.jsonl"
        if file.is_file():
            last = results(file)
            for metric in metrics:
                if last.get(f"eval_{metric}", 0) is None:
                    refuse(file, f"eval_{metric}", "null, for it was not finite", "a run with evaluation data that have targets")
                if f"eval_{metric}" not in last:
                    refuse(file, f"eval_{metric}", "missing", f"a run with metrics={list(metrics)}")
            scores[task] = 100 * sum(last[f"eval_{metric}"] for metric in metrics) / len(metrics)
    if not scores:
        refuse(folder, None, "no run in it", f"folders named {', '.join(SUITES[suite])}, each with its metrics.jsonl")
    missing = [task for task in SUITES[suite] if task not in scores]
    return {"suite": suite, "tasks": scores, "missing": missing, "score": sum(scores.values()) / len(scores)}


def results(file: Path) -> dict[str, Any]:
    """The last evaluation in a metrics.jsonl; of a run whose recipe has a `best`, that of the best step, of which its model is."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            refuse(file, f"line {number}", "no JSON", "a metrics.jsonl as a run writes it")
        rows += [row] if isinstance(row, dict) and "eval_loss" in row else []
    last, recipe = rows[-1] if rows else {}, file.with_name("recipe.yaml")
    if recipe.is_file() and read_recipe(recipe).get("best") is not None:
        return next((row for row in rows if row.get("step") == last.get("best_step")), last)
    return last
