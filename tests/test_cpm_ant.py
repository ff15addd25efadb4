"""What CPM-Ant does where transformers' class does not: with labels the future is hidden, and the context before them is not."""

import pytest
import torch
import zoo
from zoo import Case

from modelcenter.layers import position

CPM = Case("cpmant", "default", "lm")
CONTEXT, AT = 4, 7  # tokens without a label; the token that is changed


@pytest.fixture(params=["mask", "distances"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a mask is made of the bias, or the op is given it as it is."""
    monkeypatch.setattr(position, "served", lambda *_: request.param == "distances")


def losses(ids: torch.Tensor, context: int) -> torch.Tensor:
    """The loss of each token (s - 1) of one row whose first `context` tokens have no label."""
    _, ours = zoo.pair(CPM)
    labels = ids.clone()
    labels[:, :context] = -100
    logits = ours(ids, labels=labels).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").detach()


@pytest.mark.parametrize("context", [0, CONTEXT])
def test_no_label_is_predicted_from_itself_or_what_follows(context: int) -> None:
    ids = zoo.inputs(CPM)["input_ids"][:1]
    other = ids.clone()
    other[0, AT] = ids[0, AT] % 100 + 1
    changed = (losses(ids, context) - losses(other, context)).abs() > 1e-9
    assert changed.tolist() == [i >= AT - 1 for i in range(10)], "the prediction of a token, and what follows it"


def test_the_context_is_read_in_both_directions() -> None:
    ids = zoo.inputs(CPM)["input_ids"][:1]
    other = ids.clone()
    other[0, CONTEXT - 1] = ids[0, CONTEXT - 1] % 100 + 1
    assert ((losses(ids, CONTEXT) - losses(other, CONTEXT)).abs() > 1e-9).all()


def test_packed_losses_are_those_of_each_sequence_alone() -> None:
    _, ours = zoo.pair(CPM)
    row, alone = zoo.packed(CPM, lengths=(5, 2, 9))
    labels = row["input_ids"].clone()
    labels[0, row["cu_seq_lens_q"][:-1].long()] = -100
    apart = sum(ours(a["input_ids"], labels=a["input_ids"], num_items_in_batch=1).loss for a in alone)
    assert abs(ours(**row, labels=labels, num_items_in_batch=1).loss - apart) < 1e-9


def test_no_tokens_have_no_scores() -> None:
    _, ours = zoo.pair(CPM)
    out = ours(torch.zeros(2, 0, dtype=torch.long), output_hidden_states=True)
    assert out.logits.shape == (2, 0, zoo.TINY["vocab"]) and all(h.shape == (2, 0, zoo.TINY["dim"]) for h in out.hidden_states)


def test_a_text_s_vector_is_the_mean_of_tokens_that_see_each_other() -> None:
    """With labels, which are of pairs and not of tokens, too; packed or not."""
    case = Case("cpmant", "default", "embed")
    theirs, ours = zoo.pair(case)
    row, alone = zoo.packed(case, lengths=(5, 2, 9, 4), targets=(1, 1, 1, 1))
    with zoo.wide(torch.float64):
        hidden = [theirs(one["input_ids"]).last_hidden_state for one in alone]
    wanted = torch.cat([torch.nn.functional.normalize(h[:, -one["input_ids"].size(1) :].mean(1), dim=-1)
                        for h, one in zip(hidden, alone, strict=True)])  # fmt: skip
    for labels in (None, torch.tensor([0, 1]), torch.tensor([0.5, -0.5])):
        assert (ours(**row, labels=labels)["embeddings"] - wanted).abs().max() < 1e-10
    pair = torch.cat([alone[0]["input_ids"], alone[0]["input_ids"].flip(1)])
    assert torch.equal(ours(pair, labels=torch.tensor([0.5]))["embeddings"], ours(pair)["embeddings"])
