"""The floor plan of the package: few modules on top, imports in layers, composition, short ways."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest
from support import ROOT

import accumext

PACKAGE = Path(accumext.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_csrc" not in path.parts)


def dotted(path: Path) -> str:
    """`accumext.decoder._cells` of its path; a package of its `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, checking: bool) -> set[str]:
    """Modules of ours that a file imports; with `checking` also those for type checkers alone."""
    names = set()
    tree = ast.parse(path.read_text())
    ignored = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not checking:
            ignored |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in ignored or not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] != "accumext":
            continue
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            names.add(below if below in MODULES else node.module)
    return names - {dotted(path)}


MODULES = {dotted(path) for path in SOURCES}


def layers(graph: dict[str, set[str]]) -> int:
    """Modules on the longest way through a graph of imports; an error where it is a circle."""
    depth: dict[str, int] = {}

    def visit(name: str, way: tuple[str, ...]) -> int:
        assert name not in way, f"a circle: {' -> '.join((*way, name))}"
        if name not in depth:
            depth[name] = 1 + max((visit(n, (*way, name)) for n in graph[name]), default=0)
        return depth[name]

    return max(visit(name, ()) for name in graph)


def place(module: str) -> str:
    """The module or package on top that it is, or is in."""
    return ".".join(module.split(".")[:2])


def test_few_modules_on_top_in_few_layers():
    on_top = {place(module) for module in MODULES} - {"accumext", "accumext.__main__"}
    assert len(on_top) <= 21
    graph = {name: set() for name in on_top}
    for path in SOURCES:
        if place(dotted(path)) in graph:
            graph[place(dotted(path))] |= {place(n) for n in imported(path, False)} & on_top
    for name, others in graph.items():
        others.discard(name)
    assert layers(graph) <= 9


def inside(package: str, checking: bool) -> dict[str, set[str]]:
    """The imports of a package's modules among each other."""
    prefix = f"accumext.{package}."
    paths = {dotted(p): p for p in SOURCES if dotted(p).startswith(prefix)}
    return {name: imported(path, checking) & paths.keys() for name, path in paths.items()}


def test_no_circle_in_the_backend():
    layers(inside("backend", checking=False))


LAYERS = {
    "audit": 7, "decoder": 6, "generation": 5, "masters": 2, "optimizer": 6, "recurrence": 3,
    "rollout": 3, "sharding": 1,
}  # fmt: skip


@pytest.mark.parametrize("package", LAYERS)
def test_no_circle_and_few_layers_also_for_type_checkers(package):
    assert layers(inside(package, checking=True)) <= LAYERS[package]


def test_a_package_is_imported_by_its_face():
    """Its modules are its own: others import what its `__init__` exports. Only the two faces of all
    of accumext, which load the libraries and run the doctor, reach into a package."""
    for path in SOURCES:
        own = place(dotted(path))
        for module in imported(path, checking=True) if own.count(".") else ():
            private = module.count(".") > 1 and module.rsplit(".", 1)[1].startswith("_")
            faces = {own} | ({"accumext.backend"} if own == "accumext.__main__" else set())
            assert not private or place(module) in faces, (own, module)


def lines_of(node: ast.AST) -> int:
    """Without those of docstrings."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    texts = [
        n.body[0] for n in ast.walk(node) if isinstance(n, documented) and ast.get_docstring(n)
    ]
    return length_of(node) - sum(map(length_of, texts))


def length_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("package", LAYERS)
def test_functions_and_classes_are_short(package):
    folder = PACKAGE / package
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    functions = {n.name: lines_of(n) for n in nodes if isinstance(n, ast.FunctionDef)}
    with_long_signatures = {"decode_loss", "generate"}
    long = {name for name, lines in functions.items() if lines > 60}
    assert long <= with_long_signatures
    classes = {n.name: lines_of(n) for n in nodes if isinstance(n, ast.ClassDef)}
    long = {name for name, lines in classes.items() if lines > 300}
    assert long <= {"AccumulatingOptimizer"}


def test_no_concrete_class_of_ours_inherits_a_concrete_class_of_ours():
    for module in pkgutil.walk_packages(accumext.__path__, "accumext."):
        if module.name.startswith(("accumext._csrc", "accumext.__main__")) or "_C_" in module.name:
            continue
        if module.name not in MODULES:
            continue
        importlib.import_module(module.name)
        for name, cls in inspect.getmembers(sys.modules[module.name], inspect.isclass):
            if cls.__module__ == module.name:
                ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("accumext")]
                assert all(inspect.isabstract(base) for base in ours), (name, ours)


def test_the_core_names_no_framework():
    frameworks = {"accelerate", "lightning", "pytorch_lightning", "ignite", "transformers"}
    for path in SOURCES:
        tree = ast.walk(ast.parse(path.read_text()))
        used = {node.id.lower() for node in tree if isinstance(node, ast.Name)}
        assert not used & frameworks, path


@pytest.mark.skipif(accumext.backend() == "reference", reason="operators are Python there")
def test_a_step_and_a_decode_are_short_ways(monkeypatch):
    """The calls are counted by bench/calls.py; Python 3.12 and later count comprehensions no
    more."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    calls = importlib.import_module("calls")
    step, (forward, backward) = calls.window_step(), calls.decoder_passes()
    assert len(step.calls) <= 30
    assert step.changes <= 14
    assert len(forward.calls) + len(backward.calls) <= 80
    assert forward.changes + backward.changes <= 31  # 30 where nothing has imported FSDP
