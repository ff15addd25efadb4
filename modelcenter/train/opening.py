"""The first lines that a run prints: the model, the data, the length, one decoded sample, and warnings of likely mistakes."""

from collections.abc import Iterator, Sequence

import torch

from ..data.collate import IGNORED, Batch
from ..data.config import DataConfig
from ..data.loader import Blank
from ..data.objective import find_objective
from ..data.tokenizer import Tokenizer
from ..data.tokenizer_train import made_here
from ..errors import counted
from ..layers.adapter import adapted
from ..ops import _kernels
from ..ops.linear import has_low_units
from ..parallel.ranks import Ranks
from .evaluate import count_targets, count_tokens
from .launch import threads_of
from .recipe import Recipe
from .resolve import divisor, most_of
from .setup import Setup

LABELS = 12  # that are shown by name
UNKNOWN = 0.2  # of a text's tokens: with more the vocabulary is another language's, or of other letters


def opening(recipe: Recipe, device: torch.device, ranks: Ranks, setup: Setup, ended: Sequence[int]) -> list[str]:
    """What was found and what will happen. `ended`: ids at which generated texts will end. All ranks call it."""
    model, tokenizer, labels, train = setup.model, setup.tokenizer, setup.labels, setup.loader
    held = None if setup.evaluation is None else setup.evaluation.loader
    objective = find_objective(recipe.objective)
    samples, batches = next(train.steps(micro_batch=recipe.micro_batch))
    forwards = len(batches)
    tokens, targets = ranks.sum(*(sum(count(b, recipe.objective) for b in batches) for count in (count_tokens, count_targets)))
    counts = ranks.sum(*unknown(batches, tokenizer, objective.task == "seq2seq"))
    weights = f"random, seed {recipe.seed}" if recipe.init == "random" else str(model.load_report)
    many = f"{ranks.size} x " if ranks.size > 1 else ""
    most = vars(model.config).get("positions")
    shorter = ", as many as the model has positions" if most == recipe.data.seq_len < DataConfig.seq_len else ""
    sample = objective.sample(batches[0], tokenizer, labels.names) if ranks.first else ""  # of others' there may be none
    where = " (the loss covers what is in [[ ]])" if "[[" in sample else ""
    threads = counted(torch.get_num_threads(), "thread")
    lines = [
        f"model: {recipe.model} ({weights}), {setup.parameters / 1e6:,.2f} M parameters, {setup.trained / 1e6:,.2f} M of them "
        f"trained; {recipe.precision} on {many}{device.type}, {threads}",
        f"data: {counted(len(train), 'example')}, {len(held) if held else 0:,} for evaluation; {recipe.objective}, "
        f"at most {recipe.data.seq_len} tokens each{shorter}; tokenizer "
        f"{named(recipe, tokenizer.name)} of {len(tokenizer):,} tokens",
        f"steps: {setup.steps:,} of {'about ' if recipe.batch_tokens else ''}{samples:,} sequences, about {tokens:,} tokens, in "
        f"{counted(forwards, 'forward')}: {setup.steps * samples / len(train):.2f} epochs",
        f"sample{where}:\n  {sample}",
    ]
    if labels.names is not None and len(labels.names) > 1:
        shown = ", ".join(labels.names[:LABELS]) + ", ..." * (len(labels.names) > LABELS)
        lines.insert(2, f"labels: {len(labels.names):,}: {shown}")
    if model.adapter is not None:
        layers, how = len(adapted(model)), model.adapter
        coded = f", weights held in {how.quantize}" if how.quantize != "none" else ""
        lines.insert(1, f"adapter: {how.name} of rank {how.rank} on {layers} layers{coded}")
    if recipe.init == "pretrained" and recipe.tokenizer is not None and made_here(recipe.tokenizer):
        lines.append(f"tokenizer: {recipe.tokenizer} is made from this text, but the weights have learned other ids; set "
                     "init=random, or leave tokenizer out")
    for side, lost, whole in (("reads", *counts[:2]), ("is to write", *counts[2:])):
        if lost > UNKNOWN * whole:
            lines.append(f"tokenizer: {lost / whole:.0%} of what the first step {side} is {tokenizer.special['unk']}, which says "
                         "nothing about a text; use another tokenizer, or a model for the language of this data")
    if not targets:
        lines.append("targets: none in the first step, which trains nothing; the sample above shows what is read of the data")
    if recipe.max_steps is not None and setup.steps < recipe.max_steps:
        lines.append(f"max_steps: {recipe.max_steps:,}, but num_epochs={recipe.num_epochs:g} ends the run earlier; "
                     "num_epochs=null to run all steps")
    if (warmup := recipe.schedule.of(setup.steps).warmup_steps) >= setup.steps:
        so = "the learning rate never reaches its peak" if setup.steps > 1 else "its learning rate is 0, so nothing is trained"
        lines.append(f"schedule: {counted(int(warmup), 'step')} of warm-up in a run of {setup.steps:,}: {so}; "
                     "schedule.warmup_steps=0 for no warm-up")
    if labels.names is not None and labels.learned not in ((), labels.names) and not model.load_report.new:
        lines.append(f"labels: the weights have learned {', '.join(labels.learned)}, whose places those of the data take")
    if held is None and (recipe.metrics or recipe.eval_steps):
        asked = ", ".join(recipe.metrics) or f"eval_steps {recipe.eval_steps}"
        lines.append(f"evaluation: none, because there is no data for {asked}; set data.eval_path=FILE or data.eval_fraction=0.05")
    if recipe.data.group_by_length and not recipe.data.shuffle:
        lines.append("data.shuffle: false, but data.group_by_length draws batches in an order of its own; leave one of them out")
    if recipe.data.group_by_length and not train.examples.padded:
        row = "data.packing" if recipe.data.packing else "data.padding_free"
        lines.append("data.group_by_length: true, but batches have no padding that it could spare: some steps get long examples, "
                     f"some short ones; leave it out, or set {row}=false")
    if recipe.save_total_limit is not None and recipe.save_steps is None:
        lines.append(f"save_total_limit: {recipe.save_total_limit} without save_steps counts only the states of a run that is "
                     "stopped; set save_steps=500 for more")
    if ended:
        lines.append(f"generation: texts end at {tokenizer.decode(ended, special=True)}, as generation_config.json will say")
    if held is not None and recipe.data.eval_path is None and (lack := objective.unlike(train.examples, held.examples)):
        lines.append(f"held out: the last {len(held):,} have {lack}: data.path seems sorted by its labels; shuffle it, or "
                     "give data.eval_path")
    if objective.together and forwards > 1:
        lines.append(f"negatives: only from the same forward, not from all {forwards} of a step; a larger micro_batch has more")
    slow = slow_choices(recipe, device, samples, ranks.shares)
    if recipe.micro_batch is not None and recipe.batch_tokens is None:
        slow += few_divisors(recipe.batch, recipe.micro_batch, most_of(recipe, device, vars(model.config)), ranks.shares)
    return [*lines, *(f"slow: {choice}" for choice in slow)]


