"""The compiler that tests share compiles what differs, and nothing twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import compile_once
from support.programs import compiler

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="no C++ compiler"),
]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line for each call of the compiler that the shared one was written for."""
    log, logging = tmp_path / "log", tmp_path / "logging"
    logging.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {" ".join(compiler())} "$@"\n')
    logging.chmod(0o755)
    monkeypatch.setenv("CXX", str(logging))
    compile_once.write(tmp_path)
    return log


def compile_copy(
    tmp_path: Path, name: str, value: object = 1, header: str = "", flag: str = "-O0"
) -> bytes:
    """The object of a copy of a project; what ninja reads of its dependencies is there, too."""
    copy = tmp_path / name
    (copy / "csrc").mkdir(parents=True)
    (copy / "csrc" / "h.h").write_text(header)
    (copy / "csrc" / "x.cpp").write_text(f'#include "h.h"\nint x() {{ return {value}; }}\n')
    (copy / "include" / "python").mkdir(parents=True)  # empty, as in a new environment
    (copy / "torch").symlink_to(tmp_path)  # by which a new environment sees packages of another
    words = ["-MMD", "-MF", f"{copy}/x.d", flag, f"-I{copy}/csrc", f"-I{copy}/include", "-c"]
    words += ["-isystem", f"{copy}/torch"]
    command = [tmp_path / "g++", *words, "-c", copy / "csrc" / "x.cpp", "-o", copy / "x.o"]
    subprocess.run(command, check=True)
    assert (copy / "x.d").read_text().startswith(f"{copy}/x.o: ")
    return (copy / "x.o").read_bytes()


def test_copies_of_a_project_are_compiled_once_and_what_differs_anew(
    log: Path, tmp_path: Path
) -> None:
    assert compile_copy(tmp_path, "one") == compile_copy(tmp_path, "two")
    assert len(log.read_text().splitlines()) == 1
    compile_copy(tmp_path, "three", value=2)
    compile_copy(tmp_path, "four", header="int y();")
    compile_copy(tmp_path, "five", flag="-O1")
    assert len(log.read_text().splitlines()) == 4


@pytest.mark.parametrize(("value", "compilations"), [("1", 1), ("TORCH_EXTENSION_NAME", 2)])
def test_the_name_of_a_module_counts_where_a_source_has_it(
    value: str, compilations: int, log: Path, tmp_path: Path
) -> None:
    for name in "12":
        compile_copy(tmp_path, name, value, flag=f"-DTORCH_EXTENSION_NAME={name}")
    assert len(log.read_text().splitlines()) == compilations


def test_an_error_is_not_kept(log: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with pytest.raises(subprocess.CalledProcessError):
            compile_copy(tmp_path, name, header="#error on purpose")
    assert len(log.read_text().splitlines()) == 2


def test_all_else_is_the_compilers_own(log: Path, tmp_path: Path) -> None:
    ours, theirs = (
        subprocess.check_output([*command, "--version"])
        for command in ([tmp_path / "g++"], compiler())
    )
    assert ours == theirs
