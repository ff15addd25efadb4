"""Runs that are killed, stopped and started again until they are done: was anything lost?

    python tests/kill_run.py kills [--count 200] [--seed 0]      kill -9 at random moments of training, saving and starting
    python tests/kill_run.py signals [--count 200] [--seed 0]    SIGTERM or Ctrl-C, a second one after some of them
    python tests/kill_run.py ranks --steps 40 machine.fsdp=2     both and SIGSTOP, to one of several ranks, all, or their launcher
    ... machine.async_save=true                                  the same where states are written in the background
    ... --best                                                   where the best of averaged weights is written, too, as it comes

A run of 300 steps (`--steps`) is started again with the same command until it has finished, and another one until there were as
many kills as asked for. Each life is forked from this process, which has imported torch once, and so are its ranks (`--start`: they
are started as ever, which takes several times as long). After each of them every state that it said it had saved must be there and
whole, and at the end all must be as in a run that nobody touched, to the bit.
"""

import argparse
import atexit
import ctypes
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # imported by a rehearsal, both for most of a second: here once and not in each life

from modelcenter.__main__ import main as command
from modelcenter.checkpoint.manifest import verify
from modelcenter.checkpoint.state import steps
from modelcenter.errors import InputError, LateError
from modelcenter.parallel.watch import STALLED
from modelcenter.registry import families
from modelcenter.train import launch, loop, session
from modelcenter.train.metrics import TIMINGS, read_rows

RECIPE = """
model: gpt2
init: random
config: {layers: 1, dim: 16, heads: 2, positions: 32}
tokenizer: char
data: {path: text.txt, seq_len: 16, eval_fraction: 0.1}
optimizer: {lr: 1e-2}
batch: 4
micro_batch: 2
precision: fp32
logging_steps: 1
save_steps: 10
save_total_limit: 2
"""
BEST = "ema: 0.9\neval_steps: 9\nbest: loss\npatience: 30\n"  # the best of the averaged weights is written while the run goes on
TEXT = "\n".join(f"def f{n}(x):\n    return x * {n} + {n * n}" for n in range(120))
CALLS = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "ftruncate")
LIFE = 60  # steps' time that a life lasts at most, a run's start included: some save, and some do not come to that
ONCE = 20  # seconds in which a process that is to end at once ends, on however busy a machine
LIMIT = 6  # seconds without progress, after which ranks end: one may be busy for so long where several runs share two cores
OWED = "of before its evaluation"
LATE = 60  # seconds after which nothing may be left of a run: more than `FIRST` limits, and the others' words
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # of prctl(2)
RANK = b"rank"  # what a forked one is called as soon as it runs
DONE = re.compile(rb"^model: out/model(, of step \d+)?$", re.MULTILINE)
SHOWN, SAVED = re.compile(rb"^step (\d+)/", re.MULTILINE), re.compile(rb"^saved: .*/step-(\d+)(?: \(.*\))?$", re.MULTILINE)


@dataclass
class Life:
    """One process of a run, with its ranks: how it ended, what was said, and how long after the last blow all of them were gone."""

    code: int  # an exit status, as a shell has it: 128 + the signal that ended it
    said: bytes
    seconds: float = 0.0

    @property
    def saved(self) -> int:
        return max(map(int, SAVED.findall(self.said)), default=0)

    @property
    def shown(self) -> int:
        return max(map(int, SHOWN.findall(self.said)), default=0)


Blow = tuple[float, Callable[[int], None]]  # so many seconds after what came before it; what is then done to a process


def signalled(seconds: float, number: int) -> Blow:
    return seconds, lambda process: os.kill(process, number)


def children(process: int) -> list[int]:
    """Of a process, in the order in which they came; none of one that has ended."""
    try:
        return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def begun(process: int) -> bool:
    """Whether a rank runs: whoever starts it waits until then, and for ever if it is stopped before, as it is between any program's
    fork and exec."""
    try:
        place = Path(f"/proc/{process}")
        return (place / "comm").read_bytes().strip() == RANK or b"\0-m\0modelcenter\0" in (place / "cmdline").read_bytes()
    except OSError:
        return False


