"""The command line: `modelcenter VERB [NAME ...] [--machine M] [key=value ...]`.

Torch-free until a verb needs it, so that help and refusals are immediate. A setting is `key=value`, `--key=value` or
`--key value`, dashes or underscores alike. Input that the user can mend is one line on stderr and exit status 2.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from modelcenter import __version__
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint.files import ADAPTER, check_folder
from modelcenter.config import COMMAND_LINE, KEY, bind, describe, find, names, override, packaged, to_dict
from modelcenter.errors import LIMIT, InputError, nearest, printable, refuse, refuse_missing
from modelcenter.generate.options import FILE, Options

if TYPE_CHECKING:
    from modelcenter.parallel.machine import Machine
    from modelcenter.train.recipe import Recipe

T = TypeVar("T")


class Answer(NamedTuple):
    """What a verb says: `text` for people, `data` for `--json`."""

    text: str | None
    data: Any


@dataclass
class Arguments:
    """A command line taken apart, nothing interpreted yet."""

    names: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  # key=value
    machine: str | None = None
    json: bool = False
    debug: bool = False
    help: bool = False
    version: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 130 when interrupted; of ranks, the first failure's."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with warnings_in_a_line():
            answer = run(take_apart(argv))
        if answer.text is not None:  # of several ranks one has something to say
            print(answer.text if "--json" not in argv else json.dumps(answer.data, indent=2), flush=True)
        return 0
    except InputError as error:
        if "--debug" in argv:
            raise
        print(f"modelcenter: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from modelcenter.train.launch import status_of

        status = status_of(error)
        if status is None or "--debug" in argv:
            raise
        return status
    except KeyboardInterrupt:
        if "--debug" in argv:
            raise
        return 130
    except BrokenPipeError:  # `modelcenter list keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it ends
        return 0


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Each warning once, as one line without the source that raised it."""
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = printable(str(message))[:LIMIT]
        if text not in said:
            said.add(text)
            print(f"modelcenter: warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def take_apart(argv: Sequence[str]) -> Arguments:
    """Names, settings and the few options that are not settings, in any order; `--key` alone is `key=true`."""
    args, rest = Arguments(), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if is_setting(word):
                key, _, value = word.partition("=")
                args.settings.append(f"{key.replace('-', '_')}={value}")
            else:
                args.names.append(word)
            continue
        key, equals, value = word.lstrip("-").partition("=")
        key = {"h": "help"}.get(key, key.replace("-", "_"))
        if key in ("json", "debug", "help", "version"):
            if equals:
                refuse(COMMAND_LINE, word, "takes no value", f"write --{key}")
            setattr(args, key, True)
            continue
        if not word.startswith("--"):
            refuse(COMMAND_LINE, word, "unknown option", "write key=value or --key value")
        if not equals:
            alone = not rest or rest[0].startswith("--") or is_setting(rest[0])
            value = ("auto" if key == "resume" else "true") if alone else rest.pop(0)
        if key == "machine":
            args.machine = value
        else:
            args.settings.append(f"{key}={value}")
    return args


def is_setting(word: str) -> bool:
    """Whether `word` reads key=value; `./a=b` is a path."""
    key, equals, _ = word.partition("=")
    return bool(equals and KEY.fullmatch(key))


def run(args: Arguments) -> Answer:
    """Find the verb and let it answer."""
    if args.version:
        return Answer(f"modelcenter {__version__}", {"modelcenter": __version__})
    verb = args.names[0] if args.names else None
    if args.help and (verb is None or verb not in VERBS):
        return Answer(usage(), {"verbs": sorted(VERBS)})
    if verb is None:
        refuse(COMMAND_LINE, None, "no verb", f"{', '.join(VERBS)} (modelcenter --help)")
    if verb not in VERBS:
        refuse(COMMAND_LINE, verb, "unknown verb", nearest(verb, VERBS))
    if args.help:
        return Answer(manual(verb), {"verb": verb, "help": VERBS[verb].__doc__})
    return VERBS[verb](Arguments(args.names[1:], args.settings, args.machine))


def usage() -> str:
    """What `modelcenter --help` prints."""
    verbs = "\n".join(f"  {name:<10}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items())
    return (
        "usage: modelcenter VERB [NAME ...] [--machine M] [key=value ...]\n\n"
        f"{verbs}\n\n"
        "  --machine M  a machine profile: a bare name (modelcenter list machines) or a path\n"
        "  --json       answer in JSON\n"
        "  --debug      show the traceback of an error\n"
        "  --help       after a verb: what it takes"
    )


def manual(verb: str) -> str:
    """What `modelcenter VERB --help` prints."""
    lines = [line.strip() for line in (VERBS[verb].__doc__ or "").strip().splitlines()]
    keys = [f"  {key.name}={key.default or '...'}  {key.help} ({key.type})" for key in describe(KEYS[verb])] if verb in KEYS else []
    return "\n".join([f"modelcenter {verb}: {lines[0]}", *lines[1:], *(["", *keys] if keys else [])])


# ---------------------------------------------------------------------------------------------------------------- verbs


def train(args: Arguments) -> Answer:
    """Train as a recipe says.

    modelcenter train RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    RECIPE is a bare name (modelcenter list recipes) or a path; modelcenter list keys says what can be set, and
    modelcenter copy RECIPE puts the file here to be edited.
    """
    recipe, machine = run_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from modelcenter.train.launch import launch, to_launch

    if to_launch(machine):
        data = launch(recipe, machine)
    else:
        from modelcenter.train.loop import train

        run = train(recipe, machine)
        data = {"output_dir": str(run.output_dir), "step": run.step, "stopped": run.stopped, "metrics": run.metrics}
    last = ", ".join(f"{key} {value:.6g}" for key, value in data["metrics"].items() if isinstance(value, float))
    speaks = machine.ranks == 1 or os.environ.get("RANK", "0") == "0"
    return Answer(f"{data['output_dir']}: step {data['step']}, {last}" if speaks else None, data)


def evaluate(args: Arguments) -> Answer:
    """Say how well a model does, in the number that its field quotes.

    modelcenter evaluate RUN [metrics=[...]] [key=value ...]
    modelcenter evaluate MODEL data.path=FILE [objective=...] [metrics=[...]] [key=value ...]
    modelcenter evaluate RECIPE model=FOLDER [key=value ...]
    modelcenter evaluate FOLDER --suite glue|superglue
    modelcenter evaluate MODEL --lm-eval TASK,TASK... [few_shot=N] [limit=N] [lm_eval_path=FOLDER] [key=value ...]

    RUN is the output folder of a run: its recipe, its trained model, its evaluation data. MODEL is a folder that transformers,
    peft or this package has saved. FOLDER holds a run for each task of the benchmark. TASK is one of lm-eval's, or of the
    files in lm_eval_path. Nothing is written.
    """
    if any(setting.startswith("lm_eval=") for setting in args.settings):
        return examined(settings(Examination, args, ["model"]))
    if suite := [setting.partition("=")[2] for setting in args.settings if setting.startswith("suite=")]:
        (folder_name,) = take(replace(args, settings=[s for s in args.settings if not s.startswith("suite=")]), ["FOLDER"])
        from modelcenter.metrics.suites import average

        found = average(suite[0], Path(folder_name))
        lines = [f"{task} {score:.1f}" for task, score in found["tasks"].items()]
        lack = f" (the mean of what is there; missing: {', '.join(found['missing'])})" if found["missing"] else ""
        return Answer(f"{suite[0]} {found['score']:.1f}{lack}: {', '.join(lines)}", found)
    folder = Path(args.names[0]) if args.names else None
    if folder is not None and (folder / "recipe.yaml").is_file():
        recipe, machine = run_of(replace(args, names=[str(folder / "recipe.yaml"), *args.names[1:]]))
        recipe = replace(recipe, model=str(folder / "model"), tokenizer=None, init="pretrained", config={},
                         adapter=AdapterConfig())
    elif folder is not None and any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        recipe, machine = recipe_of(folder, args)
    else:
        recipe, machine = run_of(args)
    if recipe.data.eval_path is None and not recipe.data.eval_fraction:
        refuse(None, "data.eval_path", "missing", "give data.eval_path=FILE")
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from modelcenter.train.prepare import prepare, resolve
    from modelcenter.train.step import autocast

    if machine.ranks > 1:
        refuse(COMMAND_LINE, "machine", f"{machine.ranks} ranks", "one process: machine.fsdp=1 machine.tensor_parallel=1")
    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device)
    assert setup.evaluation is not None
    with autocast(recipe.precision, device):
        results = setup.evaluation(setup.model)
    return Answer(", ".join(f"{key.removeprefix('eval_')} {value:.6g}" for key, value in results.items()), results)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `evaluate --lm-eval` takes."""

    model: str = field(metadata={"help": "a folder, a preset or a hub id", "min": 1})
    lm_eval: str = field(metadata={"help": "tasks, with commas between them", "min": 1})
    lm_eval_path: str | None = field(default=None, metadata={"help": "a folder of your own task files, instead", "min": 1})
    few_shot: int | None = field(default=None, metadata={"help": "examples before each question; absent: the task's", "min": 0})
    limit: int | None = field(default=None, metadata={"help": "examples of each task; absent: all", "min": 1})
    batch: int = field(default=8, metadata={"help": "rows of one forward", "min": 1})
    dtype: str = field(default="auto", metadata={"help": "fp32, bf16, fp16; auto: as stored"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda ...; absent: the CPU", "min": 1})


def examined(asked: Examination) -> Answer:
    """A model judged by tasks of lm-eval."""
    check_model(asked.model)
    try:
        from modelcenter.train.harness import examine
    except ImportError as error:
        refuse_missing(None, "lm_eval", str(error), "pip install modelcenter[lm-eval]")
    found = examine(asked.model, asked.lm_eval.split(","), asked.lm_eval_path, asked.few_shot, asked.limit, asked.batch,
                    asked.device, asked.dtype)
    lines = [f"{task}: {', '.join(f'{key} {value:.6g}' for key, value in row.items())}" for task, row in found.items()]
    return Answer("\n".join(lines), found)


def plan(args: Arguments) -> Answer:
    """Say how much memory a run needs, part by part, and what would make it fit; nothing is trained or allocated.

    modelcenter plan RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    Takes what train takes. A step is rehearsed on tensors without storage; of a preset that is not here no weights are fetched.
    """
    recipe, machine = run_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from modelcenter.train.fit import Verdict, verdict
    from modelcenter.train.prepare import prepare, resolve
    from modelcenter.train.step import autocast

    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device, meta=True)
    found = verdict(recipe, machine, device, setup, partial(autocast, recipe.precision, device), refuses=False)
    if not isinstance(found, Verdict):
        return Answer(found, {"verdict": found})
    data = {"verdict": str(found), "fits": found.plan.fits, "device": str(device), "bytes": dict(found.plan.parts),
            "peak": found.plan.need, "free": found.plan.free, "total": found.plan.total, "batch": found.batch, "ways": found.ways}
    return Answer(f"{found.plan.table()}\n{found}", data)


def recipe_of(folder: Path, args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe that evaluates the model in `folder` on data.path, its objective that of the model's head."""
    from modelcenter.config import assignments
    from modelcenter.train.recipe import Recipe, settle

    own = [setting for setting in args.settings if setting.startswith("machine.")]
    take(replace(args, settings=[], machine=None), ["MODEL"])
    over = settle({}, assignments([setting for setting in args.settings if setting not in own]), COMMAND_LINE)
    data = dict(over.get("data", {}))
    data["eval_path"] = data.get("eval_path", data.get("path"))
    data["path"] = data.get("path", data["eval_path"])
    if data["path"] is None:
        refuse(None, "data.path", "missing", "give data.path=FILE")
    if "objective" not in over:
        if not (folder / "config.json").is_file():
            refuse(None, "objective", "missing", "an adapter does not say what it is for: give objective=...")
        from modelcenter.registry import task_named

        over["objective"] = task_named(folder)
    base = {"model": str(folder), "output_dir": "unused", "max_steps": 1, **over, "data": data}
    return bind(Recipe, base, COMMAND_LINE), machine_of(args, own)


def run_of(args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe and the machine that a command line names, `machine.key=value` put over the latter."""
    from modelcenter.train.recipe import load_recipe

    own = [setting for setting in args.settings if setting.startswith("machine.")]
    (name,) = take(replace(args, settings=[], machine=None), ["RECIPE"])
    recipe = load_recipe(name, [setting for setting in args.settings if setting not in own])
    return recipe, machine_of(args, own)


def machine_of(args: Arguments, own: Sequence[str]) -> "Machine":
    """The machine that a command line names, with the settings `own`, machine.key=value, put over it."""
    from modelcenter.parallel.machine import Machine, load_machine

    machine = to_dict(load_machine(args.machine) if args.machine is not None else Machine())
    over = override(machine, [setting.removeprefix("machine.") for setting in own])
    return bind(Machine, over, COMMAND_LINE, "machine.")


def check_model(name: str) -> None:
    """Refuse a broken local folder at once: its headers and JSON need no torch."""
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        check_folder(folder)


def check_new(out: Path) -> None:
    """Refuse a folder that holds something."""
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            refuse(out, None, "exists", "a new folder, or an empty one")
    except OSError as error:
        refuse(out, None, error.strerror or str(error), "a folder that can be written")


@dataclass(frozen=True, kw_only=True)
class Generation(Options):
    """What `generate` takes: where the prompts are and where the texts go, and how to choose their tokens."""

    model: str = field(metadata={"help": "a folder, a preset or a hub id", "min": 1})
    prompt: str | None = field(default=None, metadata={"help": "the text to go on with, or to translate", "min": 1})
    prompts: str | None = field(default=None, metadata={"help": "a file of them: a line each, or .jsonl with prompt_key", "min": 1})
    prompt_key: str = field(default="prompt", metadata={"help": "the field of the prompt in a .jsonl file", "min": 1})
    out: str | None = field(default=None, metadata={"help": "a .jsonl file to write; absent: the terminal", "min": 1})
    batch: int = field(default=8, metadata={"help": "prompts of one forward", "min": 1})
    stream: bool = field(default=False, metadata={"help": "show each token as it is written"})
    dtype: str = field(default="auto", metadata={"help": "fp32, bf16, fp16; auto: as stored"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda ...; absent: the CPU", "min": 1})


def generate(args: Arguments) -> Answer:
    """Go on with texts: greedily, by sampling or by beam search.

    modelcenter generate MODEL PROMPT [stream=true] [key=value ...]
    modelcenter generate MODEL prompts=FILE [out=FILE.jsonl] [batch=8] [key=value ...]

    What is not given comes from the model's generation_config.json; without a length in it, 64 tokens are written.
    """
    asked = settings(Generation, args, ["model", "prompt"])
    if (asked.prompt is None) == (asked.prompts is None):
        refuse(COMMAND_LINE, "prompt", "missing" if asked.prompt is None else "given, and so is prompts", "a text, or prompts=FILE")
    if asked.stream and (asked.prompt is None or asked.num_beams > 1 or asked.num_return_sequences > 1):
        refuse(COMMAND_LINE, "stream", "true with several texts", "one PROMPT, one beam, one sequence")
    if asked.out is not None and os.path.lexists(asked.out):
        refuse(asked.out, None, "exists", "a new file")
    check_model(asked.model)
    prompts = [asked.prompt] if asked.prompt is not None else read_prompts(str(asked.prompts), asked.prompt_key)
    from modelcenter.checkpoint.hub import resolve
    from modelcenter.data.tokenizer import load_tokenizer
    from modelcenter.registry import load, presets
    from modelcenter.train.write import Spoken, write

    folder = resolve(asked.model, presets={name: preset.hub for name, (_, preset) in presets().items()})
    tokenizer, model = load_tokenizer(folder), load(folder, dtype=asked.dtype, device=asked.device)
    given = [setting.partition("=")[0] for setting in args.settings]
    options = {key: getattr(asked, key) for key in given if key in {f.name for f in fields(Options)}}
    lengths = {"max_new_tokens", "max_length"}
    if not lengths & {*options, *json.loads(model.companions.get(FILE, b"{}"))}:
        options["max_new_tokens"] = 64
    if asked.stream:
        start = [] if model.encoder_decoder else tokenizer.encode(prompts[0])
        options["streamer"] = Spoken(tokenizer, partial(print, end="", flush=True), start)
    rows = []
    for prompt, texts in zip(prompts, write(model, tokenizer, prompts, asked.batch, **options), strict=True):
        rows += [{"prompt": prompt, "text": tokenizer.decode(ids), "ids": ids} for ids in texts]
    if asked.out is not None:
        with open(asked.out, "x", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return Answer(f"{asked.out}: {len(rows)} texts", {"out": asked.out, "texts": len(rows)})
    if asked.stream:
        return Answer("", rows[0])
    return Answer("\n".join(str(row["text"]) for row in rows), rows[0] if asked.prompt is not None and len(rows) == 1 else rows)


def read_prompts(file: str, key: str) -> list[str]:
    """The prompts of a file: `key` of its records, or the lines of a .txt that are not empty."""
    from modelcenter.data.read import read_records

    if Path(file).suffix not in (".txt", ""):
        return [record.text(key, "prompt_key") for record in read_records(file, key="prompts")]
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(file, None, getattr(error, "strerror", None) or "not UTF-8", "a .txt with a prompt a line, or .jsonl")
    if not any(line.strip() for line in lines):
        refuse(file, None, "no prompt", "a prompt a line")
    return [line for line in lines if line.strip()]


def compare(args: Arguments) -> Answer:
    """Put runs side by side: the keys of their recipes that differ, the last value of each metric.

    modelcenter compare RUN RUN ...
    """
    folders = [Path(name) for name in args.names]
    if len(folders) < 2:
        refuse(COMMAND_LINE, "RUN", f"{len(folders)} given", "the output folders of two runs, or of more")
    take(args, args.names)
    from modelcenter.train.summary import compare

    return Answer(*compare(folders))


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` takes."""

    source: str = field(metadata={"help": "a folder, a preset or a hub id", "min": 1})
    out: str = field(metadata={"help": "the folder to write", "min": 1})
    dtype: str = field(default="auto", metadata={"help": "fp32, bf16, fp16; auto: as stored"})
    max_shard_size: str = field(default="5GB", metadata={"help": "the size at which the weights are split"})
    task: str = field(default="auto", metadata={"help": "the head to keep; auto: the checkpoint's"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a hub id"})


def convert(args: Arguments) -> Answer:
    """Write a checkpoint as sharded safetensors, its tokenizer carried along.

    modelcenter convert SOURCE OUT [--dtype bf16] [--max-shard-size 5GB] [task=...] [revision=...]
    """
    asked = settings(Conversion, args, ["source", "out"])
    check_new(Path(asked.out))
    check_model(asked.source)
    from modelcenter.registry import load

    model = load(asked.source, dtype=asked.dtype, task=asked.task, revision=asked.revision)
    model.save_pretrained(asked.out, max_shard_size=asked.max_shard_size)
    return Answer(f"{asked.out}: {model.load_report}", {"out": asked.out, "report": str(model.load_report)})


@dataclass(frozen=True, kw_only=True)
class Merger:
    """What `merge` takes."""

    adapter: str = field(metadata={"help": "a folder with adapter_config.json", "min": 1})
    out: str = field(metadata={"help": "the folder to write", "min": 1})
    dtype: str = field(default="auto", metadata={"help": "fp32, bf16, fp16; auto: the base's"})
    max_shard_size: str = field(default="5GB", metadata={"help": "the size at which the weights are split"})


def merge(args: Arguments) -> Answer:
    """Write a model with its adapter put into the weights, as a folder of whole weights.

    modelcenter merge ADAPTER OUT [--dtype bf16] [--max-shard-size 5GB]

    What was trained on a base held in 4 or 8 bits is put into what those stand for, in the base's dtype.
    """
    asked = settings(Merger, args, ["adapter", "out"])
    check_new(Path(asked.out))
    if not os.path.isfile(Path(asked.adapter) / ADAPTER[0]):
        refuse(asked.adapter, None, f"no {ADAPTER[0]}", "the folder of an adapter, in peft's format")
    check_model(asked.adapter)
    from modelcenter.adapter.attach import merge_adapter
    from modelcenter.registry import load

    model = load(asked.adapter, dtype=asked.dtype)
    assert model.adapter is not None
    kind, held = model.adapter.name, model.adapter.quantize
    base = f"{model.source}, dequantised from {held}," if held != "none" else model.source
    merge_adapter(model).save_pretrained(asked.out, max_shard_size=asked.max_shard_size)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Answer(f"{asked.out}: {base} with its {kind} merged, {dtype}", {"out": asked.out, "base": model.source, "dtype": dtype,
                                                                         "quantize": held})  # fmt: skip


def tokenize(args: Arguments) -> Answer:
    """Write a corpus as token files, which train without being read as a whole; again, or after a kill, it goes on.

    modelcenter tokenize PATH OUT --tokenizer T [objective=lm|mlm] [text_key=...] [format=...] [processes=...]

    OUT.bin and OUT.idx are an indexed dataset of Megatron-LM; data.path=OUT.bin trains on it.
    """
    from modelcenter.data.tokenize import Tokenization
    from modelcenter.data.tokenize import tokenize as write

    asked = settings(Tokenization, args, ["path", "out"])
    if not os.path.isdir(os.path.expanduser(asked.tokenizer)):
        from modelcenter.registry import presets

        preset = presets().get(asked.tokenizer)
        asked = replace(asked, tokenizer=(preset[1].hub if preset else None) or asked.tokenizer)
    said = write(asked)
    done = "" if said["made"] else ", which are there already"
    return Answer(f"{asked.out}.bin: {said['tokens']:,} tokens of {said['documents']:,} documents{done}", said)


def list_(args: Arguments) -> Answer:
    """Say what there is: models, recipes, machines or the keys of a recipe.

    modelcenter list models|recipes|machines|keys
    """
    kinds = {"models": list_models, "recipes": list_recipes, "machines": list_machines, "keys": list_keys}
    (kind,) = take(args, ["models|recipes|machines|keys"])
    if kind not in kinds:
        refuse(COMMAND_LINE, f"list {kind}", "unknown", nearest(kind, kinds))
    rows = kinds[kind]()
    widths = [max((len(str(row[column])) for row in rows), default=0) for column in (rows[0] if rows else {})]
    lines = ["  ".join(str(v).ljust(w) for v, w in zip(row.values(), widths, strict=True)).rstrip() for row in rows]
    return Answer("\n".join(lines), rows)


def list_models() -> list[dict[str, Any]]:
    """Every preset with its family, size and hub id."""
    from modelcenter.registry import presets

    return [
        {"name": name, "family": family.__name__, "parameters": f"{preset.parameters:,}", "hub": preset.hub or "-"}
        for name, (family, preset) in presets().items()
    ]


def list_recipes() -> list[dict[str, Any]]:
    """Every packaged recipe, and what it is for."""
    from modelcenter.train.catalog import listing

    return list(listing())


def list_machines() -> list[dict[str, Any]]:
    """Every packaged machine profile with its first line."""
    from modelcenter.train.catalog import first_line

    folder = packaged("machines")
    return [{"name": name, "what": first_line(find(name, "machine profile", folder))} for name in names(folder)]


def list_keys() -> list[dict[str, Any]]:
    """Every key of a recipe, then every key of a machine profile."""
    from modelcenter.parallel.machine import Machine
    from modelcenter.train.recipe import Recipe

    keys = [*describe(Recipe), *describe(Machine, "machine.")]
    return [key._asdict() | {"default": "(required)" if key.default is None else key.default} for key in keys]


def copy(args: Arguments) -> Answer:
    """Write a recipe here with every key in it, its type, default and meaning, to be edited.

    modelcenter copy RECIPE
    """
    from modelcenter.train.catalog import commented

    (name,) = take(args, ["RECIPE"])
    text = commented(name)
    target = Path(Path(name).name if Path(name).suffix else f"{name.replace('/', '-')}.yaml")
    try:
        with open(target, "x", encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        refuse(target, None, "exists", "move it away, or go to another folder")
    except OSError as error:
        refuse(target, None, error.strerror or str(error), "a folder that can be written")
    return Answer(f"{target}: now modelcenter train {target}", {"file": str(target)})


def doctor(args: Arguments) -> Answer:
    """Say what this installation can do, and what would make it do more: devices, kernels, threads, precision, disk, hub cache.

    modelcenter doctor
    """
    take(args, [])
    from modelcenter.doctor import examine, report

    found = examine()
    return Answer("\n".join(printable(line) for line in report(found).splitlines()), found)


VERBS: dict[str, Callable[[Arguments], Answer]] = {
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "generate": generate,
    "convert": convert,
    "merge": merge,
    "compare": compare,
    "tokenize": tokenize,
    "list": list_,
    "copy": copy,
    "doctor": doctor,
}
KEYS: dict[str, type] = {"generate": Generation, "convert": Conversion}  # what `--help` lists


def take(args: Arguments, wanted: Sequence[str]) -> list[str]:
    """Exactly these names and nothing else, for a verb without settings."""
    unwanted = [*args.names[len(wanted) :], *args.settings]
    if unwanted or args.machine is not None:
        refuse(COMMAND_LINE, unwanted[0] if unwanted else "--machine", "not wanted here", "see --help after the verb")
    if len(args.names) < len(wanted):
        refuse(COMMAND_LINE, wanted[len(args.names)], "missing", "see --help after the verb")
    return args.names


def settings(cls: type[T], args: Arguments, positions: Sequence[str]) -> T:
    """The dataclass `cls` from settings, the first ones also by position."""
    if len(args.names) > len(positions) or args.machine is not None:
        extra = args.names[len(positions)] if len(args.names) > len(positions) else "--machine"
        refuse(COMMAND_LINE, extra, "not wanted here", "see --help after the verb")
    by_position = [f"{key}={value}" for key, value in zip(positions, args.names, strict=False)]
    return bind(cls, override({}, [*by_position, *args.settings]), COMMAND_LINE)


if __name__ == "__main__":
    sys.exit(main())
