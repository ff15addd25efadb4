"""Rules that change the scores of the next token before one is chosen. b rows, t tokens so far, v vocabulary.

The order is that of transformers: penalties, bans, lengths, constraints, a caller's own rules, then the filters for sampling.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import refuse
from .options import Options, several

NEVER = float("-inf")
Rule = Callable[[Tensor, Tensor], Tensor]  # ids (b t) and scores (b v) -> scores (b v); neither argument changes
Allowed = Callable[[int, Tensor], Sequence[int]]  # a row's number (of all beams of a prompt one) and ids (t) -> ids that may follow


def rules(o: Options, prompt: int, new: int, mask: Tensor | None, allowed: Allowed | None, vocab: int,
          own: Iterable[Rule] | None = None) -> list[Rule]:  # fmt: skip
    """The rules that `o` asks for, in order, for prompts of `prompt` tokens (`mask`: which are real) and `new` tokens to come.

    Rows of one prompt stand together.
    """
    check_vocab(o, vocab)
    words = [word for word in o.bad_words_ids if word not in [(end,) for end in o.ends]]
    least = o.min_length if o.min_new_tokens is None else prompt + o.min_new_tokens
    out: list[Rule] = []
    if o.repetition_penalty != 1:
        out.append(lambda ids, scores: penalise_repetition(ids, scores, o.repetition_penalty, mask))
    if o.frequency_penalty or o.presence_penalty:
        out.append(lambda ids, scores: penalise_frequency(ids[:, prompt:], scores, o.frequency_penalty, o.presence_penalty))
    if o.no_repeat_ngram_size:
        out.append(lambda ids, scores: ban_repeated_ngrams(ids, scores, o.no_repeat_ngram_size))
    if words:
        out.append(lambda ids, scores: ban_words(ids, scores, words))
    if least and o.ends:
        out.append(lambda ids, scores: ban(scores, o.ends) if ids.size(1) < least else scores)
    if allowed is not None:
        out.append(lambda ids, scores: constrain(ids, scores, allowed, o.num_beams))
    if o.forced_bos_token_id is not None:
        out.append(lambda ids, scores: force(scores, several(o.forced_bos_token_id)) if ids.size(1) == 1 else scores)
    if o.forced_eos_token_id is not None:
        last = prompt + new - 1
        out.append(lambda ids, scores: force(scores, several(o.forced_eos_token_id)) if ids.size(1) == last else scores)
    if o.suppress_tokens:
        out.append(lambda ids, scores: ban(scores, o.suppress_tokens))
    if o.begin_suppress_tokens:
        first = prompt + (prompt == 1 and o.forced_bos_token_id is not None)
        out.append(lambda ids, scores: ban(scores, o.begin_suppress_tokens) if ids.size(1) == first else scores)
    out += [partial(unshared, rule) for rule in own or ()]
    if o.do_sample:
        keep = 1 if o.num_beams == 1 else len(o.ends) + 1 if o.ends else 2  # so that a beam can go on
        out.append(lambda ids, scores: filtered(scores, o, keep))
    return out


def check_vocab(o: Options, vocab: int) -> None:
    """Refuse options that name ids which the vocabulary does not have, or ban all that it has."""
    for name, ids in (("suppress_tokens", o.suppress_tokens), ("begin_suppress_tokens", o.begin_suppress_tokens),
                      ("decoder_start_token_id", several(o.decoder_start_token_id)),
                      ("bad_words_ids", [i for word in o.bad_words_ids for i in word]),
                      ("forced_bos_token_id", several(o.forced_bos_token_id)),
                      ("forced_eos_token_id", several(o.forced_eos_token_id))):  # fmt: skip
        if max(ids, default=0) >= vocab:
            refuse(None, name, str(max(ids)), f"ids below {vocab}, the model's vocabulary")
    if len(set(o.suppress_tokens)) == vocab:
        refuse(None, "suppress_tokens", f"all {vocab} ids", "at least one id that may be generated")


def unshared(rule: Rule, ids: Tensor, scores: Tensor) -> Tensor:
    """What a caller's rule makes of scores that it may write into."""
    return rule(ids, scores.clone())


def apply(changes: Sequence[Rule], ids: Tensor, scores: Tensor) -> Tensor:
    for change in changes:
        scores = change(ids, scores)
    return scores


