"""Has a model generate texts: batches of prompts in, rows of ids out."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..data.collate import stack, stack_mask
from ..data.tokenizer import Tokenizer
from ..errors import refuse
from ..generate.run import settings
from ..model import Model
from ..parallel.device import home_of


class Spelled:
    """A tokenizer that spells out its special tokens, so that a stop string may be one."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, special=True)


class Spoken:
    """A streamer that passes the text of one row to `say` piece by piece, `ids` first. Half a character waits for its rest."""

    def __init__(self, tokenizer: Tokenizer, say: Any, ids: Sequence[int] = ()):
        self.tokenizer, self.say, self.ids, self.said = tokenizer, say, list(ids), 0
        self.flush()

    def put(self, ids: torch.Tensor) -> None:
        if ids.dim() == 1:  # what is not is the prompt
            self.ids += ids.tolist()
            self.flush()

    def end(self) -> None:
        self.flush(last=True)

    def flush(self, last: bool = False) -> None:
        text = self.tokenizer.decode(self.ids)
        if last or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.say(text[self.said :])
            self.said = len(text)


def write(model: Model, tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], batch: int = 8, **options: Any
          ) -> Iterator[list[list[int]]]:
    """For each prompt, a text or its ids, in turn the ids of its texts (`num_return_sequences` of them). A decoder's include the
    prompt; an encoder-decoder's are the target after its start token. Each goes up to and includes the id that ends it.

    `options` are those of `generate`. A seed counts up from batch to batch.
    """
    device = home_of(model)
    o = settings(model, None, {k: v for k, v in options.items() if k not in ("streamer", "prefix_allowed_tokens_fn")})
    for start in range(0, len(prompts), batch):
        encode = tokenizer.encode if model.encoder_decoder else tokenizer.begin
        rows = [encode(p) if isinstance(p, str) else list(p) for p in prompts[start : start + batch]]
        for prompt, row in zip(prompts[start : start + batch], rows, strict=True):
            if not row:
                refuse(None, "prompt", repr(prompt), "a text of at least one token")
        ids, mask = padded(rows, tokenizer.pad_id or 0, device, left=True)
        seed = {} if o.seed is None else {"seed": o.seed + start // batch}
        out = model.generate(ids, mask, tokenizer=Spelled(tokenizer), **{**options, **seed}).tolist()
        many = len(out) // len(rows)
        begin = 1 if model.encoder_decoder else ids.size(1)
        for i, row in enumerate(rows):
            kept = [] if model.encoder_decoder else row
            yield [kept + cut(text[begin:], o.ends, o.pad if o.stop_strings else None) for text in out[i * many : (i + 1) * many]]


def padded(rows: Sequence[list[int]], fill: int, device: torch.device, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (b s) of rows filled up on the left, or on the right."""
    both = stack([row[:: -1 if left else 1] for row in rows], fill), stack_mask(rows)
    ids, mask = ((x.flip(1) if left else x).to(device) for x in both)
    return ids, mask


def cut(ids: list[int], ends: Sequence[int], fill: int | None) -> list[int]:
    """`ids` up to the first that ends them. Those that a string has ended are followed only by `fill`."""
    for i, t in enumerate(ids):
        if t in ends:
            return ids[: i + 1]
    while ids and ids[-1] == fill:
        ids = ids[:-1]
    return ids
