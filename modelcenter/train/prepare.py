"""Turns a resolved recipe (`resolve.py`) into what the loop works with: tokenizer, model, data, evaluation."""

import importlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings, filterwarnings

import torch

from .. import __version__
from ..adapter.attach import choose, insert
from ..checkpoint import hub
from ..checkpoint.config import read_labels
from ..checkpoint.files import read_config
from ..checkpoint.match import LoadReport
from ..create import build, load
from ..data.examples import Examples, Packable
from ..data.indexed import Tokens
from ..data.loader import Budget, Chain, Loader
from ..data.objective import find_objective, make_examples, texts_of
from ..data.order import Blended, Grouped, Order
from ..data.packing import Unpadded, much_padding
from ..data.read import has_tables, held_of_one, in_both, read_split, splits_in
from ..data.record import Mixture, Part, Record
from ..data.sequence import filler
from ..data.tokenizer import Tokenizer
from ..data.tokenizer_open import load_tokenizer, open_tokenizer
from ..errors import MissingError, counted, refuse
from ..generate.options import FILE, several
from ..generate.run import beside, settings
from ..layers import ClassifyHead, EmbedHead, LMHead, last_token
from ..layers.adapter import current_names
from ..metrics.table import of_texts
from ..model import Model
from ..parallel.machine import ASIDE, Machine
from ..parallel.ranks import ALONE, Ranks
from ..parallel.variable import check_world
from ..parallel.watch import Pulse, apart, wait_for
from ..registry import hubs, presets
from .evaluate import Evaluation, stream_bytes
from .launch import follow
from .opening import opening
from .recipe import Recipe
from .resolve import check_length, forward_tokens, may_pack, most_of
from .setup import Labels, Setup, segmented


def enter(recipe: Recipe, machine: Machine) -> Ranks:
    """Join the ranks of the run; with one rank there is nothing to wait for."""
    follow()
    if machine.ranks == 1:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            check_world(1)  # or each of them would do the whole run, in one folder
        return replace(ALONE, zero=machine.zero)
    from ..parallel.apply import join  # FSDP and DTensor take a second to import

    return join(machine)


def prepare(recipe: Recipe, machine: Machine, device: torch.device, ranks: Ranks = ALONE, *, meta: bool = False) -> Setup:
    """Read the data, train or load the tokenizer, load the model (`meta`: without its weights), and report what was found. `recipe`
    is resolved.

    On a CPU a thread reads the weights while the texts are encoded. Errors: `InputError`; for a field of the data that does not
    fit, before any weight is read.
    """
    records, held_out = read_split(recipe.data)
    with Reader() as reader:
        made = assemble(recipe, machine, device, ranks, records, held_out, reader, meta=meta)
        loader = made.loader(records, train=True)
        judge = made.evaluation(held_out) if held_out else None
        ended = end_at(made.model, made.tokenizer, find_objective(recipe.objective).ends(made.tokenizer))
        setup = Setup(made.model, made.tokenizer, made.labels, loader, judge, steps_of(recipe, loader), idle=made.idle)
        setup.environment = facts(recipe, device, ranks, setup)
        setup.lines = [*opening(recipe, device, ranks, setup, ended), *setup.idle]
        if file := held_of_one(recipe.data, held_out):
            setup.lines.append(f"held out: all from {file}, the end of data.path's list; for other data give data.eval_path")
        if splits := splits_in(recipe.data):
            setup.lines.append(f"data.path: {' and '.join(Path(name).name for name in splits)} are all trained on; give "
                               f"data.path={splits[0]} or a glob, if one is a split to judge by")
        if same := in_both(recipe.data):
            many = counted(len(same), "file")
            setup.lines.append(f"evaluation: on {many} of data.path ({same[0]}): it judges what is trained on; give other data")
        reader.wait()
    return setup


