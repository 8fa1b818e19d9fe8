"""gpu.sh without a GPU: an interpreter that answers for the programs that the script calls.

What is tested is that no result is lost. The checks of gpu_checks.py run for real, on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.programs import run_script

import accumext
from accumext.backend import _build

PARTS = ["build", "operators", "decode_loss", "doctor", "decoder", "benchmark", "tests"]
SANITIZERS = ["memcheck", "racecheck"]
PATIENCE_S = 60.0  # for a part that takes a second

# By a part of the command line, what happens: a program that leaves a line in the log, and in
# FAILING ends with status 3 after words, and in SLEEPING does not end.
INTERPRETER = """#!{python}
import os, subprocess, sys, time
line = " ".join(sys.argv[1:])
if line == "-":
    print("fake-gpu")
    print("Fake GPU, torch 2.11.0, Python 3.12.3")
elif "gpu_report.py" in line:
    sys.exit(subprocess.run([{python!r}, *sys.argv[1:]]).returncode)
elif "sysconfig" in line:
    print("/nonexistent")
else:
    with open(os.environ["LOG"], "a") as log:
        names = "MAX_JOBS", "ACCUMEXT_BUILD", "ACCUMEXT_CUDA", "ACCUMEXT_BACKEND"
        print(line, *(f"{{name}}={{os.environ.get(name)}}" for name in names), file=log)
    if (failing := os.environ.get("FAILING")) and failing in line:
        print("much goes well")
        print("words of the error")
        sys.exit(3)
    if (sleeping := os.environ.get("SLEEPING")) and sleeping in line:
        time.sleep(600)
    if "setup.py" in line:
        open("accumext/backend/_C_cuda.abi3.so", "w").close()
"""

# All options that it is given have values.
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
"""


class Run:
    """A run of the script in a process group of its own."""

    def __init__(self, folder: Path, *parts: str, **variables: str) -> None:
        self._results = folder / "results"
        self._log = folder / "log"
        programs = folder / "programs"
        programs.mkdir()
        interpreter = programs / "interpreter"
        interpreter.write_text(INTERPRETER.format(python=sys.executable))
        sanitizer = programs / "compute-sanitizer"
        sanitizer.write_text(
            '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"\n'
        )
        for program in (interpreter, sanitizer):
            program.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if k != "MAX_JOBS"}
        environment |= {
            "PYTHON": str(interpreter),
            "LOG": str(self._log),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "tests" / "gpu.sh"), str(self._results), *parts],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def report(self) -> dict[str, Any]:
        path = self._results / "fake-gpu_checks.json"
        return json.loads(path.read_text()) if path.exists() else {"parts": []}

    def results(self) -> dict[str, str]:
        return {part["name"]: part["result"] for part in self.report()["parts"]}

    def log(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.mark.process
def test_parts_run_in_the_order_of_their_worth(tmp_path: Path) -> None:
    run = Run(tmp_path)
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 0, output
    assert run.results() == dict.fromkeys(PARTS + SANITIZERS, "passed")
    assert run.report()["machine"] == "Fake GPU, torch 2.11.0, Python 3.12.3"
    first = run.log()[0]
    assert first.startswith("setup.py")
    cores = len(os.sched_getaffinity(0))
    assert f"MAX_JOBS={cores} ACCUMEXT_BUILD=require ACCUMEXT_CUDA=1" in first
    assert all(line.endswith("=native") for line in run.log())
    assert "decode_loss passed" in output


@pytest.mark.process
def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, FAILING="bench/decoder.py")
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 1, output
    expected = dict.fromkeys(PARTS + SANITIZERS, "passed") | {"decoder": "failed"}
    assert run.results() == expected
    (row,) = [part for part in run.report()["parts"] if part["name"] == "decoder"]
    assert row["reason"] == "words of the error"


@pytest.mark.process
def test_what_does_not_build_is_compiled_on_first_use(tmp_path: Path) -> None:
    run = Run(tmp_path, "operators", FAILING="setup.py")
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    assert run.process.returncode == 1, output
    assert run.results() == {"build": "failed", "operators": "passed"}
    assert run.log()[-1].endswith("ACCUMEXT_BACKEND=jit")


@pytest.mark.process
def test_a_run_that_is_killed_leaves_what_it_has_found(tmp_path: Path) -> None:
    run = Run(tmp_path, SLEEPING="bench/accumulate.py")
    end = time.monotonic() + PATIENCE_S
    before = PARTS[: PARTS.index("benchmark")]
    while list(run.results()) != before and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate(timeout=PATIENCE_S)
    assert run.results() == dict.fromkeys(before, "passed")


def check(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """What gpu_checks.py says on the CPU."""
    path = folder / "checks.json"
    done = run_script("tests/cuda/gpu_checks.py", *arguments, "--device=cpu", f"--json={path}")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(path.read_text())


@pytest.mark.process
def test_every_operator_of_the_gpu_is_checked(tmp_path: Path) -> None:
    status, report = check(tmp_path, "operators")
    assert [row["name"] for row in report["rows"]] == _build.registered_ops("cuda")
    assert all(row["passed"] for row in report["rows"])
    assert status == 0
    assert report["backend"] == accumext.backend()


@pytest.mark.process
def test_the_decoder_is_checked_and_timed(tmp_path: Path) -> None:
    status, report = check(tmp_path, "decoder", "--quick")
    assert all(row["passed"] for row in report["rows"]), report["rows"]
    assert status == 0
    names = {row["name"] for row in report["rows"]}
    assert {
        f"{c}, {d}" for c in ("gru", "lstm") for d in ("float64", "float32", "bfloat16")
    } < names
    timed = [row for row in report["rows"] if row["name"].startswith("time, ")]
    assert len(timed) == 3
    assert all(row["times faster"] > 0.0 for row in timed)


def test_what_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_checks

    broken = gpu_checks.OPERATORS["scale_"]._replace(reference=lambda tensors, factor: None)
    monkeypatch.setitem(gpu_checks.OPERATORS, "scale_", broken)
    arguments = ["gpu_checks.py", "operators", "--device=cpu", f"--json={tmp_path / 'checks.json'}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_checks.main() == 1
    rows = json.loads((tmp_path / "checks.json").read_text())["rows"]
    assert [row["name"] for row in rows if not row["passed"]] == ["scale_"]

    def off(decoder: Any) -> Any:
        outcome = plain(decoder)
        for gradient in decoder.gradients():
            gradient *= 1.01
        return outcome

    plain = gpu_checks.plain
    monkeypatch.setattr(gpu_checks, "ours", off)
    decoder = gpu_checks.Decoder(gpu_checks.QUICK, "gru", torch.device("cpu"))
    with pytest.raises(AssertionError, match="the gradient is off by"):
        gpu_checks.check_decoder(decoder, torch.float32)
