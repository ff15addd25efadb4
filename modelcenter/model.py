"""The base class of all families: `Model`, with its `Preset`s and `Task`s."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from .adapter.config import AdapterConfig
from .adapter.save import save_adapter
from .checkpoint.config import Config, unchanging
from .checkpoint.load import taken
from .checkpoint.match import LoadReport
from .checkpoint.save import save_model
from .errors import nearest, refuse
from .generate.run import generate as generate_tokens
from .guest import Guest
from .layers import Batch, Cache, Head, Output
from .layers.adapter import current_names
from .layers.block import block_inputs
from .layers.cache import Fixed
from .layers.inputs import batch_of, check_items, check_mask, check_tokens
from .names import Entry, Names, Row, Shape
from .parallel.blocks import recomputed
from .parallel.ranks import settle
from .resize import resize
from .theirs import FORWARD, LOAD, RESIZE, SAVE, arguments, refuse_argument

M = TypeVar("M", bound="type[Model]")
FAMILIES: dict[str, type["Model"]] = {}  # transformers' model_type -> class


@dataclass(frozen=True)
class Preset:
    """A published model: its hub id (None: no public weights), parameter count, and the config's fields that are not the defaults.

    `task` is the task that it was published for, if not the family's default. The count includes that task's head.
    """

    hub: str | None
    parameters: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None


@dataclass(frozen=True)
class Task:
    """A head that a family offers: the transformers class that has it, how to build it from the config, and its rows of names."""

    architecture: str
    head: Callable[[Any], Head] = lambda c: Head()
    rows: tuple[Row, ...] = ()
    prefix: str | None = None  # of the backbone's names in that class, if not the family's own
    without: tuple[str, ...] = ()  # modules of the backbone that the class lacks, as an encoder alone lacks the decoder


class Model(Guest):
    """A model of some family. The family declares the class attributes and methods at the top; everything else follows from them.

    `from_pretrained`, `modelcenter.load` and `modelcenter.build` make a model, `save_pretrained` writes it, and it is called like
    transformers' models (`forward`). `load_report` says what became of each tensor of the files.
    """

    Config: ClassVar[type[Config]]
    presets: ClassVar[Mapping[str, Preset]]
    tasks: ClassVar[Mapping[str, Task]]
    default_task: ClassVar[str | None] = None  # the task if config.json's `architectures` names no head
    prefix: ClassVar[str] = ""  # of the backbone's names in files; the file of a bare backbone omits it
    aliases: ClassVar[Mapping[str, str]] = {}  # name in files of a duplicate -> name of the tensor that it repeats
    ignored: ClassVar[tuple[str, ...]] = ()  # patterns of names in files that hold nothing to load
    encoder_decoder: bool = False  # also False for the encoder alone
    wide: ClassVar[bool] = False  # activations of the published weights overflow fp16
    prefixed: ClassVar[bool] = False  # the body puts soft prompts before each packed sequence, and reads the lengths on the host

    config: Any  # a value of the family's own Config
    head: Head
    task: str
    shapes: dict[str, Shape]  # of the parameters as a file holds them: no padding, not sharded
    load_report: LoadReport
    companions: Mapping[str, bytes]  # tokenizer and generation files that travel with the weights
    brought: Mapping[str, bytes] = {}  # those of them that were beside the weights
    source: str | None = None  # where the weights came from: a hub id, or a folder's whole path
    revision: str | None = None  # of the hub id, if one was asked for
    adapter: AdapterConfig | None = None  # what is trained in place of the weights
    narrowed: bool = False  # beneath the adapter, frozen weights were rounded to the precision of a run
    merged: bool = False  # an adapter was merged into the weights, which are no longer those of the source
    resized: frozenset[str] = frozenset()  # parameters whose rows, one a word, were changed by `resize_token_embeddings`

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def body(self, batch: Batch) -> Tensor:
        """The backbone: hidden states (b s dim) of a batch."""
        raise TypeError(f"{type(self).__name__} declares no body")

    @staticmethod
    def names(c: Any) -> Iterable[Row]:
        """The backbone's rows of the table of names (`names.py`)."""
        raise TypeError("a family declares names")

    @staticmethod
    def tied(c: Any) -> Mapping[str, str]:
        """Parameter -> the parameter it shares: the head's matrix is the embedding's, if the config has a `tie` that is true."""
        return {"head.out.weight": "embed.tokens.weight"} if getattr(c, "tie", False) else {}

    def init_std(self, name: str, shape: Shape) -> float:
        """The standard deviation of a new weight."""
        return float(self.config.get("initializer_range", 0.02))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        logits_to_keep: int | Tensor | None = None,
        past_key_values: Cache | None = None,
        output_hidden_states: bool = False,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        target_places: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **others: Any,
    ) -> Output:
        """Run the model. b: batch, s: tokens, t: tokens including those in the cache, n: packed sequences.

        `input_ids` (b s), or `inputs_embeds` (b s dim). `attention_mask` (b t): 1 for real tokens, 0 for padding. `position_ids`
        and `token_type_ids` (b s); an encoder-decoder also takes `decoder_input_ids` and `decoder_attention_mask`, of the target.
        If positions restart at 0 within a row, a causal model treats it as several sequences, unless a mask or a cache is given.
        `logits_to_keep`: how many of the last tokens get logits, or a tensor of the indices of those that do.

        `labels` (b s) as in transformers: -100 is ignored, and a causal model shifts them itself. For a classifier they are (b), or
        (b labels) if several may apply at once; for question answering (b 2), the first and the last token of each answer, or
        `start_positions` and `end_positions` (b). The summed loss is divided by `num_items_in_batch`, or by default by this batch's
        number of targets.

        Returns an `Output`: `loss`, if labels are given; `logits` (b s vocab) of a language model, (b s labels) of a tagger,
        (b labels) of a classifier, `start_logits` and `end_logits` (b s), or `embeddings` (b dim); `last_hidden_state` (b s dim).
        In training with labels `logits` is None. So is `last_hidden_state` if the head reads only some positions, because the last
        block then computes no others. `output_hidden_states` returns it whole, and `hidden_states`, those before and after every
        block.

        Packed sequences are one row with `cu_seq_lens_q` and `cu_seq_lens_k` (n + 1 cumulative lengths; in an encoder-decoder q
        counts the target, k the source); `max_length_q` and `max_length_k` are upper bounds of their lengths.
        `target_places` (int64 indices into the flattened labels) must include all positions with a label; it saves the head from
        waiting for the device to find them.

        `past_key_values` holds the tokens seen so far; `use_cache` creates one for the next forward. If config.json says
        `"prefix_lm": true`, the tokens before the first label attend in both directions; without labels and a cache, all tokens do.

        Errors: `InputError` for arguments that do not fit each other or the model, and for arguments of transformers that are not
        supported: `output_attentions`, `return_dict=False`, and any in `others` that has a value.
        """
        if cu_seq_lens_q is not None or position_ids is not None:
            others.pop("seq_idx", None)  # transformers' collator says in three ways where packed sequences begin
        self.refuse_unsupported(past_key_values, output_attentions, return_dict, others)
        if input_ids is not None and inputs_embeds is not None:
            refuse(None, "inputs_embeds", "given beside input_ids", "one of the two")
        kept = self.kept(logits_to_keep, labels)
        if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.size(2) != self.config.dim):
            refuse(None, "inputs_embeds", f"shape {list(inputs_embeds.shape)}", f"(batch, tokens, {self.config.dim})")
        check_items(num_items_in_batch)
        for name, ids in (("input_ids", input_ids), ("decoder_input_ids", decoder_input_ids)):
            if ids is not None:
                check_tokens(ids, name)
        check_mask(attention_mask, "attention_mask")  # lengths in its place, as ModelCenter's come, before labels are looked at
        labels = self.targets(labels, start_positions, end_positions)
        if use_cache and past_key_values is None:
            past_key_values = Cache()
        if past_key_values is not None and self.training and torch.is_grad_enabled() and recomputed(self):
            refuse(None, "use_cache", "true where the backward runs blocks anew, which would read their own tokens as past ones",
                   "leave it out of training")
        if self.encoder_decoder and decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.begun(labels, cu_seq_lens_q)
        batch = batch_of(
            input_ids if inputs_embeds is None else inputs_embeds, mask=attention_mask, positions=position_ids, labels=labels,
            segments=token_type_ids, target=decoder_input_ids, target_mask=decoder_attention_mask, lengths_q=cu_seq_lens_q,
            lengths_k=cu_seq_lens_k, longest_q=max_length_q, longest_k=max_length_k, cache=past_key_values,
            encoder_decoder=self.encoder_decoder,
        )  # fmt: skip
        if self.config.file.get("prefix_lm") is True and not self.encoder_decoder:
            batch = batch.prefixed(labels if self.scores else None)
        if self.task == "classify":
            batch = replace(batch, pad=self.config.file.get("pad_token_id"))
        self.check_sizes(batch)
        if self.training and labels is not None and not torch.compiler.is_compiling():
            self.look()
        batch = self.head.prepared(batch if target_places is None else replace(batch, labelled=target_places))
        with block_inputs(self, output_hidden_states) as trace:
            h = self.body(replace(batch, wanted=None) if output_hidden_states else batch)
        if batch.packing is not None and any(t.size(1) != h.size(1) for t in trace):
            refuse(None, "output_hidden_states", "packed sequences behind soft prompts", "one sequence a row")
        out: Output = self.head(h if kept is None else h[:, kept], batch, num_items_in_batch)
        if output_hidden_states:
            out["hidden_states"] = (*(t[:, t.size(1) - h.size(1) :] for t in trace), h)
        if past_key_values is not None:
            out["past_key_values"] = past_key_values
            past_key_values.length = (batch.target or batch).keys
        return out

    def refuse_unsupported(self, cache: object, output_attentions: bool | None, return_dict: bool | None,
                           others: Mapping[str, Any]) -> None:
        """Refuse arguments of transformers' forward that this one cannot honour, and names that neither knows."""
        for name, value in others.items():
            if (value is not None and value is not False) or name not in FORWARD:
                refuse_argument("forward", name, FORWARD, signature(type(self).forward).parameters)
        if cache is not None and not isinstance(cache, Cache):
            wanted = "mc.Cache(), or use_cache=True for the first; peft's prefix tuning, which gives one, is not supported"
            refuse(None, "past_key_values", f"a {type(cache).__name__}", wanted)
        if output_attentions:
            refuse(None, "output_attentions", "True", "leave it out: attention here keeps no weights")
        if return_dict is False:
            refuse(None, "return_dict", "False", "leave it out: the output has to_tuple(), and an index counts in that")

    def kept(self, logits_to_keep: int | Tensor | None, labels: Tensor | None) -> Tensor | slice | None:
        """The index of the tokens that get logits; None: all of them."""
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None) if logits_to_keep else None
        if kept is not None and (labels is not None or not self.scores):
            found = "beside labels" if labels is not None else f"{logits_to_keep} with the task {self.task!r}"
            refuse(None, "logits_to_keep", found, "leave it out: labels, and such heads, are of all tokens")
        return kept

    def targets(self, labels: Tensor | None, start: Tensor | None, end: Tensor | None) -> Tensor | None:
        """The labels, checked for the head that reads them; (b 2) of answers given as two tensors (b)."""
        if start is not None or end is not None:
            labels = self.span(start, end, labels)
        if labels is None:
            return None
        if self.scores:
            check_tokens(labels, "labels")
        elif not isinstance(labels, Tensor):
            refuse(None, "labels", f"a {type(labels).__name__}", "a tensor")
        if self.task == "classify":
            self.config.numbers() if labels.is_floating_point() else self.config.single_label()
        return labels

    def span(self, start: Tensor | None, end: Tensor | None, labels: Tensor | None) -> Tensor:
        """The labels (b 2) of answers that are given as two tensors (b)."""
        if self.task != "qa" or start is None or end is None or labels is not None:
            found = f"with the task {self.task!r}" if self.task != "qa" else "beside labels" if labels is not None else "one alone"
            refuse(None, "start_positions, end_positions", found, "both, of a model with task='qa'; or labels (b 2)")
        return torch.stack((start.flatten(), end.flatten()), 1)

    def check_sizes(self, batch: Batch) -> None:
        """Refuse labels that the head's loss cannot use, and more tokens than the table of positions has rows: on a GPU an index
        beyond it ends the process. When a graph is compiled or exported the number of tokens is not compared, because the graph
        would then be valid for that range only."""
        if batch.labels is not None and self.task == "backbone" and not self.encoder_decoder:  # there they make the decoder's ids
            refuse(None, "labels", "with the task 'backbone', which has no loss", f"another task: {', '.join(self.tasks)}")
        if batch.labels is not None:
            self.head.check(batch.labels, batch)
        room = getattr(getattr(getattr(self, "embed", None), "positions", None), "num_embeddings", None)
        if room is None or batch.positions is not None or batch.packing is not None or isinstance(batch.cache, Fixed):
            return
        if not torch.compiler.is_compiling() and batch.keys > room:
            refuse(None, "input_ids", f"{batch.keys} tokens", f"at most {room}: the model has no more positions")

    @property
    def shared(self) -> dict[str, str]:
        """Each tied parameter -> the one that it shares, for those that this model's head has."""
        return {n: s for n, s in self.tied(self.config).items() if self.scores or not n.startswith("head.")}

    def tie(self) -> None:
        """Make each tied parameter the same object as the one that it shares."""
        for name, source in self.shared.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, self.get_parameter(source))

    @property
    def table(self) -> Names:
        """The table of names of backbone and head, as transformers' class for this task has them."""
        task, out = self.tasks[self.task], Names(self.names(self.config), self.prefix)
        out = out if task.prefix is None else out.under(task.prefix)
        out.rows += Names(task.rows).rows
        return out

    @property
    def bare(self) -> bool:
        """Whether transformers saves this task without the backbone's prefix."""
        return self.task in ("backbone", "embed")

    @property
    def entries(self) -> list[Entry]:
        """Each tensor of a file of this model, with the parameters that it holds."""
        return list(self.table.entries(self.shapes, bare=self.bare))

    @classmethod
    @arguments(LOAD)
    def from_pretrained(cls, name: str | PathLike[str], **options: Any) -> Self:
        """Load a model of this family from a folder, a preset or a hub id. The options are those of `modelcenter.load`: `task`,
        `dtype`, `device`, `machine`, `adapter`, `config`, `num_labels`, `revision` ... (see `help(modelcenter.load)`).

        Called on a subclass of a family, it returns an instance of that subclass. Errors: `InputError`, also for a checkpoint of
        another family."""
        from .create import load  # create.py imports this file

        return cast(Self, load(name, family=cls, **options))

    @arguments(SAVE)
    def save_pretrained(self, folder: str | PathLike[str], *, max_shard_size: str | int = "5GB") -> None:
        """Write a folder that transformers and `from_pretrained` open: safetensors files of at most `max_shard_size` each (bytes,
        or a text such as "5GB"), config.json, and the tokenizer that the model came with, unless the folder has one already. If
        the model has an adapter, only the adapter is written, in peft's format. The folder appears complete or not at all. Errors:
        `InputError`."""
        if not isinstance(folder, str | PathLike):
            refuse(None, "folder", f"a {type(folder).__name__}", "the name of the folder to write")
        settle(self)
        self.settle_options()
        self.check_tied()
        path = Path(os.path.expanduser(folder))
        if self.adapter is not None:
            save_adapter(self, path)
        else:
            save_model(self, path, max_shard_size)

    generate = generate_tokens  # type: ignore[has-type, unused-ignore]  # in an import cycle mypy meets it with or without its type

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module; if the model is sharded, each process takes its part of whole tensors. A dictionary with transformers'
        names, or with a wrapper's before ours, is refused with one line, where torch would list them all."""
        if not isinstance(state_dict, Mapping):
            refuse(None, "state_dict", f"a {type(state_dict).__name__}", "what state_dict() gives; a folder is for mc.load")
        if not state_dict.keys() & self.shapes.keys():  # strict or not, nothing would be loaded
            theirs = {entry.theirs for entry in self.entries} & state_dict.keys()
            if theirs:
                found = f"{min(theirs)}: transformers' names, where ours are {next(iter(self.shapes))} ..."
                refuse(None, "state_dict", found, "save_pretrained of that model into a folder, and mc.load of it")
            known = self.shapes.keys() | {entry.theirs for entry in self.entries}
            ends = ((key, key[i + 1 :]) for key in map(str, state_dict) for i, letter in enumerate(key) if letter == ".")
            if prefix := next((key.removesuffix(end) for key, end in ends if end in known), None):
                found = f"names that begin with {prefix!r}, which a wrapper put there"
                refuse(None, "state_dict", found, f"{{name.removeprefix({prefix!r}): x for name, x in state_dict.items()}}")
        return super().load_state_dict(taken(self, state_dict), strict, assign)

    @arguments(RESIZE)
    def resize_token_embeddings(self, vocab: int, pad_to_multiple_of: int | None = None, *, seed: int = 0) -> nn.Embedding:
        """Grow or shrink the vocabulary to `vocab` words, rounded up to a multiple of `pad_to_multiple_of` if that is given. New
        rows are drawn from `seed` as in a new model; the others keep their values. Errors: `InputError` for a size below 1."""
        for name, number in (("vocab", vocab), ("pad_to_multiple_of", 1 if pad_to_multiple_of is None else pad_to_multiple_of)):
            if type(number) is not int or number < 1:
                refuse(None, f"resize_token_embeddings({name})", repr(number), "a whole number, 1 or more")
        step = pad_to_multiple_of or 1
        resize(self, -(-vocab // step) * step, seed)
        return self.get_input_embeddings()

    def freeze(self, *patterns: str) -> list[str]:
        """Freeze the parameters whose names match one of the patterns, such as `embed.*`; our names and transformers' both work.
        Returns our names of the frozen parameters. Errors: `InputError` for a pattern that matches no parameter."""
        names: dict[str, tuple[str, ...]] = {name: (name,) for name in self.shapes}
        names |= {entry.theirs: entry.ours for entry in self.entries}
        frozen: list[str] = []
        for pattern in patterns:
            hits = [ours for n, ours in names.items() if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
            if not hits:
                stems = {name.rpartition(".")[0] for name in names}
                refuse(None, "freeze", f"{pattern!r} matches no parameter", nearest(pattern, {*names, *stems}))
            frozen += [name for ours in hits for name in ours if name not in frozen]
        now = current_names(self)
        for name in frozen:
            if name in now:  # codes of 4 or 8 bits are no parameters, and never trained
                self.get_parameter(now[name]).requires_grad_(False)
        return frozen


def by_name(init: Callable[..., None]) -> Callable[..., None]:
    """Reserve the `__init__` of a family for `skeleton`, which adds the head and later storage and values. Anyone else who calls
    the class gets an error that says how to make a model."""

    @wraps(init)
    def construct(self: Model, *config: Any, **fields: Any) -> None:
        if torch.get_default_device().type != "meta":
            name, preset = type(self).__name__, repr(next(iter(type(self).presets), "NAME"))
            wanted = f"mc.build({preset}, config={fields or '{...}'}), its weights random, or mc.{name}.from_pretrained({preset})"
            refuse(None, f"mc.{name}", "called itself, which gives it no head and no weights", wanted)
        init(self, *config, **fields)

    return construct


def register(cls: M) -> M:
    """Register a family under its model_type. A class without a docstring gets that of its file."""
    cls.__doc__ = cls.__doc__ or sys.modules[cls.__module__].__doc__
    cls.Config.__doc__ = f"The config of {cls.__name__}: its defaults are the base size, `file` holds config.json's other keys."
    FAMILIES[cls.Config.hf.model_type] = cls
    cls.__init__ = by_name(cls.__init__)  # type: ignore[method-assign]
    cls.Config.__setattr__ = unchanging  # type: ignore[assignment]  # dataclass gives each class its own, which says less
    return cls


def __getattr__(name: str) -> NoReturn:
    """Say where a name is that ModelCenter has in its module `model`; of `from modelcenter.model import Bert` Python would drop
    what an `AttributeError` says."""
    front: Any = sys.modules[__package__]
    said = f"module {__name__!r} has no {name}; mc.{name}" if name in dir(front) else front._spoken_of(name)
    if said and not name.startswith("_"):
        raise ImportError(said, name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
