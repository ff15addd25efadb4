"""The bench every family is held on: tiny loud models made by transformers, ours loaded from their folder, and inputs.

Everything is derived from the registry; `variants.py` adds what a family wants tried beyond its default.
"""

import atexit
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

import modelcenter as mc
from modelcenter.model import Model
from modelcenter.registry import families

try:
    import transformers
except ImportError:  # the workers of multi-process tests do without
    transformers = None

from variants import EXCEPTIONS, VARIANTS

# One value a field, none of them a default: a field that no test sees is a field that may be unwired.
TINY = dict(
    vocab=128, positions=64, segments=3, dim=32, hidden=48, heads=4, kv_heads=2, head_dim=12, layers=2, decoder_layers=3, eps=0.05,
    buckets=10, max_distance=14, prompts=3, prompt_length=4, dropout=0.3, embed_dropout=0.2, attn_dropout=0.15, head_dropout=0.25,
)  # fmt: skip
LABELS = ("no", "maybe", "yes")


@dataclass(frozen=True)
class Case:
    """A family in one variant with one head."""

    kind: str  # model_type
    variant: str
    task: str

    def __str__(self) -> str:
        return "-".join((self.kind, self.variant, self.task))

    @property
    def family(self) -> type[Model]:
        return families()[self.kind]

    @property
    def seq2seq(self) -> bool:
        return self.family.encoder_decoder and not self.family.tasks[self.task].without

    def excused(self, test: str) -> bool:
        return test in EXCEPTIONS.get(self.kind, {})


def cases(*, all_tasks: bool = True, all_variants: bool = True) -> list[Case]:
    """Every family with every head in its default form, and every variant with its first head."""
    out = []
    for kind, family in sorted(families().items()):
        tasks = list(family.tasks)
        out += [Case(kind, "default", task) for task in (tasks if all_tasks else tasks[:1])]
        if all_variants:
            out += [Case(kind, variant, tasks[0]) for variant in VARIANTS.get(kind, {}) if variant != "default"]
    return out


def tiny(kind: str, variant: str = "default", task: str = "") -> Any:
    """The config of a tiny model; question answering has two scores a token by its nature."""
    cls = families()[kind].Config
    known = {f.name for f in fields(cls)}
    chosen = {k: v for k, v in TINY.items() if k in known} | VARIANTS.get(kind, {}).get("default", {})
    return cls(**chosen | VARIANTS.get(kind, {}).get(variant, {}), labels=LABELS[:2] if task == "qa" else LABELS)


def unseen(kind: str) -> set[str]:
    """Fields that no variant moves off the default."""
    made = [tiny(kind, v) for v in {"default", *VARIANTS.get(kind, {})}]
    plain = families()[kind].Config()
    own = [f for f in fields(plain) if f.name not in ("file", "labels") and f.default is not MISSING]
    return {f.name for f in own if all(getattr(m, f.name) == f.default for m in made)}


