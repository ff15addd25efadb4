"""How a recipe is read: a packaged name or a file, one of its variants, and settings applied to it. Torch-free.

Transformers' argument names are accepted as checked aliases (`ALIASES`): they become our keys before anything else looks at them.
Giving both spellings in one place is refused; on the command line either spelling wins over the file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..adapter.config import AdapterConfig
from ..config import COMMAND_LINE, Layers, Whole, assignments, bind, convert, find, flow, merge, names, packaged, read_recipe
from ..config.binding import to_dict
from ..data.objective import objectives
from ..errors import nearest, printable, refuse, refuse_missing, tell
from ..metrics.table import named
from ..optim.config import OptimizerConfig, ScheduleConfig
from ..parallel.machine import Machine
from ..parallel.watch import speaks
from ..theirs import RECIPE, SCHEDULE
from .recipe import Recipe


def load_recipe(name: str | Path, overrides: Iterable[str] | Mapping[str, Any] = (), where: str = COMMAND_LINE) -> Recipe:
    """The packaged recipe of that name, or the file at that path, with `["a.b=v", ...]` applied to it. Errors name `where` those
    were given."""
    file, tree = open_recipe(name)
    settled, layers, left = settle(tree, assignments(overrides, where), file, where)
    recipe = bind(Recipe, settled, layers)
    check_given(recipe, layers.over, where)
    for line in left if speaks() else ():
        tell(printable(line))
    return recipe


def check_given(recipe: Recipe, given: Mapping[str, Any], where: str) -> None:
    """Refuse settings that were `given`, in our spelling, and have no effect. A file may have them for other choices."""
    if (asked := given.get("generation")) and recipe.generation and not recipe.writes:
        key = f"generation.{next(iter(asked))}" if isinstance(asked, dict) else "generation"
        wanted = f"one of {', '.join(named(('texts',)))} in metrics"
        refuse(where, key, "given with no metric for which texts are written", wanted)
    if given.get("batch") is not None and recipe.batch_tokens is not None:
        found = f"{recipe.batch} beside batch_tokens {recipe.batch_tokens}, which counts instead"
        refuse(where, "batch", found, "one of the two; batch_tokens=null leaves that out")
    asked = given.get("adapter")
    if isinstance(asked, Mapping) and (idle := [key for key in asked if key in AdapterConfig.unread(recipe.adapter.name)]):
        refuse(where, f"adapter.{idle[0]}", "set, but adapter.name is none", "adapter.name=lora or dora")  # the usual value too
    data, share = given.get("data"), recipe.data.eval_fraction
    if isinstance(data, Mapping) and "eval_fraction" in data and "eval_path" not in data and share and recipe.data.eval_path:
        found = f"{share} beside the recipe's data.eval_path, which counts instead"
        refuse(where, "data.eval_fraction", found, "one of the two; data.eval_path=null leaves that out")


def open_recipe(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file that `name` means, and what it says. RECIPE/VARIANT is a file's settings with those of one of its `variants` applied
    to them. A packaged recipe that names no output_dir has runs/NAME."""
    known = packaged()
    base, _, chosen = str(name).rpartition("/")
    file_itself = Path(chosen).suffix in (".yaml", ".yml")  # lora/recipe.yaml is that of a run in the folder lora
    if file_itself or (base not in names(known) and Path(base).suffix not in (".yaml", ".yml")):
        base, chosen = str(name), ""
    if base in objectives() and base not in names(known):
        refuse_missing(None, base, "no such recipe but an objective", with_objective(base))
    file = find(base, "recipe", known)
    tree = read_tree(file)
    variants = tree.pop("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(variant, dict) for variant in variants.values()):
        refuse(file, "variants", "not a mapping of mappings", "a name and settings for each")
    whole = [f"{base}/{variant}" for variant in variants]
    if chosen and chosen not in variants:
        name = f"{base}/{chosen}"
        refuse_missing(None, name, "no such recipe", nearest(name, whole) if whole else f"{base} has none")
    if whole and not chosen:
        refuse(None, base, "several recipes", f"one of {', '.join(whole)}")
    tree = merge(tree, variants.get(chosen, {}))
    return file, {"output_dir": f"runs/{name}", **tree} if base in names(known) else tree


def read_tree(file: Path) -> dict[str, Any]:
    """What the file of a recipe says; that of a run without the least rate that `constant` had once, and which nothing read."""
    tree = read_recipe(file)
    schedule = tree.get("schedule")
    if isinstance(schedule, dict) and schedule.get("name") == "constant" and (file.parent / "environment.json").is_file():
        schedule.pop("min_lr_ratio", None)
    return tree


def recipe_of(file: Path) -> Recipe:
    """The recipe that a run wrote, in full."""
    return bind(Recipe, read_tree(file), file)


def with_objective(objective: str) -> str:
    """The packaged recipes that train an objective, in words."""
    found, default = [], Recipe.__dataclass_fields__["objective"].default
    for base in names(packaged()):
        tree = read_recipe(find(base, "recipe", packaged()))
        variants = {f"/{name}": own for name, own in tree.get("variants", {}).items()} or {"": {}}
        found += [f"{base}{name}" for name, own in variants.items() if {**tree, **own}.get("objective", default) == objective]
    return f"recipes that have it: {', '.join(found)}" if found else f"objective={objective} goes with another recipe"


ALIASES = {  # transformers' TrainingArguments and example scripts: our key
    "model_name_or_path": "model",
    "tokenizer_name": "tokenizer",
    "train_file": "data.path",
    "validation_file": "data.eval_path",
    "max_seq_length": "data.seq_len",
    "packing": "data.packing",
    "group_by_length": "data.group_by_length",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "schedule.name",
    "label_smoothing_factor": "loss.label_smoothing",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps",
    "per_device_train_batch_size": "micro_batch",
    "num_train_epochs": "num_epochs",
    "resume_from_checkpoint": "resume",
}
PLACES = {"machine", *(setting.name for setting in fields(Machine))}  # where a run happens
# sections whose `name` decides which of their keys are used
CHOSEN: dict[str, Any] = {"adapter": AdapterConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig}
PARTIAL = ("gradient_accumulation_steps", "bf16", "fp16", "adam_beta1", "adam_beta2")  # aliases that are more than a name


def settle(
    tree: Mapping[str, Any], over: Mapping[str, Any], file: str | Path | None, where: str = COMMAND_LINE
) -> tuple[dict[str, Any], Layers, list[str]]:
    """`tree`, a file's mapping, with `over`, given at `where`, applied to it, both in our spelling; which of them says what; and
    lines about what is left out.
    The evaluation data of a packaged recipe belong to its training data: other training data do not bring them along. Likewise its
    `save_total_limit` belongs to its `save_steps`. A mixture is one value: the sources of another are not mixed into it. Settings
    of the file that a choice at `where` does not use are left out."""
    left: list[str] = []
    ours = _ours(tree, {}, file)
    given = _ours(over, ours, where)
    if place := next((key for key in {**ours, **given} if key in PLACES), None):
        wanted = "--machine M, machine.KEY=VALUE, or mc.train(recipe, machine=mc.Machine(KEY=VALUE))"
        refuse(file if place in ours else where, place, "no part of a recipe", wanted)
    data, fixed = given.get("data"), file is not None and Path(file).parent == Path(str(packaged()))
    if isinstance(data, dict) and isinstance(ours.get("data"), dict):
        whole = data if isinstance(data, Whole) else {key: value for key, value in data.items() if isinstance(value, Whole)}
        replaced = {"path", "eval_path"} & whole.keys() | ({"eval_path"} if fixed and "path" in data else set())
        ours = {**ours, "data": {key: value for key, value in ours["data"].items() if key not in replaced}}
    if fixed and "save_steps" in given and convert(given["save_steps"], int | None, where, "save_steps", {"min": 1}) is None:
        ours.pop("save_total_limit", None)
    for section in (section for section in CHOSEN if section in ours and section in given):
        ours[section] = _used(section, ours[section], given[section], file, left)
    return merge(ours, given), Layers(file, given, where, ours if fixed else None), left


def _used(section: str, ours: Any, given: Any, file: str | Path | None, left: list[str]) -> Any:
    """`ours`, a section of a file, without the settings that the `name` given for it does not use. A line in `left` says which."""
    if not isinstance(ours, dict) or not isinstance(given, dict) or "name" not in given:
        return ours
    name, usual = str(given["name"]), to_dict(CHOSEN[section]())
    idle = {key: value for key, value in ours.items() if key in CHOSEN[section].unread(name) and key not in given}
    if changed := [f"{section}.{key} {flow(value)}" for key, value in idle.items() if value != usual[key]]:
        left.append(f"{file}: {', '.join(changed)}: left out, with {section}.name={name}, which has none")
    return {key: value for key, value in ours.items() if key not in idle}


def _ours(tree: Mapping[str, Any], base: Mapping[str, Any], file: str | Path | None) -> dict[str, Any]:
    """`tree` with its aliases replaced; what one of them says only in part is completed from `base`."""
    known = (*ALIASES, *PARTIAL)
    ours = {key: value for key, value in tree.items() if key not in known}
    for key, name in _unknown(ours):
        if wanted := RECIPE.get(name) or ALIASES.get(name):
            refuse(file, key, "unknown key", wanted if wanted.startswith("leave") else f"here it is {wanted}")
        if key == name and (close := get_close_matches(key, known, n=1, cutoff=0.85)):  # `bind` would look among ours alone
            refuse(file, key, "unknown key", f"did you mean {close[0]!r}?")
    for alias, key in ALIASES.items():
        if alias in tree:
            value = tree[alias]
            if alias == "resume_from_checkpoint":  # there a boolean too
                value = {"true": "auto", "false": "never"}.get(str(value).lower(), value)
            ours = _put(ours, alias, key, value, file)
    if half := {alias: convert(tree[alias], bool, file, alias) for alias in ("bf16", "fp16") if alias in tree}:
        chosen = [alias for alias, wanted in half.items() if wanted]
        if len(chosen) == 2:
            refuse(file, "fp16", "true, and so is bf16", "one of them")
        ours = _put(ours, (chosen or list(half))[0], "precision", (chosen or ["fp32"])[0], file)
    if given := [alias for alias in ("adam_beta1", "adam_beta2") if alias in tree]:
        old = value_at(base, "optimizer.betas")
        old = OptimizerConfig.betas if old is None else old
        betas = list(convert(old, tuple[float, float], file, "optimizer.betas"))
        for alias in given:
            betas[alias == "adam_beta2"] = convert(tree[alias], float, file, alias, {"min": 0, "below": 1})
        ours = _put(ours, given[0], "optimizer.betas", betas, file)
    if wanted := SCHEDULE.get(shape := str(value_at(ours, "schedule.name"))):
        refuse(file, "lr_scheduler_type" if "lr_scheduler_type" in tree else "schedule.name", shape, f"here it is {wanted}")
    if "gradient_accumulation_steps" in tree:
        ours |= _batches(tree["gradient_accumulation_steps"], ours, base, file)
    return ours


def _unknown(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """An unknown key of a recipe: in full, and without its section."""
    sections: dict[str, Any] = {setting.name: setting.default_factory for setting in fields(Recipe)}
    for key, value in tree.items():
        if key not in sections:
            yield str(key), str(key)
        elif is_dataclass(sections[key]) and isinstance(value, Mapping):
            known = {setting.name for setting in fields(sections[key])}
            yield from ((f"{key}.{name}", str(name)) for name in value if name not in known)


def _batches(
    value: Any, ours: Mapping[str, Any], base: Mapping[str, Any], file: str | Path | None
) -> dict[str, int]:
    """What accumulation settles: batch = micro_batch x accumulation, on any number of ranks. What the same place says
    of the two counts first, then the base's micro-batch, then its batch."""
    alias, least = "gradient_accumulation_steps", {"min": 1}
    steps = convert(value, int, file, alias, least)
    batch, micro = ours.get("batch"), ours.get("micro_batch")
    if batch is None and micro is None:
        micro = base.get("micro_batch")
        batch = base.get("batch") if micro is None else None
    batch = None if batch is None else convert(batch, int, file, "batch", least)
    micro = None if micro is None else convert(micro, int, file, "micro_batch", least)
    if micro is not None and batch in (None, micro * steps):
        return {"batch": micro * steps}
    if micro is not None:
        refuse(file, alias, f"{steps} x micro_batch {micro} is not batch {batch}", "leave one of the three out")
    if batch is None:
        refuse(file, alias, f"{steps} without batch or micro_batch", "give one of them")
    if batch % steps:
        refuse(file, alias, f"batch {batch} is no multiple of {steps}", "change one of them")
    return {"micro_batch": batch // steps}


def _put(ours: dict[str, Any], alias: str, key: str, value: Any, file: str | Path | None) -> dict[str, Any]:
    if value_at(ours, key) is not None:
        refuse(file, alias, f"given, and so is {key}", "they are one setting: keep one of them")
    section, _, leaf = key.rpartition(".")
    if section and not isinstance(ours.get(section, {}), dict):
        refuse(file, alias, f"given, and so is {section} as a whole", "keep one of them")
    return merge(ours, {section: {leaf: value}} if section else {leaf: value})


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value of `tree` at a dotted key; None if there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None  # type: ignore[assignment]  # of any kind
    return tree
