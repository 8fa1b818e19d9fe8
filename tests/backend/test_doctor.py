"""`accumext doctor` on a tree with one tiny kernel: what it reports, and its exit status."""

from __future__ import annotations

import json

import pytest
from support.source_tree import Tree


@pytest.mark.build
def test_doctor_fails_when_a_kernel_computes_wrongly(tree: Tree) -> None:
    done = tree.run("import sys; from accumext.__main__ import main; sys.exit(main(['doctor']))")
    assert done.returncode == 1, done.stderr
    assert "self-test scale_ on cpu" in done.stdout
    assert done.stdout.rstrip().endswith("self-test FAILED")


@pytest.mark.build
def test_doctor_passes_on_the_reference_and_says_how_to_leave_it(tree: Tree) -> None:
    code = "import sys; from accumext.__main__ import main; sys.exit(main(['doctor', '--json']))"
    done = tree.run(code, ACCUMEXT_BACKEND="reference")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "reference"
    assert report["fix"] == "unset ACCUMEXT_BACKEND"
