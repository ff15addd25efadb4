"""Generation beside what `test_zoo` holds to transformers: steps with a cache, ends, sampling."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from zoo import Case

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.generate.options import UNSUPPORTED, WITHOUT_EFFECT, Options
from modelcenter.generate.run import settings
from modelcenter.generate.scores import apply, filtered, penalise_frequency, rules
from modelcenter.layers import Cache
from modelcenter.train.write import write

CAUSAL = [Case(kind, "default", "lm") for kind in ("bloom", "gpt2", "llama")]
GPT = Case("gpt2", "default", "lm")


def prompt() -> torch.Tensor:
    return zoo.inputs(GPT)["input_ids"]


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_steps_with_a_cache_equal_one_forward(case: Case) -> None:
    """Whoever calls the model itself need not say where the new tokens stand, and may feed several at once."""
    _, ours = zoo.pair(case)
    ids, cache, parts = zoo.inputs(case)["input_ids"], Cache(), []
    for at in (slice(0, 1), slice(1, 2), slice(2, 6), slice(6, 11)):
        parts.append(ours(ids[:, at], past_key_values=cache).logits)
    assert (torch.cat(parts, 1) - ours(ids).logits).abs().max() < 1e-12


def test_a_row_that_has_ended_is_padded_and_all_ended_stop() -> None:
    _, ours = zoo.pair(GPT)
    free = ours.generate(prompt(), max_new_tokens=12, eos_token_id=[])[:, 11:].tolist()
    first, second = free
    end = next(t for t in first if t not in second)  # ends the first row alone
    stop = first.index(end) + 1
    found = ours.generate(prompt(), max_new_tokens=12, eos_token_id=end, pad_token_id=0)[:, 11:].tolist()
    assert found == [first[:stop] + [0] * (12 - stop), second]
    ends = [first[2], second[4]]
    found = ours.generate(prompt(), max_new_tokens=12, eos_token_id=ends, pad_token_id=0)[:, 11:]
    assert found.shape[1] <= 5 and all(any(t in ends for t in row) for row in found.tolist())


@pytest.mark.parametrize("case", [*CAUSAL, Case("t5", "default", "seq2seq")], ids=str)
@pytest.mark.parametrize("end", [2, [2, 3], None])
def test_padding_without_a_mask_is_what_transformers_takes_it_for(case: Case, end: int | list[int] | None) -> None:
    """The prompt of who tokenizes a batch and hands on the ids alone."""
    theirs, ours = zoo.pair(case)
    ids = zoo.inputs(case)["input_ids"].clone()
    ids[1, slice(-4, None) if case.seq2seq else slice(4)] = 3
    ids[0, 5] = 3
    options = {"max_new_tokens": 8, "pad_token_id": 3, "eos_token_id": end}
    with zoo.wide(torch.float64):
        wanted = theirs.generate(ids, do_sample=False, **options)
    assert ours.generate(ids, **options).tolist() == wanted.tolist()
    if end == 2 and not case.seq2seq:
        assert ours.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist() != wanted.tolist()
        with pytest.raises(InputError, match="attention_mask: row 1 ends with padding; padding on the left"):
            ours.generate(ids.flip(1), **options)


def test_a_row_that_has_ended_is_filled_with_what_the_model_knows() -> None:
    """Not with the end of a config that is beyond its vocabulary: on a GPU that would end the process."""
    _, ours = zoo.pair(GPT)
    free = ours.generate(prompt(), max_new_tokens=12, eos_token_id=[])[:, 11:].tolist()
    end = next(t for t in free[0] if t not in free[1])
    found = ours.generate(prompt(), max_new_tokens=12, eos_token_id=[500, end])[:, 11:].tolist()
    stop = free[0].index(end) + 1
    assert found == [free[0][:stop] + [0] * (12 - stop), free[1]]


def test_the_prompt_stands_and_the_mode_is_left() -> None:
    _, ours = zoo.pair(GPT)
    for training in (True, False):
        out = ours.train(training).generate(prompt(), max_new_tokens=3, eos_token_id=[])
        assert ours.training is training and torch.equal(out[:, :11], prompt()) and out.shape == (2, 14)


def test_each_part_is_left_in_its_mode() -> None:
    _, ours = zoo.pair(GPT)
    ours.train().decoder.blocks[0].eval()
    before = {name: module.training for name, module in ours.named_modules()}
    ours.generate(prompt(), max_new_tokens=2)
    assert {name: module.training for name, module in ours.named_modules()} == before


def test_sampling_repeats_by_its_seed_and_touches_no_other_randomness() -> None:
    _, ours = zoo.pair(GPT)
    before = torch.get_rng_state()
    runs = [ours.generate(prompt(), do_sample=True, eos_token_id=[], seed=seed).tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("case", [GPT, Case("t5", "default", "seq2seq")], ids=str)
@pytest.mark.parametrize("options", [
    {}, {"top_k": 1}, {"top_k": 4, "length_penalty": 2.0}, {"temperature": 3.0, "top_k": 0, "num_return_sequences": 3},
    {"eos_token_id": [3, 5, 7, 9], "early_stopping": True, "temperature": 2.0},
], ids=str)  # fmt: skip
def test_drawn_beams_are_those_of_transformers(case: Case, options: dict[str, Any]) -> None:
    """With the same seed, to the token: both draw as many candidates, at the same moments, of the same probabilities."""
    theirs, ours = zoo.pair(case)
    ids = zoo.inputs(case)["input_ids"]
    given = {"do_sample": True, "num_beams": 3, "max_new_tokens": 8, "eos_token_id": 3, "pad_token_id": 0, **options}
    for seed in range(3):
        with zoo.wide(torch.float64), torch.random.fork_rng():
            torch.manual_seed(seed)
            wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), **given)
        assert ours.generate(ids, attention_mask=torch.ones_like(ids), seed=seed, **given).tolist() == wanted.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_padding_before_a_prompt_is_not_penalised(options: dict[str, Any]) -> None:
    """A row of a batch is what it is alone, whatever token it is filled up with."""
    _, ours = zoo.pair(GPT)
    given = {"max_new_tokens": 6, "eos_token_id": [], "repetition_penalty": 2.0, **options}
    short = prompt()[:1, :5]
    alone = ours.generate(short, **given)
    likely = int(alone[0, 5])
    assert likely not in short
    both, mask = torch.cat((prompt()[1:, :9], F.pad(short, (4, 0), value=likely))), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    found = ours.generate(both, attention_mask=mask, **given)
    assert found[len(found) // 2 :, 4:].tolist() == alone.tolist()
    assert found[: len(found) // 2].tolist() == ours.generate(both[:1], **given).tolist()


LIKELY = [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, LIKELY), ({"top_k": 2}, [0.4, 0.3]), ({"top_p": 0.75}, [0.4, 0.3, 0.2]), ({"top_p": 0.01}, [0.4]),
     ({"min_p": 0.6}, [0.4, 0.3]), ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
     ({"temperature": 0.5, "top_p": 0.55}, [0.16, 0.09]), ({"temperature": 0.5, "min_p": 0.5}, [0.16, 0.09])],
    ids=["all", "top-k", "top-p", "little-p", "min-p", "cold", "cold-p", "cold-min-p"],
)  # fmt: skip
def test_samples_are_drawn_from_what_is_kept(options: dict[str, float], kept: list[float]) -> None:
    order = torch.tensor([2, 0, 3, 1])
    scores = torch.empty(4).index_copy(0, order, torch.tensor(LIKELY).log())
    share = filtered(scores[None], Options(do_sample=True, **options), 1).softmax(1)[0, order]
    wanted = torch.tensor(kept + [0.0] * (4 - len(kept))) / sum(kept)
    assert ((share - wanted).abs() < 1e-6).all()


def test_draws_have_the_shares_of_their_scores() -> None:
    _, ours = zoo.pair(GPT)
    options = {"do_sample": True, "temperature": 1.7, "top_k": 6, "max_new_tokens": 1, "num_return_sequences": 4000, "seed": 0}
    drawn = ours.generate(prompt(), **options)[:, -1].view(2, 4000)
    wanted = filtered(ours(prompt()).logits[:, -1], Options(do_sample=True, temperature=1.7, top_k=6), 1).softmax(1)
    for row, share in zip(drawn, wanted, strict=True):
        assert (torch.bincount(row, minlength=128) / 4000 - share).abs().max() < 0.03 and share.max() < 0.9


def test_who_says_no_more_than_that_it_draws_draws_among_as_many_as_transformers() -> None:
    """The likeliest fifty of a hundred and more, which one temperature makes alike."""
    model, ours = zoo.pair(GPT)
    options = {"do_sample": True, "temperature": 1e5, "max_new_tokens": 1, "num_return_sequences": 1500}
    for drawn in (ours.generate(prompt()[:1], seed=0, **options), model.generate(prompt()[:1], pad_token_id=0, **options)):
        assert len(drawn[:, -1].unique()) == 50 < ours.config.vocab
    every = ours.generate(prompt()[:1], seed=0, top_k=0, **options)[:, -1]
    assert len(every.unique()) > 80


def theirs(ids: torch.Tensor, scores: torch.Tensor, prompt: int, mask: torch.Tensor | None, **options: object) -> torch.Tensor:
    """What transformers makes of the scores."""
    import transformers

    model, _ = zoo.pair(GPT)
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    config = transformers.GenerationConfig(**{"top_k": 0, "num_beams": 1, "max_length": 20, **options})
    config._eos_token_tensor = torch.tensor(config.eos_token_id) if config.eos_token_id is not None else None
    if config.min_new_tokens is not None:
        config.min_length = None
    kwargs = {} if mask is None else {"attention_mask": mask.repeat_interleave(len(ids) // len(mask), 0)}
    processors = model._get_logits_processor(config, prompt, prefix_allowed_tokens_fn=allowed, device="cpu", model_kwargs=kwargs)
    return processors(ids, scores)


RULES = [
    {"repetition_penalty": 1.7}, {"repetition_penalty": 0.4}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 9}, {"bad_words_ids": [[3], [1, 2], [0, 1, 2], [4, 4], [5]]},
    {"bad_words_ids": [[5]]}, {"min_length": 9}, {"min_length": 8}, {"min_new_tokens": 4}, {"min_new_tokens": 3},
    {"forced_eos_token_id": [2, 3], "max_length": 9}, {"forced_eos_token_id": 2, "max_length": 10}, {"suppress_tokens": [0, 6]},
    {"begin_suppress_tokens": [1, 3]}, {"do_sample": True, "temperature": 0.3}, {"do_sample": True, "top_k": 3},
    {"do_sample": True, "top_p": 0.6}, {"do_sample": True, "min_p": 0.3}, {"do_sample": True, "top_p": 1e-5, "num_beams": 2},
    {"do_sample": True, "top_k": 1, "num_beams": 2}, {"do_sample": True, "min_p": 1.0, "num_beams": 2},
    {"do_sample": True, "temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.3},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row, int(ids[-1])]},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row + 3], "suppress_tokens": [4], "bad_words_ids": [[4]], "num_beams": 2},
]  # fmt: skip


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and scores of seven words, so that everything recurs; four rows of two prompts."""
    source = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 7, (4, 8), generator=source)
    ids[0, -2:], ids[1, -2:] = ids[0, 1:3], torch.tensor([0, 1])
    return ids, torch.randn(4, 7, generator=source, dtype=torch.float64) * 2


