"""Generation: greedy and sampling, with a cache of keys and values, for rows padded on the left."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import nearest, refuse
from .layers import Cache, LMHead

if TYPE_CHECKING:
    from .registry import Model

KNOWN = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id", "seed", "num_beams")


@torch.no_grad()
def generate(
    model: "Model",
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    **options: Any,
) -> Tensor:
    """Token ids (b, prompt + new), the prompt included; an encoder-decoder returns its target from the start token on.

    `input_ids` b s, padded on the left with `attention_mask` 0. Options: max_new_tokens (20), do_sample (False), temperature
    (1.0), top_k (0: all), top_p (1.0), eos_token_id (an id or several), pad_token_id, seed. Those not given come from
    `generation_config` (an object or a mapping with these names), or else from the generation_config.json that came with the
    weights, then from config.json. `streamer.put(ids)` is called with every new column and `streamer.end()` at the end.
    """
    choose = settings(model, generation_config, options)
    check_ids(model, input_ids, choose["max_new_tokens"])
    was_training, cache, done = model.training, Cache(), torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    source = torch.Generator(input_ids.device)
    source.manual_seed(choose["seed"]) if choose["seed"] is not None else source.seed()
    ends = torch.tensor(choose["eos_token_id"], device=input_ids.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    start = choose["decoder_start_token_id"]
    ids = input_ids if start is None else input_ids.new_full((len(input_ids), 1), start)
    model.eval()
    try:
        for _ in range(choose["max_new_tokens"]):
            scores = step(model, ids, input_ids, mask, cache, start is not None)
            new = pick(scores, choose, source)
            new = torch.where(done, choose["pad_token_id"], new)
            ids = torch.cat((ids, new[:, None]), 1)
            if start is None:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            if streamer is not None:
                streamer.put(new.cpu())
            done |= torch.isin(new, ends)
            if bool(done.all()):
                break
    finally:
        model.train(was_training)
    if streamer is not None:
        streamer.end()
    return ids


def step(model: "Model", ids: Tensor, source: Tensor, mask: Tensor, cache: Cache, encoder_decoder: bool) -> Tensor:
    """Scores of the next token (b vocab). Only what the cache lacks is run."""
    if encoder_decoder:
        first = {"input_ids": source} if cache.memory is None else {}
        out = model(
            **first, attention_mask=mask, decoder_input_ids=ids[:, cache.length :], past_key_values=cache, logits_to_keep=1
        )
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # a row's first real token stands at 0, whatever pads it
        out = model(
            ids[:, cache.length :], mask, positions[:, cache.length :], past_key_values=cache, logits_to_keep=1
        )
    cache.length = ids.size(1)
    scores: Tensor = out.logits[:, -1]
    return scores


def pick(scores: Tensor, choose: dict[str, Any], source: torch.Generator) -> Tensor:
    """The next token of every row (b)."""
    if not choose["do_sample"]:
        return scores.argmax(-1)
    scores = scores.float() / choose["temperature"]
    if choose["top_k"]:
        least = scores.topk(min(choose["top_k"], scores.size(-1))).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if choose["top_p"] < 1:
        ranked, order = scores.sort(descending=True)
        mass = ranked.softmax(-1).cumsum(-1)
        late = mass - ranked.softmax(-1) >= choose["top_p"]  # what lies before a token already holds the mass
        scores = scores.masked_fill(late.scatter(1, order, late), float("-inf"))
    return torch.multinomial(scores.softmax(-1), 1, generator=source)[:, 0]


def settings(model: "Model", given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Every option: from the call, from `generation_config` or the file of that name beside the weights, from config.json, or the
    default."""
    for name in options:
        if name not in KNOWN:
            refuse(None, name, "unknown option of generate", nearest(name, KNOWN))
    if given is None:
        given = json.loads(model.companions.get("generation_config.json", b"{}"))
    elif not isinstance(given, dict):
        given = given.to_dict()
    config = model.config.to_dict()

    def find(name: str, default: Any, *places: dict[str, Any]) -> Any:
        return next((p[name] for p in (options, given, *places) if p.get(name) is not None), default)

    ends = find("eos_token_id", [], config)
    ends = ends if isinstance(ends, list | tuple) else [ends]
    out = {
        "max_new_tokens": find("max_new_tokens", 20),
        "do_sample": find("do_sample", False),
        "temperature": find("temperature", 1.0),
        "top_k": find("top_k", 0),
        "top_p": find("top_p", 1.0),
        "seed": find("seed", None),
        "eos_token_id": list(ends),
        "pad_token_id": find("pad_token_id", ends[0] if ends else 0, config),
        "decoder_start_token_id": find("decoder_start_token_id", 0, config) if model.encoder_decoder else None,
    }
    for name, good, wanted in (
        ("max_new_tokens", type(out["max_new_tokens"]) is int and out["max_new_tokens"] > 0, "a whole number from 1"),
        ("temperature", out["temperature"] >= 1e-6, "a number from 1e-6; do_sample=False for greedy"),
        ("top_p", 0 < out["top_p"] <= 1, "a number above 0 and at most 1"),
        ("top_k", type(out["top_k"]) is int and out["top_k"] >= 0, "a whole number from 0"),
        ("num_beams", find("num_beams", 1) == 1, "1: beam search is not implemented"),
    ):
        if not good:
            refuse(None, name, repr(find(name, None)), wanted)
    if not isinstance(model.head, LMHead) or not (model.head.shift or model.encoder_decoder):
        refuse(None, "generate", f"a model with the task {model.task!r}", "one that predicts the next token")
    return out


def check_ids(model: "Model", ids: Tensor, new: int) -> None:
    """Refuse what the model's tables do not hold: on an accelerator an index beyond them ends the whole process."""
    if not ids.numel():
        refuse(None, "input_ids", f"shape {list(ids.shape)}", "a prompt of at least one token")
    vocab, table = model.config.vocab, getattr(getattr(model, "embed", None), "positions", None)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        odd = ids.max() if ids.max() >= vocab else ids.min()
        refuse(None, "input_ids", str(int(odd)), f"ids below {vocab}, the model's vocabulary; is this its tokenizer?")
    positions = ids.size(1) + new if table is None else len(table.weight)
    room = positions - ids.size(1)
    if new > room:
        wanted = f"at most {room}: the model has {positions} positions" if room > 0 else "a shorter prompt"
        refuse(None, "max_new_tokens", f"{new} after a prompt of {ids.size(1)} tokens", wanted)
