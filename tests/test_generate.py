"""Generation beside what `test_zoo` holds to transformers: steps with a cache, ends, sampling."""

import pytest
import torch
import zoo
from zoo import Case

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.generate import pick
from modelcenter.layers import Cache

CAUSAL = [Case(kind, "default", "lm") for kind in ("bloom", "gpt2", "llama")]
GPT = Case("gpt2", "default", "lm")
PLAIN = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def prompt() -> torch.Tensor:
    return zoo.inputs(GPT)["input_ids"]


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_steps_with_a_cache_equal_one_forward(case: Case) -> None:
    """Whoever calls the model itself need not say where the new tokens stand, and may feed several at once."""
    _, ours = zoo.pair(case)
    ids, cache, parts = zoo.inputs(case)["input_ids"], Cache(), []
    for at in (slice(0, 1), slice(1, 2), slice(2, 6), slice(6, 11)):
        parts.append(ours(ids[:, at], past_key_values=cache).logits)
        cache.length = at.stop
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


def test_the_prompt_stands_and_the_mode_is_left() -> None:
    _, ours = zoo.pair(GPT)
    for training in (True, False):
        out = ours.train(training).generate(prompt(), max_new_tokens=3, eos_token_id=[])
        assert ours.training is training and torch.equal(out[:, :11], prompt()) and out.shape == (2, 14)


def test_sampling_repeats_by_its_seed_and_touches_no_other_randomness() -> None:
    _, ours = zoo.pair(GPT)
    before = torch.get_rng_state()
    runs = [ours.generate(prompt(), do_sample=True, eos_token_id=[], seed=seed).tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, [0.4, 0.3, 0.2, 0.1]), ({"top_k": 2}, [0.4, 0.3]), ({"top_p": 0.75}, [0.4, 0.3, 0.2]), ({"top_p": 0.01}, [0.4]),
     ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]), ({"temperature": 0.5, "top_p": 0.55}, [0.16, 0.09])],
    ids=["all", "top-k", "top-p", "little-p", "cold", "cold-p"],
)  # fmt: skip
def test_samples_are_drawn_from_what_is_kept(options: dict[str, float], kept: list[float]) -> None:
    order = torch.tensor([2, 0, 3, 1])
    scores = torch.empty(4).index_copy(0, order, torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    drawn = pick(scores.expand(20000, 4), PLAIN | options, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4)[order] / 20000
    wanted = torch.tensor(kept + [0.0] * (4 - len(kept))) / sum(kept)
    assert ((share - wanted).abs() < 0.02).all() and (share[len(kept) :] == 0).all()


def test_refusals() -> None:
    _, ours = zoo.pair(GPT)
    for options, words in (
        ({"num_beams": 2}, "num_beams: 2"), ({"top_q": 1}, "top_q"), ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"temperature": 0.0}, "temperature: 0.0"), ({"top_p": 1.5}, "top_p: 1.5"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            ours.generate(prompt(), **options)
    with pytest.raises(InputError, match="predicts the next token"):
        mc.build("gpt2", config={"layers": 1}, task="classify", device="meta").generate(prompt())