@pytest.mark.parametrize("options", RULES, ids=lambda o: "-".join(o) + "-" + "-".join(map(str, o.values()))[:20])
@pytest.mark.parametrize("shape", ["first", "later", "padded"])
def test_scores_are_changed_as_transformers_changes_them(options: dict[str, object], shape: str) -> None:
    ids, scores = words()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]) if shape == "padded" else None
    prompt = 8 if shape == "first" else 5
    eos = {"eos_token_id": [5, 6]}
    if mask is not None and "repetition_penalty" in options:  # older versions penalise what pads a row: each alone, without it
        first = (mask == 0).sum(1).repeat_interleave(2).tolist()
        rows = [theirs(ids[i : i + 1, n:], scores[i : i + 1], prompt - n, None, **options, **eos) for i, n in enumerate(first)]
        wanted = torch.cat(rows)
    else:
        wanted = theirs(ids, scores.clone(), prompt, mask, **options, **eos)
    mine = {k: tuple(map(tuple, v)) if k == "bad_words_ids" else tuple(v) if isinstance(v, list) else v
            for k, v in {**options, **eos}.items()}  # fmt: skip
    allowed = mine.pop("prefix_allowed_tokens_fn", None)
    o, before = Options(**{"max_length": 20, **mine}), scores.clone()
    changes = rules(o, prompt, o.new_tokens(prompt), mask, allowed, 7)
    found = apply(changes, ids, scores)
    assert torch.equal(found.isinf(), wanted.isinf()) and torch.equal(scores, before)
    assert (found - wanted).nan_to_num(0).abs().max() < 1e-12
    alone, n = rules(o, prompt, o.new_tokens(prompt), None if mask is None else mask[:1], allowed, 7), o.num_beams
    assert torch.equal(apply(alone, ids[:n], scores[:n]), found[:n]), "a row depends on how many there are"


