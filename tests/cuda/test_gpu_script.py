"""gpu.sh without a GPU: an interpreter that answers for the programs that the script calls.

The tests are that no result is lost. The checks of gpu_checks.py run for real, on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
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

FIRST = ["operators", "decode_loss", "decoder", "benchmark"]
SECOND = ["memcheck", "racecheck", "tests", "beyond", "masters", "loops", "windows", "doctor"]
SECONDS = 540  # of a call: nine minutes
PATIENCE_S = 60.0  # for a part that takes a second

# The programs, by their command line: all write their results where --json says and leave a line in
# the log; then those in FAILING end with status 3 after words, and those in SLEEPING do not end.
# Only libraries that are there load, and not those in BROKEN.
INTERPRETER = """#!{python}
import os, pathlib, sys, time
line = " ".join(sys.argv[1:])
if line == "-":
    print("fake-gpu")
    print("Fake GPU, torch 2.11.0, Python 3.12.3")
    sys.exit()
with open(os.environ["LOG"], "a") as log:
    tested = '"cuda", tested=True' in open("accumext/backend/_libraries.py").read()
    backend = "ACCUMEXT_BACKEND=" + os.environ["ACCUMEXT_BACKEND"]
    print(line, f"{{tested=}}", os.getpid(), backend, file=log)
if "--json" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(line)
print("much goes well")
if line.startswith("-c import accumext") and os.environ["ACCUMEXT_BACKEND"] == "native":
    print("in use:", *sorted(os.listdir("accumext/backend")))
    sys.exit("BROKEN" in os.environ or not os.path.exists("accumext/backend/_C_cuda.abi3.so"))
if (failing := os.environ.get("FAILING")) and failing in line:
    print("words of the error")
    sys.exit(3)
if (sleeping := os.environ.get("SLEEPING")) and sleeping in line:
    time.sleep(600)
"""

# All options that it is given have values.
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
"""
LIBRARIES = ("_C_cpu.abi3.so", "_C_cuda.abi3.so", "_build_info.json")


class Run:
    """A run of the script, in a checkout of its own and in a process group of its own."""

    def __init__(self, folder: Path, *what: str, **variables: str) -> None:
        self._results, self._log = folder / "results", folder / "log"
        programs, tests = folder / "programs", folder / "checkout/tests"
        backend = folder / "checkout/accumext/backend"
        for path in (programs, tests, backend, folder / "checkout/csrc", folder / "checkout/bench"):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "tests/gpu.sh", tests)
        shutil.copy(ROOT / "accumext/backend/_libraries.py", backend)
        for name, text in (
            ("interpreter", INTERPRETER.format(python=sys.executable)),
            ("compute-sanitizer", SANITIZER),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in LIBRARIES if "PREBUILT" not in variables else ["_C_cuda.other.so"]:
            (backend / name).touch()
        environment = {
            "PYTHON": str(programs / "interpreter"),
            "LOG": str(self._log),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(folder),
        }
        self.process = subprocess.Popen(
            ["bash", str(tests / "gpu.sh"), str(self._results), *what],
            env=os.environ | environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> str:
        """Wait for the script's end, and return its output."""
        return self.process.communicate(timeout=PATIENCE_S)[0]

    def pid_of(self, name: str) -> int:
        """Return the id of a program's process, as soon as it runs."""
        wait_until(lambda: self._log.exists() and name in self._log.read_text())
        return int(self.programs()[-1].split()[-2])

    def results(self) -> dict[str, str]:
        """The files of the only archive, by name; the texts in them."""
        (path,) = self._results.iterdir()
        with tarfile.open(path) as archive:
            return {
                member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                for member in archive
            }

    def log(self) -> str:
        (log,) = (text for name, text in self.results().items() if name.endswith(".log"))
        return log

    def parts(self) -> dict[str, str]:
        """Return how each part that has ended did, in their order."""
        ended = re.findall(r"^=== (\w+) +\d+ s  (.*)$", self.log(), flags=re.MULTILINE)
        return dict(ended)

    def programs(self) -> list[str]:
        """The command lines."""
        return self._log.read_text().splitlines()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.process
@pytest.mark.parametrize(("what", "parts"), [("first", FIRST), ("second", SECOND)])
def test_a_call_takes_nine_minutes_at_most(what: str, parts: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, what)
    output = run.finish()
    assert run.process.returncode == 0, output
    assert list(run.parts().items()) == [(name, "passed") for name in ["libraries", *parts]]
    limits = re.findall(r"=== \w+, at most (\d+) s", run.log())
    assert len(limits) == 1 + len(parts)
    assert sum(map(int, limits)) < SECONDS
    assert run.log().startswith("Fake GPU, torch 2.11.0, Python 3.12.3\n")
    assert [path.name for path in tmp_path.glob("results/*")] == [f"fake-gpu_{what}.tar.gz"]
    for line in run.programs():
        assert f"tested={'doctor' in line}" in line  # others show what fails the self-test
        assert line.endswith("=native")
    assert not list(tmp_path.glob("accumext-gpu*"))


@pytest.mark.process
def test_all_parts_have_files_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    output = run.finish()
    assert list(run.parts()) == ["libraries", *FIRST, *SECOND], output
    found = run.results()
    log = found.pop("fake-gpu_all.log")
    assert all(name.startswith("fake-gpu") and name.endswith(".json") for name in found)
    assert len(found) == 8
    for line in found.values():  # each part has written its own
        assert line.split(" --json")[0] in "".join(run.programs())
    assert log.count("much goes well") == len(run.programs()) == 1 + len(FIRST) + len(SECOND)


@pytest.mark.process
def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, "first", FAILING="gpu_checks.py decoder")
    output = run.finish()
    assert run.process.returncode == 1, output
    passed = dict.fromkeys(["libraries", *FIRST], "passed")
    assert run.parts() == passed | {"decode_loss": "failed: words of the error"}
    assert "failed: words of the error" in output


@pytest.mark.process
def test_a_run_that_is_killed_leaves_what_its_parts_have_found(tmp_path: Path) -> None:
    run = Run(tmp_path, "first", SLEEPING="bench/decoder.py")
    run.pid_of("bench/decoder.py")
    os.killpg(run.process.pid, signal.SIGKILL)
    run.finish()
    assert run.parts() == dict.fromkeys(["libraries", "operators", "decode_loss"], "passed")
    assert {"fake-gpu_operators.json", "fake-gpu_decode_loss.json"} < set(run.results())


@pytest.mark.process
def test_a_run_that_is_ended_leaves_what_its_part_has_found(tmp_path: Path) -> None:
    run = Run(tmp_path, "decoder", SLEEPING="bench/decoder.py")
    pid = run.pid_of("bench/decoder.py")
    run.process.terminate()
    run.finish()
    assert run.process.returncode == 128 + signal.SIGTERM
    assert run.parts() == {"libraries": "passed"}
    assert "fake-gpu_decoder.json" in run.results()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not list(tmp_path.glob("accumext-gpu*"))


@pytest.mark.process
def test_prebuilt_libraries_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for name in LIBRARIES:
        (folder / name).touch()
    run = Run(tmp_path, "doctor", PREBUILT=str(folder))
    output = run.finish()
    assert run.parts() == {"libraries": "passed", "doctor": "passed"}, output
    assert "in use: " + " ".join(sorted([*LIBRARIES, "_libraries.py"])) in run.log()


@pytest.mark.process
def test_where_no_library_loads_it_is_compiled_on_first_use(tmp_path: Path) -> None:
    run = Run(tmp_path, "operators", BROKEN="1")
    output = run.finish()
    assert run.process.returncode == 1, output
    assert list(run.parts()) == ["libraries", "compile", "operators"]
    assert run.parts()["operators"] == "passed"
    assert [line.endswith("=jit") for line in run.programs()] == [False, True, True]


@pytest.mark.process
def test_tests_are_those_that_need_a_gpu(tmp_path: Path) -> None:
    run = Run(tmp_path, "tests")
    run.finish()
    (line,) = (line for line in run.programs() if "pytest" in line)
    named = set(re.findall(r"\S+\.py", line))
    need_one = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/**/test_*.py")
        if "skipif(not torch.cuda.is_available()" in path.read_text() and path != Path(__file__)
    }
    assert named == need_one