def prepare_to_judge(recipe: Recipe, machine: Machine, device: torch.device, ranks: Ranks = ALONE) -> "tuple[Prepared, Evaluation]":
    """`prepare` for a model that is only evaluated, on the data that `recipe` holds out, with the labels that it knows, whether or
    not all of them occur in the data; nothing is encoded to train on."""
    records, held_out = read_split(recipe.data)
    with Reader() as reader:
        made = assemble(recipe, machine, device, ranks, records, held_out, reader, judged=True)
        if lack := drawn(made.model, recipe):
            found = f"no {lack[0]}, and with numbers drawn at random there is nothing to judge"
            refuse(recipe.model, "model", found, f"a model that has been trained with objective={recipe.objective}")
        judge = made.evaluation(held_out)
        reader.wait()
    return made, judge


def assemble(recipe: Recipe, machine: Machine, device: torch.device, ranks: Ranks, records: Part, held_out: Part, reader: "Reader",
             *, meta: bool = False, judged: bool = False) -> "Prepared":
    """The tokenizer, the names of the labels and the model, whose weights `reader` reads on a CPU."""
    check_fields(recipe, records)
    if held_out:
        check_fields(recipe, held_out)
    tokenizer = find_tokenizer(recipe, records)
    labels = find_labels(recipe, records, judged)
    with catch_warnings():
        filterwarnings("ignore", re.escape(ASIDE))  # a line says it
        model = find_model(recipe, tokenizer, labels.names, machine, torch.device("meta") if meta else device,
                           reader.put_off if device.type == "cpu" else None)
    configure(model, recipe, tokenizer, ranks)
    idle = list[str]()
    if not recipe.data.header and not has_tables(records) and not has_tables(held_out):
        idle.append("data.header: false, but no data are csv or tsv; leave it out, or say data.format=csv or tsv")
    if machine.offload and device.type == "cpu":
        idle.append(ASIDE)
    return Prepared(recipe, device, ranks, model, tokenizer, labels, idle)


def check_fields(recipe: Recipe, records: Part) -> None:
    """Refuse a field that the records do not have, before a tokenizer or weights are fetched."""
    objective = find_objective(recipe.objective)
    for source in records.sources if isinstance(records, Mixture) else [records]:
        if not isinstance(source, Tokens):
            list(islice(objective.texts(source[0], recipe.data), 4))


def find_tokenizer(recipe: Recipe, records: Sequence[Record]) -> Tokenizer:
    """The tokenizer that the recipe names, or the model's."""
    if recipe.tokenizer is not None:
        return open_tokenizer(recipe.tokenizer, texts_of(recipe.objective, records, recipe.data))
    return load_tokenizer(recipe.model, hubs())


def find_labels(recipe: Recipe, records: Part, judged: bool) -> Labels:
    """The names of the classes: those that the weights know, in their order, if all that occur are among them, or if the model is
    only evaluated: then a row of another class is at fault, and not the model's head."""
    objective = find_objective(recipe.objective)
    known = learned_labels(recipe) if objective.named else ()
    learned = () if known == tuple(f"LABEL_{n}" for n in range(len(known))) else known
    if judged and learned:
        return Labels(learned, learned)
    names = objective.names(records, recipe.data, known if judged else ())
    return Labels(learned if names is not None and set(names) <= set(learned) else names, learned)


def learned_labels(recipe: Recipe) -> tuple[str, ...]:
    """The names of the labels in the model's config.json, which are LABEL_0 and so on if it has no others."""
    folder = Path(os.path.expanduser(recipe.model))
    if recipe.init == "random" or (recipe.model in presets() and not folder.is_dir()):
        return ()
    folder = folder if folder.is_dir() else hub.fetch(recipe.model, ["config.json"], {})  # the tokenizer's files came with it
    if not (folder / "config.json").is_file():  # peft's adapters have none
        return ()
    return read_labels(read_config(folder), folder / "config.json")


