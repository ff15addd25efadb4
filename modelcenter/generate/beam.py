"""Beam search, optionally in groups that differ from one another (diverse beam search).

b prompts, g groups, n beams of a group, c candidates, v vocabulary, t tokens so far. Rows of the state are (b g n), in this order.
"""

import torch
from torch import Tensor

from .options import Options
from .scores import Rule, apply
from .state import State
from .stop import Stop

LOW = -1e9  # the score of what does not exist: finite, so that where little is allowed it can still be taken


class Beams:
    """The beams of one group for every prompt: the scores of those that go on, and the best that have ended."""

    def __init__(self, state: State, o: Options, stop: Stop, source: torch.Generator, like: Tensor):
        self.o, self.stop, self.source, self.prompt, self.total = o, stop, source, state.length, state.ids.size(1)
        self.count = n = o.num_beams // o.num_beam_groups
        self.fill = o.pad or (*o.ends, 0)[0]  # as transformers has it
        b = len(state.ids)
        self.scores = like.new_full((b, n), LOW)
        self.scores[:, 0] = 0  # the beams of a prompt begin as one
        self.best = like.new_full((b, n), LOW)  # of the ended, over their length
        self.ended = torch.zeros((b, n), dtype=torch.bool, device=like.device)
        self.ids = state.ids[:, None].repeat(1, n, 1)  # of the ended
        self.ids[..., self.prompt :] = self.fill  # what remains of one that there is not, where fewer than n can end
        self.lengths = torch.full_like(self.ended, self.prompt, dtype=torch.long)
        self.open = torch.ones((b, 1), dtype=torch.bool, device=like.device)  # whether something better may come
        self.over = False

    def step(self, log_probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """One more token: log_probs b n v, ids b n t. Of the n beams that go on, which one each was (b n) and its token (b n)."""
        o, n, total = self.o, self.count, (log_probs + self.scores[..., None]).flatten(1)
        many = max(2, 1 + len(o.ends)) * n  # so that n can go on, even if all others end
        if o.do_sample:
            chosen = torch.multinomial(total.softmax(1), many, generator=self.source)
            values = total.gather(1, chosen)
        else:
            values, chosen = total.topk(many)
        beam, token = chosen // log_probs.size(2), chosen % log_probs.size(2)
        long = torch.cat((take(ids, beam), token[..., None]), 2)
        ends = self.stop(long.flatten(0, 1)).view_as(token) | (long.size(2) == self.total)
        self.keep(values, long, ends)
        running = values + LOW * ends
        go = running.topk(n).indices
        self.scores = running.gather(1, go)
        self.judge(long.size(2), bool(ends.all()))
        return beam.gather(1, go), token.gather(1, go)

    def keep(self, values: Tensor, long: Tensor, ends: Tensor) -> None:
        """Put candidates (scores b c, ids b c t) that end among the best; those beyond the first n only help others go on."""
        n, length = self.count, long.size(2)
        full = self.ended.all(1, keepdim=True) & (self.o.early_stopping is True)
        fresh = ends & (torch.arange(values.size(1), device=values.device) < n)
        values = values / (length - self.prompt) ** self.o.length_penalty
        values = values + LOW * full + LOW * ~self.open + LOW * ~fresh
        padded = torch.full((*long.shape[:2], self.total), self.fill, dtype=long.dtype, device=long.device)
        padded[..., :length] = long
        self.best, top = torch.cat((self.best, values), 1).topk(n)
        self.ids = take(torch.cat((self.ids, padded), 1), top)
        self.ended = torch.cat((self.ended, fresh), 1).gather(1, top)
        self.lengths = torch.cat((self.lengths, torch.full_like(values, length, dtype=torch.long)), 1).gather(1, top)

    def judge(self, length: int, all_end: bool) -> None:
        """Whether a beam that goes on may still become better than the worst that has ended; scores only fall, but a division
        by a longer length may lift them. `False` looks at the present length, `never` at the best one possible."""
        o = self.o
        furthest = self.total if o.early_stopping == "never" and o.length_penalty > 0 else length
        hope = self.scores[:, :1] / (furthest - self.prompt) ** o.length_penalty
        worst = torch.where(self.ended, self.best.amin(1, keepdim=True), LOW)
        self.open = self.open & (hope > worst).any(1, keepdim=True)
        enough = o.early_stopping is True and bool(self.ended.all())
        self.over = not bool(self.open.any()) or enough or all_end


def search(state: State, changes: list[Rule], stop: Stop, o: Options, source: torch.Generator) -> Tensor:
    """The best `num_return_sequences` continuations of every prompt (b * num_return_sequences t), the best first.

    With groups: Vijayakumar et al., 2016, algorithm 1, with the Hamming distance as the measure of diversity: at each step a
    group's log-probabilities fall by `diversity_penalty` for each beam of an earlier group that has just taken the same token.
    """
    b, g, n = len(state.ids), o.num_beam_groups, o.num_beams // o.num_beam_groups
    first = state.scores()
    groups = [Beams(state, o, stop, source, first) for _ in range(g)]
    state.repeat(g * n)
    scores = first.repeat_interleave(g * n, 0)
    at = torch.arange(b, device=state.ids.device)[:, None] * (g * n)
    while True:
        log_probs = apply(changes, state.seen, scores.log_softmax(1)).view(b, g, n, -1)
        ids = state.seen.view(b, g, n, -1)
        used, rows, tokens = torch.zeros_like(log_probs[:, 0, 0]), [], []
        for i, group in enumerate(groups):
            beam, token = group.step(log_probs[:, i] - o.diversity_penalty * used[:, None], ids[:, i])
            used.scatter_add_(1, token, torch.ones_like(token, dtype=used.dtype))
            rows.append(at + i * n + beam)
            tokens.append(token)
        if all(group.over for group in groups):
            break
        state.reorder(torch.stack(rows, 1).flatten())
        state.append(torch.stack(tokens, 1).flatten())
        scores = state.scores()
    top = torch.cat([group.best for group in groups], 1).topk(o.num_return_sequences).indices
    longest = int(torch.cat([group.lengths for group in groups], 1).gather(1, top).max())
    return take(torch.cat([group.ids for group in groups], 1), top).flatten(0, 1)[:, :longest]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (b m t) at index (b k) of its second dimension: b k t."""
    return x.gather(1, index[..., None].expand(-1, -1, x.size(2)))
