"""What every test file shares."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes denormals to zero for the whole process, and hypothesis rightly refuses to draw floats there."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many planted bugs (mutants.py) the tests noticed."""
    reports = [r for kind in ("passed", "failed", "error") for r in terminalreporter.getreports(kind) if "::test_mutant[" in r.nodeid]
    if reports:
        terminalreporter.write_line(f"{sum(r.passed for r in reports)} of {len(reports)} mutants killed")
