"""gpu.sh without a GPU: an interpreter that answers for the programs that the script calls.

What is tested is that no result is lost. The checks of gpu_checks.py run for real, on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_beyond
import gpu_checks
import gpu_decoder
import gpu_decoder_cases
import gpu_masters
import gpu_rows
import pytest
import torch
from support import ROOT
from support.programs import run_script

import accumext
from accumext.backend import _build

PARTS = [
    "build",
    "operators",
    "decode_loss",
    "beyond",
    "masters",
    "decoder",
    "benchmark",
    "loops",
    "doctor",
    "tests",
]
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
    if line.startswith("-c import accumext"):
        print("in use:", *sorted(os.listdir("accumext/backend")))
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
        sanitizer.write_text(SANITIZER)
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
    assert list(run.results().items()) == [(name, "passed") for name in PARTS + SANITIZERS]
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
    assert run.results() == {"build": "failed", "compile": "passed", "operators": "passed"}
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


@pytest.mark.process
def test_prebuilt_libraries_are_used_instead_of_a_build(tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    names = ["_C_cpu.abi3.so", "_C_cuda.abi3.so", "_build_info.json"]
    for name in names:
        (folder / name).touch()
    run = Run(tmp_path, "doctor", PREBUILT=str(folder))
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    assert run.results() == {"build": "passed", "doctor": "passed"}, output
    assert not any(line.startswith("setup.py") for line in run.log())
    (here,) = {line for line in output.splitlines() if line.startswith("in use:")}
    assert set(names) < set(here.split())


@pytest.mark.process
def test_prebuilt_libraries_that_do_not_load_are_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for name in ("_C_cpu.abi3.so", "_C_cuda.other.so", "_build_info.json"):
        (folder / name).touch()
    run = Run(tmp_path, "operators", PREBUILT=str(folder), FAILING="-c import accumext")
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    assert run.results() == {"build": "passed", "operators": "passed"}, output
    assert f"the libraries in {folder} cannot be used; compiling" in output
    assert any(line.startswith("setup.py") for line in run.log())
    assert "_C_cuda.other.so" not in output


@pytest.mark.process
def test_the_log_has_what_the_parts_print(tmp_path: Path) -> None:
    run = Run(tmp_path, "operators", FAILING="operators")
    output, _ = run.process.communicate(timeout=PATIENCE_S)
    log = (tmp_path / "results" / "fake-gpu.log").read_text()
    for words in ("=== operators, at most", "much goes well", "words of the error"):
        assert words in log
        assert words in output


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
def test_the_decoder_is_checked(tmp_path: Path) -> None:
    status, report = check(tmp_path, "decoder", "--quick")
    rows = {row["name"]: row for row in report["rows"]}
    assert all(row["passed"] for row in rows.values()), [
        r for r in rows.values() if not r["passed"]
    ]
    assert status == 0
    assert len(rows) == len(report["rows"])
    kinds = {tuple(name.rsplit(": ", 1)) for name in rows}
    calls = {call for call, _ in kinds}
    assert kinds == {(call, name) for call in calls for name in gpu_decoder_cases.PRECISIONS}
    for mode in gpu_decoder_cases.MODES:
        assert {mode, f"{mode}, eos", f"{mode}, lengths", f"captured, {mode}"} < calls
    assert {"memory, greedy", "memory, teacher"} < calls
    assert {f"greedy, B={batch}" for batch in (1, 63, 64, 65)} < calls
    dropped = [row for name, row in rows.items() if "dropout" in name]
    assert len(dropped) == 2 * 5 * 5
    assert all(row["same bits again"] for row in rows.values() if "same bits again" in row)


@pytest.mark.process
def test_what_else_a_decoder_does_is_checked(tmp_path: Path) -> None:
    status, report = check(tmp_path, "beyond", "--quick")
    rows = report["rows"]
    assert [row["name"] for row in rows if not row["passed"]] == []
    assert status == 0
    calls = len(gpu_beyond.CALLS) + len(gpu_beyond.OWN) + len(gpu_beyond.GENERATED)
    assert len({row["name"] for row in rows}) == len(rows) == calls
    assert max(row["off by"] for row in rows) > 1e-9  # in another precision


@pytest.mark.process
def test_masters_are_checked(tmp_path: Path) -> None:
    status, report = check(tmp_path, "masters", "--quick")
    rows = report["rows"]
    assert [row["name"] for row in rows if not row["passed"]] == []
    assert status == 0
    assert len({row["name"] for row in rows}) == len(rows) == 2**4 + 2
    assert {row["clip_coef"] < 1 for row in rows if "clip_coef" in row} == {True}


# --- rows that fail -------------------------------------------------------------------------------


def double(device: torch.device) -> gpu_decoder.Check:
    case = gpu_decoder_cases.Case(
        {"feedback": "greedy", "eos": "seen"}, "lstm", layers=2, dropout=0.3
    )
    return gpu_decoder.Check(case, gpu_decoder_cases.PRECISIONS["float64"], device)


def off(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Runs find something else."""
    run = gpu_decoder.Check.run
    monkeypatch.setattr(gpu_decoder.Check, "run", lambda *args, **how: change(run(*args, **how)))


