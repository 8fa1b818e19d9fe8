"""The floor plan of the package: imports without circles, faces, composition, short ways."""

import ast
import gc
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

import accumext

PACKAGE = Path(accumext.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_csrc" not in path.parts)
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}


def dotted(path: Path) -> str:
    """`accumext.decoder._cells` of its path; a package of its `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}
COMMANDS = ("accumext.__main__", "accumext.backends._doctor")  # above accumext itself
PACKAGES = sorted({path.parent.name for path in SOURCES if path.parent != PACKAGE} - {"backends"})


def imported(path: Path, checking: bool) -> set[str]:
    """Modules of ours that a file imports; with `checking` also those for type checkers alone."""
    names, ignored = set(), set()
    for node in ast.walk(TREES[path]):  # a block before what is in it
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not checking:
            ignored |= set(ast.walk(node))
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & MODULES.keys()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accumext"):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= below & MODULES.keys()
            names |= {node.module} if below - MODULES.keys() else set()
    return names - {dotted(path)}


def layers(graph: dict[str, set[str]]) -> int:
    """Modules on the longest way through a graph of imports; an error where it is a circle."""
    depth: dict[str, int] = {}

    def visit(name, way):
        assert name not in way, f"a circle: {' -> '.join((*way, name))}"
        if name not in depth:
            depth[name] = 1 + max((visit(n, (*way, name)) for n in graph[name]), default=0)
        return depth[name]

    return max(visit(name, ()) for name in graph)


def place(module: str) -> str:
    """The module or package on top that it is, or is in."""
    return ".".join(module.split(".")[:2])


def test_no_circle_on_top():
    """`accumext` itself is a place: who imports a public name from it is above all the others."""
    graph = {place(name): set() for name in MODULES if name not in COMMANDS}
    for path in SOURCES:
        own = place(dotted(path))
        if own in graph and dotted(path) not in COMMANDS:
            graph[own] |= {place(n) for n in imported(path, False)} & graph.keys() - {own}
    assert layers(graph) <= 11


def test_no_module_has_the_name_of_a_public_function():
    """`import accumext.x as x` would give the function that hides it."""
    public = {name for name in accumext.__all__ if callable(getattr(accumext, name))}
    assert not {f"accumext.{name}" for name in public} & {place(name) for name in MODULES}


def test_the_auditor_stands_outside():
    """It knows the public names alone, and nothing but the command line knows it."""
    for path in SOURCES:
        inside, own = imported(path, checking=False), place(dotted(path)) == "accumext.auditing"
        if own:
            assert inside <= {n for n in MODULES if n.startswith("accumext.auditing")} | {
                "accumext",
                "accumext.recurrence.observing",
            }, path
        elif path.name != "__main__.py":
            assert "accumext.auditing" not in {place(name) for name in inside}, path
    program = "import accumext, sys; sys.exit('accumext.auditing' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("package", "checking"), [("backends", False), *((p, True) for p in PACKAGES)]
)
def test_no_circle_in_a_package_also_for_type_checkers(package, checking):
    prefix = f"accumext.{package}."
    inside = {name: path for name, path in MODULES.items() if name.startswith(prefix)}
    layers({name: imported(path, checking) & inside.keys() for name, path in inside.items()})


def test_a_package_is_imported_by_its_face():
    """Its modules are its own: others import what its `__init__` exports. Only the two faces of all
    of accumext, which load the libraries and run the doctor, reach into a package."""
    for path in SOURCES:
        own = place(dotted(path))
        for module in imported(path, checking=True) if own.count(".") else ():
            private = module.count(".") > 1 and module.rsplit(".", 1)[1].startswith("_")
            faces = {own} | ({"accumext.backends"} if own == "accumext.__main__" else set())
            assert not private or place(module) in faces, (own, module)


def lines_of(node: ast.AST) -> int:
    """Without those of docstrings."""
    inside = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    texts = [n.body[0] for n in inside if ast.get_docstring(n)]
    first, *others = [n.end_lineno - n.lineno + 1 for n in (node, *texts)]
    return first - sum(others)


def test_functions_and_classes_are_short():
    for kind, most, known in (
        # long signatures
        (ast.FunctionDef, 60, {"decode_loss", "generate", "tbptt"}),
        (ast.ClassDef, 300, {"AccumulatingOptimizer"}),
    ):
        nodes = [n for p in SOURCES if p.parent.name in PACKAGES for n in ast.walk(TREES[p])]
        assert {n.name for n in nodes if isinstance(n, kind) and lines_of(n) > most} <= known


def test_no_concrete_class_of_ours_inherits_a_concrete_class_of_ours():
    for name in MODULES:
        if name == "accumext.__main__":
            continue
        importlib.import_module(name)
        for _, cls in inspect.getmembers(sys.modules[name], inspect.isclass):
            if cls.__module__ == name:
                ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("accumext")]
                assert all(inspect.isabstract(base) for base in ours), (cls, ours)


def test_the_core_names_no_framework():
    frameworks = {"accelerate", "lightning", "pytorch_lightning", "ignite", "transformers"}
    for path, tree in TREES.items():
        used = {node.id.lower() for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not used & frameworks, path


@pytest.mark.skipif(accumext.backend() == "reference", reason="operators are Python there")
def test_a_step_and_a_decode_are_short_ways(monkeypatch):
    """The calls are counted by bench/calls.py: so many that a reader can follow them."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gc.collect()  # sharded modules of other tests, for whose sake any module would be looked at
    calls = importlib.import_module("calls")
    assert 0 < len(calls.window_step().calls) <= 30
    forward, backward = calls.decoder_passes()
    assert 0 < len(forward.calls) + len(backward.calls) <= 80