def check(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the status and report of gpu_checks.py on the CPU."""
    path = folder / "checks.json"
    done = run_script("tests/cuda/gpu_checks.py", *arguments, "--device=cpu", f"--json={path}")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(path.read_text())


@pytest.mark.process
def test_every_operator_of_the_gpu_is_checked(tmp_path: Path) -> None:
    status, report = check(tmp_path, "operators")
    expected = [*_build.registered_ops("cuda"), *gpu_checks.PRODUCTS]
    assert [row["name"] for row in report["rows"]] == expected
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
    calls = {name.rsplit(": ", 1)[0] for name in rows}
    for mode in gpu_decoder_cases.MODES:
        assert {mode, f"{mode}, eos", f"{mode}, lengths", f"captured, {mode}"} < calls
    assert {"memory, greedy", "memory, teacher"} < calls
    assert {f"greedy, B={batch}" for batch in (1, 63, 64, 65)} < calls
    dropped = [row for name, row in rows.items() if "dropout" in name]
    assert len(dropped) == 2 * 5 * len(gpu_decoder_cases.TWO_PRECISIONS)
    assert all(row["same bits again"] for row in rows.values() if "same bits again" in row)


def test_the_decoder_is_checked_in_the_order_of_worth() -> None:
    rows = [name for name, _ in gpu_decoder.checks(torch.device("cpu"), quick=False)]
    precisions: dict[str, list[str]] = {}
    for row in rows:
        precisions.setdefault(row.rsplit(": ", 1)[0], []).append(row.rsplit(": ", 1)[1])
    names = list(precisions)
    first = [
        "greedy, V=50257, H=1024, B=32",
        "captured, greedy",
        "memory, greedy",
        "greedy, B=1",
        "greedy, all logits below 0, B=33",
        "greedy, label smoothing",
    ]
    assert sorted(first, key=names.index) == first
    assert names[0] == first[0]
    for name in first[:-1]:
        assert precisions[name] == list(gpu_decoder_cases.PRECISIONS)
    assert precisions[first[-1]] == ["float64", "bf16 autocast"]
    assert len(rows) < 400  # of 0.2 s each on a GPU


@pytest.mark.parametrize("precision", gpu_decoder_cases.PRECISIONS)
def test_all_logits_are_below_0_where_rows_say_so(precision: str) -> None:
    cases = {name: case for name, case in gpu_decoder_cases.modes() if "below 0" in name}
    assert [case.batch for case in cases.values()] == [16, 33, 64]
    for case in cases.values():
        check = gpu_decoder.Check(
            case, gpu_decoder_cases.PRECISIONS[precision], torch.device("cpu")
        )
        found = check.run(contextlib.nullcontext())
        assert check.plain(found, torch.float64).logits.max() < -40


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
    assert gpu_masters.check(*arguments)["of the error allowed"] <= 1.0
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