def test_the_rules_above_all_change_something() -> None:
    ids, scores = words()
    idle = []
    for options in RULES:
        changed = [theirs(ids, scores.clone(), p, None, **options, eos_token_id=[5, 6]) for p in (5, 8)]
        idle += [options] if all(torch.equal(c, scores) for c in changed) else []
    meant = ({"no_repeat_ngram_size": 9}, {"bad_words_ids": [[5]]}, {"min_length": 8}, {"forced_eos_token_id": 2, "max_length": 10})
    assert idle == list(meant)


def test_frequency_and_presence() -> None:
    """score - count * frequency - (count > 0) * presence, of generated tokens alone: OpenAI's API reference."""
    _, ours = zoo.pair(GPT)
    scores = torch.zeros(2, 4)
    found = penalise_frequency(torch.tensor([[0, 1, 0], [3, 3, 3]]), scores, 0.5, 0.25)
    assert found.tolist() == [[-1.25, -0.75, 0, 0], [0, 0, 0, -1.75]]
    free = ours.generate(prompt(), max_new_tokens=24, eos_token_id=[])[:, 11:]
    once = ours.generate(prompt(), max_new_tokens=24, eos_token_id=[], presence_penalty=1e9)[:, 11:]
    assert all(len(set(row)) == 24 for row in once.tolist()) and any(len(set(row)) < 24 for row in free.tolist())
    often = ours.generate(prompt(), max_new_tokens=24, eos_token_id=[], frequency_penalty=0.8)[:, 11:]
    ids = prompt()
    for _ in range(24):  # by the definition, without a cache
        count = torch.stack([torch.bincount(row, minlength=128) for row in ids[:, 11:]])
        ids = torch.cat((ids, (ours(ids).logits[:, -1] - 0.8 * count).argmax(1, keepdim=True)), 1)
    assert torch.equal(ids[:, 11:], often) and not torch.equal(often, free)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_diverse_beams_by_their_definition(groups: int, early: bool | str) -> None:
    """Vijayakumar et al., 2016, algorithm 1, written down once more with lists and without a cache. With one group it is beam
    search itself, which test_zoo holds to transformers."""
    _, ours = zoo.pair(GPT)
    width, new, weight, penalty = 2, 6, 1.5 if groups > 1 else 0.0, 0.7
    free = ours.generate(prompt(), max_new_tokens=new, eos_token_id=[], num_beams=groups * width)
    ends = [int(free[0, 13]), int(free[1, 14])]
    found = ours.generate(prompt(), max_new_tokens=new, eos_token_id=ends, pad_token_id=0, num_beams=groups * width,
                          num_beam_groups=groups, diversity_penalty=weight, length_penalty=penalty, early_stopping=early,
                          num_return_sequences=groups * width)  # fmt: skip
    for number, row in enumerate(prompt().tolist()):
        running, ended, hopeless = [[(0.0, row)] for _ in range(groups)], [[] for _ in range(groups)], [False] * groups
        for length in range(1, new + 1):
            used: dict[int, int] = {}
            for g in range(groups):
                options = []
                for score, ids in running[g]:
                    logs = ours(torch.tensor([ids])).logits[0, -1].log_softmax(0).tolist()
                    options += [(score + lp - weight * used.get(t, 0), [*ids, t]) for t, lp in enumerate(logs)]
                options.sort(key=lambda o: -o[0])
                full = len(ended[g]) == width and early is True
                for score, ids in options[:width]:
                    if (ids[-1] in ends or length == new) and not full and not hopeless[g]:
                        ended[g].append((score / length**penalty, ids))
                ended[g] = sorted(ended[g], key=lambda e: -e[0])[:width]
                running[g] = [o for o in options if o[1][-1] not in ends][:width]
                for _, ids in running[g]:
                    used[ids[-1]] = used.get(ids[-1], 0) + 1
            for g in range(groups):
                best = running[g][0][0] / (new if early == "never" else length) ** penalty
                worst = min((s for s, _ in ended[g]), default=0)
                hopeless[g] |= len(ended[g]) == width and best <= worst
        wanted = sorted((e for group in ended for e in group), key=lambda e: -e[0])
        texts = [(ids + ends[:1] * new)[: found.size(1)] for _, ids in wanted]
        assert found.view(2, groups * width, -1)[number].tolist() == texts


