#!/usr/bin/env bash
# Expected: `CXX` is a command, as in make, CMake, setuptools and autoconf: "g++ -m64", "ccache g++" or
# "zig c++" have worked everywhere for decades.
# What happens: torch.utils.cpp_extension takes the value as the name of one program and quotes it for
# the shell, which then looks for a program with a blank in its name. The check of the compiler before
# it only warns, and of another thing: that such a compiler is not compatible.
# Version: torch 2.13.0. Read in torch/utils/cpp_extension.py: get_cxx_compiler, and
# _write_ninja_file, which joins the words with shlex. Nothing is compiled here.
# Seen:
#   build.ninja: cxx = 'g++ -pipe'
#   ninja: /bin/sh: 1: g++ -pipe: not found
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0" ninja setuptools
cat >finding.py <<'PYTHON'
import os
import pathlib
import sys

import torch
from torch.utils import cpp_extension

os.environ["CXX"] = "g++ -pipe"
os.environ["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
folder = pathlib.Path("build")
folder.mkdir()
source = "int three() { return 3; }"
try:
    cpp_extension.load_inline("three", source, functions=["three"], build_directory=str(folder))
    error = ""
except RuntimeError as failure:
    error = str(failure)
line = next(text for text in (folder / "build.ninja").read_text().splitlines() if text.startswith("cxx"))
print("build.ninja:", line)
print("ninja:", *[text for text in error.splitlines() if "not found" in text])
assert line.endswith("'g++ -pipe'"), "the compiler is no longer one word"
assert "not found" in error, "the compiler is found now"
PYTHON
venv/bin/python finding.py
