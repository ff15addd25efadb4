"""summary.md: a run described for a colleague, using only the files of its folder; and several runs side by side."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.atomic import atomic_write
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.state import check_there
from ..config import read_recipe
from ..errors import counted, refuse_missing, size
from ..metrics.table import METRICS
from .calibrate import rate
from .environment import read_processes, redacted
from .folder import RECIPE, flat
from .metrics import Row, read_rows
from .progress import clock

FILE = "summary.md"


def write_summary(folder: Path) -> Path:
    """Write `folder`/summary.md. Errors: `InputError` if the disk refuses."""
    atomic_write(folder / FILE, redacted(summarise(folder)).encode())
    return folder / FILE


def summarise(folder: Path) -> str:
    """The Markdown text about the run in `folder`."""
    recipe, rows, processes = read_run(folder)
    last = processes[-1] if processes else {}
    parts = [f"# {folder.resolve().name}", sentence(recipe, last, rows), table(facts(recipe, last, rows)), "## Metrics",
             table(measures(rows)) if measures(rows) else "None was logged."]  # fmt: skip
    if (folder / "loss.png").exists():
        parts.append("![curves](loss.png)")
    happened = "\n".join(f"- {line}" for line in incidents(rows, processes))
    parts += ["## Using it", usage(folder, recipe), "## What happened", happened]
    return "\n\n".join(parts) + "\n"


def read_run(folder: Path) -> tuple[dict[str, Any], list[Row], list[dict[str, Any]]]:
    """Recipe, rows and processes. Errors: `MissingError` if the folder holds no run."""
    if not (folder / RECIPE).is_file():
        own = (folder / MANIFEST).is_file() and (folder.parent / RECIPE).is_file()
        wanted = f"{folder.parent}, the run of this state" if own else "the output folder of a run"
        refuse_missing(folder, None, f"no {RECIPE}", wanted)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "step" in row]
    return dict(read_recipe(folder / RECIPE)), rows, read_processes(folder)


def sentence(recipe: Mapping[str, Any], process: Mapping[str, Any], rows: Sequence[Row]) -> str:
    data = recipe["data"]["path"]
    named = f"`{data}`" if isinstance(data, str) else ", ".join(f"`{path}`" for path in data)
    adapter = recipe.get("adapter", {}).get("name", "none")
    start = "from random weights" if recipe.get("init") == "random" else "from pretrained weights"
    with_ = f" by {adapter} of rank {recipe['adapter']['rank']}" if adapter != "none" else ""
    return f"`{recipe['model']}` trained{with_} {start} on {named}, objective {recipe['objective']}: {state(process, rows)}."


def state(process: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """How far the run came, and why no further."""
    step = max([process.get("to_step", 0), process.get("from_step", 0), *(row["step"] for row in rows)])
    how = process.get("how", "still running, or killed")
    return f"{how}, step {step:,} of {process['steps']:,}" if "steps" in process else f"{how}, step {step:,}"


def facts(recipe: Mapping[str, Any], process: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(what, how much) of model, data, work and machine."""
    out: list[tuple[str, str]] = []
    if "parameters" in process:
        out.append(("parameters", f"{process['parameters']:,}, {process['trained']:,} of them trained"))
    if "examples" in process:
        out.append(("examples", f"{process['examples']:,}, {process['eval_examples']:,} for evaluation"))
    for path, found in process.get("data", {}).items():
        if "bytes" in found:
            out.append((f"data `{path}`", f"{found['bytes']:,} bytes in {found['files']:,} file{'s' * (found['files'] != 1)}"))
    batch = f"{recipe['batch_tokens']:,} tokens" if recipe.get("batch_tokens") else f"{recipe['batch']:,} sequences"
    optimizer = recipe["optimizer"]
    out.append(("a step", f"{batch} of at most {recipe['data']['seq_len']:,} tokens; {optimizer['name']}, "
                          f"{recipe['schedule']['name']} from {optimizer['lr']:g}"))  # fmt: skip
    logged = [row for row in rows if "tokens" in row]
    if logged:
        rates = [row["tokens_per_second"] for row in logged if row["tokens_per_second"]]
        out.append(("read", f"{logged[-1]['tokens']:,} tokens in {clock(seconds(logged))} of steps, {median(rates):,.0f} a second"))
        whose = ", of the whole process" if process.get("device") == "cpu" else ""
        out.append(("memory", f"{size(int(max(row['memory_gb'] for row in logged) * 1e9))} at most{whose}"))
    out += beside(process, logged)
    if process:
        where = ", ".join(process.get("gpus") or []) if process.get("device") != "cpu" else counted(process["threads"], "thread")
        out.append(("on", f"{process.get('device')} ({where}), {process.get('precision')}, seed {recipe['seed']}"))
        packages = process.get("packages", {})
        out.append(("by", f"modelcenter {process.get('modelcenter')}, torch {packages.get('torch')}"))
        if process.get("commit"):
            out.append(("started at", f"commit `{process['commit']}`"))
    return out


