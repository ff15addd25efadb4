"""Folders read by several ranks of one node or of two, in few turns and many, and what happens when one cannot read."""

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from mesh import DEVICE, full, spawn
from safetensors.torch import load_file, save_file
from test_parallel import counted
from test_peers import Files
from torch import Tensor
from zoo import Case, cases

import modelcenter as mc
from modelcenter import create, place
from modelcenter.checkpoint import exchange, intake, write
from modelcenter.checkpoint.folder import FileSlice
from modelcenter.errors import InputError, refuse

CASES = [case for case in cases(all_tasks=False, all_variants=False) if case.kind in ("gpt2", "bloom", "t5")]
FOUR = mc.Machine(device="cpu", fsdp=2, tensor_parallel=2)


def bits(model: mc.Model) -> dict[str, Tensor]:
    return {name: full(p.detach(), model.shapes[name]) for name, p in model.named_parameters()}


def equal(found: mc.Model, wanted: mc.Model, what: str) -> None:
    for (name, a), b in zip(bits(found).items(), bits(wanted).values(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: {name}"


def read(rank: int, folders: dict[Case, str]) -> None:
    """Turn by turn, in another dtype, out of a pickled file, on two nodes."""
    for case, folder in folders.items():
        wanted = mc.load(folder)
        for least in (2**20, 600):
            intake.LEAST = least
            equal(mc.load(folder, machine=FOUR), wanted, f"{case}, buffers of {least}")
        usual, intake.PACE["cpu"] = intake.PACE["cpu"], intake.PACE["cuda"]
        equal(mc.load(folder, machine=FOUR), wanted, f"{case}, several turns at once")
        intake.PACE["cpu"] = usual
        equal(mc.load(folder, machine=FOUR, dtype="bf16"), mc.load(folder, dtype="bf16"), f"{case} in bf16")
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        with counted() as done:
            equal(mc.load(folder, machine=FOUR), wanted, f"{case}, two nodes")
        whole, nodes = sum(p.numel() * 4 for p in wanted.parameters()), torch.zeros(2, dtype=torch.int64)
        nodes[rank // 2] = sum(done)
        dist.all_reduce(nodes)
        if isinstance(case, Case):  # a pickled file is mapped
            twice = case.kind == "gpt2"  # its matrices are stored transposed: both nodes need columns of all rows
            assert int(nodes.max()) <= whole <= int(nodes.sum()) - twice, f"{case}: {nodes} of {whole}"
        os.environ["LOCAL_WORLD_SIZE"] = "4"


@pytest.mark.slow
def test_turns_dtypes_and_nodes(tmp_path: Path) -> None:
    folders = {case: zoo.reference(case)[1] for case in CASES}
    pickled = tmp_path / "bin"
    pickled.mkdir()
    first = Path(folders[CASES[0]])
    torch.save(load_file(first / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_bytes((first / "config.json").read_bytes())
    spawn(4, read, {**folders, "pickled": str(pickled)})


def broken(rank: int, folder: Path) -> None:
    """The file is cut after its header was read: whoever reads its end says so, the others that somebody has."""
    real = FileSlice._read

    def short(self: FileSlice, buffer: memoryview, at: int) -> None:
        if rank == 1:
            os.truncate(folder / "model.safetensors", 600)
        real(self, buffer, at)

    FileSlice._read = short  # type: ignore[method-assign]
    with pytest.raises(InputError, match="the file ends at byte"):  # said by all
        mc.load(folder, machine=mc.Machine(device="cpu", fsdp=4))


def test_one_rank_that_cannot_read_is_everybodys_error(tmp_path: Path) -> None:
    first = Path(zoo.reference(CASES[0])[1])
    save_file(load_file(first / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((first / "config.json").read_bytes())
    spawn(4, broken, tmp_path)


def beside(rank: int, folder: str) -> None:
    """What ranks do while FSDP wraps is done once, by another thread, when nothing else is on its way between them: they connect,
    and have begun to read."""
    found: list[Any] = []

    def roads(device: torch.device) -> None:
        mine, come = torch.full((2,), rank), torch.empty(2, dtype=torch.int64)
        dist.all_to_all_single(come, mine)
        found.append((device.type, come.tolist(), threading.current_thread() is threading.main_thread()))

    def out(sources: Any, device: torch.device, share: int) -> Any:
        intakes.append(real(sources, device, share))
        shares.append(share)
        return intakes[-1]

    create.open_roads, real, create.set_out = roads, exchange.set_out, out
    wanted = mc.load(folder, dtype="bf16")
    size = sum(p.nbytes for p in wanted.parameters())
    for degrees, parts in (({"fsdp": 2}, 2), ({"tensor_parallel": 2}, 2), ({"replicate": 2}, 1)):
        intakes: list[Any] = []
        shares: list[int] = []
        found.clear()
        with counted() as done:
            equal(mc.load(folder, machine=mc.Machine(device="cpu", **degrees), dtype="bf16"), wanted, f"{degrees}")
        assert found == [("cpu", [0, 1], False)] and shares == [size // parts]
        assert intakes[0].over and not intakes[0].thread.is_alive()
        assert sum(done) == sum(end - start for start, end in spans(intakes[0], rank)), "nothing is read twice"
    with pytest.raises(InputError, match="of weights"):  # what was begun is ended before the files are closed
        place.check_memory = lambda model, device: refuse(None, "model", "1 GB of weights", "less")
        mc.load(folder, machine=mc.Machine(device="cpu", fsdp=2))
    assert not intakes[-1].thread.is_alive()


class Reached(Files):
    """Buffers of several processes that each other reach, without a GPU."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(str(folder))
        self.size, self.handle, self.barriers = size, self, 0
        for rank in range(dist.get_world_size()):
            self.buffer = torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.uint8)
        dist.barrier()
        self.buffer = self.get_buffer(dist.get_rank(), (size,), torch.uint8)

    def barrier(self) -> None:
        self.barriers += 1
        dist.barrier()


def reached(rank: int, folders: dict[Case, str], place: Path) -> None:
    """Ranks that reach each other's buffers fetch what is theirs, in more turns than there are buffers, and send nothing."""
    found: list[Reached] = []

    def reach(group: Any, kind: str, size: int) -> Reached:
        found.append(Reached(place / f"{len(found)}", size))
        return found[-1]

    def unwanted(*args: Any, **options: Any) -> None:
        raise AssertionError("nothing is sent")

    for number in range(9):
        (place / f"{number}").mkdir(exist_ok=True)
    exchange.reach, create.open_roads, dist.all_to_all_single = reach, unwanted, unwanted
    for case, folder in folders.items():
        wanted = mc.load(folder)
        for machine, least in ((FOUR, 600), (FOUR, 2**20), (mc.Machine(device="cpu", replicate=2, fsdp=2), 600)):
            intake.LEAST = least
            equal(mc.load(folder, machine=machine), wanted, f"{case}, {machine}, buffers of {least}")
            assert found[-1].barriers >= 2 and found[-1].barriers % 2 == 0
    assert len(found) == 3 * len(folders) and found[0].barriers > 4, "several turns"


def test_what_is_reached_is_not_sent(tmp_path: Path) -> None:
    spawn(4, reached, {case: zoo.reference(case)[1] for case in CASES}, tmp_path)


def there(rank: int, folders: dict[Case, str]) -> None:
    """On the devices that ranks have in these tests: GPUs that reach each other map their buffers."""
    found: list[Any] = []

    def reach(*of: Any) -> Any:
        found.append(real(*of))
        return found[-1]

    real, alone = exchange.reach, f"cuda:{rank}" if DEVICE == "cuda" else DEVICE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "reach", reach)
        for case, folder in folders.items():
            wanted = mc.load(folder, device=alone)
            for degrees in ({"fsdp": 2}, {"tensor_parallel": 2}, {"replicate": 2}):
                for least in (600, 2**20):
                    patch.setattr(intake, "LEAST", least)
                    what = f"{case}, {degrees}, buffers of {least}"
                    equal(mc.load(folder, machine=mc.Machine(device=DEVICE, **degrees)), wanted, what)
    able = DEVICE == "cuda" and torch.cuda.can_device_access_peer(rank, 1 - rank)
    assert len(found) == 6 * len(folders) and all((one is not None) == able for one in found)


def test_ranks_load_as_one_process() -> None:
    spawn(2, there, {case: zoo.reference(case)[1] for case in CASES})


def spans(intake: Any, rank: int) -> list[tuple[int, int]]:
    """The places in buffers that a rank has filled."""
    return [(run.at, run.at + run.size) for turn in intake.turns for run in turn[rank]]


def test_ranks_connect_beside_the_wrapping() -> None:
    spawn(2, beside, zoo.reference(CASES[0])[1])


def test_threads_that_read_hand_on_what_is_wrong() -> None:
    """What a file has against it is kept until all pieces were waited for; anything else is raised."""
    into = bytearray(4)

    def piece(start: int, stop: int, part: memoryview) -> None:
        if start == 2:
            raise errors[0]
        part[:] = bytes(range(start, stop))

    for error in (OSError("no"), InputError("no"), RuntimeError("no")):
        errors, told = [error], intake.Told()
        with intake.Readers(3) as threads:
            for start in range(4):
                threads.pieces.put((piece, start, start + 1, memoryview(into)[start : start + 1], told))
            if isinstance(error, RuntimeError):
                with pytest.raises(RuntimeError, match="no"):
                    intake.Reading(4, told).wait()
            else:
                assert intake.Reading(4, told).wait() is error
        assert into == bytes([0, 1, 0, 3]) and not any(thread.is_alive() for thread in threads.threads)


def test_one_process_reads_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        folder = zoo.reference(case)[1]
        wanted = mc.load(folder)
        held = load_file(Path(folder) / "model.safetensors")
        for theirs, _, make in wanted.table.save({n: lambda p=p: p.detach() for n, p in wanted.named_parameters()}, wanted.shapes):
            assert torch.equal(make(), held[theirs]), f"{case}: {theirs}"
        with monkeypatch.context() as patch:
            patch.setattr(intake, "LEAST", 600)
            equal(mc.load(folder), wanted, f"{case}")


def test_nothing_is_looked_for_that_is_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is made, and afterwards as before, whatever comes of it."""
    folder, real, on = zoo.reference(CASES[0])[1], create.skeleton, []

    def skeleton(*args: Any) -> Any:
        on.append(gc.isenabled())
        if len(on) == 2:
            raise RuntimeError("no")
        return real(*args)

    monkeypatch.setattr(create, "skeleton", skeleton)
    mc.load(folder)
    assert gc.isenabled() and on == [False]
    with pytest.raises(RuntimeError, match="no"):
        mc.load(folder)
    assert gc.isenabled() and on == [False, False]


@pytest.mark.gpu
def test_an_accelerator_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through pinned buffers, in one turn and in many, transposed and cast there."""
    for case in CASES:
        folder = zoo.reference(case)[1]
        for least in (2**20, 600):
            monkeypatch.setattr(intake, "LEAST", least)
            for dtype in ("auto", "bf16"):
                found = mc.load(folder, machine=mc.Machine(device="cuda"), dtype=dtype)
                assert all(p.device.type == "cuda" for p in found.parameters())
                equal(found.cpu(), mc.load(folder, dtype=dtype), f"{case}, buffers of {least}, {dtype}")


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


WAYS = [(case, "20KB", 600) for case in CASES] + [(CASES[0], "5GB", 2**20)]  # many files in many turns, one in one


def written(rank: int, folders: dict[Case, str], place: Path, meshes: list[mc.Machine]) -> None:
    for mesh in meshes:
        for case, size, least in WAYS:
            intake.LEAST = least
            out = place / f"{case}-{size}"
            mc.load(folders[case], machine=mesh).save_pretrained(out, max_shard_size=size)
            if rank == 0:
                assert content(out) == content(place / f"alone-{case}-{size}"), f"{case} on {mesh}, files of {size}"
                assert not list(place.glob(".tmp-*"))
            dist.barrier()


OTHERS = [mc.Machine(device="cpu", fsdp=4), mc.Machine(device="cpu", replicate=2, fsdp=2)]


@pytest.mark.parametrize(
    "meshes", [pytest.param([FOUR], id="fsdp2xtp2"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_several_ranks_write_the_bytes_of_one(meshes: list[mc.Machine], tmp_path: Path) -> None:
    folders = {case: zoo.reference(case)[1] for case in CASES}
    for case, size, _ in WAYS:
        mc.load(folders[case]).save_pretrained(tmp_path / f"alone-{case}-{size}", max_shard_size=size)
    spawn(4, written, folders, tmp_path, meshes)


def full_disk(rank: int, folder: str, place: Path) -> None:
    """One rank's disk is full; then the first rank's name is taken, before anything is written, and when all is."""
    model = mc.load(folder, machine=FOUR)
    model.save_pretrained(place / "out")
    before, real = content(place / "out"), os.pwrite

    def pwrite(*rest: Any) -> int:
        if rank == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*rest)

    os.pwrite = pwrite
    with pytest.raises(InputError, match="No space left on device"):
        model.save_pretrained(place / "out")
    os.pwrite = real
    with pytest.raises(InputError, match="a folder with other files and no config"):
        model.save_pretrained(place)
    if rank == 0:
        write.commit_folder = lambda temp, final: refuse(final, None, "taken", "another")
    with pytest.raises(InputError, match="taken; another"):
        model.save_pretrained(place / "new")
    dist.barrier()
    assert content(place / "out") == before and {f.name for f in place.iterdir()} == {"out"}


def test_a_fault_of_one_rank_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    spawn(4, full_disk, zoo.reference(CASES[0])[1], tmp_path)
