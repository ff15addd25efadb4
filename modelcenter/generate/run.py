"""`generate`: options (options.py) in, token ids out. Greedy decoding and sampling are here, beam search is in beam.py.

The rows and their cache are a `State`; `rules` change scores before a token is chosen; a `Stop` decides which rows end.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.strict_json import parse_json
from ..errors import refuse
from ..layers.block import at_rest
from ..layers.inputs import check_tokens
from .beam import search
from .options import FILE, LEGACY, Options, read
from .scores import Allowed, Rule, apply, rules
from .state import State
from .stop import Criterion, Over, Stop

if TYPE_CHECKING:
    from ..model import Model


@torch.no_grad()
def generate(
    model: "Model",
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    *,
    tokenizer: Any = None,
    prefix_allowed_tokens_fn: Allowed | None = None,
    logits_processor: Iterable[Rule] | None = None,
    stopping_criteria: Iterable[Criterion] | None = None,
    **options: Any,
) -> Tensor:
    """Generate token ids (b * num_return_sequences, tokens): the prompt and its continuation, or, with an encoder-decoder, the
    target from its start token on.

    `input_ids` (b s) are padded on the left, where `attention_mask` is 0. Without a mask, tokens of a decoder's prompt that equal
    `pad_token_id` count as padding, unless that id is also an end token. The options are the fields of `generate.options.Options`,
    with transformers' names: `max_new_tokens`, `do_sample`, `num_beams` ... An option that is not given is taken from
    `generation_config` (an object or a mapping), else from the generation_config.json that came with the weights, else from
    config.json. None is not given, except `eos_token_id=None`, here or of the model's own `generation_config`: no token ends a row,
    as in transformers. Rows that end early are filled up with `pad_token_id`; if that is 0, beam search fills them with the end
    token, as in transformers. Sampling depends on the option `seed`, not on torch.manual_seed; torch's own generators stay as they
    are.

    `streamer.put(ids)` is called with the prompt of each row, or with a target's start, then with every new column (rows), and
    `streamer.end()` at the end, as in transformers. `stop_strings` need a `tokenizer` with `decode(ids)`.
    `prefix_allowed_tokens_fn(row, ids)` returns the ids that may follow; `row` is the number of the prompt, or, if several
    sequences are sampled for each prompt, of the row, as in transformers. A `logits_processor` is called with the ids (b t) and the
    scores of the next token (b vocab) and returns new scores, before they are filtered for sampling. Each of `stopping_criteria` is
    called with the ids and None, and returns which rows have ended (b). Errors: `InputError`.
    """
    if not model.can_generate():
        refuse(None, "generate", f"a model with the task {model.task!r}", "one that predicts the next token")
    if getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model) is not model:  # where a prompt is vectors
        found = "peft's prompt before the text, of which nothing is known here"
        refuse(None, "generate", found, "a loop over the forward of peft's model, peft_model(input_ids=ids).logits")
    if input_ids is None:
        instead = next((name for name in ("inputs", "inputs_embeds") if options.get(name) is not None), None)
        refuse(None, "input_ids", f"{instead} in its place" if instead else "missing", "the prompt's ids (batch, tokens)")
    check_prompt(model, input_ids, attention_mask)
    for what, thing, method in (("streamer", streamer, "put"), ("tokenizer", tokenizer, "decode")):
        if thing is not None and not hasattr(thing, method):
            refuse(None, what, f"a {type(thing).__name__}", f"an object with a method {method}, as transformers' have")
    o = settings(model, generation_config, options)
    if attention_mask is None and not model.encoder_decoder:
        attention_mask = told_by_padding(input_ids, o)
        check_prompt(model, input_ids, attention_mask)
    start = (o.decoder_start_token_id or 0) if model.encoder_decoder else None
    new = o.new_tokens(1 if model.encoder_decoder else input_ids.size(1))
    check_ids(model, input_ids, new)
    if streamer is not None and o.num_beams > 1:
        refuse(None, "streamer", f"with {o.num_beams} beams, of which none is chosen before the end", "num_beams=1")
    source = torch.Generator(input_ids.device)
    source.manual_seed(o.seed) if o.seed is not None else source.seed()
    with at_rest(model):
        state = State(model, input_ids, attention_mask, new, o.pad, start)
        mask = None if start is not None else attention_mask
        changes = rules(o, state.prompt, new, mask, prefix_allowed_tokens_fn, model.config.vocab, logits_processor)
        strings = (o.stop_strings,) if isinstance(o.stop_strings, str) else o.stop_strings
        stop = Stop(o.ends, strings, tokenizer, input_ids.device, stopping_criteria or ())
        if o.num_beams > 1:
            return search(state, changes, stop, o, source)
        return choose(state, changes, stop, o, source, streamer)


def choose(state: State, changes: list[Rule], stop: Stop, o: Options, source: torch.Generator, streamer: Any) -> Tensor:
    """Choose token by token, the likeliest or a drawn one: ids (b * num_return_sequences t)."""
    scores = state.scores().repeat_interleave(o.num_return_sequences, 0)
    state.repeat(o.num_return_sequences)
    if streamer is not None:
        streamer.put(state.seen.cpu())
    done = torch.zeros(len(state.ids), dtype=torch.bool, device=state.ids.device)
    over = Over(late=state.ids.is_cuda and streamer is None)
    while True:
        scores = apply(changes, state.seen, scores)
        new = torch.multinomial(scores.softmax(1), 1, generator=source)[:, 0] if o.do_sample else scores.argmax(1)
        new = torch.where(done, o.pad, new)
        state.append(new)
        if streamer is not None:
            streamer.put(new.cpu())
        done |= stop(state.seen)
        if over(done):
            state.length -= over.late
            break
        if state.length == state.ids.size(1):
            break
        scores = state.scores()
    if streamer is not None:
        streamer.end()
    return state.seen


def settings(model: "Model", given: Any, options: dict[str, Any]) -> Options:
    """Every option: from the call, from `given`, from what the model has (the file beside the weights, or what has been made of its
    `generation_config`), from config.json, or the default. With an empty mapping nothing of the model's own is read."""
    over, own, options = mapping(given), mapping(model._options), unended(options)
    file = file_of(model) if over is own is None else "generation_config"
    values = {} if over == {} else beside(model) if own is None else unended(own)
    if over:
        values = {**values, **{name: value for name, value in over.items() if value is not None}}
        if over.get("max_length") is not None and over.get("max_new_tokens") is None:
            values.pop("max_new_tokens", None)
    o, vocab = read(values, options, model.config.to_dict(), file), model.config.vocab
    if options.get("eos_token_id") is not None and min(o.ends, default=0) >= vocab:  # a file's may be left from a larger vocabulary
        refuse(None, "eos_token_id", f"{min(o.ends)}, which ends nothing", f"ids below {vocab}, the vocabulary; -1 for none")
    if o.pad < vocab:  # the model is given it where a row has ended, though nothing is made of the answer
        return o
    if options.get("pad_token_id") is not None:
        refuse(None, "pad_token_id", str(o.pad), f"an id below {vocab}, the model's vocabulary")
    return replace(o, pad_token_id=0)


