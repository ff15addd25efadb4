"""What T5 alone has: buckets, a bias under a cache, ties and scales as old and new files say them, labels shifted."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file
from zoo import Case, inputs, scores, tiny

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.layers import Cache, RelativeBias
from modelcenter.layers.inputs import shift_right
from modelcenter.models.t5 import T5, T5Config

PLAIN, UNTIED = Case("t5", "default", "seq2seq"), Case("t5", "gated-untied", "seq2seq")
EMBED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def theirs(where: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    cls = transformers.T5ForConditionalGeneration
    return cls.from_pretrained(where, attn_implementation="eager", dtype=dtype).eval()


def agrees(where: Path) -> mc.model.Model:
    """Load a folder here and there, and compare."""
    ours, args = mc.load(where), inputs(PLAIN)
    with zoo.wide(torch.float64):
        wanted = theirs(where).double()(**args).logits
        assert (ours.double()(**args).logits - wanted).abs().max() <= 1e-10 * wanted.std()
    return mc.load(where)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (10, 14), (4, 3), (64, 1000)])
def test_buckets_are_theirs_at_every_distance(buckets: int, distance: int, bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    at = torch.arange(-5000, 5001)
    wanted = T5Attention._relative_position_bucket(at, bidirectional, buckets, distance)
    assert torch.equal(RelativeBias(1, buckets, distance, bidirectional=bidirectional).bucket(at), wanted)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_every_bucket_is_trained_the_last_one_too(bidirectional: bool) -> None:
    bias = RelativeBias(2, 32, 128, bidirectional=bidirectional)
    bias(200, 200).spread().sum().backward()
    trained = bias.table.weight.grad.ne(0).all(1)
    assert trained.sum() == (31 if bidirectional else 32) and trained[-1]  # nothing is at distance 0 to the right


def test_the_bias_of_the_last_queries_is_the_end_of_the_whole() -> None:
    bias = RelativeBias(2, 8, 10, bidirectional=False)
    assert torch.equal(bias(3, 9).spread(), bias(9, 9).spread()[:, :, -3:])


def test_steps_with_a_cache_equal_one_forward() -> None:
    _, ours = zoo.pair(PLAIN)
    args = inputs(PLAIN, "left")
    del args["decoder_attention_mask"]
    whole, runs = ours(**args).logits, []
    ours.encoder.register_forward_hook(lambda *_: runs.append(1))
    calls: list[int] = []
    for block in ours.decoder.blocks:
        block.cross.k.register_forward_hook(lambda *_: calls.append(1))
    cache, parts, source = Cache(), [], args["input_ids"]
    for at in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 7)):
        out = ours(
            source, args["attention_mask"], decoder_input_ids=args["decoder_input_ids"][:, at], past_key_values=cache
        )
        parts.append(out.logits)
        source = None
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12
    assert len(runs) == 1 and len(calls) == len(ours.decoder.blocks), "the source is encoded and projected once"
    assert not any(block.attn in cache.pairs for block in ours.encoder.blocks)


def test_labels_shifted_right_feed_the_decoder() -> None:
    labels = torch.tensor([[5, 6, -100, 8]])
    assert shift_right(labels, None, 3, 0).tolist() == [[3, 5, 6, 0]]
    assert shift_right(labels, torch.tensor([0, 1, 1, 4]), 3, 2).tolist() == [[3, 3, 6, 2]]
    assert shift_right(labels, torch.tensor([0, 4, 4]), 3, 0).tolist() == [[3, 5, 6, 0]]


def test_a_packed_loss_is_the_mean_over_its_sequences_alone() -> None:
    _, ours = zoo.pair(PLAIN)
    row, alone = zoo.packed(PLAIN)
    labels = row.pop("decoder_input_ids")
    apart = [(ours(a["input_ids"], labels=a["decoder_input_ids"]).loss, a["decoder_input_ids"].numel()) for a in alone]
    mean = sum(loss * n for loss, n in apart) / labels.numel()
    assert abs(ours(**row, labels=labels).loss - mean) < 1e-12


def test_a_packed_target_must_fit_its_lengths() -> None:
    _, ours = zoo.pair(PLAIN)
    row, _ = zoo.packed(PLAIN)
    for name, wrong in (("cu_seq_lens_q", [0, 4, 10]), ("cu_seq_lens_k", [0, 5, 6, 14])):
        with pytest.raises(InputError, match=name):
            ours(**row | {name: torch.tensor(wrong)})


def test_a_decoder_without_input_is_refused() -> None:
    _, ours = zoo.pair(PLAIN)
    with pytest.raises(InputError, match="decoder_input_ids"):
        ours(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(InputError, match="input_ids"):
        ours(decoder_input_ids=torch.ones(1, 3, dtype=torch.long))


def test_copies_of_the_embedding_are_aliases(tmp_path: Path) -> None:
    def copy(t: dict[str, Any]) -> None:
        t.update(dict.fromkeys((*EMBED, "lm_head.weight"), t["shared.weight"]))
        t["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(10, 4)

    ours = agrees(zoo.rewritten(PLAIN, tmp_path, copy))
    assert ours.load_report.aliased == sorted((*EMBED, "lm_head.weight")) and len(ours.load_report.ignored) == 1
    assert ours.head.out.weight is ours.embed.tokens.weight


@pytest.mark.parametrize("name", [*EMBED, "lm_head.weight"])
def test_a_tied_file_may_hold_any_one_copy(name: str, tmp_path: Path) -> None:
    ours = agrees(zoo.rewritten(PLAIN, tmp_path, lambda t: t.update({name: t.pop("shared.weight")})))
    assert ours.head.out.weight is ours.embed.tokens.weight


def test_without_shared_the_embedding_is_not_taken_from_another_head(tmp_path: Path) -> None:
    where = zoo.rewritten(UNTIED, tmp_path, lambda t: t.update({EMBED[1]: t.pop("shared.weight")}))
    ours = mc.load(where)  # transformers before 5.23 takes the head for the embedding, silently
    tensors = load_file(where / "model.safetensors")
    assert torch.equal(ours.embed.tokens.weight, tensors[EMBED[1]]) and torch.equal(ours.head.out.weight, tensors["lm_head.weight"])
    assert not torch.equal(ours.head.out.weight, ours.embed.tokens.weight)


@pytest.mark.parametrize("name", EMBED)
def test_an_embedding_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    where = zoo.rewritten(PLAIN, tmp_path, lambda t: t.update({name: t["shared.weight"] + 1}))
    with pytest.raises(InputError, match=f"{name}.*differs"):
        mc.load(where)


def test_two_different_copies_and_no_shared_are_refused(tmp_path: Path) -> None:
    def change(t: dict[str, Any]) -> None:
        t[EMBED[0]] = t.pop("shared.weight")
        t[EMBED[1]] = t[EMBED[0]] + 1

    with pytest.raises(InputError, match=EMBED[1]):
        mc.load(zoo.rewritten(PLAIN, tmp_path, change))


@pytest.mark.parametrize(
    ("keys", "tied", "scaled"),
    [
        ({"tie_word_embeddings": None, "scale_decoder_outputs": None}, False, True),  # transformers 4, by default
        ({"tie_word_embeddings": False, "scale_decoder_outputs": None}, False, False),  # transformers 4, as published
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False, False),  # transformers 5
    ],
)
def test_tensors_say_what_is_tied_and_the_config_whether_to_scale(
    keys: dict[str, Any], tied: bool, scaled: bool, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    ours = agrees(zoo.rewritten(UNTIED, tmp_path / "in", **keys))
    assert ours.config.scale is scaled and ours.config.tie is tied
    ours.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["tie_word_embeddings"] is False, "or transformers 4 would tie the head"
    # transformers 4 scales where the head is tied, and knows no other word: an untied one that scales needs the new key
    assert saved.get("scale_decoder_outputs", saved["tie_word_embeddings"]) is scaled
    assert T5Config.from_dict(saved).scale is scaled
    agrees(tmp_path / "out")


def test_a_head_that_the_file_lacks_is_the_embedding(tmp_path: Path) -> None:
    keys = {"tie_word_embeddings": False, "scale_decoder_outputs": None}
    ours = agrees(zoo.rewritten(PLAIN, tmp_path, **keys))
    assert ours.head.out.weight is ours.embed.tokens.weight and not ours.load_report.new and not ours.config.scale


@pytest.mark.parametrize(
    "keys",
    [
        {"feed_forward_proj": "gated-relu"}, {"dense_act_fn": "silu"}, {"is_gated_act": True}, {"is_decoder": True},
        {"decoder_start_token_id": -1}, {"decoder_start_token_id": True},
        {"scale_decoder_outputs": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_what_would_compute_something_else_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(keys))):
        mc.load(zoo.rewritten(PLAIN, tmp_path, **keys))


def test_the_names_that_other_families_give_the_sizes(tmp_path: Path) -> None:
    """transformers reads them through T5Config.attribute_map; other heads of another width have the same matrices."""
    sizes = {"d_model": "hidden_size", "d_kv": "head_dim", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
    said = json.loads(Path(zoo.reference(PLAIN)[1], "config.json").read_text())
    respelled = {new: said[old] for old, new in sizes.items()}
    (tmp_path / "respelled").mkdir()
    ours = agrees(zoo.rewritten(PLAIN, tmp_path / "respelled", **dict.fromkeys(sizes), **respelled))
    assert (ours.config.dim, ours.config.head_dim, ours.config.heads, ours.config.layers) == tuple(respelled.values())
    folder = zoo.rewritten(PLAIN, tmp_path / "both", num_attention_heads=2)
    with pytest.raises(InputError, match=r"num_heads and num_attention_heads: \[\d, 2\]; one value, for they are one key"):
        mc.load(folder)


def test_the_start_token_may_be_zero_and_travels(tmp_path: Path) -> None:
    ours = mc.load(zoo.rewritten(PLAIN, tmp_path, decoder_start_token_id=0))
    assert ours.config.start == 0 and ours.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1)[0, 0] == 0
    assert T5Config(start=0).to_dict()["decoder_start_token_id"] == 0


def test_a_null_scale_is_none(tmp_path: Path) -> None:
    """As in transformers, where it is false; only a file without the key asks what is tied."""
    folder = zoo.rewritten(PLAIN, tmp_path)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "scale_decoder_outputs": None, "tie_word_embeddings": True}))
    assert not agrees(folder).config.scale


def test_t5_reads_mt5_and_knows_its_head_is_never_scaled(tmp_path: Path) -> None:
    _, folder = zoo.reference(Case("mt5", "default", "seq2seq"))
    assert type(T5.from_pretrained(folder)) is mc.MT5 and not T5.from_pretrained(folder).config.scale


def test_new_weights_give_logits_and_scores_of_order_one() -> None:
    for name, changes in (("t5-small", {}), ("flan-t5-small", {})):
        model = mc.build(name, config={"layers": 2, "vocab": 200, **changes}).eval()
        logits = scores(model(torch.arange(12)[None], decoder_input_ids=torch.arange(8)[None]))
        assert 0.3 < logits.std() < 3, name
        x = model.encoder.blocks[0].attn_norm(torch.randn(1, 64, 512))
        attn = model.encoder.blocks[0].attn
        q, k = (project(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for project in (attn.q, attn.k))
        assert 0.3 < (q @ k.mT).std() < 3
    assert math.isclose(model.encoder_bias.table.weight.detach().std(), 512**-0.5, rel_tol=0.3)


def test_tiny_differs_from_the_defaults() -> None:
    assert tiny("t5").buckets != T5Config().buckets and tiny("t5").max_distance != T5Config().max_distance


# ------------------------------------------------------------------------------------------------- the encoder alone


EMBEDS = [Case("t5", "default", "embed"), Case("mt5", "default", "embed")]


def pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of the real tokens, of length one: sentence-transformers' Pooling and Normalize."""
    mask = mask[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize("case", EMBEDS, ids=str)
def test_a_sentence_s_vector_is_the_mean_of_their_encoder(case: Case) -> None:
    model, ours = zoo.pair(case)
    assert type(model).__name__ == case.family.tasks["embed"].architecture and ours.decoder is None
    args = inputs(case, "right")
    with zoo.wide(torch.float64):
        wanted = pooled(model(**args).last_hidden_state, args["attention_mask"])
    found = ours(**args)["embeddings"]
    assert found.shape == (2, 32) and (found - wanted).abs().max() < 1e-12
    row, alone = zoo.packed(case)
    together = ours(**row)["embeddings"]
    assert (together - torch.cat([ours(**one)["embeddings"] for one in alone])).abs().max() < 1e-12


@pytest.mark.parametrize("case", EMBEDS, ids=str)
def test_the_encoder_of_a_whole_model(case: Case, tmp_path: Path) -> None:
    """Of a published encoder-decoder the decoder is left in the file, and what is saved is transformers' encoder, and ours."""
    whole, folder = zoo.reference(Case(case.kind, "default", "seq2seq"))
    whole.float()
    ours = mc.load(folder, task="embed")
    assert ours.load_report.ignored and not ours.load_report.new
    assert all(key.startswith(("decoder.", "lm_head.")) for key in ours.load_report.ignored)
    assert all("decoder" not in name for name, _ in ours.named_parameters())
    ours.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["architectures"] == [case.family.tasks["embed"].architecture] and saved["is_encoder_decoder"] is False
    model, report = getattr(zoo.transformers, saved["architectures"][0]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    again, args = mc.load(tmp_path / "out"), inputs(case, "right")
    assert again.task == "embed" and not again.encoder_decoder
    with torch.no_grad():
        hidden = whole.encoder(**args).last_hidden_state
        wanted, found = pooled(hidden, args["attention_mask"]), again(**args)["embeddings"]
        assert (found - wanted).abs().max() < 1e-5
        assert (model(**args).last_hidden_state - hidden).abs().max() < 1e-5 * hidden.std()
    with pytest.raises(InputError, match="decoder"):
        mc.load(tmp_path / "out", task="seq2seq")


def test_an_encoder_that_says_it_is_an_encoder_decoder(tmp_path: Path) -> None:
    """As transformers 4 wrote them, the published sentence-t5 too; and a whole model loads whole."""
    for said in (True, False):
        assert mc.load(zoo.rewritten(EMBEDS[0], tmp_path, is_encoder_decoder=said)).task == "embed"
    assert mc.load(zoo.reference(PLAIN)[1]).task == "seq2seq"


def test_a_start_that_is_no_token_is_said_so() -> None:
    with pytest.raises(InputError, match=r"config\.json: decoder_start_token_id: None; the id of a token$"):
        T5Config.from_dict({"decoder_start_token_id": None})