def loud(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that make attention peaky and outputs of order one: quiet ones hide wrong scales and masks."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 1.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2, generator=source)
            if name.endswith(("wpe.weight", "position_embeddings.weight")):
                p *= 4  # or a tied head only repeats the last token
            if name.endswith("mlp.dense_4h_to_h.weight"):
                p *= 4  # BLOOM's, which without a table of positions says one token for ever
            if name.endswith("Attention.q.weight"):
                p /= 2  # T5's, which no scale tames: in fp32 its peaks would multiply rounding
            if name == "lm_head.weight":
                p[0] = 0  # id 0 pads: a trained model never says it
            if p.dim() == 1 and name.endswith("weight"):  # of a norm
                p += 1


def unshare(model: Any) -> None:
    """Give their head a matrix of its own, where the class ties whatever its config says (T5), as in files of transformers 4."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.all_tied_weights_keys.pop("lm_head.weight")
        model.config.tie_word_embeddings = False


@functools.cache
def reference(case: Case) -> tuple[Any, str]:
    """transformers' model, in evaluation, and the folder that it saved."""
    cls = getattr(transformers, case.family.tasks[case.task].architecture)
    config = cls.config_class.from_dict(tiny(case.kind, case.variant, case.task).to_dict())
    config._attn_implementation = "eager"
    config.pad_token_id = 0  # what `inputs` pads with; their classifier finds the last token by it
    config.bos_token_id = config.eos_token_id = 1  # within the tiny vocabulary, or transformers warns
    model = cls(config).eval()
    if not tiny(case.kind, case.variant).to_dict().get("tie_word_embeddings", True):
        unshare(model)
    loud(model)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    folder = tempfile.mkdtemp(prefix="zoo-", dir=os.environ.get("ZOO"))  # conftest.py's, which is removed behind all processes
    atexit.register(remove, folder, os.getpid())
    model.save_pretrained(folder)
    return model, folder


def edit(folder: Path, **values: Any) -> None:
    """Change keys of the folder's config.json (None: removed)."""
    file = folder / "config.json"
    merged = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def rewritten(case: Case, where: Path, change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **values: Any) -> Path:
    """The reference's folder once more, with `change(tensors)` made and keys of config.json changed (None: removed)."""
    _, folder = reference(case)
    tensors = load_file(Path(folder, "model.safetensors"))
    change(tensors)
    where.mkdir(exist_ok=True)
    save_file({k: v.clone() for k, v in tensors.items()}, where / "model.safetensors", {"format": "pt"})
    shutil.copy(Path(folder, "config.json"), where)
    edit(where, **values)
    return where


def near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Of their spread, which there must be."""
    assert theirs.std() > 0.05 and (ours - theirs).abs().max() <= tolerance * theirs.std()


def remove(folder: str, owner: int) -> None:
    """Clean up, unless this is a forked child that happens to exit."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def pair(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Any, Model]:
    """Their model and ours with the same weights."""
    theirs, folder = reference(case)
    ours = mc.load(folder, task=case.task, dtype=dtype)
    theirs.to(dtype).eval()
    theirs.zero_grad()
    return theirs, ours


class Double(TorchFunctionMode):
    """float64 stays float64 where their code asks for fp32, so that 1e-10 can be asked of both sides."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


def wide(dtype: torch.dtype) -> Any:
    return Double() if dtype == torch.float64 else nullcontext()


def inputs(case: Case, side: str = "none", seed: int = 1) -> dict[str, Tensor]:
    """Two rows; the second is padded on that `side` (none, right, left)."""
    source = torch.Generator().manual_seed(seed)
    out = {"input_ids": torch.randint(1, TINY["vocab"], (2, 11), generator=source)}
    if case.seq2seq:
        out["decoder_input_ids"] = torch.randint(1, TINY["vocab"], (2, 7), generator=source)
    if side != "none":
        for name, mask, pad in (("input_ids", "attention_mask", 4), ("decoder_input_ids", "decoder_attention_mask", 2)):
            if name in out:
                out[mask] = torch.ones_like(out[name])
                hidden = slice(-pad, None) if side == "right" else slice(0, pad)
                out[mask][1, hidden] = 0
                out[name][1, hidden] = 0
        if side == "left" and not case.seq2seq:
            out["position_ids"] = (out["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return out


def theirs_only(case: Case, model: Any, args: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments that their forward knows."""
    import inspect

    known = inspect.signature(model.forward).parameters
    return {k: v for k, v in args.items() if k in known}


def scores(out: Any) -> Tensor:
    """What a task is judged by: logits, or hidden states where there are none."""
    if out.get("start_logits") is not None:
        return torch.stack((out["start_logits"], out["end_logits"]), -1)
    if out.get("logits") is not None:
        return out["logits"]
    if out.get("pooler_output") is not None:
        return torch.cat((out["pooler_output"][:, None], out["last_hidden_state"]), 1)
    return out["last_hidden_state"]


def real(case: Case, args: dict[str, Tensor], out: Tensor) -> Tensor:
    """Which positions of an output are judged: not those of padding."""
    mask = args.get("decoder_attention_mask" if case.seq2seq else "attention_mask")
    if mask is None or out.dim() == 2:
        return torch.ones(out.shape[:1], dtype=torch.bool)
    mask = mask.bool()
    return torch.cat((mask[:, :1] | True, mask), 1) if out.size(1) == mask.size(1) + 1 else mask  # a pooler's row first


def weighted(out: Tensor, kept: Tensor) -> Tensor:
    """A scalar with a different slope for every output, as a stand-in for a loss."""
    out = out[kept]
    slope = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return (out * slope).sum() / out.numel() ** 0.5


def gradients_like_theirs(ours: Model) -> dict[str, Tensor]:
    """Our gradients under their names and in their layout."""
    grads = {name: ours.get_parameter(name).grad for name in ours.shapes}
    missing = [name for name, g in grads.items() if g is None]
    assert not missing, f"no gradient: {missing}"
    rows = ours.table.save({n: (lambda g=g: g) for n, g in grads.items()}, ours.shapes, bare=ours.bare)
    return {name: make() for name, _, make in rows}


@contextmanager
def dropout_as_pattern() -> Iterator[None]:
    """Dropout as a fixed pattern that depends on the rate alone, so that equal outputs mean equal places and rates."""

    def pattern(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        return x * (1 + p * torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape))

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if enable_gqa:
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        score = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            score = score.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        if attn_mask is not None:
            score = score.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else score + attn_mask
        return pattern(score.softmax(-1), dropout_p) @ v

    ours = sys.modules["modelcenter.ops.dropout"]  # what float64 goes through; by this name, because ops.dropout is the op
    before = F.dropout, F.scaled_dot_product_attention, ours.dropped
    F.dropout, F.scaled_dot_product_attention, ours.dropped = pattern, attention, lambda x, seed, p, kernel: pattern(x, p)
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention, ours.dropped = before


def packed(case: Case, lengths: tuple[int, ...] = (5, 1, 9), targets: tuple[int, ...] = (4, 6, 1)) -> Any:
    """(arguments of one packed row, arguments of each sequence alone)."""
    source = torch.Generator().manual_seed(3)
    alone = []
    for n, m in zip(lengths, targets, strict=True):
        row = {"input_ids": torch.randint(1, TINY["vocab"], (1, n), generator=source)}
        if case.seq2seq:
            row["decoder_input_ids"] = torch.randint(1, TINY["vocab"], (1, m), generator=source)
        alone.append(row)
    ends = lambda sizes: torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)  # noqa: E731
    row = {name: torch.cat([a[name] for a in alone], 1) for name in alone[0]}
    row["cu_seq_lens_k"] = ends(lengths)
    row["cu_seq_lens_q"] = ends(targets if case.seq2seq else lengths)
    return row, alone


def folder_of(model: Model, where: Path) -> Path:
    model.save_pretrained(where)
    return where
