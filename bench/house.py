"""The size and the floor plan of the package, in numbers.

    python bench/house.py

Lines are those of files as they are. A floor is a step of the longest way through the imports: on
top those between packages and loose modules, `accumext` itself among them, and in each package
those between its modules. tests/tools/test_layout.py sets bounds to what is counted here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accumext"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_csrc" not in path.parts)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
LONG = {ast.FunctionDef: 60, ast.ClassDef: 300}  # lines
LONG_FILE = 400


def dotted(path: Path) -> str:
    """Return `accumext.decoder._cells` for its path, and a package for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}
PACKAGES = sorted(dotted(path.parent) for path in SOURCES if path.name == "__init__.py")[1:]


def place(module: str) -> str:
    """Return the module or package on top that it is, or is in."""
    return ".".join(module.split(".")[:2])


def imported(path: Path, checking: bool = False) -> set[str]:
    """Return modules of ours that a file imports; with `checking` those for type checkers, too."""
    names, ignored = set[str](), set[ast.AST]()
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
            names |= {str(node.module)} if below - MODULES.keys() else set()
    return names - {dotted(path)}


def on_top() -> dict[str, set[str]]:
    """Return what each package, loose module, and `accumext` itself import of the others."""
    graph: dict[str, set[str]] = {place(name): set() for name in MODULES}
    for name, path in MODULES.items():
        graph[place(name)] |= {place(other) for other in imported(path)} - {place(name)}
    return graph


def inside(package: str, checking: bool = False) -> dict[str, set[str]]:
    """Return what each module of a package imports of the others."""
    modules = {name for name in MODULES if f"{name}.".startswith(f"{package}.")}
    return {name: imported(MODULES[name], checking) & modules for name in modules}


def floors(graph: Mapping[str, Iterable[str]]) -> int:
    """Count modules on the longest way through a graph of imports; ValueError if it is a circle."""
    depth: dict[str, int] = {}

    def visit(name: str, way: tuple[str, ...]) -> int:
        if name in way:
            raise ValueError(f"a circle: {' -> '.join((*way, name))}")
        if name not in depth:
            depth[name] = 1 + max((visit(n, (*way, name)) for n in graph[name]), default=0)
        return depth[name]

    return max(visit(name, ()) for name in graph)


def lines_of(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Count lines without those of docstrings."""
    inner = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    spans = [node, *(n.body[0] for n in inner if ast.get_docstring(n))]
    first, *others = [(n.end_lineno or n.lineno) - n.lineno + 1 for n in spans]
    return first - sum(others)


def long_ones(kind: type[ast.FunctionDef | ast.ClassDef]) -> dict[str, int]:
    """Return functions or classes with too many lines, and how many."""
    found = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind) and (lines := lines_of(node)) > LONG[kind]:
                found[f"{dotted(path)}.{node.name}"] = lines
    return found


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_in(folder: str, *endings: str) -> int:
    paths = (ROOT / folder).rglob("*")
    return sum(length(path) for path in paths if path.is_file() and path.suffix in endings)


def plan(graph: Mapping[str, Iterable[str]]) -> str:
    """Return the number of floors, or the circle."""
    try:
        return str(floors(graph))
    except ValueError as error:
        return str(error)


def main() -> None:
    owners: Counter[str] = Counter()
    for name, path in MODULES.items():
        owners[place(name)] += length(path)
    rows: dict[str, object] = {
        **dict(owners.most_common()),
        "accumext in all": owners.total(),
        "tests": lines_in("tests", ".py", ".h", ".cpp"),
        "csrc": lines_in("csrc", ".h", ".cpp", ".cuh", ".cu"),
        "bench, Python": lines_in("bench", ".py"),
        "bench/results": lines_in("bench/results", ".json"),
        "floors on top": plan(on_top()),
        **{f"floors of {package}": plan(inside(package)) for package in PACKAGES},
        **{f"{kind.__name__} of more than {LONG[kind]}": long_ones(kind) for kind in LONG},
        f"files of more than {LONG_FILE}": {
            dotted(p): length(p) for p in SOURCES if length(p) > LONG_FILE
        },
    }
    for label, value in rows.items():
        print(f"{label:40} {value}")


if __name__ == "__main__":
    main()