def test_groups_differ() -> None:
    _, ours = zoo.pair(GPT)
    options = {"max_new_tokens": 5, "eos_token_id": [], "num_beams": 4, "num_return_sequences": 4}
    alike = ours.generate(prompt(), **options).view(2, 4, -1)[..., 11]
    apart = ours.generate(prompt(), **options, num_beam_groups=4, diversity_penalty=50.0).view(2, 4, -1)[..., 11]
    assert all(len(set(row)) == 4 for row in apart.tolist()) and any(len(set(row)) < 4 for row in alike.tolist())


@pytest.mark.parametrize("case", [GPT, Case("t5", "default", "seq2seq")], ids=str)
def test_a_beam_that_there_is_not_is_filled_as_in_transformers(case: Case) -> None:
    """Where two tokens may follow and three texts are asked for."""
    theirs, ours = zoo.pair(case)
    options = {"max_new_tokens": 1, "num_beams": 3, "num_return_sequences": 3, "eos_token_id": 52, "pad_token_id": 0}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: [7, 52]
    with zoo.wide(torch.float64):
        wanted = theirs.generate(zoo.inputs(case)["input_ids"], **options)
    assert torch.equal(ours.generate(zoo.inputs(case)["input_ids"], **options), wanted)


class Letters:
    """A tokenizer of which every id is one letter, and 100 is half of an ä."""

    def decode(self, ids: list[int]) -> str:
        halves = {100: b"\xc3", 101: b"\xa4"}
        return b"".join(halves.get(i, chr(97 + i % 26).encode()) for i in ids).decode(errors="replace")


def test_a_stop_string_ends_its_row() -> None:
    _, ours = zoo.pair(GPT)
    free = ours.generate(prompt(), max_new_tokens=16, eos_token_id=[])
    first, second = (Letters().decode(row) for row in free.tolist())
    runs = [(first[k - 3 : k], k) for k in range(15, 24)]
    stop, end = next((run, k) for run, k in runs if first.find(run) == k - 3 and run not in second)
    out = ours.generate(prompt(), max_new_tokens=16, eos_token_id=[], pad_token_id=7, stop_strings=[stop], tokenizer=Letters())
    assert out[0].tolist() == free[0, :end].tolist() + [7] * (27 - end) and torch.equal(out[1], free[1])
    begun = first[9:12]  # begins in the prompt, ends in the first new token
    assert begun not in first[:11]
    out = ours.generate(prompt()[:1], max_new_tokens=16, eos_token_id=[], stop_strings=begun, tokenizer=Letters())
    assert out.shape == (1, 12)
    inside = first[6:9]  # what the prompt holds is not what was written
    out = ours.generate(prompt()[:1], max_new_tokens=3, eos_token_id=[], stop_strings=inside, tokenizer=Letters())
    assert out.shape == (1, 14)
    with pytest.raises(InputError, match="stop_strings: given without a tokenizer"):
        ours.generate(prompt(), stop_strings="a")


def test_what_fills_up_behind_a_stop_string_is_no_text() -> None:
    """Also where the id that ends texts, which fills up, lies beyond a vocabulary that was made smaller."""
    _, ours = zoo.pair(GPT)
    ours.companions = {"generation_config.json": b'{"eos_token_id": 50256}'}
    words: Any = SimpleNamespace(pad_id=0, begin=list, decode=lambda ids, special: Letters().decode(ids))
    options = {"max_new_tokens": 12, "stop_strings": ["n"]}
    together, alone = (list(write(ours, words, prompt().tolist(), batch, **options)) for batch in (2, 1))
    assert together == alone and len({len(row) for [row] in alone}) == 2


def test_a_stop_string_of_half_characters() -> None:
    from modelcenter.generate.stop import Stop

    stop = Stop((), ("ä",), Letters(), torch.device("cpu"))
    assert stop(torch.tensor([[0, 1, 100, 101], [0, 100, 101, 1], [0, 1, 2, 100]])).tolist() == [True, False, False]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_a_callback_says_what_may_follow(options: dict[str, object]) -> None:
    _, ours = zoo.pair(GPT)
    calls = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        calls.add((row, len(ids)))
        return [10 * row + len(ids), 10 * row + len(ids) + 1]

    out = ours.generate(prompt(), max_new_tokens=5, eos_token_id=[], prefix_allowed_tokens_fn=allowed, **options)
    at = torch.arange(11, 16) + torch.tensor([[0], [10]])
    assert ((out[:, 11:] == at) | (out[:, 11:] == at + 1)).all()
    assert calls == {(row, n) for row in (0, 1) for n in range(11, 16)}
    with pytest.raises(InputError, match="prefix_allowed_tokens_fn: no token for row 0"):
        ours.generate(prompt(), prefix_allowed_tokens_fn=lambda row, ids: [], **options)


