"""The state of a run, to the last bit: what a training state holds, and how it is restored."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.load import local, put
from ..checkpoint.manifest import MANIFEST_LIMIT, Files
from ..checkpoint.optimizer import flatten_optimizer, restore_optimizer
from ..checkpoint.shards import Piece, Spread, pieces, whole
from ..checkpoint.state import FILE, STATE, load_state, save_state
from ..checkpoint.strict_json import read_json
from ..config import bind
from ..data.order import VERSION, Blended, Order
from ..errors import refuse
from ..layers.adapter import adapted
from ..names import Shape
from ..optim.ema import EMA
from ..optim.loss_scale import LossScale
from ..parallel.ranks import ALONE, Ranks, settle
from .spike import Losses

Write = Callable[[Path, int, Mapping[str, Mapping[str, Tensor | Piece]], Mapping[str, Any], int | None, Ranks], Path | None]


@dataclass
class Position:
    """The numbers of a run that are not tensors."""

    step: int = 0  # updates done, or left out
    sample: int = 0  # of the loader's order, read
    tokens: int = 0  # read in training
    skipped: int = 0  # updates left out because a gradient was not finite
    streak: int = 0  # of them, in a row up to now; those that the loss scale was too large for are none
    scale: LossScale = field(default_factory=LossScale)
    losses: Losses = field(default_factory=Losses)
    spikes: int = 0  # steps whose loss leapt
    trouble: int = 0  # steps in a row up to now that had no update, for whatever reason, or whose loss leapt
    rollbacks: int = 0  # returns to a saved state
    returned: int = -1  # the step of the last state that was gone back to
    window_loss: float = 0.0  # the summed loss of the targets since the last row of metrics
    window_targets: int = 0
    best: float | None = None  # the best evaluation's value of the metric that decides
    best_step: int | None = None
    waited: int = 0  # evaluations since
    owed: bool = False  # the evaluation of this step was given up, and is still to come

    def advance(self, sample: int, tokens: int, loss: float, targets: int, sound: bool, overflow: bool = False,
                look: bool = True) -> float | None:
        """Count a step; `sound` if there was an update. A bad step does not enter the mean, because one NaN would hide the losses
        around it. An `overflow` is not a bad step: its loss is right, and it only needs a smaller loss scale. Returns by what
        factor the loss spikes, if it does and the caller wants to `look`."""
        self.step, self.sample, self.tokens = self.step + 1, sample, self.tokens + tokens
        self.skipped += not sound
        self.streak = 0 if sound or overflow else self.streak + 1
        if sound or overflow:
            self.window_loss, self.window_targets = self.window_loss + loss * targets, self.window_targets + targets
        leap = self.losses.see(loss) if look and targets and not self.streak else None
        self.spikes += leap is not None
        self.trouble = 0 if sound and not self.losses.high else self.trouble + 1
        return leap

    def judge(self, value: float, more: bool) -> bool:
        """Whether an evaluation at this step is the best so far. `more`: larger is better."""
        better = math.isfinite(value) and (self.best is None or (value > self.best if more else value < self.best))
        if better:
            self.best, self.best_step = value, self.step
        self.waited = 0 if better else self.waited + 1
        return better

    def loss(self) -> float | None:
        """The mean loss per target since the last row, 0 without targets; None if no step was sound."""
        if self.window_targets == 0 and self.streak:
            return None
        return self.window_loss / max(1, self.window_targets)


def save(folder: Path, position: Position, model: nn.Module, optimizer: Optimizer, keep: int | None,
         ema: EMA | None = None, ranks: Ranks = ALONE, write: Write = save_state) -> Path | None:
    """Write `folder`/step-N, which is on disk when this returns, and keep the newest `keep` states. Errors: `SaveError`. Another
    `write` may return earlier: it gets the tensors themselves, which the next update changes."""
    settle(model)
    moments, groups = flatten_optimizer(optimizer, model)
    moments = dict(sorted(moments.items()))  # in one order, whether they were made here or restored
    tables = {"model": dict(weights(model)), "optimizer": moments, **({"ema": ema.averages} if ema is not None else {})}
    own = {group: {name: local(tensor)[1] for name, tensor in table.items()} for group, table in tables.items()}
    tensors: dict[str, Mapping[str, Tensor | Piece]] = {**own, "random": random_states()}
    if ranks.size > 1:
        shapes = {"model": getattr(model, "shapes", {}), "ema": getattr(model, "shapes", {})}
        shapes["optimizer"] = dict(unpadded(moments, model, groups["shapes"]))
        tensors = {group: pieces(table, shapes[group], ranks) for group, table in tables.items()}
        tensors["random"] = {f"{ranks.rank}/{key}": value for key, value in random_states().items()}
    state = {"position": asdict(position), "optimizer": groups, "python": random.getstate(), "mesh": ranks.degrees,
             "order": VERSION}  # fmt: skip
    return write(folder, position.step, tensors, state, keep, ranks)


def unpadded(moments: Mapping[str, Tensor], model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Shape]]:
    """The shapes of `moments` without the rows that only pad their parameter, whose own shape without them is in `shapes`."""
    for key, tensor in moments.items():
        name = key.partition("/")[2]
        if tensor.dim() and name in shapes:
            sides = zip(tensor.shape, model.get_parameter(name).shape, shapes[name], strict=True)
            yield key, tuple(true if held == padded else held for held, padded, true in sides)


def restore(path: Path, model: nn.Module, optimizer: Optimizer, ema: EMA | None = None, ranks: Ranks = ALONE) -> Position:
    """Put a step-N folder back into `model`, `optimizer`, the averages and the random generators. On another mesh than the one that
    wrote it, each rank draws from a new stream, given by (its seed, the step). Errors: `InputError`."""
    settle(model)
    tensors, state = load_state(path, ranks, partial(read_by, model, ranks))
    put_weights(path, tensors, model, ema)
    restore_optimizer(optimizer, model, tensors["optimizer"], state["optimizer"])
    at = bind(Position, state["position"], path / "state.json", "position.")
    restore_random(tensors["random"], state, at.step, ranks)
    return at


def read_by(model: nn.Module, ranks: Ranks, files: Files) -> Iterator[str]:
    """Of a state's files those with anything that this rank has: its parts of tensors, and its random states."""
    held = {name: (local(p)[0], p.shape[-1] if p.dim() else 1) for name, p in (*model.named_parameters(), *weights(model))}

    def touches(key: str, row: Mapping[str, Any]) -> bool:
        region, width = held.get(key.partition("/")[2] or key, ((), 1))
        if "start" not in row or not region or len(region) != len(row["whole"]):
            return True
        ends = [(r.start, r.stop, s, s + n) for r, s, n in zip(region, row["start"], row["shape"], strict=True)]
        *_, (start, stop, begin, end) = ends
        block = max(1, width // max(1, row["whole"][-1]))  # of a row's numbers, which have one here
        rows = all(a < d and c < b for a, b, c, d in ends[:-1])
        return rows and any(start // n < end and begin < -(-stop // n) for n in (1, block))

    for name, file in files.items():
        group = FILE.fullmatch(name)
        if group is None:
            mine = True
        elif group[1] == "random":
            mine = any(key.partition("/")[0] in (str(ranks.rank), key) for key in file["tensors"])
        else:
            mine = any(touches(key, row) for key, row in file["tensors"].items())
        if mine:
            yield name


def check_order(start: Path, order: Order | None) -> None:
    """Refuse to continue from the state `start` if examples stood elsewhere when it was written."""
    if isinstance(order, Blended) and order.twins and read_json(start / STATE, MANIFEST_LIMIT).get("order") != VERSION:
        found = "sources of one size, whose rows came in one order when this state was written"
        refuse(start, "data.path", found, "another output_dir, to begin again")


def put_weights(path: Path, tensors: Mapping[str, Mapping[str, Tensor | Spread]], model: nn.Module, ema: EMA | None) -> None:
    """Restore the model's weights, and the averages, from a state in `path`. Errors: `InputError` if these are not weights of this
    model."""
    mine, theirs = dict(weights(model)), tensors["model"]
    shapes: Mapping[str, Shape] = getattr(model, "shapes", {})
    for group, these in (("model", mine), *((("ema", ema.averages),) if ema is not None else ())):
        those = tensors.get(group, {})
        if odd := [n for n in sorted(these.keys() | those.keys())
                   if n not in these or n not in those or shapes.get(n, tuple(these[n].shape)) != tuple(those[n].shape)]:
            refuse(path / f"{group}.safetensors", odd[0], "missing, unknown or of another shape", "the weights of this model")
    for name, parameter in mine.items():
        put(parameter, theirs[name])
    if ema is not None:
        for name, average in ema.averages.items():
            put(average, tensors["ema"][name])


def restore_random(states: Mapping[str, Tensor | Spread], state: Mapping[str, Any], step: int, ranks: Ranks) -> None:
    """Restore this rank's generators; or, if the ranks were others, begin streams that no earlier step used."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    then, now = ({name: n for name, n in mesh.items() if n > 1} for mesh in (state.get("mesh", {}), ranks.degrees))
    if then != now:
        torch.manual_seed((torch.initial_seed() + step) % 2**63)
        return
    own, here = f"{ranks.rank}/" if ranks.size > 1 else "", random_states()  # not of devices that only the writer saw
    for key, value in states.items():
        if key == f"{own}cpu":
            torch.set_rng_state(whole(value).clone())
        elif key.startswith(own) and key.removeprefix(own) in here:
            kind, _, index = key.removeprefix(own).partition(":")
            torch.get_device_module(kind).set_rng_state(whole(value).clone(), int(index))


def weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, a tied one once by its first name, and the buffers that a checkpoint keeps. With an adapter, whose base never
    changes, only what is trained."""
    if adapted(model):
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return [(name, tensor) for tensor, name in names.items()]


def random_states() -> dict[str, Tensor]:
    """The states of torch's generators: the host's and those of the accelerators."""
    states = {"cpu": torch.get_rng_state()}
    if (kind := torch.accelerator.current_accelerator(check_available=True)) is not None:
        for index in range(torch.accelerator.device_count()):
            states[f"{kind.type}:{index}"] = torch.get_device_module(kind.type).get_rng_state(index)
    return states
