"""Planted bugs. Each changes a line of a copy of the package as somebody, somewhere, once had it, and names the tests that must
then fail, by what they assert. A test that a planted bug survives is no test.

    python tests/mutants.py [NAME ...]     names may have wildcards; without any, all are planted

Every mutant runs in a process forked from one that has imported torch and transformers but nothing of this package, so that it
costs a second or two. The same tests are run on an unchanged copy too, where all must pass.
"""

import argparse
import compileall
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from plant import Plant

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 200  # seconds a mutant may take: an endless loop is no verdict
CLEAN = "clean"
PARENT = (  # imported once, before the first fork
    "torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.utils.checkpoint", "hypothesis", "pytest", "numpy",
    "yaml", "safetensors.torch", "tokenizers", "huggingface_hub", "transformers.generation.utils",
    *(f"transformers.models.{m}.modeling_{m}" for m in ("bert", "bloom", "cpmant", "gpt2", "llama", "t5")),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant(Plant):
    """Planted in the package; each of `tests` must then fail with `error`."""

    tests: str  # ids within tests/, separated by semicolons
    error: str = "AssertionError"


def zoo(test: str, *cases: str) -> str:
    return ";".join(f"test_zoo.py::test_{test}[{case}]" for case in cases)


def parity(*cases: str) -> str:
    return zoo("logits_and_gradients_in_double", *cases)


GPT, BERT, LLAMA, T5, BLOOM = "gpt2-default-lm", "bert-default-mlm", "llama-default-lm", "t5-default-seq2seq", "bloom-default-lm"
ATTEND = "            return F.scaled_dot_product_attention(q, k, v, mask, dropout, self.causal, scale=scale, enable_gqa=grouped)"
SOFTMAX = """            if mask is None:
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, self.causal, scale=scale, enable_gqa=grouped)
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
            return (q @ k.mT * (scale or q.size(-1) ** -0.5) + bias).softmax(-1) @ v"""

# What the predecessors got wrong, as far as this code has a place for it, then what is easily got wrong.
MUTANTS = (
    # ---- attention and positions
    Mutant("t5-attention-scaled", "models/t5.py", "bias=False, scale=1.0,", "bias=False,", parity(T5)),
    Mutant("gpt-scale-by-layer-unwired", "models/gpt.py", "(i + 1 if c.scale_by_layer else 1)", "1", parity("gpt2-by-layer-lm")),
    Mutant("rope-angles-in-half", "layers/position.py",
           "kind = torch.promote_types(dtype, torch.float32)\n        frequencies", "kind = dtype\n        frequencies",
           "test_rope.py::test_angles_stay_wide"),
    Mutant("rope-interleaved", "layers/position.py", "interleaved: bool = False", "interleaved: bool = True", parity(LLAMA)),
    Mutant("rope-of-queries-alone", "layers/attention.py", "projection is not self.v", "projection is self.q", parity(LLAMA)),
    Mutant("hidden-places-hold-anything", "layers/cache.py", "                x[:, :, full:] = 0", "                x[:, :, full:] *= 1",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[gpt2-default-lm-greedy]"),
    Mutant("a-place-too-many-is-seen", "layers/cache.py", "self.places <= self.at", "self.places <= self.at + 1",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[gpt2-default-lm-greedy]"),
    Mutant("a-steps-bias-of-the-last-place", "layers/position.py", "(key - at + self.keys - 1)", "key",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[t5-default-seq2seq-greedy]"),
    Mutant("a-step-forgets-the-prompts-bias", "layers/position.py", "key < self.prompt, self.vector[:, -1:]", "key < 0, self.vector[:, -1:]",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[cpmant-default-lm-greedy]"),
    Mutant("a-step-sees-the-padding", "layers/output.py", "self.mask & cache.there", "cache.there",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[llama-default-lm-greedy]"),
    Mutant("beams-trade-no-places", "layers/cache.py", "x[:, :, : self.span] = x[:, :, : self.span].index_select(0, rows)", "pass",
           "test_generate_steps.py::test_the_tokens_are_those_of_steps_that_grow[llama-default-lm-beams]"),
    Mutant("a-late-end-is-not-cut", "generate/run.py", "            state.length -= over.late\n", "",
           "test_generate_steps.py::test_what_ends_early_is_cut_though_it_is_known_late"),
    Mutant("frequencies-of-a-rehearsal", "layers/position.py", " and not torch._C._len_torch_dispatch_stack()", "",
           "test_rope.py::test_frequencies_are_brought_to_a_device_once_unless_a_length_changes_them"),
    Mutant("frequencies-of-another-length", "layers/position.py", "kept = not by_length and", "kept =",
           "test_rope.py::test_frequencies_are_brought_to_a_device_once_unless_a_length_changes_them"),
    Mutant("cached-query-at-0", "generate/state.py", "self.positions(cache.length))", "self.positions(0)[:, : new.size(1)])",
           zoo("greedy_generation_token_for_token", LLAMA)),
    Mutant("cache-without-past-positions", "layers/output.py", "torch.arange(self.past, self.keys, device", "torch.arange(self.queries, device",
           "test_generate.py::test_steps_with_a_cache_equal_one_forward[gpt2-default-lm]"),
    Mutant("cache-that-does-not-count", "registry.py", "past_key_values.length = (batch.target or batch).keys", "pass",
           "test_generate.py::test_a_loop_of_ones_own_needs_no_count_of_what_the_cache_holds[gpt2-default-lm]"),
    Mutant("prompt-padded-on-the-right", "generate/run.py", "not bool(mask[:, -1].all())", "False",
           "test_generate.py::test_a_prompt_that_cannot_be_gone_on_with_is_refused", "Failed"),
    Mutant("last-bucket-never-reached", "layers/position.py", ".clamp(max=n - 1)", ".clamp(max=n - 2)",
           "test_t5.py::test_every_bucket_is_trained_the_last_one_too[False]"),
    Mutant("bucket-off-by-one", "layers/position.py", "(distance > 0) * n", "(distance >= 0) * n", parity(T5)),
    Mutant("decoder-bias-bidirectional", "models/t5.py", "bias(bidirectional=False)", "bias(bidirectional=True)", parity(T5)),
    Mutant("alibi-slope-off-by-one", "layers/position.py", "(-8 * (i + 1) / n)", "(-8 * i / n)", parity(BLOOM)),
    Mutant("additive-bias-dropped", "layers/view.py", 'return torch.where(seen, bias, float("-inf")), False', "return seen, False",
           parity(T5, BLOOM)),
    Mutant("causal-sees-the-next", "layers/view.py", "seen = at[None, :] <= at[keys - queries :, None]",
           "seen = at[None, :] <= at[keys - queries :, None] + 1", zoo("padding", f"{GPT}-right")),
    Mutant("causal-forgets-the-past", "layers/view.py", "seen = at[None, :] <= at[keys - queries :, None]",
           "seen = at[None, :] <= at[:queries, None]",
           "test_generate.py::test_steps_with_a_cache_equal_one_forward[gpt2-default-lm]"),
    Mutant("padding-mask-ignored", "layers/output.py", "merged(real=self.mask, context", "merged(real=None, context",
           zoo("padding", f"{BERT}-right")),
    Mutant("padded-source-seen", "layers/output.py", "mask = None if source.mask is None else source.mask[:, None, None, :]",
           "mask = None", zoo("padding", f"{T5}-right")),
    Mutant("hidden-row-is-nan", "layers/view.py", ATTEND, SOFTMAX, zoo("a_row_of_nothing_but_padding", BERT)),
    Mutant("tiles-without-dropout", "layers/view.py",
           "no copies.\"\"\"\n        seed = ops.draw(q.device) if dropout else None", "no copies.\"\"\"\n        seed = None",
           "test_view.py::test_dropout_is_the_op_s[0.1]"),
    Mutant("tiles-see-what-comes", "layers/view.py", "self.mask, *self.lengths, scale, self.causal, seed", "self.mask, *self.lengths, scale, False, seed",
           "test_view.py::test_both_roads_agree[70-70-4-causal]"),
    Mutant("tiles-in-half-scale", "layers/view.py",
           "no copies.\"\"\"\n        seed = ops.draw(q.device) if dropout else None\n        scale = q.size(-1) ** -0.5 if scale is None else scale",
           "no copies.\"\"\"\n        seed = ops.draw(q.device) if dropout else None\n        scale = q.size(-1) ** -0.5",
           "test_view.py::test_both_roads_agree[70-70-4-plain]"),
    Mutant("packing-leaks", "layers/view.py", "        if self.packing is None:\n", "        if self.packing is None or mask is None:\n",
           zoo("packed_equals_alone", GPT)),
    Mutant("packed-positions-run-on", "layers/output.py", "(at - ends[torch.searchsorted(ends, at, right=True) - 1])", "(at)",
           zoo("packed_equals_alone", GPT)),
    Mutant("packed-classes-from-one-text", "layers/head.py", "x[0, batch.packing.q.there[1:] - 1]",
           "x[0, batch.packing.q.there[1:].flip(0) - 1]", zoo("packed_sequences_are_classified_one_by_one", "gpt2-default-classify")),
    # ---- norms, activations, dropout
    Mutant("eps-unwired", "models/gpt.py", "partial(LayerNorm, c.dim, c.eps)", "partial(LayerNorm, c.dim, 1e-5)", parity(GPT)),
    Mutant("rms-eps-unwired", "models/t5.py", "partial(RMSNorm, c.dim, c.eps)", "partial(RMSNorm, c.dim, 1e-6)", parity(T5)),
    Mutant("gradient-of-a-shard-for-the-whole", "ops/_shard.py", "grad_placements=self.placements(names, Partial())",
           "grad_placements=self.placements(names, Replicate())", "test_shard.py::test_equal_to_one_process"),
    Mutant("loss-of-a-shard-for-the-whole", "ops/_shard.py", "placements = self.placements(names, Partial())",
           'placements = self.placements(names, Partial("avg"))', "test_shard.py::test_equal_to_one_process"),
    Mutant("one-mask-for-all-shards", "ops/_shard.py", "if number else seed", "if number < 0 else seed",
           "test_shard.py::test_each_shard_has_its_own_dropout"),
    Mutant("norm-over-a-piece-of-a-row", "ops/_shard.py", '"rms_norm": "* D, D -> * D"', '"rms_norm": "* d, d -> * d"',
           "test_shard.py::test_where_no_rule_fits"),
    Mutant("key-heads-cut-elsewhere", "ops/_shard.py", "any(n % shards for n in lengths)", "False",
           "test_shard.py::test_where_no_rule_fits"),
    Mutant("rms-in-half", "ops/rms_norm.py", "h = wide(x)", "h = x", "test_ops.py::test_rms_norm_takes_large_half_precision_inputs"),
    Mutant("gelu-tanh-is-erf", "ops/activation.py", 'return F.gelu(x, approximate="tanh")', "return F.gelu(x)", parity(GPT)),
    Mutant("gelu-erf-is-tanh", "ops/activation.py", 'plain("gelu", F.gelu)', 'plain("gelu", tanh_gelu)',
           parity("gpt2-erf-gelu-lm")),
    Mutant("gate-and-up-swapped", "layers/ffn.py", "gate, up = together(x, self.gate, self.up)", "up, gate = together(x, self.gate, self.up)",
           parity(LLAMA)),
    Mutant("dropout-of-the-stream-missing", "layers/block.py", "return self.dropout.add(self.ffn(h), x)", "return x + self.ffn(h)",
           zoo("dropout_has_their_places_and_rates", GPT)),
    Mutant("dropout-of-attention-missing", "models/gpt.py", "scale=scale, dropout=c.attn_dropout)", "scale=scale)",
           zoo("dropout_has_their_places_and_rates", GPT)),
    Mutant("dropout-of-embeddings-missing", "models/t5.py", "Embedding(c.vocab, c.dim, dropout=c.dropout)", "Embedding(c.vocab, c.dim)",
           zoo("dropout_has_their_places_and_rates", T5)),
    Mutant("dropout-rates-swapped", "models/gpt.py", "dropout=c.embed_dropout)", "dropout=c.dropout)",
           zoo("dropout_has_their_places_and_rates", GPT)),
    Mutant("dropout-in-evaluation", "layers/attention.py", "self.dropout if self.training else 0.0", "self.dropout", parity(GPT)),
    Mutant("dropout-redrawn-by-recompute", "parallel/blocks.py", "*args, use_reentrant=False)", "*args, use_reentrant=False, preserve_rng_state=False)",
           "test_parallel.py::test_recompute_replays_dropout"),
    Mutant("segments-ignored", "models/bert.py", "torch.zeros_like(batch.at) if batch.segments is None else batch.segments",
           "torch.zeros_like(batch.at)", "test_bert.py::test_segments"),
    Mutant("the-stream's-gradient-lost", "ops/_norm.py", "backward(grad, more, x, weight,", "backward(grad, None, x, weight,",
           "test_norm.py::test_both_gradients[both-torch.float32-cpu-LayerNorm]"),
    Mutant("second-gradient-of-a-norm-lost", "ops/_norm.py", "norm_backward(grad, also, total,", "norm_backward(grad, None, total,",
           "test_norm.py::test_two_read_a_norm[both-0.0-torch.float32-cpu-LayerNorm]"),
    Mutant("alone-the-second-gradient-is-no-first", "ops/_norm.py", "grad, also = also, None", "pass",
           "test_norm.py::test_two_read_a_norm[second-0.4-torch.float32-cpu-RMSNorm]"),
    Mutant("one-product's-gradient-for-all", "ops/linear.py", "multiply(out, a, b, float(i > 0))", "multiply(out, a, b, 0.0)",
           "test_linear.py::test_whatever_is_used_frozen_or_left_out[111]"),
    Mutant("an-unused-product-shifts-weights", "ops/linear.py", "[(g, weights[i]) for i, g in gs]",
           "[(g, w) for (_, g), w in zip(gs, weights, strict=False)]",
           "test_linear.py::test_whatever_is_used_frozen_or_left_out[001]", "RuntimeError"),
    Mutant("gradients-added-one-by-one", "layers/linear.py", "if all(map(alone, layers)):", "if not layers:",
           "test_linear.py::test_no_additions_of_activations"),
    Mutant("relu's-slope-lost", "ops/linear.py", "torch.ops.aten.threshold_backward(grad, out, 0).reshape", "grad.reshape",
           "test_linear.py::test_relu_of_a_product[True-True]"),
    Mutant("relu-around-a-hook", "layers/linear.py", "and act is relu and alone(layer):", "and act is relu:",
           "test_linear.py::test_a_layer_does_relu_within_its_product"),
    Mutant("labels-asked-for-after-the-body", "registry.py",
           "batch = self.head.prepared(batch if labelled is None else replace(batch, labelled=labelled))", "",
           "test_head.py::test_labelled_positions_are_asked_for_before_the_body[t5-small-seq2seq-1]"),
    Mutant("rotated-under-a-hook", "layers/attention.py", "spare=alone(projection)", "spare=True",
           "test_linear.py::test_what_a_hook_has_seen_is_not_rotated_under_it"),
    # ---- a micro-batch that is recorded
    Mutant("a-record-reads-its-first-batch", "train/graphs.py", "shapes.inputs[name].copy_(value)", "value.clone()",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt-cpu]"),
    Mutant("a-record's-loss-scale-stays", "train/graphs.py", "shapes.scale.copy_(scale)", "scale.clone()",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt overflows-cpu]"),
    Mutant("gradients-of-records-kept-back", "train/graphs.py", "        record.launch()\n        for p, gradient in self.gradients.items():",
           "        record.launch()\n        for p, gradient in list(self.gradients.items())[1:]:",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt-cpu]"),
    Mutant("other-shapes'-gradients-elsewhere", "train/graphs.py", "p.grad = self.gradients[p].copy_(p.grad)", "pass",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt in thirds of two lengths-cpu]"),
    Mutant("a-record-adds-to-others'-gradients", "train/graphs.py", '(kind == "later" and not self.held())', "False",
           "test_graphs.py::test_gradients_that_are_not_the_records_are_added_to_by_calls"),
    Mutant("half-a-backward-left-behind", "train/graphs.py", "            for p, gradient in before.items():\n                p.grad = gradient",
           "            pass", "test_graphs.py::test_what_cannot_be_recorded_runs_as_before[gpt]"),
    Mutant("the-generator-of-a-failure-stays", "train/graphs.py", "        self.drop()\n        self.recorder.close()", "        self.drop()",
           "test_graphs.py::test_what_cannot_be_recorded_runs_as_before[gpt]"),
    Mutant("records-outlive-their-generator", "train/graphs.py", "        self.drop()\n        self.recorder.close()", "        self.recorder.close()",
           "test_graphs.py::test_a_failure_does_not_cost_other_shapes_their_records"),
    Mutant("done-again-on-half-of-it", "train/graphs.py", "        for p in self.trained:\n            p.grad = None\n", "",
           "test_graphs.py::test_out_of_memory_beside_records[8]"),
    Mutant("done-again-with-other-dropout", "train/graphs.py", "        self.recorder.rewind(drawn)\n", "",
           "test_graphs.py::test_out_of_memory_beside_records[8]"),
    Mutant("a-first-record-leaves-no-memory", "train/graphs.py", "if self.ended or any(", "if not self.gradients or any(",
           "test_graphs.py::test_out_of_memory_beside_records[3]", "OutOfMemoryError"),
    Mutant("memory-asked-for-at-every-step", "train/graphs.py", "            shapes.seen = -WORTH  # to ask costs time\n", "",
           "test_graphs.py::test_no_record_where_memory_is_short"),
    Mutant("packed-bounds-recorded", "train/graphs.py", ' or "max_length_q" not in arguments', "",
           "test_graphs.py::test_packed_batches_whose_longest_is_not_said_are_never_recorded"),
    Mutant("packed-bounds-asked-for-in-a-record", "layers/output.py", "if most is not None and recording(x):", "if False:",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt packed-cpu]"),
    Mutant("other-shapes-as-late-as-the-first", "train/graphs.py", "(AGAIN if self.gradients else WARM)", "WARM",
           "test_graphs.py::test_records_of_other_shapes_are_made_sooner"),
    Mutant("batches-of-graphs-alone-filled", "train/step.py", "batch if graphs is None else filled(model, batch)",
           "batch if graphs is None or graphs.ended else filled(model, batch)",
           "test_graphs.py::test_bits_are_those_of_the_calls[gpt packed-cpu]"),
    Mutant("what-fills-up-is-learned", "train/shapes.py", 'wider(labels, tokens["q"], IGNORE)', 'wider(labels, tokens["q"], 1)',
           "test_shapes.py::test_losses_and_gradients_stay[gpt2-lm]"),
    Mutant("what-fills-up-is-seen", "train/shapes.py", "wider(batch[name], s, 0)", 'wider(batch[name], s, name == "attention_mask")',
           "test_shapes.py::test_losses_and_gradients_stay[bert-tag]"),
    Mutant("what-fills-up-joins-the-last", "train/shapes.py", "(x[-1] + longest[side] * torch.arange(1, many - n + 1))",
           "(0 * x[-1] + longest[side] * torch.arange(1, many - n + 1))", "test_shapes.py::test_a_packed_batch_is_of_few_shapes"),
    Mutant("filled-beyond-the-positions", "train/shapes.py", "most or up(own, *LENGTHS)))", "up(own, *LENGTHS)))",
           "test_shapes.py::test_no_row_is_longer_than_the_positions"),
    Mutant("compared-with-what-fills-up", "train/shapes.py", "    if not by_token and len(labels) != n:\n        return batch\n", "",
           "test_shapes.py::test_vectors_that_are_compared_get_no_others"),
    Mutant("the-length-of-what-fills-up-counts", "train/shapes.py", "isinstance(m, Rotary) and m.frequencies.by_length", "False",
           "test_shapes.py::test_where_the_length_says_what_positions_mean_it_stays"),
    Mutant("mean-of-all-that-is-packed", "layers/head.py", "(at >= ends[:-1, None]) & ", "(at >= 0) & ",
           "test_data_embed.py::test_packed_rows_have_the_gradients_of_padded_ones[similarity]"),
    Mutant("a-record-of-weights-that-are-gone", "train/graphs.py", "self.places != self.here()", "not self.places",
           "test_graphs.py::test_parameters_that_are_elsewhere_are_recorded_anew"),
    Mutant("zeros-where-there-is-no-gradient", "train/graphs.py", "            if others or any(", "            if any(",
           "test_graphs.py::test_shapes_that_train_other_parameters_have_no_record[lengths0]"),
    Mutant("what-fills-up-is-a-label", "layers/head.py", "none = (labels.flatten() == IGNORE)", "none = (labels.flatten() != IGNORE)",
           "test_graphs.py::test_labelled_places_are_few_numbers_and_all_of_them[8192-0.15]"),
    Mutant("numbers-of-the-host-recorded", "layers/onto.py", "torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()", "False",
           "test_graphs.py::test_numbers_of_the_host_are_refused_in_a_record", "AssertionError"),
    # ---- heads and losses
    Mutant("tie-broken", "models/gpt.py", '{"head.out.weight": "embed.tokens.weight"} if c.tie else {}', "{}", parity(GPT)),
    Mutant("head-in-half", "layers/head.py", "self.norm(self.act(self.dense(x)))", "self.norm(self.act(self.dense(x))).half().to(x.dtype)",
           parity(BERT)),
    Mutant("t5-head-unscaled", "models/t5.py", "scale=c.dim**-0.5 if c.scale else 1.0", "scale=1.0", parity(T5)),
    Mutant("labels-not-shifted", "layers/head.py", "nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE)", "labels", zoo("losses", GPT)),
    Mutant("all-ignored-is-nan", "layers/head.py", "(labels != IGNORE).sum().clamp(min=1)", "(labels != IGNORE).sum()", zoo("losses", GPT)),
    Mutant("long-batch-cut-to-a-chunk", "ops/linear_cross_entropy.py", "zip(x.split(CHUNK), labels.split(CHUNK), strict=True)",
           "[(x[:CHUNK], labels[:CHUNK])]", "test_zoo.py::test_the_loss_of_more_tokens_than_a_chunk"),
    Mutant("loss-in-the-model's-dtype", "ops/cross_entropy.py", "logits = wide(logits)", "logits = logits.clone()",
           "test_head.py::test_the_reference_computes_high"),
    Mutant("a-chunk-forgets-the-others", "ops/linear_cross_entropy.py", "1.0 if start else 0.0", "0.0",
           "test_head.py::test_chunks_are_whole_logits[7-(50, 16, 37)-plain]"),
    Mutant("unlabelled-rows-unwritten", "ops/linear_cross_entropy.py", "dx = into.zero_().index_copy_", "dx = into.fill_(1).index_copy_",
           "test_head.py::test_chunks_are_whole_logits[7-(50, 16, 37)-plain]"),
    Mutant("scaled-under-a-later-backward", "ops/linear_cross_entropy.py", "and not torch._C._autograd._get_current_graph_task_keep_graph()",
           "", "test_head.py::test_backward_twice_and_accumulated"),
    Mutant("half-precision-scale-kept", "ops/linear_cross_entropy.py", "w[piece], 1.0 if i else 0.0, scale / up)",
           "w[piece], 1.0 if i else 0.0, scale)", "test_head.py::test_autocast[True-torch.float16]"),
    Mutant("smoothing-lost-by-the-fused-loss", "layers/head.py", "(self.scale, self.smoothing, self.z)", "(self.scale, 0.0, 0.0)",
           "test_head.py::test_smoothing_and_z_are_applied[True]"),
    Mutant("a-changed-layer-passed-over", "layers/head.py", "if not apart and not plain(self.out):", "if False:",
           "test_head.py::test_a_changed_layer_is_called[False-a forward of its own]"),
    Mutant("last-token-is-padding", "layers/head.py", "(batch.mask * at).argmax(1)", "torch.full_like(at[: len(x)], -1)",
           zoo("padding", "gpt2-default-classify-right")),
    Mutant("padding-holds-answers", "layers/head.py", "scores.masked_fill(~real, torch.finfo(scores.dtype).min)", "scores",
           "test_bert.py::test_padding_is_no_place_of_an_answer[0.0]"),
    Mutant("sentence-mean-with-padding", "layers/head.py", "x.new_ones(x.shape[:2]) if batch.mask is None else", "x.new_ones(x.shape[:2]) if True else",
           "test_bert.py::test_a_sentence_of_nothing_but_padding_has_a_finite_vector"),
    Mutant("decoder-fed-unshifted", "layers/output.py", "pad(labels, (1, 0), value=start)", "pad(labels, (0, 1), value=start)",
           "test_t5.py::test_labels_shifted_right_feed_the_decoder"),
    Mutant("future-read-by-cpm", "models/cpm_ant.py", "causal=labels is not None", "causal=False",
           "test_cpm_ant.py::test_no_label_is_predicted_from_itself_or_what_follows[mask-4]"),
    Mutant("packed-cpm-read-at-its-prompt", "models/cpm_ant.py", "out[:, a + n * (i + 1) :", "out[:, a + n * i :",
           "test_cpm_ant.py::test_packed_losses_are_those_of_each_sequence_alone[mask]", "ValueError"),
    Mutant("context-of-cpm-read-one-way", "layers/output.py", "contiguous(), right=True) - 1", "contiguous(), right=False) - 1",
           "test_cpm_ant.py::test_the_context_is_read_in_both_directions[mask]"),
    Mutant("context-of-cpm-no-kernel-s", "layers/output.py", "open_ = self.context if causal else None", "open_ = None",
           "test_cpm_ant.py::test_the_context_is_read_in_both_directions[distances]"),
    Mutant("ways-across-segments-exchanged", "layers/position.py", "+ a * self.segments + b, self.buckets + b * self.segments + a",
           "+ b * self.segments + a, self.buckets + a * self.segments + b", parity("cpmant-default-lm")),
    Mutant("a-cut-table-makes-a-mask", "layers/position.py", "served(vector, self.table.weight.dtype)",
           "served(self.table.weight, self.table.weight.dtype)", "test_distances.py::test_ranks_that_share_the_heads_make_no_mask"),
    Mutant("too-few-distances-for-a-decoder", "layers/position.py", "buckets // (4 if bidirectional else 2)", "buckets // 4",
           "test_trust.py::test_a_model[all distances exact]"),
    Mutant("edge-of-the-prompt-moved", "ops/relative_attention.py", "own, other = (x < prompt for", "own, other = (x <= prompt for",
           f"{parity('cpmant-default-lm')};test_distances.py::test_by_distance[cpmant-default-lm]"),
    # ---- checkpoints
    Mutant("missing-tensor-drawn", "checkpoint/load.py", "    if fresh not in (set(), headed, headed - shared):", "    if False:",
           "test_bert.py::test_half_a_head_is_refused[bert.encoder.layer.1.output.dense.bias-mlm]", "Failed"),
    Mutant("unexpected-tensor-ignored", "checkpoint/load.py", "    if strange:", "    if False:",
           "test_bert.py::test_a_tensor_that_nothing_reads_is_refused[cls.predictions.transform.dense.scale]", "Failed"),
    Mutant("misshapen-tensor-cut", "checkpoint/load.py", "    if wrong:", "    if False:",
           "test_zoo.py::test_a_config_that_asks_for_less_than_the_file_holds_is_refused[gpt2-vocab]", "Failed"),
    Mutant("deeper-file-accepted", "checkpoint/load.py", "if key not in known]", "if key not in known and not any(c.isdigit() for c in key)]",
           "test_zoo.py::test_a_config_that_asks_for_less_than_the_file_holds_is_refused[gpt2-layers]", "Failed"),
    Mutant("gamma-and-beta-swapped", "checkpoint/load.py", '((".gamma", ".weight"), (".beta", ".bias"))',
           '((".gamma", ".bias"), (".beta", ".weight"))', "test_bert.py::test_a_file_of_2018"),
    Mutant("square-weight-not-transposed", "models/gpt.py", '"decoder.blocks.{}.attn.o", T', '"decoder.blocks.{}.attn.o"', parity(GPT)),
    Mutant("qkv-order", "models/gpt.py", 'for p in "qkv"), T', 'for p in "kqv"), T', parity(GPT)),
    Mutant("bloom-qkv-flat", "models/bloom.py", ", PerHead(c.heads)\n", "\n", parity(BLOOM)),
    Mutant("heads-written-flat", "names.py", "parts], 1).flatten(0, 2)", "parts], 0).flatten(0, 2)", zoo("round_trip_is_bit_for_bit", BLOOM)),
    Mutant("copy-not-compared", "checkpoint/load.py", "in keys and same(keys[key], keys[source]):", "in keys:",
           "test_t5.py::test_an_embedding_of_its_own_is_refused[encoder.embed_tokens.weight]", "Failed"),
    Mutant("saved-by-name", "checkpoint/write.py", "return -DTYPE_ORDER[DTYPE_NAMES[item.dtype]], item.name", "return 0, item.name",
           "test_write.py::test_bytes_equal_save_file"),
    Mutant("nf4-halves-swapped", "ops/quantize.py", "codes[..., ::2] << 4 | codes[..., 1::2]", "codes[..., 1::2] << 4 | codes[..., ::2]",
           "test_quantize.py::test_kernels_and_references_agree_to_the_bit[torch.float32-nf4-cpu]"),
    Mutant("bias-of-a-quantised-vector", "ops/quantize.py", "grad.reshape(-1, grad.shape[-1]).sum(0", "grad.flatten(0, -2).sum(0",
           "test_kernels.py::test_no_less_exact_than_the_peers[torch.float32-linear_nf4]", "IndexError"),
    Mutant("ids-wrapped-into-the-table", "ops/embedding.py", "ids.clamp(-1, vocab).int()", "ids.int()",
           "test_embedding.py::test_an_id_outside_is_sorted_to_no_row"),
    Mutant("kernels-on-any-gpu", "ops/_op.py", "bool(_C.cuda_architectures) and covered(index)", "bool(_C.cuda_architectures)",
           "test_op.py::test_the_reference_computes_where_no_kernel_would_run[0]"),
    Mutant("gpu-of-the-call-not-asked", "ops/_op.py", 'index = a.get_device() if device == "cuda" else -1', "index = 0",
           "test_op.py::test_the_reference_computes_where_no_kernel_would_run[1]"),
    Mutant("tiny-scales-kept", "ops/quantize.py", "torch.where(most < TINY, 0.0, most)", "most",
           "test_quantize.py::test_groups_of_zeros_tiny_numbers_and_none[nf4-cpu]"),
    Mutant("autocast-in-a-quantised-product", "ops/quantize.py", "with without_autocast(x.device):",
           "with torch.autocast(x.device.type, enabled=torch.is_autocast_enabled('cpu')):",
           "test_quantize.py::test_autocast_does_not_reach_inside[nf4]"),
    Mutant("scales-cast-with-the-model", "layers/quantized.py", "if self.scales.dtype != scales.dtype:", "if False:",
           "test_quantize.py::test_casting_a_model_does_not_round_the_scales[NF4Linear]", "ValueError"),
    Mutant("config-says-another-dtype", "checkpoint/save.py", 'str(kind).removeprefix("torch.")', '"float32"',
           "test_zoo.py::test_a_dtype_stays_what_it_is_in_the_file"),
    Mutant("always-loaded-wide", "registry.py", 'dtype_of(folder, cls.ignored) if dtype == "auto"', 'torch.float32 if dtype == "auto"',
           "test_zoo.py::test_a_dtype_stays_what_it_is_in_the_file"),
    Mutant("initial-weights-by-part", "layers/initial.py",
           "            piece.uniform_(generator=source)", "            pass",
           "test_initial.py::test_a_part_is_that_of_one_draw[normal_]"),
    Mutant("initial-weights-in-ragged-pieces", "layers/initial.py", "LANES // math.gcd(width, LANES)", "1",
           "test_initial.py::test_a_part_is_that_of_one_draw[normal_]"),
    Mutant("last-piece-no-group", "layers/initial.py", "(shape[0] - stop) * width < LANES:", "(shape[0] - stop) * width < 0:",
           "test_initial.py::test_a_part_is_that_of_one_draw[normal_]"),
    Mutant("whole-tensors-drawn", "layers/initial.py", "max(1, PIECE // (group * width)) * group", "shape[0]",
           "test_initial.py::test_a_rank_never_holds_more_than_its_share"),
    Mutant("initial-weights-all-alike", "layers/initial.py", 'f"{seed}/{name}"', 'f"{seed}"',
           "test_zoo.py::test_initial_weights_follow_the_seed_and_the_name"),
    Mutant("residual-weights-too-large", "models/gpt.py", "((2 * self.config.layers) ** 0.5 if residual else 1)", "1",
           "test_zoo.py::test_initial_weights_follow_the_seed_and_the_name"),
    Mutant("narrowest-dtype-taken", "registry.py", "return max(floating,", "return min(floating,",
           "test_zoo.py::test_of_several_dtypes_in_a_file_the_widest_is_taken"),
    Mutant("temp-renamed-before-it-is-flushed", "checkpoint/atomic.py", "        sync_tree(temp)\n        os.rename(temp, final)",
           "        os.rename(temp, final)\n        sync_tree(final)", "test_state.py::test_order_of_calls"),
    Mutant("manifest-hash-unchecked", "checkpoint/state.py", '            if found != row["sha256"]:', "            if False:",
           "test_state.py::test_load_verifies", "Failed"),
    Mutant("pickles-run", "checkpoint/folder.py", "weights_only=True, mmap", "weights_only=False, mmap",
           "test_folder.py::test_bin_refused[bare pickle];test_folder.py::test_bin_refused[runs code]"),
    Mutant("another-computation-accepted", "checkpoint/config.py", "if name in values and values[name] != wanted:", "if False:",
           "test_bert.py::test_another_computation_is_refused[is_decoder-True]", "Failed"),
    # ---- adapters
    Mutant("adapter-after-sharding", "adapter/attach.py",
           """    if any(type(p) not in PLAIN for p in model.parameters()):
        refuse(None, "adapter", "the model is sharded already", "add_adapter before parallelize, or load(..., machine=, adapter=)")
""", "", "test_adapter.py::test_an_adapter_comes_before_sharding", "Failed"),
    Mutant("adapter-rows-head-by-head-forgotten", "adapter/folder.py", "return a, site.rows.whole(parts), magnitude",
           "return a, torch.cat(parts), magnitude", "test_adapter.py::test_peft_computes_the_same[bloom-default-lm-lora]"),
    Mutant("adapter-scale-of-rslora", "adapter/config.py", "return alpha / (rank**0.5 if self.rslora else rank)", "return alpha / rank",
           "test_adapter.py::test_what_peft_wrote_is_read[bloom-default-lm-target_modules-use_rslora]"),
    Mutant("adapter-stack-scaled-by-its-rank", "adapter/folder.py", "config.alpha_of(scale, rank)", "config.alpha_of(scale, config.rank)",
           "test_adapter.py::test_parts_of_a_matrix_that_others_hold_as_one[gpt2-default-lm-q+k+v-lora]"),
    Mutant("dora-lengths-of-the-base", "layers/adapter.py", "torch.linalg.vector_norm(self.summed(), dim=1)",
           "torch.linalg.vector_norm(self.base.weight.to(self.b.weight.dtype), dim=1)",
           "test_adapter.py::test_peft_computes_the_same[llama-default-lm-dora]"),
    Mutant("whole-weights-kept-while-quantising", "adapter/attach.py", "        for name in plain:  # by name",
           "        held = list(model.modules())\n        for name in plain:  # by name",
           "test_adapter.py::test_one_layer_at_a_time_is_whole_while_a_base_is_quantised"),
    Mutant("adapter-state-without-a-classifier", "adapter/attach.py", 'model.task in LABELLED and n.startswith("head.out.")',
           "False", "test_adapter.py::test_only_the_adapter_and_a_classifiers_head_are_trained"),
    Mutant("adapter-row-parallel-b-cut", "parallel/adapted.py", '"b" if style == "column" else "a": styles', '"b": styles',
           "test_adapter.py::test_adapters_on_a_mesh_equal_one_process[tp2]", "RuntimeError"),
    # ---- data
    Mutant("first-packed-label-kept", "data/objectives/lm.py", "np.where(np.arange(len(ids)) == 0, IGNORED, ids)", "ids",
           "test_data_objective.py::test_packing_keeps_each_token_once_and_never_crosses;"
           "test_data_packing.py::test_gradients_are_those_of_the_same_sequences_padded[gpt2-lm]"),
    Mutant("packed-rows-count-on", "data/collate.py", "torch.cat([torch.arange(len(row)) for row in ids])[None]",
           "torch.arange(sum(map(len, ids)))[None]", "test_data_objective.py::test_packing_keeps_each_token_once_and_never_crosses;"
           "test_data_packing.py::test_every_sequence_stands_in_one_bin[seq2seq]"),
    Mutant("targets-bound-by-their-sources", "data/collate.py", "for rows in (labels, ids))", "for rows in (ids, ids))",
           "test_data_packing.py::test_every_sequence_stands_in_one_bin[seq2seq]"),
    Mutant("prompt-hidden-from-itself", "models/cpm_ant.py", "else bounds) + n", "else bounds)",
           "test_cpm_ant.py::test_the_context_is_read_in_both_directions[mask]"),
    Mutant("packed-row-too-long", "data/packing.py", "place = bisect_left(rooms, length)", "place = bisect_left(rooms, length - 1)",
           "test_data_packing.py::test_every_sequence_stands_in_one_bin[lm];test_data_packing.py::test_every_sequence_stands_in_one_bin[seq2seq]"),
    Mutant("what-is-said-of-vectors-left-on-the-hub", "checkpoint/hub.py", "if \"modules.json\" in sizes else ()", "if False else ()",
           "test_hub.py::test_what_is_said_of_vectors_comes_too", "FileNotFoundError"),
    Mutant("every-pooling-is-ours", "checkpoint/sentence.py", "    elif names:\n", "    elif False:\n",
           "test_sentence.py::test_what_is_left_out_is_said[gpt2-modules3-mean_sqrt_len_tokens-said3]"),
    Mutant("windows-of-one-kind", "data/tokenizer.py", "kind if s == 1 else t for", "t for",
           "test_parity_trainer.py::test_what_transformers_makes_of_the_records[qa]"),
    Mutant("windows-do-not-overlap", "data/tokenizer.py", "stride=stride, strategy", "stride=0, strategy",
           "test_data_answer.py::test_windows_show_all_of_the_text"),
    Mutant("a-text-of-many-pairs-is-the-first", "data/tokenizer.py", "None if second is None else cut[second])", "None if second is None else cut[texts[-1]])",
           "test_data_objective.py::test_pairs_are_encoded_many_at_a_time_and_told_apart[12]"),
    Mutant("a-template-s-token-beyond-the-model", "data/encode.py", "self.refuse(record, ids)  # a token", "pass  # a token",
           "test_data_objective.py::test_ids_that_the_model_lacks_are_named", "Failed"),
    Mutant("pairs-not-refused-by-their-record", "data/encode.py", "                with self.naming(record):\n                    ids, segments",
           "                if True:\n                    ids, segments", "test_data_objective.py::test_pairs_are_encoded_many_at_a_time_and_told_apart[12]"),
    Mutant("last-texts-not-encoded", "data/encode.py", "    if some:\n        yield some\n", "",
           "test_data_objective.py::test_texts_are_encoded_many_at_a_time_and_told_apart[12]"),
    Mutant("a-forwards-loss-by-the-steps-targets", "train/step.py", "loss * (each / max(1, count_targets(batch, task)))", "loss",
           "test_train.py::test_accumulation_equals_one_batch[2]"),
    Mutant("a-long-document-loses-its-end", "data/sequence.py", "counts = -(-lengths // size)", "counts = np.maximum(lengths // size, 1)",
           "test_data_objective.py::test_packing_keeps_each_token_once_and_never_crosses"),
    Mutant("prompt-is-trained-on", "data/objectives/lm.py", "np.where(np.arange(len(ids)) < self.known[index], IGNORED, ids)", "ids",
           "test_data_objective.py::test_only_responses_are_trained_on"),
    Mutant("masks-as-in-the-first-epoch", "data/objectives/mlm.py", "(self.seed, epoch, index, 2)", "(self.seed, 0, index, 2)",
           "test_data_objective.py::test_masks_depend_on_epoch_and_index_alone"),
    Mutant("examples-cannot-be-pickled", "data/objectives/mlm.py", "self.seed, self.probability = seed, data.mlm_probability",
           'self.seed, self.probability, self.lock = seed, data.mlm_probability, __import__("threading").Lock()',
           "test_data_objective.py::test_masks_depend_on_epoch_and_index_alone", "TypeError"),
    Mutant("sequences-counted-in-ids", "data/indexed.py", "(begins != (sums - lengths) * self.dtype.itemsize)", "(begins != sums - lengths)",
           "test_data_indexed.py::test_what_others_wrote_is_read[i4]", "InputError"),
    Mutant("half-a-part-kept", "data/tokenize.py", "            file.truncate(length)\n", "            pass\n",
           "test_data_tokenize.py::test_a_kill_costs_a_part_at_most"),
    Mutant("other-options-taken-for-the-same", "data/tokenize.py", 'if said["key"] != key:', "if False:",
           "test_data_tokenize.py::test_the_same_again_is_there_already_and_another_is_refused", "Failed"),
    Mutant("foreign-ids-reach-the-model", "data/indexed.py", "odd = np.flatnonzero((ids < 0)", "odd = np.flatnonzero((ids < -9)",
           "test_data_indexed.py::test_more_refusals", "Failed"),
    Mutant("shares-drift", "data/order.py", "((2 * i * a + whole) // (2 * whole)", "((2 * i * a + whole) // (2 * whole + 1)",
           "test_data_order.py::test_shares_hold_far_out;test_data_order.py::test_every_prefix_has_its_shares"),
    Mutant("grouping-forgets-the-straddling-batch", "data/order.py", "head = min(-epoch * self.size % self.batch, self.size)", "head = 0",
           "test_data_order.py::test_batches_are_of_about_one_length_in_every_epoch"),
    Mutant("short-batches-first", "data/order.py", "[np.random.default_rng((self.seed, epoch, 3)).permutation(full)]", "",
           "test_data_order.py::test_batches_are_of_about_one_length_in_every_epoch"),
    Mutant("budget-ends-with-the-rank", "data/loader.py", "range(0)] * (max(map(len, every)) - len(every[self.rank]))", "range(0)] * 0",
           "test_data_order.py::test_a_budget_of_tokens_whatever_the_ranks"),
    Mutant("errors-end-the-data", "data/prefetch.py", "            waiting.put(error)\n", "            waiting.put(None)\n",
           "test_data_prefetch.py::test_an_error_stands_where_its_item_would", "StopIteration"),
    Mutant("packed-tags-padded", "data/sequence.py", "return pack(ids, labels)", "return pad(ids, labels, self.fill)",
           "test_data_packing.py::test_every_sequence_stands_in_one_bin[tag]", "KeyError"),
    Mutant("shuffle-with-replacement", "data/order.py", ".permutation(size)", ".integers(size, size=size)",
           "test_data_loader.py::test_the_order_is_pinned"),
    Mutant("evaluation-goes-round", "data/loader.py", "range(len(self))[k * size", "range(rounds * self.world * size)[k * size",
           "test_data_loader.py::test_an_evaluation_by_ranks_counts_every_sample_once"),
    Mutant("ranks-read-the-same", "data/loader.py", "first = start + rank * each + min(rank, rest)", "first = start",
           "test_ranks.py::test_steps_equal_one_process[fsdp2]"),
    Mutant("ranks-evaluate-the-same", "data/loader.py", "for k in range(self.rank, rounds", "for k in range(0, rounds",
           "test_data_loader.py::test_an_evaluation_by_ranks_counts_every_sample_once"),
    Mutant("answers-in-the-order-of-ranks", "parallel/ranks.py", "for k in range(len(batches)) for rank in leads for row",
           "for rank in leads for k in range(len(batches)) for row", "test_ranks.py::test_evaluations_equal_one_process", "ValueError"),
    Mutant("gathering-does-not-reduce", "parallel/gather.py", "        dist.all_reduce(whole)\n", "",
           "test_gather.py::test_steps_equal_one_process[fsdp2]"),
    Mutant("another-share-first", "parallel/gather.py", "ctx.order = [ranks.rank, *(rank for rank in column if rank != ranks.rank)]",
           "ctx.order = list(column)", "test_gather.py::test_steps_equal_one_process[fsdp2]"),
    Mutant("what-fills-up-is-near", "layers/head.py", "self.gather(every[labels != IGNORE])", "self.gather(every)",
           "test_gather.py::test_steps_equal_one_process[fsdp2]"),
    # ---- training
    Mutant("mean-over-micro-batches", "train/step.py", "\"num_items_in_batch\": items}",
           "\"num_items_in_batch\": max(1, count_targets(batch, task)) * len(batches)}",
           "test_train.py::test_accumulation_equals_one_batch[2];test_parity_trainer.py::test_accumulation_changes_nothing[35];"
           "test_parity_trainer.py::test_what_transformers_makes_of_the_records[rows]"),
    Mutant("mean-over-own-tokens", "train/session.py", "at.scale.value, targets, ranks,", "at.scale.value, None, ranks,",
           "test_ranks.py::test_a_run_equals_one_process[fsdp2]"),
    Mutant("norm-of-one-shard", "parallel/ranks.py", "return both[:1], both[1]", "return squares, both[1]",
           "test_ranks.py::test_steps_equal_one_process[fsdp2]"),
    Mutant("verdict-of-each-rank", "parallel/ranks.py", "return both[:1], both[1]", "return squares, loss",
           "test_ranks.py::test_one_ranks_trouble_is_everybodys"),
    Mutant("replicas-never-compared", "parallel/replicas.py", "if any(len({int(said[rank][number]) for rank in group}) > 1",
           "if any(len({int(said[rank][number]) for rank in group}) > ranks.size", "test_replicas.py::test_one_flipped_bit_is_found[tp2]", "Failed"),
    Mutant("parts-taken-for-copies", "parallel/ranks.py", "key=lambda k: names[k] not in cuts)", "key=lambda k: names[k] in cuts)",
           "test_replicas.py::test_one_flipped_bit_is_found[hsdp]", "InputError"),
    Mutant("where-bits-lie-counts", "parallel/replicas.py", "part.clone() if part.storage_offset()", "part if part.storage_offset()",
           "test_replicas.py::test_sums_of_bits_do_not_cancel", "RuntimeError"),
    Mutant("ranks-agree-on-the-first", "train/agree.py", "        if len(held) > 1:", "        if len(held) > len(all_of_them):",
           "test_agree.py::test_what_differs_is_named"),
    Mutant("data-not-compared", "train/agree.py", "for key in (\"files\", \"bytes\", \"sha256_of_contents\")", "for key in (\"files\",)",
           "test_agree.py::test_contents_count_and_times_do_not"),
    Mutant("waiting-taken-for-standing", "parallel/watch.py", "if MEETING in path and not imports:", "if MEETING == path and not imports:",
           "test_watch.py::test_a_loader_that_sleeps_is_named"),
    Mutant("what-is-low-added-by-each-rank", "parallel/adapted.py", "(out, mesh, [Replicate()]",
           "(out, mesh, [__import__('torch.distributed.tensor', fromlist=['Partial']).Partial()]",
           "test_adapter.py::test_adapters_on_a_mesh_equal_one_process[sequence2]"),
    Mutant("low-sums-left-in-parts", "parallel/adapted.py", "styles(False)[style]()", "styles(late)[style]()",
           "test_adapter.py::test_adapters_on_a_mesh_equal_one_process[sequence2]", "RuntimeError"),
    Mutant("dora-of-codes-measured-when-cut", "adapter/attach.py", "is not None and isinstance(layer.base, Linear)", "is not None",
           "test_adapter.py::test_codes_are_shared_out_among_tensor_parallel_ranks"),
    Mutant("lengths-of-parts-of-rows", "parallel/adapted.py", "    layer.joined = joined", "    pass",
           "test_adapter.py::test_codes_are_shared_out_among_tensor_parallel_ranks"),
    Mutant("gradients-of-codes-in-parts", "parallel/adapted.py", "grad_placements=[Partial()]", "grad_placements=[Replicate()]",
           "test_adapter.py::test_codes_are_shared_out_among_tensor_parallel_ranks"),
    Mutant("bias-of-each-rank", "layers/quantized.py", "self.product(x, None)", "self.product(x, None if own is None else own.to_local())",
           "test_adapter.py::test_codes_are_shared_out_among_tensor_parallel_ranks"),
    Mutant("codes-cut-by-nobody", "registry.py", "machine.tensor_parallel > 1 and adapter.quantize", "machine.ranks > 9 and adapter.quantize",
           "test_adapter.py::test_an_adapter_comes_before_sharding", "IndexError"),
    Mutant("a-long-save-a-stall", "parallel/watch.py", "        if moved != ", "        if moved < ",
           "test_watch.py::test_a_long_save_is_no_stall_as_long_as_it_comes_along[comes-0]"),
    Mutant("written-bytes-no-progress", "checkpoint/atomic.py", "                    flushed = total\n                beat()",
           "                    flushed = total", "test_watch.py::test_a_long_save_is_no_stall_as_long_as_it_comes_along[comes-0]"),
    Mutant("a-save-beside-hides-a-stall", "parallel/watch.py", "getattr(_own, \"pulse\", _run)", "_run",
           "test_watch.py::test_a_long_save_is_no_stall_as_long_as_it_comes_along[beside-76]"),
    Mutant("stalls-kept-to-oneself", "parallel/watch.py", "self.store.set(STILL, why)", "self.store.check([STILL])",
           "test_watch.py::test_one_that_gives_up_tells_the_others"),
    Mutant("another-number-of-ranks", "parallel/connect.py", "    if size != machine.ranks:", "    if size > 2 * machine.ranks:",
           "test_connect.py::test_what_is_wrong_is_named[changes4-environment: WORLD_SIZE: 4, for a machine of 2 ranks]"),
    Mutant("versions-not-compared", "parallel/connect.py", "if one[key] != all_of_them[0][key]), None)", "if one[key] != one[key]), None)",
           "test_connect.py::test_versions_that_differ[torch]"),
    Mutant("stopped-taken-for-done", "train/cluster.py", "then exit {STOPPED}; fi", "then exit 0; fi",
           "test_cluster.py::test_a_pod_hands_sigterm_on"),
    Mutant("mistakes-queued-again", "train/cluster.py", 'if [ "$status" -ne 2 ] && {{', 'if [ "$status" -ne 3 ] && {{',
           "test_cluster.py::test_what_failed_is_queued_again_a_few_times[2-0-False]"),
    Mutant("words-of-a-command-torn", "train/cluster.py", "    {shlex.join(command)} &", "    {' '.join(command)} &",
           "test_cluster.py::test_a_script_tells_each_node_what_it_needs"),
    Mutant("started-again-for-ever", "train/launch.py", "if not left or asked or not error.passing:", "if not left or asked:",
           "test_launch.py::test_how_often_a_run_is_started[2-False-1]"),
    Mutant("one-dropout-for-all-data", "parallel/ranks.py", "return (seed + self.share * STEP) % 2**63", "return seed",
           "test_ranks.py::test_dropout_differs_between_shares_alone"),
    Mutant("a-signal-to-one-rank-alone", "train/session.py", "if asked:  # one rank", "if interrupt:  # one rank",
           "test_ranks.py::test_one_ranks_trouble_is_everybodys", "RuntimeError"),
    Mutant("whole-gradient-not-cut", "optim/adamw.py", "if p.grad is not None and placements is not None and", "if False and",
           "test_optim_ranks.py::test_a_gradient_that_is_whole_is_cut_as_its_parameter_is", "ValueError"),
    Mutant("gradients-sent-each-time", "parallel/ranks.py", "sharded.set_requires_gradient_sync(last or self.zero > 1)",
           "sharded.set_requires_gradient_sync(True)", "test_apply.py::test_what_a_step_sends"),
    Mutant("norms-of-parts-unsummed", "parallel/sequence.py", "return grad.redistribute(placements=whole)", "return grad",
           "test_sequence.py::test_between_layers_ranks_have_parts"),
    Mutant("sequence-left-whole", "parallel/sequence.py", "whole if x.shape[1] % mesh.size() else part)", "whole)",
           "test_sequence.py::test_between_layers_ranks_have_parts"),
    Mutant("vocab-parallel-sums-of-one-rank", "ops/vocab_parallel.py", "                reduce(sums)\n", "",
           "test_vocab_parallel.py::test_the_loss_of_parts_is_that_of_the_whole[2]"),
    Mutant("vocab-parallel-gradient-of-one-rank", "ops/vocab_parallel.py", "                reduce(dx)\n",
           "                pass\n", "test_vocab_parallel.py::test_the_loss_of_parts_is_that_of_the_whole[2]"),
    Mutant("vocab-parallel-padding-is-words", "ops/vocab_parallel.py", 'logits[:, words:] = float("-inf")', "pass",
           "test_vocab_parallel.py::test_the_loss_of_parts_is_that_of_the_whole[2]"),
    Mutant("logits-gathered-in-training", "layers/head.py", "type(self.out) is Linear and ops.split(self.out.weight)", "False",
           "test_vocab_parallel.py::test_a_model_in_training_gathers_no_logits"),
    Mutant("gradients-summed-in-low-precision", "parallel/apply.py", "reduce_dtype=torch.float32 if narrow else None", "reduce_dtype=low",
           "test_apply.py::test_what_a_step_sends"),
    Mutant("copies-never-told", "parallel/ranks.py", "sharded.set_requires_all_reduce(last)", "sharded.set_requires_all_reduce(False)",
           "test_apply.py::test_what_a_step_sends"),
    Mutant("weights-whole-between-micro-batches", "parallel/ranks.py", "set_reshard_after_backward(last or self.zero == 3)",
           "set_reshard_after_backward(last)", "test_apply.py::test_what_is_whole_and_for_how_long"),
    Mutant("weights-whole-after-an-evaluation", "parallel/apply.py", "        model.register_forward_hook(release)\n", "        pass\n",
           "test_apply.py::test_what_is_whole_and_for_how_long"),
    Mutant("stream-begins-in-low-precision", "layers/embedding.py", "return out if autocast_dtype(out.device) is None else wide(out)",
           "return out", "test_apply.py::test_the_precision_of_the_stream"),
    Mutant("stream-in-fp16", "layers/norm.py", "return low if low == torch.bfloat16 else None", "return low",
           "test_apply.py::test_the_precision_of_the_stream"),
    Mutant("stream-stays-wide", "layers/norm.py", "return low if low == torch.bfloat16 else None", "return None",
           "test_apply.py::test_the_precision_of_the_stream"),
    Mutant("root-left-whole", "parallel/apply.py", "reshard_after_forward=zero == 3)",
           "reshard_after_forward=None if module is model else zero == 3)",
           "test_ranks.py::test_other_ranks_go_on[(1, 1)-(2, 1)]", "ValueError"),
    Mutant("turned-rows-shift-along-the-wrong-axis", "checkpoint/copy_plan.py", "len(want.place) - 1 if want.turned else 0", "0",
           "test_copy_plan.py::test_what_is_written_is_the_whole[3]", "RuntimeError"),
    Mutant("copies-written-by-all", "checkpoint/copy_plan.py", "            if once and key in seen:", "            if False:",
           "test_copy_plan.py::test_what_is_written_is_the_whole[3]"),
    Mutant("heads-all-at-the-first", "names.py", "part.at[0] + row - first.start", "part.at[0]",
           "test_copy_plan.py::test_views_are_traced_to_what_is_stored"),
    Mutant("nodes-forgotten", "checkpoint/exchange.py", "if local < size and size % local == 0", "if False",
           "test_exchange.py::test_turns_dtypes_and_nodes"),
    Mutant("a-piece-that-failed-is-forgotten", "checkpoint/exchange.py", "failure = failure or error\n            elif", "pass\n            elif",
           "test_exchange.py::test_threads_that_read_hand_on_what_is_wrong"),
    Mutant("connected-by-whoever-wraps", "registry.py", "jobs.append(thread.submit(beside, where()))", "beside(where())",
           "test_exchange.py::test_ranks_connect_beside_the_wrapping"),
    Mutant("begun-and-read-again", "registry.py", "together(machine), *begun)", "together(machine))",
           "test_exchange.py::test_ranks_connect_beside_the_wrapping"),
    Mutant("turns-in-one-buffer", "checkpoint/exchange.py", "for run in turn[group.rank]}", "for run in turns[0][group.rank]}",
           "test_exchange.py::test_turns_dtypes_and_nodes", "KeyError"),
    Mutant("a-fault-while-reading-ahead", "checkpoint/exchange.py", "failure = failure or fault  # the", "pass  # the",
           "test_exchange.py::test_one_rank_that_cannot_read_is_everybodys_error", "Failed"),
    Mutant("written-over-the-header", "checkpoint/exchange.py", "slot.start + run.start * row_of(slot)", "run.start * row_of(slot)",
           "test_exchange.py::test_several_ranks_write_the_bytes_of_one[fsdp2xtp2]"),
    Mutant("full-disk-of-a-rank-unheard", "checkpoint/exchange.py", "    except OSError as error:\n        return error",
           "    except OSError:\n        pass", "test_exchange.py::test_a_fault_of_one_rank_leaves_the_folder_as_it_was", "Failed"),
    Mutant("state-not-copied", "train/background.py", "        host.copy_(tensor, non_blocking=True)", "        host = tensor",
           "test_background.py::test_the_bytes_of_a_run_that_waits"),
    Mutant("fault-in-the-background-unheard", "train/session.py",
           "self.saved = step_of(path)\n        except (SaveError, InputError) as error:\n            self.journal.tell(str(error))",
           "self.saved = step_of(path)\n        except (SaveError, InputError):\n            pass",
           "test_background.py::test_a_fault_is_heard_and_costs_one_state"),
    Mutant("stop-not-waiting-for-the-state", "train/session.py", "            self.save()\n            self.settle()", "            self.save()",
           "test_background.py::test_a_stop_between_two_states_is_saved", "InputError"),
    Mutant("next-state-does-not-wait", "train/session.py", "        at = self.at\n        self.settle()\n        self.metrics.sync()",
           "        at = self.at\n        self.metrics.sync()", "test_background.py::test_the_bytes_of_a_run_that_waits"),
    Mutant("pieces-all-at-the-start", "checkpoint/shards.py", "start, whole = tuple(r.start for r in region),", "start, whole = (0,) * len(region),",
           "test_ranks.py::test_other_ranks_go_on[(2, 1)-(1, 1)]"),
    Mutant("who-lost-another-is-blamed", "train/launch.py", "key=lambda rank: (status[rank] == LOST, rank)", "key=lambda rank: rank",
           "test_launch.py::test_who_failed_first[status1-1]"),
    Mutant("norm-counts-copies", "parallel/ranks.py", "for name, n in self.degrees.items() if name not in self.cuts(tensor)]", "for n in ()]",
           "test_ranks.py::test_steps_equal_one_process[tp2]"),
    Mutant("moments-of-a-part", "parallel/ranks.py", "        if cut:\n            import torch\n", "        if False:\n            import torch\n",
           "test_optim_ranks.py::test_five_steps_equal_one_process[fsdp2]"),
    Mutant("padding-counts-in-a-mean", "optim/adafactor.py", "ends = self.shapes.get(p, tuple(p.shape))", "ends = tuple(p.shape)",
           "test_optim_ranks.py::test_five_steps_equal_one_process[tp2]", "RuntimeError"),
    Mutant("orthogonal-in-parts", "optim/muon.py", "if not self.ranks.cuts(p))\n", "if True)\n",
           "test_optim_ranks.py::test_five_steps_equal_one_process[fsdp2]"),
    Mutant("parts-of-a-matrix-mixed-up", "optim/muon.py", "back = [matrix[region].flatten() for region, _ in own]",
           "back = [matrix[region].flatten() for region, _ in own[::-1]]", "test_optim_ranks.py::test_five_steps_equal_one_process[fsdp2]"),
    Mutant("blocks-across-a-cut", "optim/optimizers.py", "if not place.is_replicate() and place.dim == last)", "if False)",
           "test_optim_ranks.py::test_rows_that_tensor_parallel_cuts_within_a_block_are_refused", "Failed"),
    Mutant("scales-of-one-rank", "optim/adamw.py", "return zeros_like(p, torch.float32, BLOCK)",
           "return torch.zeros(part.numel() // BLOCK, device=part.device)",
           "test_optim_ranks.py::test_other_ranks_go_on[(2, 1)-(1, 1)]", "ValueError"),
    Mutant("labels-shifted-twice", "layers/head.py", "nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE)",
           "nn.functional.pad(labels[..., 2:], (0, 2), value=IGNORE)",
           "test_parity_trainer.py::test_what_transformers_makes_of_the_records[rows];test_parity_trainer.py::test_what_our_loader_makes[blocks]"),
    Mutant("evaluation-by-positions", "train/evaluate.py", "loss = total / max(1, targets)", "loss = total / max(1, targets + 1)",
           "test_parity_trainer.py::test_evaluation_is_that_of_one_batch[rows]"),
    Mutant("nan-step-applied", "train/step.py", "optimizer.step(clip=clip)", "optimizer.step()",
           "test_train.py::test_a_gradient_that_is_not_finite_changes_nothing[nan]"),
    Mutant("nan-loss-applied", "train/step.py", " + 0 * torch.as_tensor(loss, device=squares.device)", "",
           "test_train.py::test_a_gradient_that_is_not_finite_changes_nothing[nan]"),
    Mutant("rows-lost-on-a-full-disk", "train/metrics.py", "        done = 0\n", "        done, self.waiting = 0, []\n",
           "test_disk.py::test_rows_wait_for_room"),
    Mutant("unsaved-stop-is-fine", "train/session.py", "        if self.at.step != self.saved:\n            found", "        if False:\n            found",
           "test_disk.py::test_a_stop_that_cannot_be_saved_is_an_error", "Failed"),
    Mutant("accelerators-alone-run-out", "train/memory.py", "any(word in str(error).lower() for word in WORDS)", "\"CUDA\" in str(error)",
           "test_trust.py::test_out_of_memory_names_the_key_and_a_value[session.accumulate-cpu]", "RuntimeError"),
    Mutant("advice-that-is-refused", "train/memory.py", "            if settings and recipe.adapter.quantize != \"nf4\" and accepted(recipe, machine, *settings)]",
           "            if settings and recipe.adapter.quantize != \"nf4\"]",
           "test_trust.py::test_advice_for_weights_is_what_the_run_would_accept[changes4-machine4-a smaller model]"),
    Mutant("leap-enters-what-is-usual", "train/spike.py", "                return math.exp(stray)\n        self.high = 0\n",
           "                out = math.exp(stray)\n        self.high = 0\n",
           "test_spike.py::test_a_spike_does_not_hide_the_next_and_a_new_level_is_accepted"),
    Mutant("spike-by-sigmas-alone", "train/spike.py", "BEYOND * max(self.strays)", "0.0",
           "test_spike.py::test_no_false_alarm_in_ten_thousand_clean_steps[0]"),
    Mutant("gone-back-to-again-and-again", "train/guard.py", "step_of(Path(found)) <= at.returned", "False",
           "test_guard.py::test_trouble_that_stays_ends_the_run", "Failed"),
    Mutant("suspect-state-gone-back-to", "train/guard.py", "before=first - 1", "before=first",
           "test_guard.py::test_five_bad_steps_go_back_and_on_past_their_data"),
    Mutant("abandoned-states-kept", "train/guard.py", "    remove_states(folder, after=then.step)\n", "",
           "test_guard.py::test_a_run_that_goes_back_is_interrupted_without_a_trace[stops1]"),
    Mutant("clipping-skipped", "train/step.py", "optimizer.clip(max_norm, unscale, squares +", "optimizer.clip(0.0, unscale, squares +",
           "test_train.py::test_clipping_scales_the_gradient_to_the_norm"),
    Mutant("scale-not-divided-out", "train/step.py", "optimizer.clip(max_norm, unscale, squares +", "optimizer.clip(max_norm, None, squares +",
           "test_loss_scale.py::test_every_optimizer_divides_by_the_scale[lion-0.002];"
           "test_loss_scale.py::test_the_scale_is_that_of_torch[usual]"),
    Mutant("scale-kept-after-an-overflow", "optim/loss_scale.py", "self.value, self.steady = self.value / 2, 0", "self.steady = 0",
           "test_loss_scale.py::test_the_scale_is_that_of_torch[usual]"),
    Mutant("scale-not-saved", "train/state.py", '"position": asdict(position)', '"position": asdict(position) | {"scale": {}}',
           "test_loss_scale.py::test_the_scale_comes_back_to_the_bit"),
    Mutant("overflow-is-a-bad-step", "train/state.py", "self.streak = 0 if sound or overflow else", "self.streak = 0 if sound else",
           "test_loss_scale.py::test_an_overflow_is_no_bad_step", error="InputError"),
    Mutant("overflow-without-end", "optim/loss_scale.py", "math.isfinite(loss) and self.value > 1", "True",
           "test_loss_scale.py::test_a_loss_that_is_not_finite_is_not_the_scales_fault"),
    Mutant("reading-fails-in-silence", "train/prepare.py", "    for job in read:\n        job.result()\n", "",
           "test_train.py::test_a_file_that_fails_while_it_is_read_beside_is_named", error="Failed"),
    Mutant("compiler-left-in-pieces", "parallel/tally.py", "            sys.modules.pop(part, None)\n", "            pass\n",
           "test_train.py::test_a_run_imports_no_compiler"),
    Mutant("compiler-for-an-optimizer", "optim/adamw.py", "    add_param_group: Any = unwrap(Optimizer.add_param_group)\n", "",
           "test_train.py::test_a_run_imports_no_compiler"),
    Mutant("dense-layer-left-out", "layers/head.py", "            vector = self.dense(vector)\n", "            pass\n",
           "test_sentence.py::test_dense_layers_are_read_trained_and_written_back[t5-mean_tokens-safetensors]"),
    Mutant("dense-without-activation", "layers/head.py", "out: Tensor = self.act(self.linear(x))", "out: Tensor = self.linear(x)",
           "test_sentence.py::test_dense_layers_are_read_trained_and_written_back[t5-mean_tokens-safetensors]"),
    Mutant("dense-not-written-back", "checkpoint/save.py", "**files_of(model.head, kind), ", "",
           "test_sentence.py::test_dense_layers_are_read_trained_and_written_back[gpt2-mean_tokens-safetensors]",
           error="FileNotFoundError"),
    Mutant("pooling-of-the-family", "checkpoint/sentence.py", "        head.pick = POOLINGS[said.pooling]\n", "        pass\n",
           "test_sentence.py::test_dense_layers_are_read_trained_and_written_back[bert-cls_token-bin]"),
    Mutant("bf16-without-units", "train/prepare.py", "has_low_units(torch.bfloat16) and (width is None", "(width is None",
           "test_loss_scale.py::test_the_precision_of_a_cpu[False]"),
    Mutant("emulated-bf16", "train/prepare.py", "is_bf16_supported(including_emulation=False)", "is_bf16_supported()",
           "test_loss_scale.py::test_the_precision_of_a_device"),
    Mutant("packed-one-by-one", "layers/view.py", "        if mask is None:\n            road", "        if False:\n            road",
           "test_view.py::test_the_road_that_is_said_is_taken[ours-by_lengths]"),
    Mutant("sum-in-bf16", "parallel/peers.py", "lasting(size, torch.float32, device)", "lasting(size, dtype, device)",
           "test_peers.py::test_sums_lose_nothing_and_weights_arrive", error="RuntimeError"),
    Mutant("mean-is-sum", "parallel/peers.py", "torch.mean if op == dist.ReduceOp.AVG else torch.sum", "torch.sum",
           "test_peers.py::test_sums_lose_nothing_and_weights_arrive"),
    Mutant("another-rank-s-part", "parallel/peers.py", "parts[peer * size : (peer + 1) * size]", "parts[me * size : (me + 1) * size]",
           "test_peers.py::test_sums_lose_nothing_and_weights_arrive"),
    Mutant("gather-does-not-wait", "parallel/peers.py", "        memory.barrier()\n        for k in range(len(parts)):",
           "        for k in range(len(parts)):", "test_peers.py::test_sums_lose_nothing_and_weights_arrive"),
    Mutant("all-to-all-across-nodes", "parallel/peers.py", "not agreed(on_one_node(group), group, kind)", "False",
           "test_peers.py::test_sums_lose_nothing_and_weights_arrive"),
    Mutant("norm-asked-for-behind-the-update", "train/step.py", "    norm = known()\n", "    norm = soon(clip[0])()\n",
           "test_train.py::test_the_norm_is_asked_for_before_the_update_and_read_behind_it"),
    Mutant("gradients-kept", "train/step.py", "    optimizer.zero_grad(set_to_none=True)\n", "",
           "test_train.py::test_clipping_scales_the_gradient_to_the_norm"),
    Mutant("schedule-off-by-one", "train/session.py", "lr_factor(recipe.schedule, at.step, self", "lr_factor(recipe.schedule, at.step + 1, self",
           "test_train.py::test_losses_equal_transformers"),
    Mutant("warm-up-share-rounded-down", "optim/config.py", "ceil(self.warmup_steps * total)", "int(self.warmup_steps * total)",
           "test_optim.py::test_a_share_of_the_run_equals_transformers[0.06-17]"),
    Mutant("share-of-a-longer-run", "optim/config.py", "and not 0 < self.warmup_steps < 1", "",
           "test_optim.py::test_which_schedules_may_be_prolonged"),
    Mutant("variant-under-its-recipe", "train/recipe.py", "merge(tree, variants.get(chosen, {}))", "merge(variants.get(chosen, {}), tree)",
           "test_catalog.py::test_a_recipe_of_ones_own_with_variants"),
    Mutant("copy-of-the-defaults", "train/catalog.py", "key.default if value is None else flow(value)", "key.default or flow(value)",
           "test_catalog.py::test_a_copy_has_every_key_and_means_the_same[lora]", "InputError"),
    Mutant("braces-in-a-value-read-again", "data/record.py", "return FIELD.sub(lambda field: self.text(field[1], option), key)",
           "return self.text(FIELD.sub(lambda field: self.text(field[1], option), key), option)",
           "test_data_read.py::test_a_text_of_several_fields", "InputError"),
    Mutant("warm-up-too-short", "optim/schedules.py", "float(done) / float(max(1, config.warmup_steps))",
           "float(done + 1) / float(max(1, config.warmup_steps))", "test_optim.py::test_schedules_equal_transformers[5-17]"),
    Mutant("noam-counts-from-0", "optim/schedules.py", 'done = step + (config.name == "noam")', "done = step",
           "test_optim.py::test_noam_is_as_published[4-512]"),
    Mutant("wsd-decays-too-early", "optim/schedules.py", "float(step - (total - length))", "float(step + 1 - (total - length))",
           "test_optim.py::test_wsd_equals_transformers[10-30-0.0-cosine]"),
    Mutant("lion-momentum-by-beta1", "optim/clipped.py", "torch._foreach_lerp_(moments, grads, 1 - beta2)",
           "torch._foreach_lerp_(moments, grads, 1 - beta1)", "test_optim.py::test_ten_steps_are_as_published[lion-lion]"),
    Mutant("muon-of-embeddings", "optim/optimizers.py", "parameter.ndim == 2 and decays and name.startswith(blocks)",
           "parameter.ndim == 2 and decays", "test_optim.py::test_muon_leaves_what_is_not_a_hidden_matrix_to_adamw"),
    Mutant("bad-gradients-stepped-on", "optim/clipped.py", "    if not bool(clip[1].isfinite()):\n        return False\n", "",
           "test_optim.py::test_clipping_and_bad_gradients[lion]"),
    Mutant("layers-counted-from-below", "optim/optimizers.py", "decay ** (len(blocks) + 1 - depth)", "decay**depth",
           "test_optim.py::test_layer_decay_is_by_depth"),
    Mutant("decay-on-tables-of-biases", "optim/optimizers.py", ' or module in tables', "",
           "test_parity_trainer.py::test_weight_decay_is_of_the_same_parameters[t5-default-seq2seq]"),
    Mutant("schedule-overrides-layer-rates", "optim/optimizers.py", 'lr * group.get("lr_scale", 1.0)', "lr",
           "test_optim.py::test_layer_decay_is_by_depth"),
    Mutant("average-not-restored", "train/state.py", '            put(average, tensors["ema"][name])\n', "            pass\n",
           "test_train.py::test_every_means_learns_and_resumes_to_the_bit[ema]"),
    Mutant("average-not-evaluated", "train/session.py", "with self.ema.in_place() if self.ema is not None else nullcontext(),", "with nullcontext(),",
           "test_train.py::test_averaged_weights_are_evaluated_and_written"),
    Mutant("slow-first-step-in-the-pace", "train/progress.py", "            self.steps.clear()\n", "            pass\n",
           "test_progress.py::test_the_time_left_is_right[0]"),
    Mutant("work-that-is-due-forgotten", "train/progress.py", "(step - 1) // every", "step // every",
           "test_progress.py::test_the_time_left_is_right[700]"),
    Mutant("secret-in-a-file", "train/environment.py", "TOKEN|KEY|", "TOKEN|",
           "test_journal.py::test_redaction"),
    Mutant("service-asked-again", "train/report.py", "            self.open.pop(name, None)\n", "",
           "test_report.py::test_a_failure_is_a_line_and_then_silence[RuntimeError-write]"),
    Mutant("plan-without-kernels", "parallel/rehearse.py", "with tally, rehearsal(tally.kernel, gpu):\n        if dtype",
           "with tally:\n        if dtype",
           "test_plan.py::test_the_peak_is_foreseen[gpt]"),
    Mutant("plan-of-one-micro-batch", "parallel/rehearse.py", "            if forwards == 1:\n", "            if forwards:\n",
           "test_plan.py::test_the_peak_is_foreseen[gpt forwards 3]"),
    Mutant("each-rank-has-the-whole-host", "train/choose.py", "chip.memory if gpu else chip.memory / ranks", "chip.memory",
           "test_choose.py::test_ranks_of_a_cpu_share_its_memory"),
    Mutant("layout-chosen-anew", "train/choose.py", "        if before[1].ranks == ranks:", "        if before[1].ranks != ranks:",
           "test_choose.py::test_a_resume_takes_what_was_taken"),
    Mutant("micro-batch-not-taken", "train/choose.py", "replace(recipe, micro_batch=best.rows) if free else recipe", "recipe",
           "test_choose.py::test_the_fastest_that_fits_is_taken_and_said"),
    Mutant("a-rank-s-part-as-a-whole", "parallel/twin.py", "memo[id(tensor)].part = id(tensor) in cut", "memo[id(tensor)].part = False",
           "test_layout.py::test_what_tensor_parallel_cuts_is_known_for_a_part"),
    Mutant("whole-gradient-of-a-table", "parallel/apply.py", "table.forward = partial(looked_up, table)", "pass",
           "test_parallel.py::test_a_table_s_gradient_is_cut_as_the_table_is"),
    Mutant("impatient-ever-after", "parallel/peers.py", "    store.set_timeout(usual)", "    pass",
           "test_peers.py::test_one_that_may_not_map_keeps_nobody"),
    Mutant("the-first-choice-stays", "parallel/survey.py", "        known.add(exact.machine)\n        sort(found)",
           "        known.add(exact.machine)", "test_layout.py::test_what_is_slower_than_it_seemed_is_not_the_choice"),
    Mutant("plan-of-gradients-that-grow", "parallel/layout.py", "1 / ratio / n if forwards == 1 else 0.0", "1 / ratio / n",
           "test_layout.py::test_the_gradients_of_micro_batches_before_are_there_all_the_while"),
    Mutant("plan-without-hooks", "parallel/layout.py", "host.hooked(job.model, machine, forwards) + host.updated", "host.updated",
           "test_layout.py::test_a_host_with_more_to_do_than_its_device_sets_the_pace"),
    Mutant("all-ranks-for-fsdp", "parallel/machine.py", "return ranks // others", "return ranks",
           "test_launch.py::test_as_many_ranks_as_a_launcher_has_started"),
    Mutant("states-not-shared-out", "parallel/layout.py", 'parts["optimizer"] = ceil(last["optimizer"] / n)',
           'parts["optimizer"] = ceil(last["optimizer"])', "test_layout.py::test_zero_3_holds_sixteen_bytes_a_parameter_shared_out[8]"),
    Mutant("outermost-gradients-sent-all-the-while", "parallel/layout.py", 'sent * outside if of_a_block == "0 first" else 0.0',
           "sent * outside", "test_layout.py::test_the_outermost_layers_send_their_gradients_when_the_blocks_are_done[2-16]"),
    Mutant("outermost-gradients-do-not-wait", "parallel/layout.py", "sent * block + waits", "sent * block",
           "test_layout.py::test_the_outermost_layers_send_their_gradients_when_the_blocks_are_done[8-4]"),
    Mutant("weights-whole-to-the-end", "parallel/layout.py", "if machine.zero < 3 and forwards == 1 else 0.0", "if False else 0.0",
           "test_layout.py::test_what_ranks_hold_is_foreseen[gpt, zero 2, full]"),
    Mutant("fp32-by-bf16-s-units", "parallel/tally.py", "if q.itemsize < 4 else FULL", "if True else FULL",
           "test_layout.py::test_attention_and_products_in_fp32_take_what_was_measured"),
    Mutant("fp32-at-the-power-limit", "parallel/layout.py", 'chip.shapes if one.dtype != "fp32" else 1.0', "chip.shapes",
           "test_layout.py::test_attention_and_products_in_fp32_take_what_was_measured"),
    Mutant("every-host-alike", "parallel/chips.py", "call=near.call * host_call() / HOST", "call=near.call",
           "test_layout.py::test_a_gpu_is_known_by_its_name_and_its_host_is_timed"),
    Mutant("a-bias-by-distance-is-a-move", "parallel/tally.py", "if forward in ATTENTION:", 'if forward == "attention":',
           "test_layout.py::test_attention_with_a_bias_is_arithmetic_whichever_kernel_does_it"),
    Mutant("attention-thrice-backward", "parallel/tally.py", "(2.5 if back else 1)", "(3 if back else 1)",
           "test_layout.py::test_arithmetic_is_six_times_the_parameters[none]"),
    Mutant("a-block-too-few", "parallel/deep.py", "more = {i: len(stacks[i].blocks) - AHEAD for", "more = {i: len(stacks[i].blocks) - AHEAD - 1 for",
           "test_layout.py::test_a_deep_model_is_its_few_blocks_many_times[gpt]"),
    Mutant("nodes-without-wires", "parallel/chips.py", "min(self.link, self.wire * inside)", "self.link",
           "test_layout.py::test_collectives_are_what_rings_take"),
    Mutant("ratios-of-ratios", "train/calibrate.py", 'ratio = foreseen["uncalibrated"]', 'ratio = foreseen["tokens_per_second"]',
           "test_calibrate.py::test_a_prediction_learns_from_runs"),
    Mutant("a-new-head-not-rehearsed", "train/fit.py", "out.load_report = model.load_report", "out.load_report = type(model.load_report)()",
           "test_plan.py::test_ranks_have_a_verdict_on_an_adapter[head]"),
    Mutant("plan-of-this-batch", "train/fit.py", "source if value.size(1) == width", "width if value.size(1) == width",
           "test_plan.py::test_every_objective_has_a_verdict[classify-padded]"),
    Mutant("smoothing-in-evaluation", "layers/head.py", "return self.smoothing if self.training else 0.0", "return self.smoothing",
           "test_train.py::test_label_smoothing_equals_transformers[classify]"),
    Mutant("decay-on-norms", "optim/optimizers.py", "parameter.ndim > 1 and not exempt", "leaf != \"bias\"",
           "test_optim.py::test_weight_decay_is_for_matrices"),
    Mutant("coupled-decay", "optim/adamw.py", "    g = g.to(wide) * factor.to(wide)\n    x = p.to(wide) * (1 - lr * group[\"weight_decay\"])\n",
           "    g = g.to(wide) * factor.to(wide) + group[\"weight_decay\"] * p.to(wide)\n    x = p.to(wide)\n",
           "test_optim.py::test_the_update_is_adamw"),
    Mutant("bf16-truncated", "optim/adamw.py", "raised = (x.contiguous().view(torch.int32) + random.view(x.shape)) & -0x10000",
           "raised = x.contiguous().view(torch.int32) & -0x10000", "test_adamw.py::test_rounding_at_random_is_right_in_the_mean[reference-cpu]"),
    Mutant("nan-applied", "optim/adamw.py", "        if not factor[1].isnan():\n", "        if True:\n",
           "test_adamw.py::test_what_is_not_finite_changes_nothing[int8-reference-cpu]"),
    Mutant("start-not-corrected", "optim/adamw.py", "1 / math.sqrt(1 - beta2**t))", "1.0)", "test_optim.py::test_the_update_is_adamw"),
    Mutant("moments-rounded-on-loading", "optim/adamw.py", "            for name, value in state_dict[\"state\"].get(i, {}).items():\n",
           "            for name, value in ():\n", "test_adamw.py::test_a_state_dict_goes_on_bitwise[int8]"),
    Mutant("second-moment-vanishes", "optim/adamw.py", "torch.where(x.flatten() > 0, code.clamp(min=2), code) if fourth", "code if fourth",
           "test_adamw.py::test_a_small_second_moment_is_not_stored_as_zero[reference]"),
    Mutant("moments-in-the-weights'-dtype", "checkpoint/state.py", "(value).to(home, copy=True)", "(value).to(home, parameter.dtype, copy=True)",
           "test_state.py::test_moments_keep_their_dtype"),
    Mutant("moments-not-restored", "train/state.py", '    restore_optimizer(optimizer, model, tensors["optimizer"], state["optimizer"])\n', "",
           "test_train.py::test_resume_from_another_folder"),
    Mutant("random-state-not-restored", "train/state.py", '            torch.set_rng_state(whole(value).clone())\n', "            pass\n",
           "test_train.py::test_resume_from_another_folder"),
    Mutant("python's-random-state-not-restored", "train/state.py", "    random.setstate((version, tuple(words), gauss))\n", "",
           "test_train.py::test_the_random_states_of_torch_and_python_come_back"),
    Mutant("broken-states-are-none", "train/folder.py", "broken := [path.name for path in steps(folder)]", "broken := []",
           "test_train.py::test_a_run_whose_states_are_all_broken_does_not_begin_again_by_itself", "Failed"),
    Mutant("data-off-by-one-on-resume", "train/loop.py", "loader.steps(session.at.sample,", "loader.steps(session.at.sample + (session.at.step > 0),",
           "test_train.py::test_resume_from_another_folder"),
    Mutant("evaluation-mean-of-batches", "train/evaluate.py", "            total += float(out.loss)\n",
           "            total += float(out.loss) / max(1, count_targets(here, task))\n",
           "test_train.py::test_evaluation_is_a_mean_over_tokens"),
    Mutant("left-in-evaluation-mode", "train/evaluate.py", "model.train(was_training)", "model.train(False)",
           "test_train.py::test_evaluation_is_a_mean_over_tokens"),
    Mutant("best-is-the-last", "train/state.py", "(value > self.best if more else value < self.best)", "True",
           "test_evaluate.py::test_more_is_better_or_less"),
    Mutant("perplexity-wants-more", "metrics/table.py", '"perplexity": Metric(("loss",), more=False)', '"perplexity": Metric(("loss",))',
           "test_evaluate.py::test_the_best_is_kept_and_a_run_without_a_better_one_ends[perplexity]"),
    Mutant("characters-for-bytes", "train/evaluate.py", "size += len(text.encode())", "size += len(text)",
           "test_evaluate.py::test_bytes_are_utf_8_and_without_the_first_token"),
    Mutant("articles-kept", "metrics/texts.py", "(a|an|the)", "(the)", "test_metrics.py::test_squad_as_its_script"),
    Mutant("start-token-read-as-text", "train/evaluate.py", "self.tokenizer.decode(row[1:])", "self.tokenizer.decode(row[2:])",
           "test_evaluate.py::test_texts_are_written_and_judged"),
    Mutant("several-labels-summed", "layers/head.py", "sum() / logits.size(-1)", "sum()",
           "test_zoo.py::test_losses_of_task_heads[bert-default-classify-several]"),
    Mutant("every-token-of-a-word-tagged", "data/objectives/tag.py", "(k == 0 or where[k - 1] != w)", "True",
           "test_data_tag.py::test_the_first_token_of_a_word_has_its_label[roberta:280]"),
    Mutant("span-target-from-the-source-s-side", "data/objectives/span.py", "masked(ids, ~noise, marks)", "masked(ids, noise, marks)",
           "test_data_span.py::test_the_example_of_the_paper"),
    Mutant("span-lengths-without-the-end", "data/objectives/span.py", "spans_of(n + 1, density, mean)[1] + 1 <= size", "spans_of(n + 1, density, mean)[1] <= size",
           "test_data_span.py::test_the_published_lengths"),
    Mutant("words-chosen-by-token", "data/objectives/mlm.py", "word = np.arange(len(ids)) if self.inside is None else", "word = np.arange(len(ids)) if True else",
           "test_data_span.py::test_whole_words_are_masked[roberta:290];test_data_span.py::test_whole_words_are_masked[wordpiece]"),
    Mutant("end-before-start", "data/objectives/qa.py", "if a <= b < a + LONGEST and", "if b < a + LONGEST and",
           "test_data_answer.py::test_the_best_answer_of_all_windows"),
    Mutant("answer-in-the-question", "data/objectives/qa.py", "np.where(starts >= 0, side, -np.inf)", "np.where(starts >= -1, side, -np.inf)",
           "test_data_answer.py::test_the_best_answer_of_all_windows"),
    Mutant("half-an-answer-learned", "data/objectives/qa.py", "if at >= end]", "if at > begin]",
           "test_data_answer.py::test_labels_are_the_answer_where_a_window_holds_it_whole"),
    Mutant("a-suggestion-without-its-section", "config.py", "section + names[close[0]]", "names[close[0]]",
           "test_keys.py::test_a_misspelt_key_of_a_section_is_named_whole"),
    Mutant("fields-looked-for-after-the-download", "train/prepare.py", "list(islice(objective.texts(source[0], recipe.data), 4))", "pass",
           "test_train.py::test_a_field_that_is_not_there_is_named_before_anything_is_fetched[lm]"),
    Mutant("padding-in-the-mean", "models/t5.py", "EmbedHead(mean_token)", "EmbedHead(lambda x, batch: x.mean(1))",
           "test_t5.py::test_a_sentence_s_vector_is_the_mean_of_their_encoder[t5-default-embed]"),
    Mutant("an-encoder-alone-drops-nothing", "models/t5.py", "memory = self.dropout(self.encoder(self.embed(batch.x), batch.view(bias=self.encoder_bias(*batch.span))))", "memory = self.encoder(self.embed(batch.x), batch.view(bias=self.encoder_bias(*batch.span)))",
           "test_zoo.py::test_dropout_has_their_places_and_rates[t5-default-embed]"),
    Mutant("an-entity-without-its-last-letter", "data/objectives/choice.py", 'int(entity["end"]) + 1)', 'int(entity["end"]))',
           "test_data_choice.py::test_record"),
    Mutant("the-surest-wrong-answer", "data/objectives/choice.py", "[right - wrong for ((wrong, right),) in some]", "[right for ((wrong, right),) in some]",
           "test_data_choice.py::test_record_is_judged_by_the_likeliest_entity"),
    Mutant("answers-of-all-questions-as-one", "metrics/labels.py", "sum(list(f) == list(w) for f, w in zip(found, wanted, strict=True)) / len(found)", "sum(a == b for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)) / sum(map(len, found))",
           "test_data_choice.py::test_multirc_is_judged_by_question;test_data_choice.py::test_numbers_of_multirc_as_scikit_learn"),
    Mutant("marks-move-the-second-span", "data/objectives/coreference.py", "sorted(places, reverse=True)", "places",
           "test_data_choice.py::test_wsc_marks_both_spans[as published];test_data_choice.py::test_wsc_marks_both_spans[pronoun first]"),
    Mutant("a-conversation-s-questions-learned", "data/objectives/chat.py", "np.where(trained, ids, IGNORED)", "np.where(ids < 0, IGNORED, ids)",
           "test_data_chat.py::test_ids_and_mask_are_those_of_transformers[chatml];"
           "test_data_chat.py::test_ids_and_mask_are_those_of_transformers[tools]"),
    Mutant("a-turn-learned-from-its-header", "data/chat.py", "before = self.text(record, messages[:k], tools, prompt=True)",
           "before = self.text(record, messages[:k], tools, prompt=False)",
           "test_data_chat.py::test_prefix_differences_are_what_a_template_marks[chatml]"),
    Mutant("the-token-behind-a-turn-learned", "data/objectives/chat.py", "(starts < end)", "(starts <= end)",
           "test_data_chat.py::test_ids_and_mask_are_those_of_transformers[plain]"),
    Mutant("chat-template-lost-with-the-folder", "data/tokenizer.py", 'else {"chat_template": self.chat_template}', "else {}",
           "test_data_chat.py::test_the_named_templates_are_kept_with_the_tokenizer", "ValueError"),
    Mutant("negatives-without-the-scale", "layers/head.py", ".flatten(0, 1).T * self.scale", ".flatten(0, 1).T",
           "test_data_embed.py::test_losses_and_gradients_of_the_published_formulas[contrastive]"),
    Mutant("negatives-of-one-column", "layers/head.py", "every[:, 1:].transpose(0, 1)", "every[:, 1:2].transpose(0, 1)",
           "test_data_embed.py::test_losses_and_gradients_of_the_published_formulas[negatives]"),
    Mutant("texts-row-by-row", "data/objectives/embed.py", "[texts[k] for k in range(self.many) for texts, _ in examples]",
           "[texts[k] for texts, _ in examples for k in range(self.many)]",
           "test_data_embed.py::test_losses_and_gradients_of_the_published_formulas[similarity]"),
    Mutant("pairs-cut-into-micro-batches", "train/prepare.py", "micro = recipe.batch if together else", "micro =",
           "test_data_embed.py::test_a_forward_holds_the_whole_batch"),
    Mutant("labels-counted-for-examples", "data/objectives/classify.py", "return labels[..., 0]  # one", "return labels  # one",
           "test_data_objective.py::test_several_labels"),
    Mutant("all-labels-there", "data/objectives/classify.py", "return logits > 0  #", "return logits > -1e9  #",
           "test_data_objective.py::test_several_labels"),
    Mutant("prompt-read-in-one-direction", "layers/view.py", "seen = seen | (at < context[:, :, None, None])", "seen = seen.clone()",
           "test_prefix_lm.py::test_the_mask_is_that_of_transformers_with_four_dimensions[gpt2];"
           "test_prefix_lm.py::test_what_a_token_depends_on[bloom]"),
    Mutant("prompt-hidden-from-the-kernel", "layers/view.py", "self.lengths, self.context, *span", "self.lengths, None, *span",
           "test_prefix_lm.py::test_by_a_kernel_that_knows_the_prompt[gpt2-False]"),
    Mutant("padding-seen-by-the-kernel", "layers/view.py", "(None, self.seen, *self.lengths", "(None, None, *self.lengths",
           "test_prefix_lm.py::test_by_a_kernel_that_knows_the_prompt[llama-False]"),
    Mutant("packed-prompt-one-longer", "layers/output.py", "full((1, 1), n,", "full((1, 1), n + 1,",
           "test_data_packing.py::test_gradients_are_those_of_the_same_sequences_padded[llama-prefix_lm]"),
    Mutant("generation-from-a-prompt-of-one-direction", "layers/output.py", "(cache is None or not cache.length)", "cache is None",
           "test_prefix_lm.py::test_a_prompt_is_generated_from_as_it_is_trained_on[llama]"),
    Mutant("adapter-reads-as-its-base", "registry.py", "if saved is not None and saved.settled:", "if False:",
           "test_prefix_lm.py::test_an_adapter_says_it_too_and_its_base_does_not", "KeyError"),
    Mutant("nobody-is-asked", "data/chat.py", "return unmarked(self.text(record, messages, tools, prompt=True))[0]",
           "return unmarked(self.text(record, messages, tools))[0]", "test_data_chat.py::test_prompts_are_those_of_transformers[chatml]"),
    Mutant("marks-in-a-prompt", "data/chat.py", "return unmarked(self.text(record, messages, tools, prompt=True))[0]",
           "return self.text(record, messages, tools, prompt=True)", "test_data_chat.py::test_prompts_are_those_of_transformers[plain]"),
    Mutant("vector-of-padding", "layers/head.py", "(batch.mask * at).argmax(1)", "at.new_full((len(x),), x.size(1) - 1)",
           "test_data_embed.py::test_a_causal_models_vector_is_that_of_its_last_token[gpt2]"),
    Mutant("prefix-as-in-the-first-epoch", "data/objectives/prefix_lm.py", "(self.seed, epoch, index, 4)", "(self.seed, 0, index, 4)",
           "test_prefix_lm.py::test_documents_are_cut_in_two_anew_each_epoch"),
    Mutant("suffix-and-middle-swapped", "data/objectives/fim.py", "[suf], suffix, [mid], middle)]", "[suf], middle, [mid], suffix)]",
           "test_data_fim.py::test_the_published_forms;test_data_fim.py::test_rates_and_all_documents[packed]"),
    Mutant("the-last-character-never-in-the-middle", "data/objectives/fim.py", "(0, len(text) + 1, 2)", "(0, len(text), 2)",
           "test_data_fim.py::test_the_published_forms"),
    Mutant("a-key-that-nobody-reads", "train/recipe.py", "(*COMMON, *objective.keys) and value !=", "(*COMMON, *objective.keys) and False and value !=",
           "test_recipe.py::test_a_key_says_which_objectives_read_it_and_others_refuse_it", "Failed"),
    Mutant("the-first-row-lost", "data/read.py", "self.places = self.places[int(header) :]", "self.places = self.places[1:]",
           "test_data_read.py::test_rows_without_a_header[tsv]"),
    Mutant("a-chinese-sentence-is-a-word", "data/objectives/mlm.py", "not (token.startswith(mark) or CJK[mark].match(token))", "not token.startswith(mark)",
           "test_data_span.py::test_a_character_without_spaces_around_it_is_a_word"),
    # ---- generation
    Mutant("ended-row-goes-on", "generate/run.py", "new = torch.where(done, o.pad, new)", "new = new.clone()",
           "test_generate.py::test_a_row_that_has_ended_is_padded_and_all_ended_stop"),
    Mutant("top-p-drops-the-token-that-fills-it", "generate/scores.py", "late = mass.cumsum(1) - mass >=", "late = mass.cumsum(1) >=",
           "test_generate.py::test_samples_are_drawn_from_what_is_kept[top-p]"),
    Mutant("prompt-seen-past-its-padding", "generate/state.py", "(self.mask[:, : self.length].cumsum(1) - 1).clamp(min=0)[:, start:]",
           "torch.arange(start, self.length, device=self.mask.device).expand(len(self.mask), -1)",
           zoo("greedy_generation_token_for_token", GPT)),
    Mutant("beams-keep-their-places-in-the-cache", "generate/state.py", "        self.cache.reorder(rows)\n", "",
           zoo("searches_token_for_token", GPT, T5)),
    Mutant("prompt-counted-in-a-beam-s-length", "generate/beam.py", "values / (length - self.prompt) ** self.o.length_penalty",
           "values / length ** self.o.length_penalty", zoo("searches_token_for_token", GPT)),
    Mutant("never-hopes-too-little", "generate/beam.py", "furthest = self.total if", "furthest = length if",
           zoo("searches_token_for_token", LLAMA)),
    Mutant("a-backup-beam-is-kept", "generate/beam.py", "fresh = ends & (torch.arange(values.size(1), device=values.device) < n)",
           "fresh = ends", zoo("searches_token_for_token", BLOOM)),
    Mutant("groups-do-not-see-one-another", "generate/beam.py", "used.scatter_add_(1, token, torch.ones_like(token, dtype=used.dtype))",
           "pass", "test_generate.py::test_diverse_beams_by_their_definition[False-2];test_generate.py::test_groups_differ"),
    Mutant("padding-is-penalised", "generate/scores.py", "spare = torch.where(real, ids, scores.size(1))", "spare = ids",
           "test_generate.py::test_scores_are_changed_as_transformers_changes_them[padded-repetition_penalty-1.7]"),
    Mutant("prompt-counts-as-generated", "generate/scores.py", "penalise_frequency(ids[:, prompt:], scores,", "penalise_frequency(ids, scores,",
           "test_generate.py::test_frequency_and_presence"),
    Mutant("stop-string-of-the-prompt", "generate/stop.py", "any(at >= 0 and at + len(s) > old", "any(at >= 0",
           "test_generate.py::test_a_stop_string_ends_its_row"),
    Mutant("room-for-the-text-alone", "layers/cache.py", "x.size(2) + ahead", "ahead + 1",
           "test_generate.py::test_memory_is_taken_once_and_filled_in_place", "InputError"),
    # ---- several processes
    Mutant("key-heads-unchecked", "parallel/apply.py", "for projection in (module.q, module.k):", "for projection in (module.q,):",
           "test_parallel.py::test_key_heads_must_divide_too", "Failed"),
    Mutant("ends-of-spans-that-begin-others", "metrics/labels.py", """open_ and mark in ("I", "M", "E", "L")""",
           """open_ and mark in ("I",)""", "test_metrics.py::test_spans_of_tags"),
    Mutant("tensors-of-a-bin-by-their-address", "checkpoint/folder.py", "self._tensor, self.start = tensor, number",
           "self._tensor, self.start = tensor, tensor.data_ptr()",
           "test_folder.py::test_tensors_of_a_bin_are_in_the_order_of_the_file[False]"),
    Mutant("a-transpose-in-one-storage-is-the-same", "checkpoint/folder.py", "tensor.data_ptr(), tensor.stride()", "tensor.data_ptr()",
           "test_folder.py::test_tied_weights_of_a_bin_are_the_same_unread"),
    Mutant("frequencies-say-the-dtype", "registry.py", "if not any(fnmatchcase(key, pattern) for pattern in ignored)]  # noqa",
           "]  # noqa", "test_llama.py::test_old_files"),
    Mutant("token-types-beside-vectors-looked-up", "models/gpt.py", "self.embed.tokens(x) if x.dim() == 2 else x", "x",
           "test_gpt.py::test_token_types_are_words", "RuntimeError"),
    Mutant("segments-that-nobody-is-told-of", "data/tokenizer.py", 'if segments and self.segmented else []', 'if False else []',
           "test_data_objective.py::test_pairs_of_texts_are_cut_like_transformers"),
    Mutant("segments-where-they-are-words", "train/prepare.py", "segments=segmented(setup.model)", "segments=True",
           "test_train.py::test_a_model_of_pairs_is_asked_in_transformers_with_what_it_was_trained_with[gpt2]"),
    Mutant("settings-of-another-optimizer-restored", "checkpoint/state.py", "            if was != now:\n", "            if False:\n",
           "test_optim.py::test_the_state_comes_back_to_the_bit[adamw]", "Failed"),
    Mutant("rows-read-once", "data/ragged.py", "rest, at = rest[done:], at + done", "rest = rest[:0]",
           "test_data_packing.py::test_rows_wait_in_a_file"),
    Mutant("constants-that-correlate", "metrics/labels.py", "if not np.ptp(f) or not np.ptp(w):", "if len(f) < 2:",
           "test_metrics.py::test_classes_and_values_by_hand"),
    Mutant("classes-of-a-data-set-in-sorted-order", "data/record.py", "return found.pop() if len(found) == 1 else None",
           "return None", "test_data_objective.py::test_classes_that_a_data_set_numbers_keep_their_numbers"),
    Mutant("numbers-of-classes-in-a-list-kept", "data/table.py", "            if isinstance(value, list):\n", "            if False:\n",
           "test_data_objective.py::test_classes_that_a_data_set_numbers_keep_their_numbers"),
    Mutant("labels-learned-in-another-order", "train/prepare.py", "set(names) <= set(learned) else names", "False else names",
           "test_train.py::test_labels_that_a_model_has_learned_keep_their_places"),
    Mutant("products-done-again", "parallel/blocks.py", '"aten::mm", "aten::addmm", ', '"aten::mm", ',
           "test_blocks.py::test_what_is_kept_is_not_done_again[llama]"),
    Mutant("attention-that-draws-kept", "parallel/blocks.py", "in KEPT and not draws(op, args, options)", "in KEPT",
           "test_blocks.py::test_attention_that_draws_is_done_again"),
    Mutant("nothing-recomputed", "parallel/blocks.py", "    recompute(model, machine.recompute)\n", "    pass\n",
           "test_parallel.py::test_recompute_replays_dropout"),
    Mutant("slopes-of-the-first-rank-on-all", "parallel/apply.py", "part.chunk(ranks)[me]", "part.chunk(ranks)[0]",
           "test_parallel.py::test_a_mesh_equals_one_process[tp2]"),
    Mutant("padding-of-the-vocabulary-is-words", "layers/head.py", "if scores.size(-1) == self.vocab:", "if True:",
           "test_parallel.py::test_a_vocabulary_that_does_not_divide"),
)  # fmt: skip


class Outcomes:
    """A pytest plugin that notes how each test ended: "" passed, else the name of what was raised."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        name = item.nodeid.rpartition("tests/")[2]
        if call.excinfo is not None:
            self.rows[name] = kind(call.excinfo.value)
        elif call.when == "call":
            self.rows.setdefault(name, "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.rows[report.nodeid] = "an error of collection: " + str(report.longrepr)[-300:]


def kind(error: BaseException) -> str:
    """The name of an error; of one that another process reported, the name that its traceback ends in."""
    text = str(error)
    if re.match(r"rank \d+:\n", text) and (ends := re.findall(r"^(?:\w+\.)*(\w+)(?::|$)", text, re.MULTILINE)):
        return str(ends[-1]) if "AssertionError" not in ends else "AssertionError"
    return type(error).__name__


def plant(mutant: Mutant | None, base: Path, place: Path) -> str:
    """A copy of the package of `base` in `place`, with the bug in it; why that cannot be, or ""."""
    shutil.copytree(base / "modelcenter", place / "modelcenter")
    if mutant is not None:
        if not mutant.fits(place / "modelcenter"):
            return f"{mutant.file} does not hold {mutant.old!r} once, to become {mutant.new!r}"
        mutant.into(place / "modelcenter")
        Path(cache_from_source(str(place / "modelcenter" / mutant.file))).unlink()  # whose time may be the same second
    return ""


def start(tests: Sequence[str], base: Path, place: Path) -> int:
    """Fork a process that runs `tests` on the package in `place`; what came of them will be in outcomes.json there."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(TIMEOUT)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(place)
        os.environ["PYTHONPATH"] = str(place)  # for the processes that tests start
        os.environ.pop("PYTEST_ADDOPTS", None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed: pytest-benchmark ends under xdist
        os.environ.pop("CI", None)  # there pytest prints whole differences, for minutes where they are large
        sys.path[:0] = [str(place)]
        import pytest

        outcomes = Outcomes()
        ids = [f"{base}/tests/{test}" for test in tests]
        options = ["-c", f"{base}/pyproject.toml", "--rootdir", str(base), "-p", "no:cacheprovider", "-p", "pytest_timeout", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        pytest.main([*options, "--basetemp", f"{place}/tmp", *ids], plugins=[outcomes])
        from modelcenter import __file__ as imported

        assert imported is not None and imported.startswith(str(place)), imported
        (place / "outcomes.json").write_text(json.dumps(outcomes.rows))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def judge(mutant: Mutant | None, tests: Sequence[str], place: Path) -> str:
    """What is wrong with how the tests ended; "" if they ended as they must."""
    file = place / "outcomes.json"
    if not file.exists():
        return "no verdict: " + (place / "log").read_text()[-1000:]
    rows: dict[str, str] = json.loads(file.read_text())
    wanted = "" if mutant is None else mutant.error
    faults = [f"{test}: {rows.get(test, 'did not run')}" for test in tests if rows.get(test, "?") != wanted]
    faults = [fault.replace(": ", ": survived", 1) if fault.endswith(": ") else fault for fault in faults]
    return "; ".join(faults) if mutant is not None or not faults else "; ".join(faults) + (place / "log").read_text()[-3000:]


@contextmanager
def prepared() -> Iterator[Callable[[Mutant | None], str]]:
    """How to try a mutant, or None: all their tests on an unchanged copy. The answer is what is wrong, "" for nothing."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    for module in PARENT:
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base, left = Path(folder), shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", base / "tests", ignore=left)
        shutil.copytree(ROOT / "modelcenter", base / "modelcenter", ignore=left)
        shutil.copy(ROOT / "pyproject.toml", base)
        compileall.compile_dir(base / "modelcenter", quiet=1)

        def attempt(mutant: Mutant | None) -> str:
            tests = list(dict.fromkeys(test for m in ([mutant] if mutant else MUTANTS) for test in m.tests.split(";")))
            place = base / "run" / (mutant.name if mutant else CLEAN)
            fault = plant(mutant, base, place)
            if not fault:
                os.waitpid(start(tests, base, place), 0)
                fault = judge(mutant, tests, place)
            shutil.rmtree(place)
            return fault

        yield attempt


def serve() -> None:
    """Read names, a line each, and answer each with itself and what is wrong, as JSON."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    with prepared() as attempt:
        for line in sys.stdin:
            name = line.strip()
            print(json.dumps([name, attempt(by_name.get(name))]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs in a copy of the package and see the tests fail.")
    parser.add_argument("names", nargs="*", default=["*"])
    names = parser.parse_args().names
    chosen = [mutant for mutant in MUTANTS if any(fnmatchcase(mutant.name, name) for name in names)]
    killed = 0
    with prepared() as attempt:
        for mutant in [*([None] if names == ["*"] else []), *chosen]:
            began = time.monotonic()
            fault = attempt(mutant)
            killed += mutant is not None and not fault
            print(f"{time.monotonic() - began:5.1f} s  {mutant.name if mutant else CLEAN}  {fault or 'ok'}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return int(killed < len(chosen))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else sys.exit(main())