def unknown(batches: Sequence[Batch], tokenizer: Tokenizer, pairs: bool) -> Iterator[int]:
    """How many tokens of the texts that are read are unknown, and how many there are, special ones left out; then the same of the
    texts that are to be written, if there are `pairs` of texts."""
    apart = [role for role, token in tokenizer.special.items() if token == tokenizer.special.get("unk")] == ["unk"]
    left = {tokenizer.unk_id} if apart else set()  # GPT-2's is the end of each text, too, of which there may be many
    special = torch.tensor(sorted(tokenizer.special_ids - left), dtype=torch.long)
    real = [batch for batch in batches if not isinstance(batch, Blank)]
    read = [batch["input_ids"][batch["attention_mask"] == 1] if "attention_mask" in batch else batch["input_ids"] for batch in real]
    written = [batch["labels"][batch["labels"] != IGNORED] for batch in real if pairs]
    for side in (read, written):
        ids = torch.cat([torch.empty(0, dtype=torch.long), *(part.flatten() for part in side)])
        ids = ids[~torch.isin(ids, special)]
        yield from (int((ids == tokenizer.unk_id).sum()) if tokenizer.unk_id is not None else 0, len(ids))


def named(recipe: Recipe, name: str) -> str:
    """The tokenizer as the recipe names it, if its own name is that of a file in the hub's cache."""
    return (recipe.tokenizer or recipe.model) if "/snapshots/" in name else name


def few_divisors(batch: int, micro: int, most: int, shares: int) -> list[str]:
    """What to take in place of a batch that is cut into far smaller forwards than need be, because `micro` is the largest of its
    divisors up to `most`."""
    could = min(most, -(-batch // shares))
    if 2 * micro > could or micro != divisor(batch, most):
        return []
    return [f"batch: {batch}, which divides into forwards of {counted(micro, 'sequence')} alone; "
            f"batch={-(-batch // could) * could} has forwards of {could}"]


def slow_choices(recipe: Recipe, device: torch.device, samples: int, shares: int) -> list[str]:
    """What is known to be slow here, for steps of so many samples in so many shares, and what to do about it."""
    out, lacking = [], device.type in ("cpu", "cuda") and not _kernels.available(device.type)
    if not _kernels.WANTED:
        out.append("MODELCENTER_KERNELS=0: the plain PyTorch operations run; unset it to use kernels")
    elif lacking and not _kernels.warned(device.type):
        out.append(f"no kernels for this {device.type}: the plain PyTorch operations run; modelcenter doctor says what is missing")
    if (threads := torch.get_num_threads()) > (cores := threads_of(1)):
        out.append(f"{threads} threads on {counted(cores, 'core')}, where they take turns; machine.threads={cores}")
    if device.type == "cpu" and recipe.precision == "bf16" and not has_low_units(torch.bfloat16):
        out.append("precision=bf16 on a CPU without units for it: products are computed in fp32; precision=fp32 needs no casts")
    if samples < shares:
        out.append(f"{counted(samples, 'sequence')} in batch_tokens={recipe.batch_tokens}, for {shares} shares of the data: set a "
                   "larger batch_tokens, or a smaller machine.fsdp or machine.replicate")
    return out