@pytest.mark.parametrize("fewest", [None, 6])
def test_a_callback_is_told_the_row_of_each_that_is_sampled(fewest: int | None) -> None:
    """As in transformers; where all that may follow in one row is banned, that row alone goes on with it."""
    if fewest and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip("transformers draws from a row of which nothing is left")  # seen in 5.17, no more in 5.23
    theirs, ours = zoo.pair(GPT)
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "eos_token_id": [3, 5], "min_new_tokens": fewest}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: [9 * row, 9 * row + 7] if len(ids) % 2 else [3, 5] if row % 2 else [4, 8]
    with zoo.wide(torch.float64):
        torch.manual_seed(2)
        wanted = theirs.generate(prompt(), top_k=0, pad_token_id=0, **options)
    found = ours.generate(prompt(), seed=2, pad_token_id=0, **options)
    assert torch.equal(found, wanted) and len(set(map(tuple, found.tolist()))) == 6


class EvenOnes(LogitsProcessor):
    """No odd token; written into what it is given."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, 1::2] = float("-inf")
        return scores


class Said(StoppingCriteria):
    """A row ends behind its first token in the lower half of the vocabulary."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] < 64


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 1}], ids=str)
@pytest.mark.parametrize("case", [GPT, Case("t5", "default", "seq2seq")], ids=str)
def test_a_callers_processors_and_criteria_are_heard(case: Case, options: dict[str, Any]) -> None:
    """As transformers hears them: with the ids so far, before scores are filtered, and in beams."""
    theirs, ours = zoo.pair(case, torch.float32)
    ids = zoo.inputs(case)["input_ids"]
    asked = {"max_new_tokens": 9, "eos_token_id": 120, "pad_token_id": 0} | options
    plain = ours.generate(ids, **asked)
    for more in ({"logits_processor": LogitsProcessorList([EvenOnes(), NoRepeatNGramLogitsProcessor(2)])},
                 {"logits_processor": [EvenOnes()], "stopping_criteria": [Said()]}):  # fmt: skip
        lists = {name: (LogitsProcessorList if name == "logits_processor" else StoppingCriteriaList)(items)
                 for name, items in more.items()}  # fmt: skip
        found = ours.generate(ids, **asked, **more)
        assert torch.equal(found, theirs.generate(ids, **asked, **lists))
        assert found.shape != plain.shape or not torch.equal(found, plain)


def test_columns_are_handed_out_as_they_are_written() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.columns: list[torch.Tensor | None] = []

        def put(self, ids: torch.Tensor) -> None:
            self.columns.append(ids)

        def end(self) -> None:
            self.columns.append(None)

    _, ours = zoo.pair(GPT)
    streamer = Streamer()
    out = ours.generate(prompt(), max_new_tokens=4, eos_token_id=[], streamer=streamer)
    assert streamer.columns.pop() is None and torch.equal(streamer.columns.pop(0), prompt())
    assert torch.equal(torch.stack(streamer.columns, 1), out[:, 11:])
    with pytest.raises(InputError, match="streamer: with 2 beams"):
        ours.generate(prompt(), streamer=streamer, num_beams=2)


@pytest.mark.parametrize("case", [GPT, Case("t5", "default", "seq2seq")], ids=str)
def test_transformers_streamers_show_what_they_show_there(case: Case) -> None:
    """One that leaves the prompt out would leave out the first token too, were it not given the prompt first."""
    theirs, ours = zoo.pair(case)
    ids = zoo.inputs(case)["input_ids"][:1]

    class Letters:
        def decode(self, ids: list[int], **options: object) -> str:
            return "".join(chr(0x4E00 + int(i)) for i in ids)

    def shown(model: object) -> list[str]:
        streamer, texts = TextStreamer(Letters(), skip_prompt=True), []
        streamer.on_finalized_text = lambda text, stream_end=False: texts.append(text)
        with zoo.wide(torch.float64):
            model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, streamer=streamer)  # type: ignore[attr-defined]  # both have it
        return texts

    assert shown(ours) == shown(theirs) and len("".join(shown(ours))) == 5
    with pytest.raises(ValueError, match="only supports batch size 1"):  # or two samples would be one text
        ours.generate(ids, do_sample=True, num_return_sequences=2, streamer=TextStreamer(Letters()))


def test_memory_is_taken_once_and_filled_in_place() -> None:
    """Whatever a model puts before the text, and for any number of tokens at once."""
    for case in (*CAUSAL, Case("cpmant", "default", "lm")):
        _, ours = zoo.pair(case)
        ids, cache, grown = zoo.inputs(case)["input_ids"], Cache(ahead=5), Cache()
        places = set()
        with torch.no_grad():
            for at in (slice(0, 6), slice(6, 8), slice(8, 11)):
                out, wanted = (ours(ids[:, at], past_key_values=c).logits for c in (cache, grown))
                places.add(tuple(k.data_ptr() for k, _ in cache.pairs.values()))
                assert torch.equal(out, wanted)
            assert len(places) == 1
            with pytest.raises(InputError, match=r"past_key_values: \d+ tokens; at most"):
                ours(ids[:, :1], past_key_values=cache)


