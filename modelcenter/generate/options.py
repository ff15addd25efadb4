"""The options of `generate`, under transformers' names, and where each value comes from. Torch-free.

The metadata of a field hold its help text and its bounds, as in a recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..config import bind, says
from ..errors import refuse
from ..theirs import GENERATE, refuse_argument

FILE = "generation_config.json"

# What transformers knows and this package does not do, with the values at which it does nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (), "sequence_bias": (),
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "exponential_decay_length_penalty": (),
    "renormalize_logits": (False,), "remove_invalid_values": (False,), "guidance_scale": (1.0,), "token_healing": (False,),
    "watermarking_config": (), "penalty_alpha": (0.0,), "dola_layers": (), "constraints": (), "force_words_ids": (),
    "max_time": (), "prompt_lookup_num_tokens": (), "use_mtp": (False,), "speculation_type": (),
    "return_dict_in_generate": (False,), "output_scores": (False,), "output_logits": (False,), "output_attentions": (False,),
    "output_hidden_states": (False,),
}  # fmt: skip
# What changes no result: speed, memory, bookkeeping, how an assistant that nobody gave would be used, and what Seq2SeqTrainer
# leaves in a batch: the targets, which only a forward learns from, and whether ranks wait for each other, which write the same.
WITHOUT_EFFECT = frozenset((
    "bos_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "transformers_version", "continuous_batching_config", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "labels", "synced_gpus",
))  # fmt: skip

DRAWN, SEARCHED = ("temperature", "top_k", "top_p", "min_p"), ("length_penalty", "early_stopping")  # what else says nothing


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to choose the tokens that follow. Lengths are in tokens; a target of an encoder-decoder counts its start token."""

    max_new_tokens: int | None = field(
        default=None, metadata=says("most tokens to generate; null: max_length, or else 20, in the command 64", min=1)
    )
    max_length: int | None = field(default=None, metadata=says("the same, including the prompt", min=1))
    min_new_tokens: int | None = field(
        default=None, metadata=says("fewest tokens to generate before an end token; null: min_length", min=0)
    )
    min_length: int = field(default=0, metadata=says("the same, including the prompt", min=0))
    do_sample: bool = field(default=False, metadata=says("sample each token instead of taking the likeliest"))
    temperature: float = field(default=1.0, metadata=says(
        "divides the scores before sampling", min=1e-6, beyond="none and do_sample=false, for the likeliest token each time"
    ))  # fmt: skip
    top_k: int = field(default=50, metadata=says("sample among this many most likely tokens; 0: all", min=0))
    top_p: float = field(
        default=1.0, metadata=says("sample among the most likely tokens that together have this probability", above=0, max=1)
    )
    min_p: float = field(
        default=0.0, metadata=says("sample among tokens at least this fraction as likely as the most likely one", min=0, max=1)
    )
    num_beams: int = field(default=1, metadata=says("beams of a beam search; 1: no beam search", min=1))
    num_beam_groups: int = field(default=1, metadata=says("groups of beams that should differ", min=1))
    diversity_penalty: float = field(
        default=0.0, metadata=says("subtracted from a token's score for each beam of an earlier group that has it", min=0)
    )
    length_penalty: float = field(default=1.0, metadata=says("a finished beam's score is divided by its length to this power"))
    early_stopping: bool | Literal["never"] = field(
        default=False, metadata=says("true: stop at num_beams finished; false: if a better one is unlikely; never: if impossible")
    )
    num_return_sequences: int = field(default=1, metadata=says("texts for each prompt", min=1))
    repetition_penalty: float = field(default=1.0, metadata=says("divides the scores of tokens that have occurred", above=0))
    frequency_penalty: float = field(default=0.0, metadata=says("subtracted from a token's score for each time it was generated"))
    presence_penalty: float = field(default=0.0, metadata=says("subtracted once from the score of a token that was generated"))
    no_repeat_ngram_size: int = field(default=0, metadata=says("no n-gram of this size occurs twice; 0: no limit", min=0))
    bad_words_ids: tuple[tuple[int, ...], ...] = field(default=(), metadata=says("sequences of ids that never occur", min=0))
    suppress_tokens: tuple[int, ...] = field(default=(), metadata=says("ids that never occur", min=0))
    begin_suppress_tokens: tuple[int, ...] = field(default=(), metadata=says("ids that are never generated first", min=0))
    forced_bos_token_id: int | None = field(default=None, metadata=says("the id forced after a prompt of one token", min=0))
    forced_eos_token_id: int | tuple[int, ...] | None = field(
        default=None, metadata=says("the id forced at the last position", min=0)
    )
    stop_strings: str | tuple[str, ...] = field(default=(), metadata=says("texts that end a sequence; needs a tokenizer", min=1))
    eos_token_id: int | tuple[int, ...] | None = field(
        default=None, metadata=says("the id, or ids, that end a sequence; left out, the model's; null: none")
    )
    pad_token_id: int | None = field(default=None, metadata=says("the id that fills up a sequence that has ended", min=0))
    decoder_start_token_id: int | None = field(default=None, metadata=says("the first id of a target", min=0))
    seed: int | None = field(default=None, metadata=says("seed of the sampling; null: a new one each time", min=0))

    def __post_init__(self) -> None:
        if self.num_beams % self.num_beam_groups:
            refuse(None, "num_beam_groups", f"{self.num_beam_groups} for {self.num_beams} beams", "a divisor of num_beams")
        if self.num_beam_groups > 1 and self.do_sample:
            refuse(None, "do_sample", "with num_beam_groups", "one of the two")
        if self.diversity_penalty and self.num_beam_groups == 1:
            refuse(None, "diversity_penalty", f"{self.diversity_penalty} without num_beam_groups", "num_beam_groups from 2")
        if self.num_return_sequences > self.num_beams and not (self.do_sample and self.num_beams == 1):
            found, wanted = f"{self.num_return_sequences} of {self.num_beams} beams", "at most num_beams"
            refuse(None, "num_return_sequences", found, wanted if self.do_sample else f"{wanted}, or do_sample")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            refuse(None, "min_new_tokens", f"{self.min_new_tokens} with max_new_tokens {self.max_new_tokens}", "at most as many")
        if self.max_new_tokens is None and self.max_length is not None and self.min_length > self.max_length:
            refuse(None, "min_length", f"{self.min_length} with max_length {self.max_length}", "at most as many")
        if not all(self.bad_words_ids):
            refuse(None, "bad_words_ids", "an empty sequence, which is everywhere", "sequences of at least one id")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            ids = several(getattr(self, name))
            if ids and set(ids) <= set(self.suppress_tokens):
                refuse(None, name, f"{ids[0]}, which suppress_tokens holds", "one of the two")

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a row; -1 means none."""
        return tuple(i for i in several(self.eos_token_id) if i >= 0)

    @property
    def pad(self) -> int:
        """The id that fills up rows, by default the first of `ends`."""
        return self.pad_token_id if self.pad_token_id is not None else (*self.ends, 0)[0]

    def new_tokens(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens or 20
        if self.max_length <= prompt:
            refuse(None, "max_length", f"{self.max_length} with a prompt of {prompt} tokens", "more, or max_new_tokens")
        return self.max_length - prompt


NAMES = tuple(f.name for f in fields(Options))
# The keys that count where they stand in config.json, as in files of before 2023, which have no file of their own for them.
LEGACY = ({*NAMES} - {"seed"}) | {key for key in UNSUPPORTED if not key.startswith(("output_", "return_"))}


def several(ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def read(given: Mapping[str, Any], options: Mapping[str, Any], config: Mapping[str, Any], file: str | None) -> Options:
    """Every option: from the call, or else from `given` (what `file` holds), or else from the model's `config`, or else its
    default.

    None means not given. What transformers has and this package has not is refused, unless its value does nothing: an empty list of
    processors or criteria, for example.
    """
    for name in options:
        nothing = options[name] is None or (isinstance(options[name], list) and not options[name])
        if name not in (*NAMES, *UNSUPPORTED, *WITHOUT_EFFECT) and not (nothing and name in GENERATE):
            refuse_argument("generate", name, GENERATE, NAMES)
    base, over = chosen(given, file), chosen(options, None)
    if "max_length" in over:
        base.pop("max_new_tokens", None)
    bind(Options, base, file)
    ids = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
    model = chosen({name: config.get(name) for name in ids}, "config.json")
    found = bind(Options, {**model, **base, **over})
    for names, used, wanted in ((DRAWN, found.do_sample, "do_sample=true"), (SEARCHED, found.num_beams > 1, "num_beams from 2")):
        for name in names:  # of the call alone: a file's are for those who draw
            if name in over and not used and over[name] != getattr(Options, name):
                refuse(None, name, f"{over[name]}, which does nothing without {wanted}", f"{wanted}, or leave it out")
    return found


def chosen(values: Mapping[str, Any], file: str | None) -> dict[str, Any]:
    """Those of `values` that are options of ours and given."""
    for name, neutral in UNSUPPORTED.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            held = "take it out of the file, or in Python read none of it: generation_config={}"
            refuse(file, name, f"{str(value)[:60]} is not implemented", held if file and file.endswith(".json") else "leave it out")
    given = {name: plain(values[name]) for name in NAMES if values.get(name) is not None}
    if file and given.get("pad_token_id") == -1:  # how old files say that there is none
        del given["pad_token_id"]
    return given


def plain(value: Any) -> Any:
    """A number or a list of numbers where a tensor or an array is given."""
    return value.tolist() if hasattr(value, "tolist") else value