def live(folder: Path, blows: Sequence[Blow], settings: Sequence[str] = (), first: Callable[[], object] = bool,
         words: Sequence[str] = ("train", "recipe.yaml", "output_dir=out")) -> Life:
    """Train, or what `words` say, in `folder` with `settings`, and give the process each blow; wait for it and for whatever it has
    started. `first` is called in it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks whose launcher has ended are children of this process then
    said, others = folder / "said", children(os.getpid())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 2)
            os.dup2(2, 1)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))  # pytest may have put others there
            os.chdir(folder)
            first()
            code = command([*words, "--machine", "cpu", "machine.threads=1", *settings])
        except KeyboardInterrupt:  # before the command could hear it
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    watch, began = os.pidfd_open(child), time.monotonic()
    for delay, act in blows:
        if select.select([watch], [], [], delay)[0]:
            break
        act(child)
        began = time.monotonic()
    _, status = os.waitpid(child, 0)
    os.close(watch)
    while left := [process for process in children(os.getpid()) if process not in others]:
        if time.monotonic() - began > LATE:
            for process in left:
                os.kill(process, signal.SIGKILL)
        for process in left:
            os.waitpid(process, os.WNOHANG)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    return Life(128 - code if code < 0 else code, said.read_bytes() if said.exists() else b"", time.monotonic() - began)


def fork(words: Sequence[str], env: Mapping[str, str], **how: Any) -> "subprocess.Popen[bytes]":
    """`modelcenter` with those words as a process of its own, as `Popen` starts it, but forked."""

    def run() -> None:
        code = 1
        try:
            for number in launch.SIGNALS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.closerange(3, 1024)  # Popen waits for a pipe to end to hear that the program has begun: it may be told things now
            ctypes.CDLL(None).prctl(PR_SET_NAME, RANK)
            atexit._clear()
            os.environ.clear()
            os.environ.update(env)
            code = command(words[3:])
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any Python program
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)

    return subprocess.Popen(words, env=env, preexec_fn=run, **how)


def forked() -> None:
    """From now on ranks are forked from this process."""
    launch.subprocess = SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


def fresh(trial: "Trial", name: str) -> Path:
    folder = trial.place / name
    folder.mkdir()
    (folder / "recipe.yaml").write_text(f"{RECIPE}{trial.more}max_steps: {trial.steps}\n")
    (folder / "text.txt").write_text(TEXT)
    return folder


def result(folder: Path) -> dict[str, object]:
    """What a finished run leaves, without what the time of day changes."""
    out = folder / "out"
    last = steps(out)[0]
    files = {f.name: sha256(f.read_bytes()).hexdigest() for f in sorted(last.iterdir())}
    if json.loads((last / "state.json").read_text())["position"]["owed"]:  # what its evaluation has found is in its row alone
        files |= dict.fromkeys(("state.json", "manifest.json"), OWED)
    rows = [{k: v for k, v in row.items() if k not in TIMINGS} for row in read_rows(out / "metrics.jsonl")]
    files["model"] = sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()
    return {**files, "last": last.name, "rows": rows}


def killed_at(number: int) -> None:
    """From now on this process kills itself at the call of that number by which `write_model` changes a file."""
    write, calls = session.write_model, count(1)
    real = {name: getattr(os, name) for name in CALLS}

    def counted(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    def watched(*args: Any) -> Any:
        for name, call in real.items():
            setattr(os, name, partial(counted, call))
        try:
            return write(*args)
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    session.write_model = watched


def newest(folder: Path, wrong: list[str]) -> int:
    """The newest step saved; each that is not whole is noted."""
    for path in steps(folder / "out"):
        try:
            verify(path)
        except InputError as error:
            wrong.append(f"torn: {error}")
    return max((int(path.name[5:]) for path in steps(folder / "out")), default=0)


@dataclass
class Trial:
    """Runs of `steps` with `settings` in `place`, until `count` lives of theirs were ended at moments that `seed` draws; `more` is
    put behind the recipe, of the run that nobody touches too. `first` is called in each process of a run."""

    place: Path
    count: int
    seed: int = 0
    steps: int = 300
    settings: Sequence[str] = ()
    more: str = ""
    first: Callable[[], object] = forked

    @property
    def alone(self) -> list[str]:
        """The settings without which the result is another one: those of the machine's layout."""
        return [word for word in self.settings if "async" not in word]


