"""A bug that is planted in a copy of a file, to see whether the tests notice it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plant:
    """In `file` of a folder `old`, which stands there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def fits(self, folder: Path) -> bool:
        return self.new != self.old and (folder / self.file).read_text(encoding="utf-8").count(self.old) == 1

    def into(self, folder: Path) -> None:
        """Plant it there."""
        assert self.fits(folder), f"{self.name}: what it changes in {self.file} has changed"
        file = folder / self.file
        file.write_text(file.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")