class Reader(AbstractContextManager["Reader"]):
    """A thread that reads weights while texts are encoded. At the end of the context it reads no further."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, initializer=partial(torch.set_flush_denormal, True))  # as the one that computes has it
        self.jobs: list[Future[None]] = []
        self.pulse = Pulse()

    def __exit__(self, *_: object) -> None:
        self.pulse.wanted = False
        self.thread.shutdown()

    def put_off(self, job: Callable[[], None]) -> None:
        def read() -> None:
            with apart(self.pulse):
                job()

        self.jobs.append(self.thread.submit(read))

    def wait(self) -> None:
        """Wait until all is read; its errors are raised here."""
        for name in ("torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor") if self.jobs else ():
            importlib.import_module(name)  # the rehearsal that follows wants them, for two thirds of a second
        for job in self.jobs:
            wait_for(job, self.pulse)
            job.result()


def find_model(recipe: Recipe, tokenizer: Tokenizer, names: tuple[str, ...] | None, machine: Machine, device: torch.device,
               put_off: Callable[[Callable[[], None]], object] | None = None) -> Model:
    """The recipe's model in fp32: pretrained, or random with the vocabulary and the special tokens of the tokenizer. `put_off`: see
    `load`."""
    id2label = dict(enumerate(names)) if names is not None else None
    adapter = recipe.adapter if recipe.adapter.name != "none" else None
    if recipe.init == "pretrained" and device.type == "meta" and absent(recipe.model):
        model = build(recipe.model, task=recipe.task, device=device, config=recipe.config, id2label=id2label)
        model.load_report = LoadReport()
        if adapter is not None:
            insert(model, adapter, choose(model, adapter), precision=recipe.precision)
        return model
    if recipe.init == "pretrained":
        return load(recipe.model, task=recipe.task, dtype=torch.float32, device=device, machine=machine, precision=recipe.precision,
                    adapter=adapter, config=recipe.config, id2label=id2label, seed=recipe.seed, put_off=put_off)
    model = build(recipe.model, task=recipe.task, dtype=torch.float32, device=device, machine=machine, precision=recipe.precision,
                  config={"vocab": len(tokenizer), **recipe.config}, id2label=id2label, seed=recipe.seed)
    special = {f"{role}_token_id": tokenizer.id(role) for role in ("bos", "eos", "pad")}
    config: Any = model.config
    model.config = replace(config, file={**config.to_dict(), **special})  # carried into config.json
    return model


def absent(model: str) -> bool:
    """Whether this is a preset that would have to be downloaded; its shapes are known without that."""
    known = hubs()
    if model not in known or Path(os.path.expanduser(model)).is_dir():
        return False
    try:
        hub.resolve(model, local_files_only=True, presets=known)
    except MissingError:
        return True
    return False


def restrict(model: Model, recipe: Recipe) -> None:
    """Freeze what the recipe says. A model that cannot be trained in this way, or in its precision, is refused."""
    if recipe.precision == "fp16" and model.wide:
        family = type(model).__name__.removeprefix("FSDP")  # which torch puts before a class that it has divided
        found = f"fp16 with {family}, whose feed-forward layers overflow it"
        refuse(None, "precision", found, "bf16, or fp32 where there is no bf16")
    if recipe.freeze and model.adapter is not None:
        found = f"given, and {recipe.model} is an adapter, which freezes all but what it trains"
        refuse(None, "freeze", found, "leave it out; or what modelcenter merge makes of the adapter")
    model.freeze(*recipe.freeze)
    if recipe.freeze and not any(p.requires_grad for p in model.parameters()):
        refuse(None, "freeze", "all parameters of the model", "one at least is to be trained")
    still = {name for name, now in current_names(model).items() if not model.get_parameter(now).requires_grad}
    if kept := next((name for name in drawn(model, recipe) if name in still), None):
        found = f"{kept}, which the weights lack, and which would stay as it was drawn"
        if recipe.freeze:
            refuse(None, "freeze", found, "patterns of other names")
        refuse(recipe.model, "adapter", found, "model=OUT, which modelcenter merge makes of the adapter")


def drawn(model: Model, recipe: Recipe) -> list[str]:
    """The matrices that pretrained weights lack, and that are drawn at random. The pooler of a model of vectors has no part in
    them."""
    made = recipe.init == "pretrained" and not isinstance(model.head, EmbedHead)
    return [name for name in model.load_report.new if len(model.shapes[name]) > 1] if made else []  # a bias is 0


def configure(model: Model, recipe: Recipe, tokenizer: Tokenizer, ranks: Ranks) -> None:
    """Apply what the recipe says about the model: what is frozen, its loss, keys of config.json."""
    restrict(model, recipe)
    model.head.smoothing = recipe.loss.label_smoothing
    if isinstance(model.head, ClassifyHead):
        model.head.r_drop = recipe.loss.r_drop
    if isinstance(model.head, EmbedHead):
        model.head.scale, model.head.symmetric = recipe.loss.scale, recipe.loss.symmetric
        if ranks.shares > 1:
            from ..parallel.gather import Gather

            model.head.gather = Gather(ranks)
    if isinstance(model.head, LMHead):
        model.head.z = recipe.loss.z_loss
    if said := {**find_objective(recipe.objective).settle(model.config), **padding(model, tokenizer)}:
        model.config = replace(model.config, file={**model.config.to_dict(), **said})
    check_length(recipe, vars(model.config))  # of a hub id, which `resolve` has not fetched


def padding(model: Model, tokenizer: Tokenizer) -> dict[str, int]:
    """What config.json must contain for a classifier that reads the last token: transformers finds that token by the padding id,
    and without one refuses more than one text at a time."""
    head, known = model.head, tokenizer.pad_id is not None or tokenizer.eos_id is not None
    reads_last = isinstance(head, ClassifyHead) and head.pick is last_token
    return {"pad_token_id": filler(tokenizer)} if reads_last and known and model.config.get("pad_token_id") is None else {}


@dataclass(frozen=True)
class Prepared:
    """What examples, and an evaluation on them, are made with. `idle`: a line for each setting that does nothing."""

    recipe: Recipe
    device: torch.device
    ranks: Ranks
    model: Model
    tokenizer: Tokenizer
    labels: Labels
    idle: list[str] = field(default_factory=list)

    def loader(self, records: Part, *, train: bool) -> Loader:
        """The encoded examples of `records` in batches: those of a step, or for evaluation as large as a forward may be."""
        recipe, device, ranks = self.recipe, self.device, self.ranks
        examples = make_examples(recipe.objective, records, self.tokenizer, recipe.data, vocab=self.model.config.vocab, train=train,
                                 seed=recipe.seed, names=self.labels.names, segments=segmented(self.model))
        if not train:
            many = (recipe.micro_batch or most_of(recipe, device, vars(self.model.config))) * ranks.shares
            return Loader(examples, examples.collate, many, rank=ranks.share, world=ranks.shares)
        order = order_of(recipe, records, examples)
        if may_pack(recipe, device.type == "cuda") and not self.model.prefixed and examples.padded and much_padding(examples):
            examples = Unpadded(cast(Packable, examples))
        return Loader(examples, examples.collate, recipe.batch, recipe.seed, ranks.share, ranks.shares, recipe.data.shuffle, order,
                      budget_of(recipe, device, examples, vars(self.model.config)))

    def evaluation(self, records: Part) -> Evaluation:
        """The evaluation that the recipe asks for, on `records`. What it draws follows from the recipe's seed, so that all ranks
        write the same texts."""
        recipe, data, size, words = self.recipe, self.recipe.data, None, self.tokenizer
        loader, wanted = self.loader(records, train=False), tuple(dict.fromkeys((*recipe.metrics, *filter(None, [recipe.best]))))
        plain = recipe.objective == "lm" and not data.packing and data.response_key is None
        if plain and not isinstance(records, Tokens | Mixture):
            size = stream_bytes((r.text(data.text_key, "data.text_key") for r in records), words)
        elif "bits_per_byte" in wanted:
            refuse(None, "metrics", "bits_per_byte of packed or prompted text or of token files", "plain text, not packed")
        texts = of_texts(wanted, find_objective(recipe.objective).of)
        references = [r.text(data.target_key, "data.target_key") for r in records] if texts else []
        length = {} if recipe.generation.get("max_length") is not None else {"max_new_tokens": data.target_len or data.seq_len}
        generation = {**length, "seed": recipe.seed, **recipe.generation}
        # `settings` refuses here, too, what else generation would refuse at the first evaluation
        if texts and (many := settings(self.model, None, generation).num_return_sequences) > 1:
            refuse(None, "generation.num_return_sequences", str(many), "1: one text for each example is judged")
        tags = self.labels.names or ()
        if "f1" in wanted and len(tags) > 2:
            refuse(None, "metrics", f"f1, which is that of class 1, of {len(tags)} classes", "f1_macro or f1_micro")
        return Evaluation(loader, recipe.objective, wanted, size, words, references, generation, tags, self.ranks)


def order_of(recipe: Recipe, records: Part, examples: Examples) -> Order | None:
    """The order of the training examples, if it is not a permutation of them all."""
    data = recipe.data
    if isinstance(records, Mixture) and isinstance(examples, Chain) and records.weights is not None:
        return Blended([len(source) for source in examples.sources], records.weights, recipe.seed, data.shuffle)
    if not data.group_by_length:
        return None
    batch = int(recipe.batch_tokens / examples.lengths.mean()) if recipe.batch_tokens else recipe.batch
    return Grouped(examples.lengths, recipe.seed, max(1, batch))


def budget_of(recipe: Recipe, device: torch.device, examples: Examples, sizes: Mapping[str, Any]) -> Budget | None:
    """The tokens of a step and of a forward, where they are counted: if the recipe says so, or batches have no padding. `sizes`:
    the fields of the model's config."""
    together, micro = find_objective(recipe.objective).together, recipe.micro_batch
    if recipe.batch_tokens is None and (examples.padded or recipe.data.packing or together):
        return None
    if micro is None or examples.padded:
        most = forward_tokens(device, sizes, recipe.precision != "fp32")
    else:
        most = micro * cast(Packable, examples).size
    return Budget(recipe.batch_tokens, None if together else most, examples.padded)