def penalise_repetition(ids: Tensor, scores: Tensor, penalty: float, mask: Tensor | None) -> Tensor:
    """Divide the scores of a row's tokens by `penalty` if they are above zero, and multiply them by it if not. Keskar et al., 2019,
    section 4.1.

    Padding on the left (b0 s; of each prompt, if rows were repeated) does not count as tokens of the row.
    """
    there = torch.zeros_like(scores, dtype=torch.bool)
    if mask is None:
        there = there.scatter(1, ids, True)
    else:
        first = mask.ne(0).int().argmax(1).repeat_interleave(len(ids) // len(mask))
        real = torch.arange(ids.size(1), device=ids.device) >= first[:, None]
        spare = torch.where(real, ids, scores.size(1))
        there = torch.nn.functional.pad(there, (0, 1)).scatter(1, spare, True)[:, :-1]
    return torch.where(there, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def penalise_frequency(new: Tensor, scores: Tensor, frequency: float, presence: float) -> Tensor:
    """score - frequency * count - presence * (count > 0), where `count` is how often a token was generated so far."""
    count = torch.zeros_like(scores).scatter_add(1, new, torch.ones_like(new, dtype=scores.dtype))
    return scores - frequency * count - presence * (count > 0)


def ban_repeated_ngrams(ids: Tensor, scores: Tensor, n: int) -> Tensor:
    """No token that would make a run of `n` tokens occur twice in its row. Paulus et al., 2017, section 2.5."""
    if ids.size(1) < n:
        return scores
    runs = ids.unfold(1, n, 1)
    again = (runs[..., :-1] == ids[:, None, ids.size(1) - n + 1 :]).all(-1)
    last = torch.where(again, runs[..., -1], scores.size(1))
    banned = scores.new_zeros((len(scores), scores.size(1) + 1), dtype=torch.bool).scatter(1, last, True)
    return scores.masked_fill(banned[:, :-1], NEVER)


def ban(scores: Tensor, ids: Sequence[int]) -> Tensor:
    return scores.index_fill(1, torch.tensor(ids, device=scores.device), NEVER)


def ban_words(ids: Tensor, scores: Tensor, words: Sequence[Sequence[int]]) -> Tensor:
    """No token that would complete one of the `words`."""
    scores = ban(scores, single) if (single := [word[0] for word in words if len(word) == 1]) else scores.clone()
    for *head, last in words:
        if head and len(head) <= ids.size(1):
            begun = (ids[:, -len(head) :] == torch.tensor(head, device=ids.device)).all(1)
            scores[:, last] = scores[:, last].masked_fill(begun, NEVER)
    return scores


def constrain(ids: Tensor, scores: Tensor, allowed: Allowed, beams: int) -> Tensor:
    """Allow only what `allowed` returns for each row, by the number of its `beams` together, as in transformers. If all of that is
    banned in all of them, it is allowed nevertheless."""
    mask = torch.full_like(scores, NEVER)
    for i, row in enumerate(ids):
        may = list(allowed(i // beams, row))
        if not may:
            refuse(None, "prefix_allowed_tokens_fn", f"no token for row {i // beams}", "at least one")
        mask[i, may] = 0
    out = scores + mask
    stuck = out.amax(1).isneginf().view(-1, beams).all(1).repeat_interleave(beams)
    return torch.where(stuck[:, None], mask, out)


def force(scores: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.full_like(scores, NEVER).index_fill(1, torch.tensor(ids, device=scores.device), 0)


def filtered(scores: Tensor, o: Options, keep: int) -> Tensor:
    """Scores divided by the temperature, with -inf for tokens that are not to be drawn; at least `keep` tokens stay.

    top-k: Fan et al., 2018; top-p: Holtzman et al., 2020; min-p: Nguyen et al., 2024.
    """
    scores = scores / o.temperature
    if o.top_k:
        least = scores.topk(min(max(o.top_k, keep), scores.size(1))).values[:, -1:]
        scores = scores.masked_fill(scores < least, NEVER)
    if o.top_p < 1:
        ranked, order = scores.sort(descending=True)
        mass = ranked.softmax(1)
        late = mass.cumsum(1) - mass >= o.top_p  # what lies before a token already holds the mass
        late[:, :keep] = False
        scores = scores.masked_fill(late.scatter(1, order, late), NEVER)
    if o.min_p:
        share = scores.softmax(1)
        small = share < o.min_p * share.amax(1, keepdim=True)
        small = small.scatter(1, scores.topk(keep).indices, False)
        scores = scores.masked_fill(small, NEVER)
    return scores
