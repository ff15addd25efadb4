"""Where a run happens: the degrees of parallelism, and what is traded for memory. This changes the speed, not the result.

Torch-free: `parallelize` reads it, `load_machine` finds the packaged profiles.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import bind, checked, documented, find, packaged, read_recipe, says
from ..errors import refuse
from ..theirs import made_by_name, within
from .variable import variable

if TYPE_CHECKING:
    Degree = int  # what it is as soon as there is a machine
else:
    Degree = Literal["auto"] | int
Recompute = Literal["none", "selective", "full"] | bool
ASIDE = "machine.offload: true, but on a CPU the host's memory holds everything already; leave it out"
LAYOUT = ("tensor_parallel", "fsdp", "replicate", "zero", "recompute", "offload")  # the keys that say how ranks share the work
MOST = 65536  # devices
ROOM = 1.25  # of what a micro-batch takes must be free for a CUDA graph of it: a record's memory is its own


@made_by_name(within("machine"))
@documented
@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine profile: how a run is divided among ranks, and what it trades for memory.

    There are `tensor_parallel` x `fsdp` x `replicate` ranks. Up to rounding, the result of a run does not depend on the machine.
    Errors: `InputError` for settings that do not go together.
    """

    devices: Literal["all"] | int | None = field(
        default=None, metadata=says("train on this many GPUs, in the layout predicted to be fastest; "
                                    "all: every GPU here, or the CPU; null: the layout that the keys below give", min=1, max=MOST)
    )  # fmt: skip
    tensor_parallel: int = field(default=1, metadata=says("ranks that share each layer's matrices", min=1, max=1024))
    sequence_parallel: bool = field(
        default=False, metadata=says("split the sequence among the tensor_parallel ranks between layers")
    )
    fsdp: Degree = field(
        default=1, metadata=says("ranks that split the data and the training state; auto: all that the "
                                 "launcher has started, divided by tensor_parallel x replicate", min=1, max=MOST)
    )  # fmt: skip
    replicate: int = field(
        default=1, metadata=says("copies of the fsdp ranks, or of one; they split the data only", min=1, max=MOST)
    )
    zero: Literal[1, 2, 3] = field(
        default=3, metadata=says("what the fsdp ranks split: 1 the optimizer's state, 2 gradients too, 3 weights too")
    )
    recompute: Recompute = field(
        default="none",
        metadata=says("recompute in the backward: selective, all but matrix products and attention; full, whole blocks"),
    )
    offload: bool = field(
        default=False, metadata=says("keep weights, gradients and the optimizer's state in the host's memory and update them "
                                     "there; a device holds those of the current block")
    )  # fmt: skip
    compile: bool = field(default=False, metadata=says("torch.compile each block"))
    cuda_graphs: bool = field(
        default=True, metadata=says("on GPUs, without offload and compile: record forward, backward and updates as CUDA graphs, "
                                    "padding batches to recurring shapes, where memory allows")
    )  # fmt: skip
    deterministic: bool = field(
        default=False, metadata=says("on a GPU: the same bits from run to run; what has no deterministic kernel is refused")
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=says("auto: a GPU if there is one"))
    threads: int | None = field(default=None, metadata=says("CPU threads of a rank; null: torch's choice", min=1, max=1024))
    async_save: bool = field(
        default=False, metadata=says("write training states in the background, from a copy in the host's memory")
    )
    timeout: float = field(
        default=600,
        metadata=says("seconds without progress after which ranks end and print their stacks, three "
                      "times as long before the first step; also how long ranks wait for each other at the start", min=1, max=1e6),
    )  # fmt: skip
    check_steps: int | None = field(
        default=100, metadata=says("steps between checks that copies of weights are equal, bit for bit; null: never", min=1)
    )
    restarts: int = field(
        default=0, metadata=says("how often the command restarts a run from its last state when a rank "
                                 "fails; for ranks that the command itself has started", min=0, max=10**6)
    )  # fmt: skip

    def __post_init__(self) -> None:
        checked(self)
        if isinstance(self.recompute, bool):  # as it was said before there were three
            object.__setattr__(self, "recompute", "full" if self.recompute else "none")
        if self.deterministic and self.compile:
            refuse(None, "deterministic", "true, with compile: compiled kernels are chosen by timing", "one of the two")
        if isinstance(self.fsdp, str):
            object.__setattr__(self, "fsdp", self.left_over())

    def left_over(self) -> int:
        """The number of fsdp ranks that is left of a launcher's WORLD_SIZE, which may differ each time that it starts them."""
        if "WORLD_SIZE" not in os.environ:
            found = "auto, and no launcher has said how many ranks there are"
            refuse(None, "fsdp", found, "torchrun, or a number; for the devices of this machine machine.devices=all in its place")
        ranks, others = variable("WORLD_SIZE", 1, MOST), self.tensor_parallel * self.replicate
        if ranks % others:
            found = f"auto, of {ranks} ranks with tensor_parallel={self.tensor_parallel} replicate={self.replicate}"
            refuse(None, "fsdp", found, f"a multiple of {others} ranks (WORLD_SIZE)")
        return ranks // others

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.shares

    @property
    def meshed(self) -> bool:
        """Whether the model is spread over a mesh of devices, if only of one, where weights come from the host."""
        return self.ranks > 1 or self.offload

    @property
    def wrapped(self) -> bool:
        """Whether FSDP manages the weights, and brings those of a block to where it computes."""
        return self.fsdp > 1 or self.offload

    @property
    def graphs(self) -> bool:
        """Whether micro-batches may run as CUDA graphs: without compiled blocks, and without work of the host."""
        return self.cuda_graphs and not self.offload and not self.compile

    def records(self, forwards: int) -> bool:
        """Whether those of a step of so many may."""
        return self.graphs and whole(forwards, self.zero, self.fsdp, self.replicate)

    @property
    def shares(self) -> int:
        """Into how many shares the data is divided."""
        return self.fsdp * self.replicate


def whole(forwards: int, zero: int, fsdp: int, replicate: int) -> bool:
    """Whether each of a step's `forwards` begins and ends like the step, with sharded weights and with gradients sent. Otherwise
    FSDP keeps something from one to the next: whole weights, whole gradients, or sums that other replicas wait for."""
    return forwards == 1 or fsdp == 1 or (zero == 3 and replicate == 1)


def in_shards(machine: Machine) -> tuple[str, Machine] | None:
    """If each rank has a replica of the model, the settings with which they would share one, and that machine."""
    if machine.fsdp > 1 or machine.replicate == 1:
        return None
    return f"machine.fsdp={machine.replicate} machine.replicate=1", replace(machine, fsdp=machine.replicate, replicate=1)


def in_copies(machine: Machine) -> tuple[str, Machine] | None:
    """If ranks share a model, the settings with which each would have a replica, and that machine."""
    if machine.fsdp == 1:
        return None
    return f"machine.fsdp=1 machine.replicate={machine.shares}", replace(machine, fsdp=1, replicate=machine.shares)


def load_machine(name: str | Path) -> Machine:
    """The packaged profile with that name, or the file at that path."""
    file, values = read_machine(name)
    return bind(Machine, values, file)


def as_machine(machine: Machine | str | Path) -> Machine:
    """The machine itself, or the profile of that name or path."""
    if not isinstance(machine, Machine | str | Path):
        refuse(None, "machine", f"a {type(machine).__name__}", "mc.Machine(fsdp=2), or the name of a profile")
    return machine if isinstance(machine, Machine) else load_machine(machine)


def read_machine(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file of a profile, and what it says."""
    file = find(name, "machine profile", packaged("machines"))
    return file, read_recipe(file)
