"""One compiler for the copies of the project and of a tiny kernel that tests compile."""

from __future__ import annotations

import shutil

import pytest
from support import compile_once, source_tree
from support.once import once
from support.programs import compiler


@pytest.fixture(scope="session", autouse=True)
def shared_compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which(compiler()[0]) is not None:
        folder = once(tmp_path_factory, "compiler", compile_once.write)
        source_tree.COMPILER["CXX"] = str(folder / "g++")