@pytest.mark.parametrize("index", range(-2, 2))
def test_a_wrong_gradient_is_seen(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = double(torch.device("cpu"))
    assert checked()["others off by"] < 1e-12

    def change(found: Any) -> Any:
        found.gradients[index] *= 1 + 1e-6
        return found

    off(monkeypatch, change)
    with pytest.raises(AssertionError, match=r"of the (head|others)"):
        checked()


def test_a_wrong_loss_or_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = double(torch.device("cpu"))
    with monkeypatch.context() as patch:
        off(patch, lambda found: found._replace(loss=found.loss * (1 + 1e-6)))
        with pytest.raises(AssertionError, match="of the loss"):
            checked()
    for name, change, words in (
        ("tokens", lambda tokens: tokens.index_fill(0, torch.tensor([9]), 1), "below the argmax"),
        ("tokens", lambda tokens: (tokens + 1) % 211, "lengths|an input is not"),
        ("inputs", lambda inputs: inputs + 1, "input"),
        ("lengths", lambda lengths: lengths - 1, "lengths"),
    ):

        def changed(found: Any, name: str = name, change: Any = change) -> Any:
            return found._replace(
                out=found.out._replace(**{name: change(getattr(found.out, name))})
            )

        with monkeypatch.context() as patch:
            off(patch, changed)
            with pytest.raises(AssertionError, match=words):
                checked()


def test_dropout_that_does_not_drop_is_seen() -> None:
    checked = double(torch.device("cpu"))
    checked.model.cell.eval()
    with pytest.raises(AssertionError, match="dropout keeps 0%"):
        checked()


@pytest.mark.parametrize(
    ("check", "name", "changed"),
    [
        (gpu_beyond.check_call, "rollout", "rollout"),
        (gpu_beyond.check_own_tokens, "own tokens, gru, greedy", "decode_loss"),
        (gpu_beyond.check_generate, "generate, beams, gru, eos", "generate"),
    ],
)
def test_what_is_wrong_beyond_is_seen(
    check: Any, name: str, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = name, torch.float32, torch.device("cpu")
    assert check(*arguments)["off by"] < 1e-5
    function, calls = getattr(accumext, changed), []

    def once_off(*args: Any, **how: Any) -> Any:
        out = function(*args, **how)
        calls.append(out)
        if len(calls) > 1:
            return out
        field = "log_probs" if changed == "generate" else "loss"
        return out._replace(**{field: 1.001 * getattr(out, field)})

    monkeypatch.setattr(accumext, changed, once_off)
    with pytest.raises(AssertionError, match="off by"):
        check(*arguments)


@pytest.mark.parametrize("wrong", ["masters", "parameters"])
def test_wrong_masters_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = None, True, False, False, torch.bfloat16, torch.device("cpu")
    assert gpu_masters.check(*arguments)["off by"] <= gpu_masters.ALLOWED
    round_, calls = accumext.ops.copy_rounded_, []

    def off(targets: Any, sources: Any, **how: Any) -> None:
        calls.append(round_(targets, sources, **how))
        if len(calls) == gpu_masters.WINDOWS:
            written = sources if wrong == "masters" else targets
            written[0][5, 7] += 1e-2

    monkeypatch.setattr(accumext.ops, "copy_rounded_", off)
    with pytest.raises(AssertionError):
        gpu_masters.check(*arguments)


def test_a_wait_for_the_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waiting() -> None:
        with gpu_decoder.no_waits(torch.device("cuda")):
            raise ValueError(modes[-1])

    with pytest.raises(ValueError, match="error"):
        waiting()
    assert modes == ["error", "default"]


def test_a_captured_step_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpu_decoder_cases.Case({"feedback": "sample"})
    arguments = case, gpu_decoder_cases.PRECISIONS["float32"], torch.device("cpu")
    assert gpu_decoder.check_captured(*arguments) == {"off by": 0.0, "same bits": True}

    def stale(step: Any, *args: Any, **how: Any) -> Any:
        loss = step()
        return lambda: loss

    monkeypatch.setattr(gpu_decoder, "record", stale)
    with pytest.raises(AssertionError, match="after 3 steps"):
        gpu_decoder.check_captured(*arguments)


def test_a_peak_that_was_not_predicted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, case), *_) = gpu_decoder_cases.remembered()
    arguments = case, gpu_decoder_cases.PRECISIONS["float32"], torch.device("cpu")
    assert 0.9 < gpu_decoder.check_memory(*arguments)["over predicted"] < 1.1
    predicted = accumext.decode_memory
    monkeypatch.setattr(accumext, "decode_memory", lambda *a, **how: predicted(*a, **how) * 4 // 5)
    with pytest.raises(AssertionError, match="were predicted"):
        gpu_decoder.check_memory(*arguments)


def test_a_step_is_recorded_after_another_has_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: events.append("wait"))

    class Graph:
        def register_generator_state(self, generator: torch.Generator) -> None:
            events.append("register")

        def replay(self) -> None:
            events.append("replay")

    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": lambda graph: contextlib.nullcontext(events.append("capture")),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    loss = torch.ones(())

    def step() -> torch.Tensor:
        events.append("step")
        return loss

    replay = gpu_decoder.record(
        step, torch.Generator(), lambda: events.append("warm up"), torch.device("cuda")
    )
    assert replay() is loss
    wanted = ["wait", "warm up", "wait", "register", "capture", "step", "replay"]
    assert events == wanted