def unended(options: dict[str, Any]) -> dict[str, Any]:
    """The options, in which an end token of None is none: no other one, from elsewhere, takes its place."""
    return {**options, "eos_token_id": []} if options.get("eos_token_id", ()) is None else options


def mapping(given: Any) -> dict[str, Any] | None:
    """Options as a mapping, or as transformers' GenerationConfig has them; None if none are given."""
    if given is not None and not isinstance(given, dict) and not hasattr(given, "to_dict"):
        refuse(None, "generation_config", repr(given), "a mapping of options, or transformers' GenerationConfig")
    found: dict[str, Any] | None = given if given is None or isinstance(given, dict) else given.to_dict()
    return found


def beside(model: "Model") -> dict[str, Any]:
    """What the generation_config.json that came with the weights holds; if none came, what config.json has of it, as transformers
    reads it. There a length of 20 is what was written where nobody had given one."""
    if FILE not in model.companions:
        held = {key: value for key, value in model.config.file.items() if key in LEGACY}
        return {key: value for key, value in held.items() if (key, value) != ("max_length", 20)}
    held = parse_json(file_of(model), model.companions[FILE])
    if not isinstance(held, dict):
        refuse(file_of(model), None, f"a {type(held).__name__}", "an object with generation's options")
    return held


def file_of(model: "Model") -> str:
    name = FILE if FILE in model.companions else "config.json"
    return f"{model.source}/{name}" if model.source else name


def check_prompt(model: "Model", ids: Tensor, mask: Tensor | None) -> None:
    """Refuse ids or a mask of another shape than (b s), and padding on the right, from which a model would continue."""
    check_tokens(ids, "input_ids")
    if model.device.type == "meta":
        refuse(None, "device", "meta, where weights have no values", "the model on a device")
    if not ids.numel():
        refuse(None, "input_ids", f"shape {list(ids.shape)}", "(batch, tokens), and at least one token")
    if mask is None:
        return
    if mask.shape != ids.shape:
        refuse(None, "attention_mask", f"shape {list(mask.shape)}", f"{list(ids.shape)}, as input_ids has")
    if not model.encoder_decoder and not bool(mask[:, -1].all()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        refuse(None, "attention_mask", f"row {row} ends with padding", "padding on the left: tokenizer.padding_side = 'left'")


def told_by_padding(ids: Tensor, o: Options) -> Tensor | None:
    """The mask of a decoder's prompt that came without: 0 where `pad_token_id` stands, which must be given and end no row, as in
    transformers; None without padding."""
    if o.pad_token_id is None or o.pad_token_id in o.ends:
        return None
    mask = ids.ne(o.pad_token_id)
    return None if bool(mask.all()) else mask.long()


def check_ids(model: "Model", ids: Tensor, new: int) -> None:
    """Refuse ids and positions beyond the model's tables: on an accelerator an index beyond them ends the whole process."""
    vocab, table = model.config.vocab, getattr(getattr(model, "embed", None), "positions", None)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        odd = ids.max() if ids.max() >= vocab else ids.min()
        refuse(None, "input_ids", str(int(odd)), f"ids below {vocab}, the model's vocabulary; is this its tokenizer?")
    positions = ids.size(1) + new if table is None else len(table.weight)
    room = positions - ids.size(1)
    if new > room:
        wanted = f"{f'at most {room}' if room > 0 else 'a shorter prompt'}: the model has {positions} positions"
        refuse(None, "max_new_tokens", f"{new} after a prompt of {ids.size(1)} tokens", wanted)
