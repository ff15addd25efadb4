"""The records of a run besides its numbers: environment.json when it begins, and summary.md when it ends, however it ends."""

from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self

from ..errors import InputError, printable
from .environment import now, read_processes, surroundings, write_processes
from .recipe import Recipe
from .summary import write_summary


class Journal:
    """The processes that worked on the run in `folder`, of which this is one. If the disk refuses, that costs only a line. One that
    is `silent`, of a rank that is not the first, writes nothing."""

    def __init__(self, folder: Path, recipe: Recipe, *, silent: bool = False) -> None:
        self.folder, self.recipe, self.silent = folder, recipe, silent
        self.say: Callable[[str], None] = lambda text: None
        self.processes: list[dict[str, Any]] = []
        self.mine: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The run's name, the same in all its processes."""
        return str(self.processes[0].get("run"))

    def begin(self, environment: Mapping[str, Any], step: int, say: Callable[[str], None]) -> None:
        """This process begins or continues after `step`. `environment`: what is known about model and data."""
        self.say = say
        before = read_processes(self.folder) if step else []
        if before and step >= environment["steps"] and before[-1].get("how") == "finished":  # nothing happens
            self.processes = before
            return
        run = (before[0].get("run") if before else None) or token_hex(4)
        self.mine = {"run": run, "from_step": step, **surroundings(self.recipe.data), **environment, "incidents": []}
        self.processes = [*before, self.mine]
        self.write()

    def note(self, incident: str) -> None:
        """Note an event that a reader of the summary should know."""
        if self.mine:
            self.mine["incidents"].append(incident)
            self.write()

    def tell(self, incident: str) -> None:
        """Note it, and print it now."""
        self.say(incident)
        self.note(incident)

    def end(self, step: int, how: str) -> None:
        """This process ends after `step`: "finished" or "stopped"."""
        self.mine |= {"ended": now(), "to_step": step, "how": how}

    def write(self) -> None:
        self.attempt("environment.json", lambda: write_processes(self.folder, self.processes))

    def attempt(self, what: str, act: Callable[[], Any]) -> None:
        if self.silent:
            return
        try:
            act()
        except (OSError, InputError) as error:
            self.say(f"{what}: not written: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.mine:  # it had not begun
            return
        if error is not None:
            self.mine |= {"ended": now(), "how": f"failed: {printable(' '.join(f'{type(error).__name__}: {error}'.split()))[:300]}"}
        self.write()
        self.attempt("summary.md", lambda: self.say(f"summary: {write_summary(self.folder)}"))