def test_options_come_from_the_call_then_the_file_then_the_config(tmp_path: Path) -> None:
    _, folder = zoo.reference(GPT)
    shutil.copytree(folder, tmp_path / "m")

    def told(values: dict[str, object], **options: object) -> torch.Tensor:
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(values))
        return mc.load(tmp_path / "m").generate(prompt(), **options)

    assert told({"eos_token_id": None}, eos_token_id=[]).shape == (2, 31)
    assert told({"max_new_tokens": 3, "typical_p": 1.0, "top_p": None, "strange": 7}).shape == (2, 14)
    assert told({"max_new_tokens": 3}, max_length=13).shape == (2, 13)
    assert told({"max_length": 12}, max_new_tokens=4, eos_token_id=[]).shape == (2, 15)
    assert told({"num_beams": 2, "num_return_sequences": 2, "max_length": 13}).shape == (4, 13)
    given = {"max_new_tokens": 2, "num_beams": 2, "num_return_sequences": 2}
    assert told({"max_new_tokens": 9}, generation_config=given).shape == (4, 13)
    given = {"num_beams": 2, "num_return_sequences": 2, "do_sample": None}  # the rest is the file's, as in transformers
    assert told({"max_new_tokens": 3}, generation_config=given).shape == (4, 14)
    assert told({"max_new_tokens": 3}, generation_config={"max_length": 13}).shape == (2, 13)
    assert told({"max_new_tokens": 3}, generation_config={"max_length": 13}, max_new_tokens=4).shape == (2, 15)
    for values, words in (({"typical_p": 0.9}, rf"{tmp_path}/m/generation_config.json: typical_p: 0.9 is not implemented; "
                           r"take it out of the file, or in Python read none of it: generation_config=\{\}"),
                          ({"num_beams": "2"}, "generation_config.json: num_beams: '2'")):  # fmt: skip
        with pytest.raises(InputError, match=words):
            told(values)
    (tmp_path / "m" / "generation_config.json").write_text('{"typical_p": 0.9}')
    assert mc.load(tmp_path / "m").generate(prompt(), generation_config={}, eos_token_id=[]).shape == (2, 31)
    for text, words in (("{", r"generation_config.json: .*JSON"), ("[1]", "generation_config.json: a list; an object with")):
        (tmp_path / "m" / "generation_config.json").write_text(text)
        with pytest.raises(InputError, match=words):
            mc.load(tmp_path / "m").generate(prompt())


def test_every_option_of_transformers_is_done_or_refused_or_without_effect() -> None:
    import transformers

    theirs = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    done = {f.name for f in dataclasses.fields(Options)}
    assert theirs <= done | set(UNSUPPORTED) | WITHOUT_EFFECT
    assert not done & (set(UNSUPPORTED) | WITHOUT_EFFECT) and not set(UNSUPPORTED) & WITHOUT_EFFECT


