"""`modelcenter convert`, `merge` and `average`: from folders of weights to another."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint.files import ADAPTER
from ..checkpoint.manifest import MANIFEST
from ..config import COMMAND_LINE, says
from ..errors import refuse
from .arguments import Answer, Arguments, check_model, check_new, settings


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` takes."""

    source: str = field(metadata=says("a folder, a preset or a hub id, or a run's step-N", min=1))
    out: str = field(metadata=says("the folder to write", min=1))
    dtype: str = field(default="auto", metadata=says("fp32, bf16, fp16; auto: as stored"))
    max_shard_size: str = field(default="5GB", metadata=says("the size at which the weights are split"))
    task: str = field(default="auto", metadata=says("the head to keep; auto: the checkpoint's"))
    revision: str | None = field(default=None, metadata=says("branch, tag or commit of a hub id"))


def convert(args: Arguments) -> Answer:
    """Convert a checkpoint to sharded safetensors, with its tokenizer beside it.

    modelcenter convert SOURCE OUT [--dtype bf16] [--max-shard-size 5GB] [task=...] [revision=...]
    modelcenter convert RUN/step-500 OUT

    RUN/step-500 is a training state, of which the model at that step is written. Call this from the folder where the run was
    started, because the run's data are read.
    """
    asked = settings(Conversion, args, ["source", "out"])
    check_new(Path(asked.out))
    if os.path.isfile(Path(asked.source) / MANIFEST):
        return of_state(asked)
    check_model(asked.source)
    from ..create import load

    model = load(asked.source, dtype=asked.dtype, task=asked.task, revision=asked.revision)
    model.save_pretrained(asked.out, max_shard_size=asked.max_shard_size)
    return Answer(f"{asked.out}: {model.load_report}", {"out": asked.out, "report": str(model.load_report)})


def of_state(asked: Conversion) -> Answer:
    """The model of a run's training state."""
    for key, value, plain in (("task", asked.task, "auto"), ("revision", asked.revision, None)):
        if value != plain:
            refuse(None, key, repr(value), "leave it out: a run's model has one head, and no other version")
    from ..train.export import export

    export(asked.source, asked.out, asked.dtype, max_shard_size=asked.max_shard_size)
    return Answer(f"{asked.out}: the model of {asked.source}", {"out": asked.out, "state": asked.source})


@dataclass(frozen=True, kw_only=True)
class Merger:
    """What `merge` takes."""

    adapter: str = field(metadata=says("an adapter in peft's format: a folder or a hub id", min=1))
    out: str = field(metadata=says("the folder to write", min=1))
    dtype: str = field(default="auto", metadata=says("fp32, bf16, fp16; auto: the base's"))
    max_shard_size: str = field(default="5GB", metadata=says("the size at which the weights are split"))
    revision: str | None = field(default=None, metadata=says("branch, tag or commit of a hub id"))


def merge(args: Arguments) -> Answer:
    """Merge an adapter into the weights of its base, and write the model.

    modelcenter merge ADAPTER OUT [--dtype bf16] [--max-shard-size 5GB] [revision=...]

    If the adapter was trained on a base in 4 or 8 bits, it is merged into the dequantized weights, in the base's dtype.
    """
    asked = settings(Merger, args, ["adapter", "out"])
    check_new(Path(asked.out))
    folder, lacks = Path(asked.adapter).expanduser(), f"no {ADAPTER[0]}"
    if (trained := folder / "model" / ADAPTER[0]).is_file() and not (folder / ADAPTER[0]).is_file():  # the folder of a run
        refuse(asked.adapter, None, lacks, f"what was trained there is {trained.parent}")
    check_model(asked.adapter)
    if folder.is_dir() and not (folder / ADAPTER[0]).is_file():
        refuse(asked.adapter, None, lacks, "the folder of an adapter, in peft's format")
    from ..adapter.attach import merge_adapter
    from ..create import load
    from ..identify import asked_dtype

    kind = asked_dtype(asked.dtype)
    model = load(asked.adapter, revision=asked.revision)  # as it was trained: rounded before, a base has other codes of 4 or 8 bits
    if model.adapter is None:
        refuse(asked.adapter, None, lacks, "the hub id of an adapter, in peft's format")
    name, held = model.adapter.name, model.adapter.quantize
    base = f"{model.source}, dequantised from {held}," if held != "none" else model.source
    merge_adapter(model).to(kind).save_pretrained(asked.out, max_shard_size=asked.max_shard_size)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    told = {"out": asked.out, "base": model.source, "dtype": dtype, "quantize": held}
    return Answer(f"{asked.out}: {base} with its {name} adapter merged in, {dtype}", told)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What `average` takes beside folders."""

    dtype: str = field(default="auto", metadata=says("fp32, bf16, fp16; auto: the first's"))
    max_shard_size: str = field(default="5GB", metadata=says("the size at which the weights are split"))


def average(args: Arguments) -> Answer:
    """Average the weights of several models that were trained from the same start; the mean is often better than any of them.

    modelcenter average MODEL MODEL ... OUT [--dtype bf16] [--max-shard-size 5GB]

    MODEL is a folder of weights, or the folder of a run, whose trained model is taken. Runs may differ in seed, data or settings
    (Wortsman et al., 2022), but must have begun with the same weights: otherwise the mean is useless.
    """
    if len(args.names) < 3:
        wanted = "two models, or more, and then the folder to write"
        refuse(COMMAND_LINE, "MODEL MODEL ... OUT", f"{len(args.names)} given", wanted)
    *sources, out = args.names
    asked = settings(Averaging, replace(args, names=[]), [])
    check_new(Path(out))
    folders = [str(Path(name) / "model") if (Path(name) / "recipe.yaml").is_file() else name for name in sources]
    for folder in folders:
        check_model(folder)
        if (Path(folder) / ADAPTER[0]).is_file():  # told by its own name, which the model no longer has
            refuse(folder, None, "an adapter", "modelcenter merge puts it into its base's weights")
    from ..create import load
    from ..identify import asked_dtype
    from ..optim.soup import soup

    kind = asked_dtype(asked.dtype)
    model = soup(map(load, folders), kind)
    model.save_pretrained(out, max_shard_size=asked.max_shard_size)
    return Answer(f"{out}: the mean of {len(folders)} models", {"out": out, "models": folders})
