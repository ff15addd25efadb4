"""Where a row ends: at an end token, when its text contains a stop string, or when a caller's criterion says so. b rows, t tokens
so far."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import refuse

Criterion = Callable[[Tensor, None], Tensor | bool]  # ids (b t) and None, for scores are not kept -> which rows end (b)


class Stop:
    """Tells which rows (b t) end with their last token (b)."""

    def __init__(self, ends: Sequence[int], strings: Sequence[str], tokenizer: Any, device: torch.device,
                 criteria: Iterable[Criterion] = ()):  # fmt: skip
        self.criteria = tuple(criteria)
        self.ends, self.strings, self.tokenizer = torch.tensor(ends, dtype=torch.long, device=device), tuple(strings), tokenizer
        if strings and tokenizer is None:
            refuse(None, "stop_strings", "given without a tokenizer", "generate(..., tokenizer=...)")
        # a token of any text has a byte at least; a few more, for what a decoder strips from the beginning
        self.window = max((len(s.encode()) for s in strings), default=0) + 4

    def __call__(self, ids: Tensor) -> Tensor:
        ended = (ids[:, -1:] == self.ends).any(1)
        if self.strings:
            ended |= torch.tensor([self.found(row) for row in ids[:, -self.window :].tolist()], device=ids.device)
        for criterion in self.criteria:
            ended = ended | torch.as_tensor(criterion(ids, None), device=ids.device)
        return ended

    def found(self, row: list[int]) -> bool:
        """Whether one of the strings is there that the last token has a part in; it may have begun in the prompt."""
        before, text = self.tokenizer.decode(row[:-1]), self.tokenizer.decode(row)
        pairs = zip(before, text, strict=False)
        old = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before))  # half a character may have been completed
        return any(at >= 0 and at + len(s) > old for s in self.strings for at in [text.rfind(s)])


class Over:
    """Asked after every token whether all rows have ended (b). On a GPU it does not wait: the answer is that of the token before
    (`late`), so that one token more than necessary is written."""

    def __init__(self, late: bool):
        self.late, self.known = late, torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=late and torch.cuda.is_available())
        self.copied: torch.cuda.Event | None = None

    def __call__(self, done: Tensor) -> bool:
        if not self.late:
            return bool(done.all())
        if self.copied is not None:
            self.copied.synchronize()
        answer = bool(self.known)
        self.known.copy_(done.all(), non_blocking=True)
        if done.is_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record()
        return answer
