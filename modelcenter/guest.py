"""What other programs expect of a model under transformers' names: Trainer, accelerate, peft, pipelines."""

import logging
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from .errors import refuse
from .generate.options import FILE
from .generate.run import beside
from .layers.head import Head
from .layers.inputs import shift_right
from .parallel.blocks import kept, recompute, recomputed
from .parallel.device import home_of
from .theirs import MODEL

MET: dict[str, str] = {}  # a class of ours that pipelines have met -> transformers' with the head that the last one had


def worth_saying(record: logging.LogRecord) -> bool:
    """Filter out a pipeline's message that it does not know one of our classes by name, if it knows transformers' class with the
    same head."""
    said, rest = record.getMessage(), " is not supported"
    return not any(said.startswith(f"The model '{ours}'{rest}") and f"'{theirs}'" in said for ours, theirs in MET.items())


def rows_alone(layer: Any) -> bool:
    """Whether a layer is peft's wrapper around an embedding, or around a head tied to it, to train some of its rows."""
    return hasattr(getattr(layer, "token_adapter", layer), "trainable_tokens_delta")


class Guest(nn.Module):
    """The part of a `Model` that serves programs written for transformers: names that they expect, and things that they change."""

    accepts_loss_kwargs = True  # every head divides its summed loss by `num_items_in_batch`
    input_modalities = "text"  # a pipeline's repr
    base_model_prefix = ""  # what a pipeline names in an error; no module here holds all but the head
    head: Any
    shared: Any
    load_report: Any
    companions: Any  # files that travel with the weights
    _options: Any = None

    @property
    def architecture(self) -> str:
        """transformers' class with this head."""
        return str(self.tasks[self.task].architecture)

    def _get_name(self) -> str:
        """Trainer's label smoothing looks the name up to learn whether labels are shifted, as a causal model's are."""
        return self.architecture

    def __repr__(self) -> str:
        return super().__repr__().replace(self.architecture, type(self).__name__, 1)

    @property
    def loss_type(self) -> str | None:
        """Trainer reads here that no token predicts the first label of a row, and does not count it among a step's targets."""
        return "ForCausalLM" if getattr(self.head, "shift", False) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "hf_device_map":  # what a pipeline asks first of all
                self.introduce()
            if name not in MODEL:
                raise
            raise AttributeError(f"{type(self).__name__} has no {name}; {MODEL[name]}", name=name, obj=self) from None

    @property
    def device(self) -> torch.device:
        """The device that the model computes on, and that inputs go to."""
        return home_of(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.get_input_embeddings().weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of tokens, weight (vocab dim). On several ranks it may end with rows that no token uses."""
        return self.get_submodule("embed.tokens")  # type: ignore[return-value]  # an embedding

    # ---- tied weights: one tensor has one name, as safetensors asks of what it writes; either name is read

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """As for any module, but a tied weight has only one name."""
        out = super().state_dict(*args, **options)
        prefix = str(options.get("prefix", args[1] if len(args) > 1 else ""))
        for name, source in self.held().items():
            if prefix + source in out:
                out.pop(prefix + name, None)
        return out

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        for name, source in self.held().items():
            if prefix + source in state_dict and local_metadata.get("assign_to_params_buffers"):
                value = state_dict[prefix + source]  # of a plain tensor torch would make a parameter for each name
                one = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)  # torch sets that
                state_dict[prefix + name] = state_dict[prefix + source] = one
            elif prefix + source in state_dict:
                state_dict.setdefault(prefix + name, state_dict[prefix + source])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def held(self) -> dict[str, str]:
        """Each tied parameter -> the one that it shares, for those that still are one tensor."""
        now = dict(self.named_parameters(remove_duplicate=False))
        return {name: source for name, source in self.shared.items() if source in now and now.get(name) is now[source]}

    def check_tied(self) -> None:
        """Refuse to save weights that were tied and no longer are: if peft is asked to train a head in full, it gives it its own
        matrix."""
        now, shared = dict(self.named_parameters(remove_duplicate=False)), self.shared
        for name in sorted(shared.keys() - self.held().keys()):
            if name in now and shared[name] in now:
                found = f"no longer {shared[name]}, which is all that a file of a tied model has"
                refuse(None, name, found, "model.tie(), or to save the adapter before it is merged")

    def tie_weights(self, *args: Any, **options: Any) -> None:
        """`tie`, as lm-eval and others call it."""
        self.tie()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As for any module (`to`, `half`, `to_empty`), but tied weights stay tied: when moving to or from `meta` torch would give
        each name its own parameter."""
        tied = self.held()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types there
        if tied:
            self.tie()
        return self

    # ---- recompute

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward."""
        return recomputed(self)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
                                        every_n_layers: int = 1, offload: bool = False) -> None:
        """Keep only the inputs of blocks and recompute the rest in the backward, as `Machine(recompute="full")` does.
        Errors: `InputError` for what this cannot do: recompute only some blocks, or keep their inputs on another device."""
        for name, value, only in (("every_n_layers", every_n_layers, 1), ("offload", offload, False)):
            if value != only:
                refuse(None, f"activation_checkpointing_enable({name})", repr(value), f"{only}: every block, where it is")
        for name in activation_checkpointing_kwargs or {}:
            if name not in ("use_reentrant", "preserve_rng_state"):  # either gives the same gradients
                refuse(None, "activation_checkpointing_enable", name, "leave it out")
        if not recomputed(self):
            recompute(self, "full")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Keep in the forward all that the backward needs."""
        kept(self)

    activation_checkpointing_disable = gradient_checkpointing_disable

    def enable_input_require_grads(self) -> None:
        """Nothing to do: recompute here needs no gradient of its input."""

    # ---- peft

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """Tied parameters and what they share: peft trains the rows of a tied head with those of the embedding."""
        return dict(self.shared)

    def look(self) -> None:
        """Warn of two things that go wrong silently when peft is put on this model: a new head, which peft does not know by name,
        stays untrained, and an adapter on one of two layers that share a matrix would be merged into both."""
        report = vars(self).get("load_report")  # a model that was built has none
        drawn = [name for name in (report.new if report is not None else ()) if name.startswith("head.out.")]
        if drawn and not any(p.requires_grad for p in self.head.parameters()):
            warnings.warn("head: drawn at random, and not trained; peft trains it with modules_to_save=['head']", stacklevel=5)
        both = {"head.out": getattr(self.head, "out", None), "embed.tokens": self.get_submodule("embed.tokens")}
        bases = {name: getattr(layer, "base_layer", None) for name, layer in both.items()}
        for (name, base), other, where in zip(bases.items(), reversed(both.values()), ("embedding", "head"), strict=True):
            alone = base is not None and getattr(other, "weight", None) is base.weight
            if alone and not any(map(rows_alone, both.values())):
                said = f"merged, what is added to it would change the {where} too"
                warnings.warn(f"{name}: the {where}'s own matrix; {said}: peft's exclude_modules=['{name}']", stacklevel=5)

    # ---- trl

    @property
    def base_model(self) -> "Guest":
        """This model without its head, of the same layers, whose output has hidden states alone: trl multiplies them with the
        head's matrix itself, in pieces."""
        out = copy(self)
        vars(out).update(_modules={**self._modules, "head": Head()}, task="backbone")
        vars(out).pop("forward", None)  # trl puts one of its own, which calls this, into the model
        return out

    def add_model_tags(self, tags: Any) -> None:
        """Nothing to do: trl's tags are for the card of a model that transformers uploads."""

    # ---- pipelines

    def introduce(self) -> None:
        """Make the model known to a pipeline, which goes by the names of classes."""
        MET[type(self).__name__] = self.architecture
        logging.getLogger("transformers.pipelines.base").addFilter(worth_saying)

    # ---- generation

    def get_output_embeddings(self) -> nn.Module | None:
        """The matrix that gives scores over the vocabulary, if there is one."""
        return self.head.out if self.scores else None

    def prepare_inputs_for_generation(self, input_ids: Tensor, **rest: Any) -> dict[str, Any]:
        """The arguments of the next step's forward, for tools that generate with a loop of their own."""
        return {"input_ids": input_ids, **rest}

    def can_generate(self) -> bool:
        """Whether `generate` works: the model has a head that predicts the next token."""
        return self.scores and (bool(self.head.shift) or bool(self.encoder_decoder))

    @property
    def scores(self) -> bool:
        """Whether the head, or what peft has put around it, gives scores over the vocabulary."""
        return hasattr(self.head, "shift")

    @property
    def prepare_decoder_input_ids_from_labels(self) -> Callable[..., Tensor]:
        """What a decoder reads to write labels: transformers' collators call this, and take a model that has it for one with a
        decoder of its own."""
        if not self.encoder_decoder:
            raise AttributeError
        return self.begun

    def begun(self, labels: Tensor, lengths: Tensor | None = None) -> Tensor:
        """What a decoder reads to write `labels` (b s), which may be packed (`shift_right`)."""
        config: Any = self.config
        return shift_right(labels, lengths, config.start, config.file.get("pad_token_id") or 0)

    @property
    def generation_config(self) -> Any:
        """The defaults of `generate`, as transformers' GenerationConfig (transformers must be installed). It is made when first
        asked for, from generation_config.json and config.json; what is changed in it holds for `generate` and `save_pretrained`."""
        if self._options is None:
            from transformers import GenerationConfig

            config: Any = self.config
            ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")}
            held = {name: value for name, value in beside(self).items() if value is not None}  # type: ignore[arg-type]  # a Model
            self._options = GenerationConfig(**{**ids, **held})  # type: ignore[no-untyped-call]  # which has no types
        return self._options

    @generation_config.setter
    def generation_config(self, options: Any) -> None:
        self._options = options

    def settle_options(self) -> None:
        """Let `save_pretrained` write `generation_config`, if it was asked for."""
        if self._options is not None:
            self.companions = {**self.companions, FILE: self._options.to_json_string().encode()}