def end_at(model: Model, tokenizer: Tokenizer, ends: Sequence[int]) -> list[int]:
    """Add these ids to those at which the model's generation_config.json says that texts end. Returns the ids that are new."""
    if not ends:  # nor is the file looked at: what generation would refuse does not stop a run
        return []
    held = beside(model)
    known = several(held.get("eos_token_id", model.config.get("eos_token_id")))
    texts = [] if known or tokenizer.eos_id is None else [tokenizer.eos_id]  # where nobody has said what ends them
    added = [i for i in dict.fromkeys([*texts, *ends]) if i not in known]
    if added:
        said = {**held, "eos_token_id": [*known, *added]}
        model.companions = {**model.companions, FILE: (json.dumps(said, indent=2) + "\n").encode()}
    return added


def steps_of(recipe: Recipe, train: Loader) -> int:
    """The length of the run: `max_steps` or `num_epochs`, whichever ends first."""
    epochs = train.count(max(1, ceil(recipe.num_epochs * len(train))), recipe.max_steps) if recipe.num_epochs is not None else None
    return min(limit for limit in (recipe.max_steps, epochs) if limit is not None)


def facts(recipe: Recipe, device: torch.device, ranks: Ranks, setup: Setup) -> dict[str, Any]:
    """What is needed to interpret the rows of metrics.jsonl."""
    return {
        "modelcenter": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "device": device.type, "threads": torch.get_num_threads(),
        "precision": recipe.precision, "ranks": ranks.size, "parameters": setup.parameters, "trained": setup.trained,
        "steps": setup.steps, "examples": len(setup.loader),
        "eval_examples": len(setup.evaluation.loader) if setup.evaluation is not None else 0,
    }  # fmt: skip
