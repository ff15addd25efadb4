"""Spread a model over devices, in place, in one fixed order.

Tensor parallelism comes first, because it defines what a rank's layer is; recompute and compile next, because they act on that
layer and must not see the all-gathers; FSDP last, because it shards whatever parameters are left and wraps the outermost call. FSDP
and DTensor take a second to import, so they are imported where they are used.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import ops
from ..errors import refuse
from ..layers import Adapted, Attention, Block, QuantizedLinear
from .adapted import cut_adapted, cut_codes
from .averaging import KNOWN as AVERAGED
from .averaging import average
from .blocks import fit_blocks, units
from .check import check
from .connect import by_itself, connected, kept_by
from .device import LOW, check_precision, device_of
from .machine import ASIDE, Machine, as_machine
from .ranks import Ranks, settle
from .sequence import sequence_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle


def styles(sequence: bool) -> "dict[str, Callable[[], ParallelStyle]]":
    """torch's parallel style for each word of the layers' `tp` tables. With `sequence`, sums over ranks are left to sequence.py."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "column": ColwiseParallel,
        "row": partial(RowwiseParallel, output_layouts=Partial(), use_local_output=False) if sequence else RowwiseParallel,
        "vocab": partial(RowwiseParallel, input_layouts=Replicate()),
        "heads": ColwiseParallel,  # an embedding with a column for every head
        "logits": partial(ColwiseParallel, output_layouts=Replicate()),
    }


def parallelize(model: nn.Module, machine: Machine | str, precision: str | None = None, *,
                quiet: Callable[[], object] = lambda: None) -> nn.Module:
    """Shard `model` in place as `machine` (a profile or its name) says, and return it. A model on the meta device stays there.

    `precision`: bf16 or fp16, if forwards will run under torch.autocast with it. Ranks then exchange weights in that precision,
    which halves the bytes; they hold and update weights, and sum gradients, in the model's own dtype. `quiet`: a function that is
    called as soon as the ranks have nothing more to exchange; each rank does the rest, FSDP's hooks, by itself. Make the optimizer
    afterwards: one made before would update the old, unsharded parameters.

    Errors: `InputError` if settings of the machine do not go together (before anything is allocated), if the number of processes is
    not the machine's number of ranks, if they fail to connect, if the model is spread over ranks already, or if heads cannot be
    divided among the ranks.
    """
    machine = as_machine(machine)
    check(machine)
    check_precision(precision)
    if not any(p.is_meta for p in model.parameters()) and not machine.offload:  # FSDP brings one block after another back
        model.to(device_of(machine))
    mesh = mesh_of(machine)
    if machine.offload and device_of(machine).type == "cpu" and mesh is not None and mesh.get_rank() == 0:
        warnings.warn(ASIDE, stacklevel=2)
    if mesh is not None and (model in AVERAGED or any(hasattr(p, "placements") for p in model.parameters())):
        wanted = "one call; mc.load and mc.build with a machine have made it already"
        refuse("parallelize", "model", "spread over ranks already", wanted)
    if mesh is not None and machine.tensor_parallel > 1:
        tensor_parallel(model, mesh["tp"], machine.sequence_parallel)
        if machine.sequence_parallel:
            sequence_parallel(model, mesh["tp"])
    fit_blocks(model, machine)
    if mesh is not None and machine.wrapped:
        inner = mesh["fsdp" if machine.replicate == 1 else ("replicate", "fsdp")]
        shard(model, inner, machine.zero, precision, quiet, machine.offload)
        kept_by(model)
    elif mesh is not None:
        if machine.replicate > 1:
            average(model, mesh.get_group("replicate"))
        quiet()
    return model


def mesh_of(machine: Machine) -> "DeviceMesh | None":
    """The mesh (replicate, fsdp, tp) over all ranks, without dimensions of size one that nobody needs; None for a single process
    with its weights on its device."""
    if not machine.meshed:
        return None
    kind = device_of(machine)
    if kind.type != "cpu":
        torch.accelerator.set_device_index(kind.index)
    with nullcontext() if dist.is_initialized() else connected(kind, machine) if machine.ranks > 1 else by_itself():
        if dist.get_world_size() != machine.ranks:
            found = f"{machine.shares} x {machine.tensor_parallel} ranks wanted, {dist.get_world_size()} running"
            refuse(None, "replicate x fsdp x tensor_parallel", found, "start as many processes, or change the degrees")
        degrees = {"replicate": machine.replicate, "fsdp": machine.fsdp, "tp": machine.tensor_parallel}
        kept = tuple((name, n) for name, n in degrees.items() if n > 1 or (name == "fsdp" and machine.offload))
        return one_mesh(kind.type, kept, dist.group.WORLD)


@cache
def one_mesh(kind: str, degrees: tuple[tuple[str, int], ...], group: Any) -> "DeviceMesh":
    """The mesh, made once for as long as `group` is the group of all ranks: each new one would start process groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, tuple(n for _, n in degrees), mesh_dim_names=tuple(name for name, _ in degrees))


def join(machine: Machine) -> Ranks:
    """Join the ranks of `machine`: they have found each other when this returns."""
    return Ranks(mesh_of(machine) if machine.ranks > 1 else None, machine.zero)


def tensor_parallel(model: nn.Module, mesh: "DeviceMesh", sequence: bool = False) -> None:
    """Apply the layers' own `tp` tables."""
    from torch.distributed.tensor.parallel import parallelize_module

    ranks, me, known = mesh.size(), mesh.get_local_rank(), styles(sequence)
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            for projection in (module.q, module.k):
                heads = projection.out_features // module.head_dim
                if heads % ranks:
                    found = f"{heads} heads in {name} over {ranks} ranks"
                    refuse(None, "machine.tensor_parallel", found, "a divisor of the heads")
        plan: dict[str, ParallelStyle] = {}
        for child, style in getattr(module, "tp", {}).items():
            part = getattr(module, child, None)
            if isinstance(part, Adapted):
                plan |= {f"{child}.{name}": how for name, how in cut_adapted(part, style, mesh, sequence, styles).items()}
            elif isinstance(part, QuantizedLinear):
                cut_codes(part, style, mesh, sequence)
            elif isinstance(part, nn.Module):
                if style in ("vocab", "logits"):
                    pad_rows(part, ranks)
                plan[child] = known[style]()
            elif isinstance(part, torch.Tensor):
                setattr(module, child, part.chunk(ranks)[me])
        if plan:
            parallelize_module(module, mesh, plan)
        for child, style in getattr(module, "tp", {}).items():
            if style == "vocab":
                table = getattr(module, child)
                table.forward = partial(looked_up, table)
    retie(model)


