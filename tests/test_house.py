"""The rules of the house that a machine can hold: who imports whom, what an import costs, what is never called, what is shipped."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stub
import torch

import modelcenter
from modelcenter.ops import OPS
from modelcenter.registry import families

ROOT = Path(modelcenter.__file__).parent
HOUSE = Path(__file__).parent.parent  # the checkout; the package may be installed elsewhere
FILES = sorted(f for f in ROOT.rglob("*.py") if "__pycache__" not in f.parts)
FLOORS = (
    {"errors"}, {"ops", "config", "theirs"}, {"names", "layers"}, {"parallel", "checkpoint", "generate"}, {"adapter", "plan"},
    {"guest", "skeleton", "resize", "model", "registry", "identify", "place", "create"}, {"models"},
    {"optim", "data", "metrics"}, {"train"}, {"doctor"}, {"cli"}, {"__main__"},
)  # fmt: skip
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
UPWARD = {("registry", "models")}  # families() finds the files of the floor above by walking the folder; it names none


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *running(other))
        else:
            yield node
            yield from running(node)


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Full dotted names of what a module of `package` imports, inside functions too."""
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (*package[: len(package) - node.level + 1],) if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(file: Path) -> list[str]:
    return list(imported(ast.parse(file.read_text("utf-8")), ("modelcenter", *file.relative_to(ROOT).parts[:-1])))


def part(dotted: str) -> str | None:
    """The part of the house that an import of ours reaches: `modelcenter.layers.head.Head` -> layers."""
    first, _, rest = dotted.partition(".")
    return (rest.split(".")[0] or None) if first == "modelcenter" else None


def test_every_part_has_a_floor() -> None:
    parts = {f.relative_to(ROOT).parts[0].removesuffix(".py") for f in FILES} - {"__init__"}
    assert parts == set(FLOOR)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_down_only(file: Path) -> None:
    mine = file.relative_to(ROOT).parts[0].removesuffix(".py")
    if mine == "__init__":
        return  # the front door: it imports nothing before it is asked
    for dotted in imports_of(file):
        theirs = part(dotted)
        if theirs in FLOOR and theirs != mine and (mine, theirs) not in UPWARD:
            assert FLOOR[theirs] <= FLOOR[mine], f"{name_of(file)} imports {dotted}, which stands above it"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_package_imports_itself_by_dots(file: Path) -> None:
    """So that every line of imports says which are ours, and how far away they stand."""
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    assert not [name for name in found if name.split(".")[0] == "modelcenter"], "from ..errors import refuse"


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name == "layers"], ids=name_of)
def test_layers_know_no_ranks(file: Path) -> None:
    assert not [d for d in imports_of(file) if d.startswith("torch.distributed")]


def test_the_import_walk_sees_what_it_must() -> None:
    source = """
import modelcenter.train.loop
if TYPE_CHECKING:
    from ..model import Model
else:
    from . import b
def f():
    from ..models import gpt
    from ...top import x
"""
    found = list(imported(ast.parse(source), ("modelcenter", "ops", "deep")))
    assert found == ["modelcenter.train.loop", "modelcenter.ops.deep.b", "modelcenter.ops.models.gpt", "modelcenter.top.x"]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250).stdout


def test_little_is_imported_beside_torch() -> None:
    """By a family; then by a process that builds a model: FSDP, DTensor, torch's compiler, and sympy with them, take seconds."""
    code = """
import json, sys, torch
found = [set(sys.modules)]
import modelcenter as mc
mc.GPT, mc.load
found.append(set(sys.modules))
import modelcenter.train.loop
mc.build("gpt2", config={"layers": 1, "dim": 8, "heads": 1}, machine=mc.Machine(device="cpu"))
found.append(set(sys.modules))
print(json.dumps([sorted(names) for names in found]))
"""
    before, family, built = map(set, json.loads(python(code)))
    added = {name.split(".")[0] for name in family - before if "cython" not in name} - set(sys.stdlib_module_names)
    assert "modelcenter" in added and added <= {"modelcenter", "yaml", "_yaml", "torch"} and "torch._inductor" not in family
    assert not {"torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy"} & built


@pytest.mark.parametrize("arguments", ["--help", "train --help", "list models --help"])
def test_help_answers_without_torch(arguments: str) -> None:
    code = f"""
import json, sys
from modelcenter.__main__ import main
try:
    main({arguments.split()})
except SystemExit as end:
    assert not end.code
print(json.dumps(sorted(sys.modules)))
"""
    out = python(code).splitlines()
    assert len(out) > 3 and not {"torch", "numpy"} & set(json.loads(out[-1]))


FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "os.system", "os.popen",
}  # fmt: skip
FORBIDDEN_OPTIONS = {"shell": True, "verify": False, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def offences(source: str) -> list[str]:
    """What must never stand in the package: code that runs what a file says, shells, races, connections that trust anyone."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            out += [f"imports {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
            if isinstance(node, ast.ImportFrom):
                out += [f"imports {node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in FORBIDDEN_CALLS]
        if isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            out.append(node.id)
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) in FORBIDDEN_CALLS:
                out.append(ast.unparse(node))
            if re.search(r"_object(_list)?$", node.attr) and not node.attr.startswith(("from_", "to_", "is_")):
                out.append(f"{node.attr}: a collective that pickles")
        if isinstance(node, ast.Call):
            options = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            out += [f"{k}={v}" for k, v in FORBIDDEN_OPTIONS.items() if options.get(k) is v]
            if ast.unparse(node.func) == "torch.load" and options.get("weights_only") is not True:
                out.append("torch.load without weights_only=True")
    return out


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_forbidden(file: Path) -> None:
    assert not offences(file.read_text("utf-8"))


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import marshal as m", "def f(): import shelve", "eval('1')", "exec(s)",
    "f = eval",
    "yaml.load(s, Loader)", "from yaml import unsafe_load", "torch.load(f)", "torch.load(f, weights_only=False)",
    "torch.load(f, weights_only=flag)", "run('ls', shell=True)", "dist.all_gather_object(a, b)", "dist.broadcast_object_list(a)",
    "tempfile.mktemp()", "from tempfile import mktemp", "requests.get(u, verify=False)", "np.load(f, allow_pickle=True)",
    "os.system('ls')", "from_pretrained(n, trust_remote_code=True)",
])  # fmt: skip
def test_the_lint_catches(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize("source", ["model.eval()", "torch.load(f, weights_only=True, mmap=True)", "yaml.safe_load(s)"])
def test_the_lint_lets_pass(source: str) -> None:
    assert not offences(source)


def test_refusals_have_one_form() -> None:
    """`<found>; <wanted>`: what stands behind the semicolon is what is wanted, and need not say so."""
    calls = [(f"{name_of(file)}:{node.lineno}", ast.unparse(node)) for file in FILES
             for node in ast.walk(ast.parse(file.read_text("utf-8")))
             if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("refuse", "refuse_missing"))]
    assert len(calls) > 600 and not [place for place, call in calls if re.search(r"\b(is|are) wanted\b", call)]


@pytest.mark.parametrize("file", sorted(ROOT.glob("models/*.py")), ids=name_of)
def test_a_family_is_short(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) < 150


def told_by_code(tree: ast.AST) -> Iterator[str]:
    """Every name and every string of the code; comments and docstrings are documentation."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name != "models"], ids=name_of)
def test_families_are_named_in_models_alone(file: Path) -> None:
    names = {word for kind, family in families().items() for word in (kind, family.__name__)} | {"CPM"}
    word = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, sorted(names)))})(?![\w])")
    assert not [text for text in told_by_code(ast.parse(file.read_text("utf-8"))) if word.search(text)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_whole(name: str) -> None:
    op = OPS[name]
    assert callable(op.reference) and op.name == name
    assert len(list(op.cases("cpu", torch.float32))) >= 3


def test_the_types_of_the_public_names_are_current() -> None:
    assert stub.FILE.read_text("utf-8") == stub.text(), "python tests/stub.py writes it anew"
    for name in stub.names():
        assert getattr(modelcenter, name) is not None


def test_public_names_are_completed_and_suggested_before_they_are_used() -> None:
    code = "import modelcenter as mc; print(*dir(mc)); mc.Gpt"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert set(stub.names()) <= set(run.stdout.split())
    assert run.stderr.endswith("AttributeError: module 'modelcenter' has no attribute 'Gpt'. Did you mean: 'GPT'?\n")


@pytest.mark.parametrize(("code", "said"), [
    ("from modelcenter import Bert", r"module 'modelcenter' has no Bert; mc\.BERT$"),
    ("import modelcenter.layer", r"module 'modelcenter' has no layer; modelcenter\.layers, or torch\.nn$"),
    ("from modelcenter.generation import T5BeamSearch", r"module 'modelcenter' has no generation; model\.generate\(ids, "),
    ("from modelcenter.optim import OptimManager", r"module 'modelcenter' has no OptimManager; mc\.train\(recipe\)$"),
    ("from modelcenter.model import BertConfig", r"module 'modelcenter' has no BertConfig; mc\.load\(name, "),
    ("from modelcenter.model import BERT", r"module 'modelcenter\.model' has no BERT; mc\.BERT$"),
    ("from modelcenter.model import nothing", r"cannot import name 'nothing' from 'modelcenter\.model' "),
    ("import modelcenter.nothing", r"No module named 'modelcenter\.nothing'$"),
    ("from modelcenter import nothing", r"cannot import name 'nothing' from 'modelcenter' "),
], ids=lambda text: text.partition("import ")[2])
def test_an_import_of_another_package_s_name_says_what_is_here(code: str, said: str) -> None:
    """Of any other that is not here Python says what it always says; and whether one is here can still be asked."""
    with pytest.raises(ImportError, match=f"^{said}"):
        exec(code)  # noqa: S102  # one of those above
    assert not hasattr(modelcenter, "Bert")


def test_a_family_is_there_before_the_types_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes one builds it by its class, though nothing has written the types anew; names alike it are no family."""
    monkeypatch.setattr(modelcenter, "__dir__", lambda: [])
    assert modelcenter.__getattr__("BLOOM").__name__ == "BLOOM"
    with pytest.raises(AttributeError):
        modelcenter.__getattr__("bloom")


def project() -> dict[str, Any]:
    return tomllib.loads((HOUSE / "pyproject.toml").read_text("utf-8"))


def test_everything_in_the_package_is_shipped() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["modelcenter"]
    others = [f.relative_to(ROOT) for f in ROOT.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc", ".so")]
    assert len(others) > 5
    assert not [str(f) for f in others if not any(f.match(p) and len(f.parts) == len(Path(p).parts) for p in patterns)]
    folders = [d for d in ROOT.rglob("*") if d.is_dir() and list(d.glob("*.py")) and d.name != "__pycache__"]
    assert all((d / "__init__.py").is_file() for d in folders), "a folder that is no package is not shipped"


def test_init_files_are_empty() -> None:
    """But for the three that gather names (config, layers, ops) and the one that answers a call (train)."""
    spoken = {d.parent.name for d in ROOT.glob("*/__init__.py") if d.read_text("utf-8").strip()}
    assert spoken <= {"config", "layers", "ops", "train"}


def test_constraints_hold_every_dependency() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(.+)$", (HOUSE / "constraints.txt").read_text("utf-8"), re.M))
    found = project()["project"]
    wanted = [*found["dependencies"], *found["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=\[; ]", w)[0].lower() for w in wanted}
    assert names <= {p.lower() for p in pinned}


def test_cuda_counts_its_threads_in_64_bits() -> None:
    """A product with the number of a block is one of 32 bits unless a factor says otherwise."""
    product = re.compile(r"(blockIdx|gridDim)\.[xyz] \* (?!int64_t\{)|(?<!\}) \* (blockIdx|gridDim)\.[xyz]")
    assert product.search("blockIdx.x * blockDim.x") and product.search("blockDim.x * blockIdx.x")
    assert not product.search("int64_t{blockIdx.x} * 8") and not product.search("blockIdx.x * int64_t{blockDim.x}")
    found = [f"{file.name}: {line}" for file in HOUSE.glob("csrc/*.cu*") for line in file.read_text("utf-8").splitlines()
             if product.search(line)]  # fmt: skip
    assert not found and list(HOUSE.glob("csrc/*.cu"))


def test_the_makefile_installs_torch_first() -> None:
    lines = (HOUSE / "Makefile").read_text("utf-8").splitlines()
    installs = [line for line in lines if line.startswith("\t$(PIP)")]
    assert "torch==" in installs[0] and "-e" not in installs[0]


def test_text_is_clean() -> None:
    """No tab or space at a line's end, no tab in Python, one newline at the end."""
    for file in (*FILES, *sorted(Path(__file__).parent.glob("*.py")), *ROOT.rglob("*.yaml"), *HOUSE.glob("*.md")):
        text = file.read_text("utf-8")
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), file
        assert not re.search(r"[ \t]+$", text, re.M) and "\t" not in text, file
