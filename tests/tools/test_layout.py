"""The floor plan of the package: imports without circles, faces, composition, short ways."""

import ast
import gc
import importlib
import inspect
import re
import sys

import house
import pytest
from house import MODULES, SOURCES, TREES, dotted, imported, place
from support.programs import output_of, run_script

import accumext


def test_no_circle_on_top():
    """`accumext` itself is a place: who imports a public name from it is above all the others."""
    graph = house.on_top()
    assert {"accumext", "accumext.__main__", *house.PACKAGES} <= graph.keys()
    assert house.floors(graph) <= 8


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    with pytest.raises(ValueError, match=r"^a circle: a -> b -> d -> b$"):
        house.floors(graph)
    assert house.floors(graph | {"d": {"c"}}) == 4


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
                "accumext.ops.wgrad_fusion",  # its observers
                "accumext.recurrence.observing",
            }, path
        elif path.name != "__main__.py":
            assert "accumext.auditing" not in {place(name) for name in inside}, path


def test_what_commands_need_is_not_imported_with_the_package():
    """The auditor, the demo and the doctor, which alone needs the self-test."""
    needed = ("accumext.auditing", "accumext.demo", "accumext.backends._doctor")
    program = f"import accumext, sys; sys.exit(any(m in sys.modules for m in {needed}))"
    output_of(run_script("-c", program))


@pytest.mark.parametrize("checking", [False, True])
@pytest.mark.parametrize("package", house.PACKAGES)
def test_no_circle_in_a_package_also_for_type_checkers(package, checking):
    house.floors(house.inside(package, checking))


def test_a_package_is_imported_by_its_face():
    """Its modules are its own: others import what its `__init__` exports. Only the two faces of all
    of accumext, which load the libraries and run the doctor, reach into a package."""
    for path in SOURCES:
        own = place(dotted(path))
        for module in imported(path, checking=True) if own.count(".") else ():
            private = module.count(".") > 1 and module.rsplit(".", 1)[1].startswith("_")
            faces = {own} | ({"accumext.backends"} if own == "accumext.__main__" else set())
            assert not private or place(module) in faces, (own, module)


def test_functions_and_classes_are_short():
    signatures = {"decode_loss", "generate", "tbptt"}  # long ones
    for kind, known in ((ast.FunctionDef, signatures), (ast.ClassDef, set())):
        assert {name.rsplit(".", 1)[1] for name in house.long_ones(kind)} <= known


def test_no_concrete_class_of_ours_inherits_a_concrete_class_of_ours():
    for name in MODULES:
        if name == "accumext.__main__":
            continue
        importlib.import_module(name)
        for _, cls in inspect.getmembers(sys.modules[name], inspect.isclass):
            if cls.__module__ == name:
                ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("accumext")]
                assert all(inspect.isabstract(base) for base in ours), (cls, ours)


FRAMEWORKS = {
    *("accelerate", "lightning", "ignite", "transformers", "opacus", "peft", "deepspeed", "trl"),
    *("fairscale", "megatron", "composer", "fastai", "timm", "skorch", "keras", "horovod", "apex"),
}


def words_of(tree):
    """Yield words of names, attributes, imports and strings, but for docstrings and our modules."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            texts = [str(node.value)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            ours = modules[0].startswith("accumext") or modules[1] in MODULES
            texts = [] if ours else modules
        else:
            texts = [getattr(node, key, None) for key in ("id", "attr", "name", "arg")]
        for text in texts:
            yield from re.findall("[a-z]+", str(text).lower())


def test_the_core_names_no_framework():
    """But in a file that is named after it. The auditor stands outside: its advice is to users of
    trainers."""
    for path, tree in TREES.items():
        if path.parent.name != "auditing":
            named = FRAMEWORKS & set(words_of(tree)) - {path.stem.strip("_")}
            assert not named, (path, named)


@pytest.mark.parametrize(
    "fault",
    [
        "import lightning.pytorch as pl",
        "from accelerate import Accelerator",
        "model.accelerate.step()",
        "'transformers' in sys.modules",
        "f'{name} of lightning'",
        "def of_ignite(): ...",
    ],
)
def test_a_framework_in_the_core_is_found(fault):
    assert set(words_of(ast.parse(fault))) & FRAMEWORKS
    assert not set(words_of(ast.parse(f'"""{fault}"""'))) & FRAMEWORKS


@pytest.mark.skipif(accumext.backend() == "reference", reason="operators are Python there")
def test_a_decode_is_a_short_way():
    """The calls are counted by bench/calls.py: so many that a reader can follow them. Those of the
    wrapper have budgets in tests/optimizer/test_calls.py."""
    gc.unfreeze()
    gc.collect()  # sharded modules of other tests, for whose sake any module would be looked at
    calls = importlib.import_module("calls")
    forward, backward = calls.decoder_passes()
    assert 0 < len(forward.calls) + len(backward.calls) <= 80