Draw = Callable[[random.Random, float], list[Blow]]
Judge = Callable[[Life, int, list[str]], None]


def hammer(trial: Trial, draw: Draw, judge: Judge) -> tuple[int, list[str]]:
    """(finished runs, what went wrong) of runs whose lives get the signals that `draw` gives, until so many lives were ended by
    one; `judge` looks at each with the newest saved step."""
    wanted_ends, rng = trial.count, random.Random(trial.seed)
    wrong: list[str] = []
    untouched = fresh(trial, "untouched")
    began = time.monotonic()
    if (life := live(untouched, [], trial.alone, trial.first)).code != 0:
        raise RuntimeError(life.said.decode())
    pace, wanted, finished, ends = (time.monotonic() - began) * min(1, LIFE / trial.steps), result(untouched), 0, 0
    while ends < wanted_ends:
        folder = fresh(trial, f"run-{finished}")
        known = 0  # the newest step that was said to be saved
        while True:
            life = live(folder, draw(rng, pace) if ends < wanted_ends else [], trial.settings, trial.first)
            known, there = max(known, life.saved), newest(folder, wrong)
            if there < known:
                wrong.append(f"step {known} was said to be saved, the newest is {there}")
            if DONE.search(life.said) and life.code == 0:
                break
            ends += 1
            judge(life, there, wrong)
        finished += 1
        found = result(folder)
        other = [key for key in wanted if found[key] not in (wanted[key], OWED)]
        wrong += [f"run {finished}: {key} is another than that of the untouched run" for key in other]
    return finished, wrong


def kills(trial: Trial) -> tuple[int, list[str]]:
    """kill -9 at any moment of a life."""

    def judge(life: Life, there: int, wrong: list[str]) -> None:
        if life.code != 128 + signal.SIGKILL:
            wrong.append(f"a life ended with {life.code}: {life.said[-300:].decode(errors='replace')}")

    return hammer(trial, lambda rng, pace: [signalled(rng.uniform(0, pace), signal.SIGKILL)], judge)


def signals(trial: Trial) -> tuple[int, list[str]]:
    """A signal at any moment: status 0, and no step that was done is lost. A second one, which a third of the lives get, ends them
    at once: 128 + its number, unless they had ended. Before a run listens (it has not begun) a signal does what it always does."""

    def draw(rng: random.Random, pace: float) -> list[Blow]:
        number = rng.choice([signal.SIGTERM, signal.SIGINT])
        return [signalled(rng.uniform(0, pace), number), *[signalled(rng.uniform(0, 0.02), number)] * (rng.random() < 1 / 3)]

    def judge(life: Life, there: int, wrong: list[str]) -> None:
        text = life.said[-300:].decode(errors="replace")
        listened = b"; once more ends it now" in life.said
        if life.code not in (128 + signal.SIGTERM, 128 + signal.SIGINT) and not (listened and life.code == 0):
            wrong.append(f"a life ended with {life.code}: {text}")
        if life.code == 0 and life.shown > there:
            wrong.append(f"step {life.shown} was done, step {there} is the newest saved: {text}")
        if life.code > 128 and life.seconds > ONCE:
            wrong.append(f"{life.seconds:.1f} s from the second signal to the end")

    return hammer(trial, draw, judge)


def to_one(number: int, rng: random.Random, process: int) -> None:
    """A signal to one of the ranks of a process, as soon as any runs; to none of one that has ended."""
    while not (there := [*filter(begun, children(process))]):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(rng.choice(there), number)


def to_all(number: int, rng: random.Random, process: int) -> None:
    """As from who ends a job: to each of its processes, in any order."""
    everybody = [process, *children(process)]
    rng.shuffle(everybody)
    for victim in everybody:
        with suppress(ProcessLookupError):
            os.kill(victim, number)