def test_refusals() -> None:
    _, ours = zoo.pair(GPT)
    for options, words in (
        ({"top_q": 1}, "top_q"), ({"max_new_tokens": 0}, "max_new_tokens: 0"), ({"temperature": 0.0}, "temperature: 0.0"),
        ({"top_p": 1.5}, "top_p: 1.5"), ({"typical_p": 0.5}, "typical_p: 0.5 is not implemented"),
        ({"num_beams": 0}, "num_beams: 0"), ({"diversity_penalty": 1.0}, "without num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups: 3 for 4 beams"), ({"max_length": 11}, "max_length: 11 with"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2 of 1 beams"),
        ({"num_return_sequences": 3, "num_beams": 2, "do_sample": True}, "num_return_sequences: 3 of 2 beams; at most num_beams$"),
        ({"bad_words_ids": [[1, 128]]}, "bad_words_ids: 128; ids below 128"), ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"num_beams": 2, "num_beam_groups": 2, "do_sample": True}, "do_sample: with num_beam_groups"),
        ({"temperature": 0.7}, "temperature: 0.7, which does nothing without do_sample=true"), ({"top_k": 5}, "top_k: 5, which"),
        ({"length_penalty": 2.0}, "length_penalty: 2.0, which does nothing without num_beams from 2"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens: 4 with max_new_tokens 3; at most as many"),
        ({"max_length": 20, "min_length": 21}, "min_length: 21 with max_length 20"),
        ({"pad_token_id": 128}, "pad_token_id: 128; an id below 128"),
        ({"eos_token_id": 128}, "eos_token_id: 128, which ends nothing; ids below 128"),
        ({"decoder_start_token_id": 128}, "decoder_start_token_id: 128; ids below"),
        ({"output_scores": True}, "output_scores"), ({"max_new_tokens": 54}, "max_new_tokens: 54 after a prompt of 11 tokens"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            ours.generate(prompt(), **options)
    for ids, said in (("hello", "input_ids: a str; a tensor of"), ([[1, 2]], "a list;"), (prompt().float(), "of float32; a")):
        with pytest.raises(InputError, match=said):
            ours.generate(ids)
    assert ours.dtype == torch.float64 and ours.device.type == "cpu"
    ours.generate(prompt(), generation_config={"temperature": 0.7, "top_k": 5}, max_new_tokens=1)  # a file's are for who draws
    with pytest.raises(InputError, match="predicts the next token"):
        mc.build("gpt2", config={"layers": 1}, task="classify", device="meta").generate(prompt())


@pytest.mark.parametrize("case", [*CAUSAL, Case("t5", "default", "seq2seq")], ids=str)
def test_a_loop_of_ones_own_needs_no_count_of_what_the_cache_holds(case: Case) -> None:
    """As with transformers' models: what came out goes in again."""
    _, ours = zoo.pair(case)
    ids = prompt()
    seen = torch.full((2, 1), 3) if case.seq2seq else ids
    name = "decoder_input_ids" if case.seq2seq else "input_ids"
    source = {"input_ids": ids} if case.seq2seq else {}
    out = ours(**{**source, name: seen}, use_cache=True)
    for _ in range(6):
        assert torch.allclose(out.logits[:, -1], ours(**{**source, name: seen}, use_cache=False).logits[:, -1])
        new = out.logits[:, -1:].argmax(-1)
        seen = torch.cat((seen, new), 1)
        out = ours(**{name: new}, past_key_values=out.past_key_values)
    assert len(set(seen.flatten().tolist())) > 3 and ours(**{**source, name: seen}, use_cache=False).past_key_values is None


def test_what_a_forward_cannot_do_is_refused() -> None:
    _, ours = zoo.pair(GPT)
    ids = prompt()
    assert torch.equal(ours(ids, return_dict=True, output_attentions=False).logits, ours(ids).logits)
    for options, line in (
        ({"output_attentions": True}, "output_attentions: True; leave it out"),
        ({"return_dict": False}, r"return_dict: False; leave it out: the output has to_tuple\(\)"),
        ({"inputs_embeds": ours.get_input_embeddings()(ids)}, "inputs_embeds: given beside input_ids; one of the two"),
        ({"attention_mask": torch.ones(1, 11)}, r"attention_mask: shape \[1, 11\]; \[2, 11\], as 11 tokens a row are there"),
        ({"attention_mask": torch.ones(2, 1)}, r"attention_mask: shape \[2, 1\]"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, "attention_mask: 4 dimensions"),
        ({"attention_mask": [[1] * 11] * 2}, "attention_mask: a list; a tensor of 2"),
        ({"attention_mask": torch.tensor([[-1e9] * 4 + [0.0] * 7] * 2)}, "attention_mask: numbers other than 0 and 1; 1 where a"),
        ({"attention_mask": torch.full((2, 11), float("nan"))}, "attention_mask: numbers other than 0 and 1"),
        ({"labels": ids.tolist()}, "labels: a list; a tensor of whole numbers"),
        ({"labels": ids.float()}, "labels: of float32; a tensor of whole numbers"),
        ({"labels": ids[:1]}, r"labels: shape \[1, 11\]; \[2, 11\], one for each token"),
    ):
        with pytest.raises(InputError, match=line):
            ours(ids, **options)
    with pytest.raises(InputError, match="logits_to_keep: 1 with the task 'classify'"):  # whose one token would be another
        mc.build("gpt2", config={"layers": 1, "dim": 8, "heads": 2, "vocab": 128}, task="classify")(ids, logits_to_keep=1)
    for odd, line in (
        (ids.tolist(), r"input_ids: a list; a tensor of whole numbers \(batch, tokens\)"), (ids.numpy(), "input_ids: a ndarray; "),
        (ids.float(), "input_ids: of float32; "), (ids[None], "input_ids: shape"),
        (ids[0], r"input_ids: shape \[11\]; \(batch, tokens\)"),
        (torch.zeros(1, 65, dtype=torch.long), "input_ids: 65 tokens; at most 64: the model has no more positions"),
    ):
        with pytest.raises(InputError, match=line):
            ours(odd)
    cache = ours(ids, use_cache=True).past_key_values
    with pytest.raises(InputError, match="input_ids: 65 tokens; at most 64"):
        ours(torch.zeros(2, 54, dtype=torch.long), past_key_values=cache)
    with pytest.raises(InputError, match=r"attention_mask: shape \[2, 1\]; \[2, 12\], as 1 tokens a row are there behind 11"):
        ours(ids[:, :1], torch.ones(2, 1), past_key_values=cache)
    _, writer = zoo.pair(Case("t5", "default", "seq2seq"))
    with pytest.raises(InputError, match=r"decoder_attention_mask: shape \[2, 3\]; \[2, 4\]"):
        writer(ids, decoder_input_ids=ids[:, :4], decoder_attention_mask=torch.ones(2, 3))
    with pytest.raises(InputError, match=r"labels: shape \[2, 4\]; \[2, 3\], one for each token"):
        writer(ids, decoder_input_ids=ids[:, :3], labels=ids[:, :4])


def test_a_prompt_that_cannot_be_gone_on_with_is_refused() -> None:
    _, ours = zoo.pair(GPT)
    ids, mask = prompt(), torch.ones(2, 11)
    right = mask * (torch.arange(11) < torch.tensor([[11], [10]]))
    for args, line in (
        ((ids[0],), r"input_ids: shape \[11\]; \(batch, tokens\)"),
        ((ids[:, :0],), r"input_ids: shape \[2, 0\]; \(batch, tokens\), and at least one token"),
        ((ids, mask[:, 1:]), r"attention_mask: shape \[2, 10\]; \[2, 11\], as input_ids has"),
        ((ids, right), "attention_mask: row 1 ends with padding; padding on the left"),
    ):
        with pytest.raises(InputError, match=line):
            ours.generate(*args)
    _, writer = zoo.pair(Case("t5", "default", "seq2seq"))
    assert writer.generate(ids, right, max_new_tokens=2).shape == (2, 3), "a source may be padded anywhere"


def test_what_may_not_be_said_cannot_be_forced() -> None:
    _, ours = zoo.pair(GPT)
    for options, line in (
        ({"forced_eos_token_id": 5, "suppress_tokens": [4, 5]}, "forced_eos_token_id: 5, which suppress_tokens holds; one"),
        ({"forced_bos_token_id": 4, "suppress_tokens": [4, 5]}, "forced_bos_token_id: 4, which suppress_tokens holds"),
        ({"suppress_tokens": list(range(128))}, "suppress_tokens: all 128 ids; at least one id that may be generated"),
    ):
        with pytest.raises(InputError, match=line):
            ours.generate(prompt(), **options)
    assert ours.generate(prompt(), forced_eos_token_id=[5, 6], suppress_tokens=[5], max_new_tokens=2)[:, -1].tolist() == [6, 6]


def test_a_mask_may_be_of_any_dtype() -> None:
    _, ours = zoo.pair(GPT)
    mask = (torch.arange(11) >= torch.tensor([[0], [4]])).long()
    wanted = ours.generate(prompt(), mask, max_new_tokens=5)
    assert not torch.equal(wanted, ours.generate(prompt(), max_new_tokens=5))
    for kind in (torch.float32, torch.bool, torch.int8):
        assert torch.equal(ours.generate(prompt(), mask.to(kind), max_new_tokens=5), wanted)


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "device: 'tpu'; cpu, cuda"), ("cuda:99", "device: 'cuda:99'"), ("xpu", "device: 'xpu', which torch does not find"),
])
def test_a_device_that_is_not_here_is_one_line(device: str, said: str) -> None:
    for make in (lambda: mc.build("gpt2", config={"layers": 1, "dim": 24, "heads": 2}, device=device),
                 lambda: mc.load(zoo.reference(GPT)[1], device=device)):  # fmt: skip
        with pytest.raises(InputError, match=said):
            make()


