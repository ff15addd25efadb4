"""Every bug planted in `mutants.py` must be noticed by the tests that it names: one of 96 here, all in `make test-all`."""

import ast
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import mutants
import pytest
import test_emulate
import test_kernel_mutants
from mutants import CLEAN, MUTANTS

from modelcenter.ops._kernels import available


@pytest.fixture(scope="module")
def fault() -> Iterator[Callable[[str], str]]:
    """What is wrong with how a mutant ended, "" if it was killed. A process of its own: it forks, and has imported no mutant."""
    with subprocess.Popen([sys.executable, mutants.__file__, "--serve"], stdin=-1, stdout=-1, text=True) as runner:
        assert runner.stdin is not None and runner.stdout is not None

        def ask(name: str) -> str:
            print(name, file=runner.stdin, flush=True)
            said, answer = json.loads(runner.stdout.readline())
            while said != name:  # the late answer to one that ran out of time
                said, answer = json.loads(runner.stdout.readline())
            return str(answer)

        yield ask


@pytest.mark.slow
def test_without_a_mutant_all_pass(fault: Callable[[str], str]) -> None:
    assert fault(CLEAN) == ""


def test_what_they_change_is_there() -> None:
    """Of those in the kernels too, which are compiled, and so tried, by `make test-all` alone."""
    places = {"modelcenter": MUTANTS, "csrc": (*test_kernel_mutants.MUTANTS, *test_emulate.MUTANTS, *test_emulate.FAR)}
    assert [m.name for place, plants in places.items() for m in plants if not m.fits(mutants.ROOT / place)] == []


def test_what_must_notice_them_is_there() -> None:
    """With the name of a case where a test has several: without it the test does not run."""
    tests = [(mutant.name, *test.split("::")) for mutant in MUTANTS for test in mutant.tests.split(";")]
    assert [(name, test) for name, file, test in tests if not runs(file, test)] == []


def runs(file: str, test: str) -> bool:
    """Whether a file has that test; of its marks those are seen that it, or a name of the file, spells out."""
    name, case, _ = test.partition("[")
    several = functions(file).get(name)
    return several is not None and (bool(case) or not several)


@cache
def functions(file: str) -> dict[str, bool]:
    """The functions of a file of tests, each with whether it has several cases."""
    body = ast.parse((mutants.ROOT / "tests" / file).read_text("utf-8")).body
    named = [line for line in body if isinstance(line, ast.Assign)]
    marks = {ast.unparse(line.targets[0]) for line in named if "parametrize" in ast.unparse(line.value)}
    defined = [line for line in body if isinstance(line, ast.FunctionDef)]
    return {f.name: any("parametrize" in said or said in marks for said in map(ast.unparse, f.decorator_list)) for f in defined}


def sometimes(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The mark of those that wait for `make test-all`: 95 of 96, by their names."""
    return () if zlib.crc32(name.encode()) % 96 == 0 else (pytest.mark.slow,)


@pytest.mark.skipif(not available("cpu"), reason="what the rows say of tests and errors is so where kernels were built")
@pytest.mark.parametrize("name", [pytest.param(mutant.name, marks=sometimes(mutant.name)) for mutant in MUTANTS])
def test_mutant(name: str, fault: Callable[[str], str]) -> None:
    assert fault(name) == ""


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS} | {CLEAN}) == len(MUTANTS) + 1
