"""The threads of a CPU kernel: csrc/cpu/team.h with threads of the program's own."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs import compiler

from accumext.backends import _build

PROGRAM = Path(__file__).with_name("team.cpp")
FLAGS = ("-O1", "-g", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.build
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="no C++ compiler")
def test_pieces_are_run_once_and_nobody_waits_for_an_idle_thread(tmp_path):
    folder = tmp_path / "torch" / "csrc" / "stable"
    folder.mkdir(parents=True)
    (folder / "ops.h").touch()  # the program has the two functions that the team calls
    program = tmp_path / "team"
    command = [*compiler(), *_build.cxx_flags("cpu"), *FLAGS, f"-I{tmp_path}", f"-I{_build.csrc()}"]
    subprocess.run([*command, str(PROGRAM), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