@pytest.mark.parametrize("fewest", [0, 2, None])
def test_fewest_new_tokens_count_for_more_than_a_length(fewest: int | None) -> None:
    """None at all too: min_length may come from the file beside the weights."""
    theirs, ours = zoo.pair(GPT)
    options = {"min_length": 19, "max_new_tokens": 9, "eos_token_id": list(range(40)), "pad_token_id": 0}
    with zoo.wide(torch.float64):
        wanted = theirs.generate(prompt(), min_new_tokens=fewest, **options)
    assert torch.equal(ours.generate(prompt(), generation_config=options, min_new_tokens=fewest), wanted)


@pytest.mark.parametrize(
    "said", [{"num_beams": 3, "length_penalty": 0.6}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 2.0}, {"max_length": 13},
             {"max_new_tokens": 3}, {"forced_eos_token_id": 9}],
)  # fmt: skip
def test_options_that_config_json_holds(said: dict[str, Any], tmp_path: Path) -> None:
    """As in files of before 2023, beside which there is no generation_config.json."""
    folder = zoo.rewritten(GPT, tmp_path / "old", eos_token_id=None, **said)
    asked = {} if said.keys() & {"max_length", "max_new_tokens"} else {"max_new_tokens": 8}
    ours, ids = mc.load(folder), prompt()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = type(zoo.reference(GPT)[0]).from_pretrained(folder).eval().generate(ids, **asked)
    free = ours.generate(ids, generation_config={}, max_new_tokens=8)
    assert torch.equal(ours.generate(ids, **asked), wanted) and not torch.equal(wanted, free)
    ours.save_pretrained(tmp_path / "new")
    assert torch.equal(mc.load(tmp_path / "new").generate(ids, **asked), wanted)
    (folder / "generation_config.json").write_text("{}")  # which then is what counts
    assert torch.equal(mc.load(folder).generate(ids, max_new_tokens=8), free)


def test_what_config_json_holds_is_refused_as_its_own(tmp_path: Path) -> None:
    folder = zoo.rewritten(GPT, tmp_path / "old", typical_p=0.9)
    with pytest.raises(InputError, match=rf"^{folder}/config.json: typical_p: 0.9 is not implemented; take it out of the file"):
        mc.load(folder).generate(prompt())
    zoo.edit(folder, typical_p=1.0, max_length=20, output_hidden_states=True, seed=1)  # and 20 where a file holds every default
    assert mc.load(folder).generate(prompt(), eos_token_id=[]).shape == (2, prompt().size(1) + 20)


@pytest.mark.parametrize("beams", [1, 3])
def test_none_as_the_end_token_is_none(beams: int, tmp_path: Path) -> None:
    """Of a call, and of what the model holds; in what is given for a call it is not given, all as in transformers."""
    folder = shutil.copytree(zoo.reference(GPT)[1], tmp_path / "m")
    how: dict[str, Any] = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False}
    end = int(mc.load(folder).generate(prompt(), **how, eos_token_id=[])[0, 12])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "pad_token_id": 0}))
    zoo.edit(folder, eos_token_id=end)
    told = transformers.GenerationConfig(**how, eos_token_id=None)  # type: ignore[no-untyped-call]
    for model in (transformers.AutoModelForCausalLM.from_pretrained(folder), mc.load(folder)):
        lengths = [len(model.generate(prompt()[:1], **options)[0]) for options in (how, {"generation_config": told})]
        assert lengths[0] == lengths[1] < 17
        assert len(model.generate(prompt()[:1], **how, eos_token_id=None)[0]) == 17
        model.generation_config.eos_token_id = None
        assert len(model.generate(prompt()[:1], **how)[0]) == 17
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    ours = mc.load(folder)
    assert len(ours.generate(prompt()[:1], **how)[0]) < 17
    assert ours.generation_config.eos_token_id == end and len(ours.generate(prompt()[:1], **how)[0]) < 17, "looked at"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_minus_one_is_no_token(file: str, tmp_path: Path) -> None:
    """As in files of 2023: nothing ends a row, and what keeps it from ending bans no word; what fills up is not given."""
    folder = shutil.copytree(zoo.reference(GPT)[1], tmp_path / "old")
    (folder / "generation_config.json").unlink()
    said = json.loads((folder / "config.json").read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(said | {"eos_token_id": -1, "pad_token_id": -1}))
    model, ids = mc.load(folder), prompt()
    o = settings(model, None, {})
    assert (o.ends, o.pad) == ((), 0)
    last = model.config.vocab - 1
    with torch.no_grad():
        scores = torch.full((1, last + 1), 0.0).index_fill(1, torch.tensor([last]), 9.0)
        kept = apply(rules(dataclasses.replace(o, min_new_tokens=3), 2, 5, None, None, last + 1), ids[:1, :2], scores)
    assert kept.argmax() == last
    assert model.generate(ids, max_new_tokens=3).shape == (len(ids), ids.size(1) + 3)
