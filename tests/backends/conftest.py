"""A copy of the project with a tiny kernel, and one compiler for all that tests compile."""

import os
import shutil

import pytest
from support import compile_once, source_tree
from support.once import once
from support.programs import compiler
from support.source_tree import Tree


@pytest.fixture(scope="session", autouse=True)
def shared_compiler(tmp_path_factory):
    found = os.environ.get("COMPILE_ONCE")  # by .ci/run
    if found is None and shutil.which(compiler()[0]) is not None:
        found = str(once(tmp_path_factory, "compiler", compile_once.write) / "g++")
    if found is not None:
        source_tree.COMPILER.update(CXX=found, COMPILE_ONCE=found)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "tree")