def beside(process: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What was predicted, and what was measured. On a CPU the memory of the process is measured, which is not what was
    predicted."""
    foreseen, measured = process.get("foreseen"), rate(rows)
    if not foreseen:
        return []
    said = f"{foreseen['seconds']:.3g} s a step of full sequences, {foreseen['tokens_per_second']:,.0f} tokens a second"
    if measured is not None:
        said += f"; measured {measured:,.0f} ({measured / foreseen['tokens_per_second'] - 1:+.0%})"
    out = [("predicted", said)]
    if rows and process.get("device") != "cpu":
        most, wanted = max(row["memory_gb"] for row in rows), foreseen["memory_gb"]
        said = f"{size(int(wanted * 1e9))}; measured {size(int(most * 1e9))} ({most / wanted - 1:+.0%})"
        out.append(("predicted memory", said))
    return out


def seconds(rows: Sequence[Row]) -> float:
    """The time of the steps of these rows, over all processes, without what a killed process did in vain."""
    total, before = 0.0, 0
    for row in rows:
        if row["tokens_per_second"]:
            total += (row["tokens"] - before) / row["tokens_per_second"]
        before = row["tokens"]
    return total


def measures(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """(metric, first, last, best and its step), a header first; empty without rows."""
    keys = dict.fromkeys(key for row in rows for key in row if key == "loss" or key.startswith("eval_"))
    out: list[tuple[str, ...]] = []
    for key in keys:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if not points or key == "eval_targets":
            continue
        name = key.removeprefix("eval_")
        more = name != "loss" and METRICS[name].more if name in METRICS else False
        at, best = (max if more else min)(points, key=lambda point: point[1])
        name = "loss, training" if key == "loss" else f"{name}, evaluation"
        out.append((name, f"{points[0][1]:.6g}", f"{points[-1][1]:.6g}", f"{best:.6g} at step {at:,}"))
    return [("metric", "first", "last", "best"), *out] if out else []


def typed(path: Path) -> str:
    """A path as typed in a shell: in quotes if it has blanks."""
    return str(path) if not set(str(path)) & set(" \t\n'\"`$&|;<>()*?[]#~!{}\\") else shlex.quote(str(path))


def usage(folder: Path, recipe: Mapping[str, Any]) -> str:
    """Where the model is and how to open it, and how to continue the run."""
    commands = [f"modelcenter train {typed(folder / RECIPE)}    # continues where it stopped"]
    model = folder / "model"
    if not model.is_dir():
        return f"There is no model yet.\n\n```\n{commands[0]}\n```"
    judged = recipe["data"].get("eval_path") or recipe["data"].get("eval_fraction")
    commands.insert(0, f"modelcenter evaluate {typed(folder)}" + ("" if judged else " data.eval_path=FILE"))
    if recipe["objective"] in ("lm", "seq2seq", "span"):
        commands.insert(1, f"modelcenter generate {typed(model)} \"...\"")
    lines = [f"import modelcenter as mc\n\nmodel = mc.load({str(model)!r})"]
    if (model / "adapter_config.json").is_file():
        commands.append(f"modelcenter merge {typed(model)} merged    # whole weights")
        lines.append(f"import peft\n\nmodel = peft.{opener(model)}.from_pretrained({str(model)!r})")
    elif (model / "modules.json").is_file():
        lines.append(f"import sentence_transformers\n\nmodel = sentence_transformers.SentenceTransformer({str(model)!r})")
    elif named := (json.loads((model / "config.json").read_text("utf-8")).get("architectures") or [None])[0]:
        lines.append(f"import transformers\n\nmodel = transformers.{named}.from_pretrained({str(model)!r})")
    if "sentence_transformers" not in lines[-1]:  # whose model takes texts
        lines[-1] += f"\ntokenizer = transformers.AutoTokenizer.from_pretrained({str(model)!r})"
    lines[-1] = lines[-1].replace("import peft\n", "import peft\nimport transformers\n")
    code = "\n\n".join(lines)
    return f"The model is in `{model}`.\n\n```python\n{code}\n```\n\n```\n" + "\n".join(commands) + "\n```"


def opener(model: Path) -> str:
    """peft's class for an adapter."""
    kind = json.loads((model / "adapter_config.json").read_text("utf-8")).get("task_type")
    names = {"CAUSAL_LM": "CausalLM", "SEQ_2_SEQ_LM": "Seq2SeqLM", "SEQ_CLS": "SequenceClassification",
             "TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}  # fmt: skip
    return f"AutoPeftModelFor{names[kind]}" if kind in names else "AutoPeftModel"


def incidents(rows: Sequence[Row], processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Skipped updates, interruptions, resumes and other notes."""
    out, before = [], (0, 0)
    for number, process in enumerate(processes):
        verb = "began" if number == 0 else f"resumed after step {process['from_step']:,}"
        end = f", {process['how']} {process['ended']}" if "ended" in process else ", no end was written: killed, or still running"
        if number + 1 == len(processes) and "ended" not in process:
            end = ""
        out += [f"{process['started']}: {verb} on {process.get('host')}{end}", *process.get("incidents", [])]
    for row in rows:
        if "skipped" in row:
            if (more := row["skipped"] - before[1]) > 0:
                out.append(f"steps {before[0] + 1:,} to {row['step']:,}: {more} without an update, the gradient was not finite")
            before = row["step"], row["skipped"]
    return out


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first one is the header if it has other than two columns."""
    head, body = (rows[0], rows[1:]) if len(rows[0]) != 2 else (("", ""), rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def compare(folders: Sequence[Path]) -> tuple[str, list[dict[str, Any]]]:
    """Runs side by side: the keys of their recipes that differ, then the last value of each metric, as text and as data."""
    for folder in folders:  # that a user has named
        check_there(folder)
    read = [read_run(folder) for folder in folders]
    recipes = [flat(recipe) for recipe, _, _ in read]
    for recipe in recipes:
        if recipe.get("adapter.name") == "none":  # the rest of its section is of nothing
            recipe.update({key: None for key in recipe if key.startswith("adapter.") and key != "adapter.name"})
    lasts = [{key: value for row in rows for key, value in row.items() if value is not None} for _, rows, _ in read]
    keys = [key for key in dict.fromkeys(k for recipe in recipes for k in recipe) if key != "output_dir"]
    differ = [key for key in keys if len({json.dumps(recipe.get(key)) for recipe in recipes}) > 1]
    numbers = list(dict.fromkeys(key for last in lasts for key in last))
    rows = [{"run": str(folder), **{key: recipe.get(key) for key in differ}, **{key: last.get(key) for key in numbers}}
            for folder, recipe, last in zip(folders, recipes, lasts, strict=True)]  # fmt: skip
    lines = [[name, *(shown(row.get(name)) for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return text, rows


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