def looked_up(table: nn.Embedding, ids: Any) -> Any:
    """The rows (b s dim) of a table at `ids` (b s): the sum over the ranks, each of which has zeros for rows that others have.
    torch's own lookup computes the gradient of the whole table on every rank, and leaves it whole there if nothing else shards it.
    The sum is waited for: if a block's input were one under way, the backward of a compiled block would fail."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    weight: Any = table.weight
    mesh, own = weight.device_mesh, weight.to_local(grad_placements=weight.placements)
    at = ids.to_local() - mesh.get_local_rank() * len(own)
    others = (at < 0) | (at >= len(own))
    rows = ops.embedding(at.masked_fill(others, 0), own, None).masked_fill(others[..., None], 0)
    return DTensor.from_local(rows, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])


def pad_rows(module: nn.Module, ranks: int) -> None:
    """Lengthen a vocabulary's table so that it can be divided among `ranks`; a large one into parts whose size suits tensor cores
    (multiples of 8; ops/linear_cross_entropy.py has figures). The added rows are zero and never saved."""
    for name, old in list(module.named_parameters(recurse=False)):
        if extra := -len(old) % (8 * ranks if len(old) >= 1024 else ranks):
            grown = torch.cat((old.detach(), old.new_zeros(extra, *old.shape[1:])))
            setattr(module, name, nn.Parameter(grown, requires_grad=old.requires_grad))


def retie(model: nn.Module) -> None:
    tie = getattr(model, "tie", None)
    if tie is not None:
        tie()


def shard(model: nn.Module, mesh: "DeviceMesh", zero: int, precision: str | None, quiet: Callable[[], object],
          offload: bool = False) -> None:
    """Apply FSDP2: each block gathers its own parameters, a large head too, and the root gathers the rest. In a mesh (replicate,
    fsdp) each row shards a copy, and the rows sum their gradients.

    Bytes of a parameter on each of n fsdp ranks, with AdamW in bf16 over fp32, and what is sent for the m micro-batches of a step
    (Rajbhandari et al., 2020, "ZeRO"; `Ranks.reduce` turns the same knobs from one micro-batch to the next):

        zero 3   16 / n, and 2 + 4 of a block at a time    2 m gathers of blocks, m of the rest, m reduce-scatters of the gradients
        zero 2   16 / n + 2 for as long as a step lasts    1 gather, m reduce-scatters
        zero 1   16 / n + 2 + 4, where m > 1               1 gather, 1 reduce-scatter

    Gradients of all rows are summed once per step, whatever the stage. With `offload` the 16 bytes are in host memory: the rank's
    part is copied to its device in the model's dtype before it is gathered, and its gradients are copied back once they are summed.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    from .peers import Gather, Own, Sum, ways
    from .shards import KNOWN

    whole = policy(model, precision)
    inner = mesh["fsdp"] if mesh.ndim > 1 else mesh
    bits = whole.param_dtype or next(model.parameters()).dtype
    # zero 1 adds up whole gradients, in what they are sent
    short = whole.reduce_dtype is not None and bits in LOW.values() and zero > 1 and inner.size() > 1
    gather, add = ways(inner.get_group(), mesh.device_type) if short else (None, None)
    sums = add is not None
    if inner.size() == 1:
        gather = add = Own()
    quiet()
    home = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": home, "mp_policy": replace(whole, reduce_dtype=None) if sums else whole}
    for module in (*units(model), model):
        # what is outermost stays: the backward begins with it
        sharded: Any = fully_shard(module, **how, reshard_after_forward=zero == 3 and isinstance(module, Block))
        if gather is not None:
            sharded.set_custom_all_gather(gather)
        if add is not None:
            sharded.set_custom_reduce_scatter(add)
        if isinstance(add, Sum) and bits == torch.float16:  # torch would divide before they are added up, and lose the smallest
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # of adapters in fp32 too, where it would ask NCCL to multiply by 1
            add.over = mesh.size()
    model.register_forward_hook(release)
    KNOWN[model] = [way for way in (gather, add) if isinstance(way, Gather | Sum)]
    if offload:
        from .offload import keep

        keep(model, inner.size() == 1)


def policy(model: nn.Module, precision: str | None) -> "MixedPrecisionPolicy":
    """The dtypes in which ranks exchange weights and gradients. Gradients are never summed in low precision, which would lose small
    summands. The residual stream keeps its dtype: inputs of blocks are not cast."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = LOW.get(precision or "")
    narrow = low is not None or any(p.dtype in LOW.values() for p in model.parameters())
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)


def release(model: nn.Module, args: Any, out: Any) -> None:
    """Free gathered weights after a forward that no backward follows. Otherwise they would stay whole, and whoever changes or saves
    weights would find these and not the shards."""
    if not torch.is_grad_enabled():
        settle(model)