def faulty(device: torch.device, quick: bool) -> gpu_rows.Checks:
    """The second check ends its process, the fourth never ends."""
    yield "fails", lambda: 1 / 0
    yield "dies", lambda: os._exit(7)
    yield "passes", lambda: {"fact": 1}
    yield "hangs", lambda: time.sleep(600)
    yield "passes, too", lambda: {"fact": 2}


def unusable(device: torch.device, quick: bool) -> gpu_rows.Checks:
    os._exit(9)
    yield


@pytest.mark.process
def test_a_process_that_dies_or_hangs_costs_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert not gpu_rows.collect(faulty, "cpu", True, path, patience=5.0)
    report = json.loads(path.read_text())
    assert report["backend"] == accumext.backend()
    assert [(row["name"], row["passed"], row.get("error")) for row in report["rows"]] == [
        ("fails", False, "ZeroDivisionError: division by zero"),
        ("dies", False, "the process ended with status 7"),
        ("passes", True, None),
        ("hangs", False, "no answer within 5 s"),
        ("passes, too", True, None),
    ]
    assert not gpu_rows.collect(unusable, "cpu", True, path, patience=5.0)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["name"], row["error"]) == ("start", "the process ended with status 9")


def test_after_a_crash_of_the_gpu_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashed() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    assert not gpu_rows._is_lost("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not gpu_rows._is_lost("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", crashed)
    assert gpu_rows._is_lost("cuda")


def test_a_wrong_operator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = gpu_checks.OPERATORS["scale_"]._replace(reference=lambda tensors, factor: None)
    monkeypatch.setitem(gpu_checks.OPERATORS, "scale_", broken)
    checks = gpu_checks.operators(torch.device("cpu"), quick=True)
    rows = [gpu_rows.examine(name, check) for name, check in checks]
    assert [row["name"] for row in rows if not row["passed"]] == ["scale_"]