def to_launcher(number: int, rng: random.Random, process: int) -> None:
    """As from a terminal, whose group the ranks are not in."""
    os.killpg(process, number)


ENDS: dict[str, Callable[[random.Random, int], None]] = {
    "SIGKILL to a rank": partial(to_one, signal.SIGKILL),
    "SIGKILL to the launcher": partial(to_launcher, signal.SIGKILL),
    "SIGKILL to all": partial(to_all, signal.SIGKILL),
    "SIGTERM to a rank": partial(to_one, signal.SIGTERM),
    "SIGTERM to all": partial(to_all, signal.SIGTERM),
    "Ctrl-C": partial(to_launcher, signal.SIGINT),
    "SIGSTOP to a rank": partial(to_one, signal.SIGSTOP),
}
WHY = {  # what is said, by the status with which a run ends
    0: rb"\nstopped after step \d+ of|\nmodel: out/model",
    LateError.status: rb"modelcenter: error: environment: (WORLD_SIZE|RANK): ",  # who stands still before they are connected
    STALLED: rb"modelcenter: error: no progress for \d s: ranks? \d: says nothing",
    128 + signal.SIGKILL: rb"modelcenter: error: rank \d was ended by signal 9",
    128 + signal.SIGTERM: rb"^(?![^\0]*finishing the step)",  # before there is anything to save
    128 + signal.SIGINT: rb"^(?![^\0]*finishing the step)",
}


def ranks(trial: Trial) -> tuple[int, list[str]]:
    """Each of `ENDS`, as often as the others, at any moment of a run of several ranks: all of it ends, and a line says why."""
    trial = replace(trial, settings=[*trial.settings, f"machine.timeout={LIMIT}", "save_steps=4", "eval_steps=7"])
    seen: Counter[str] = Counter()
    kind = ""

    def draw(rng: random.Random, pace: float) -> list[Blow]:
        nonlocal kind
        kind = min(ENDS, key=lambda name: (seen[name], rng.random()))
        return [(rng.uniform(0, pace), partial(ENDS[kind], rng))]

    def judge(life: Life, there: int, wrong: list[str]) -> None:
        seen[kind] += 1
        text = life.said[-600:].decode(errors="replace")
        killed = kind in ("SIGKILL to the launcher", "SIGKILL to all") and life.code == 128 + signal.SIGKILL  # and says nothing
        if b"Traceback" in life.said or not (killed or re.search(WHY.get(life.code, rb"(?!)"), life.said)):
            wrong.append(f"{kind}: ended with {life.code}, and said {text}")
        if life.code == 0 and life.shown > there:
            wrong.append(f"{kind}: step {life.shown} was done, step {there} is the newest saved: {text}")
        if life.seconds > LATE:
            wrong.append(f"{kind}: {life.seconds:.1f} s later some of it was there still: {text}")

    finished, wrong = hammer(trial, draw, judge)
    print(", ".join(f"{n} {name}" for name, n in seen.items()))
    return finished, wrong


KINDS = {"kills": kills, "signals": signals, "ranks": ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs and see whether anything is lost.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("settings", nargs="*", help="of all runs but the one that nobody touches")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--start", action="store_true", help="ranks as they ever are, and not forked")
    given = parser.parse_intermixed_args()  # settings may stand behind the options
    families()
    torch.set_num_threads(1)
    loop.plot_loss = lambda folder: "not drawn"  # half a second each time
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-run-") as place:
        trial = Trial(Path(place), given.count, given.seed, given.steps, given.settings, BEST if given.best else "",
                      bool if given.start else forked)
        finished, wrong = KINDS[given.kind](trial)
    seconds = time.monotonic() - began
    print(f"{given.count} {given.kind} over {finished} runs of {given.steps} steps in {seconds:.0f} s: {len(wrong)} wrong")
    print("\n".join(wrong) or f"with none wrong, at most 3 / {given.count} = {3 / given.count:.2%} of them lose something (95 %)")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
