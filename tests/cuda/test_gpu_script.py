"""gpu.sh without a GPU, by an interpreter that answers for the programs that the script calls: no
result may be lost. And the checks of gpu_checks.py, which run for real, on the CPU."""

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
from typing import Any

import gpu_checks
import gpu_decoder
import gpu_decoder_cases as cases
import gpu_rows
import pytest
import torch
from support import ROOT
from support.programs import run_script

import accumext
from accumext.backends import _build

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
    tested = '"cuda", tested=True' in open("accumext/backends/_libraries.py").read()
    backend = "ACCUMEXT_BACKEND=" + os.environ["ACCUMEXT_BACKEND"]
    print(line, f"{{tested=}}", os.getpid(), backend, file=log)
if "--json" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(line)
print("much goes well")
if line.startswith("-c import accumext") and os.environ["ACCUMEXT_BACKEND"] == "native":
    print("in use:", *sorted(os.listdir("accumext/backends")))
    sys.exit("BROKEN" in os.environ or not os.path.exists("accumext/backends/_C_cuda.abi3.so"))
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
        backend = folder / "checkout/accumext/backends"
        for path in (programs, tests, backend, folder / "checkout/csrc", folder / "checkout/bench"):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "tests/gpu.sh", tests)
        shutil.copy(ROOT / "accumext/backends/_libraries.py", backend)
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
def test_each_part_leaves_its_results_and_a_call_takes_nine_minutes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    output = run.finish()
    assert run.process.returncode == 0, output
    assert list(run.parts().items()) == [
        (name, "passed") for name in ["libraries", *FIRST, *SECOND]
    ]
    limits = dict(re.findall(r"=== (\w+), at most (\d+) s", run.log()))
    for parts in (FIRST, SECOND):
        assert sum(int(limits[name]) for name in ["libraries", *parts]) < SECONDS
    assert run.log().startswith("Fake GPU, torch 2.11.0, Python 3.12.3\n")
    assert [path.name for path in tmp_path.glob("results/*")] == ["fake-gpu_all.tar.gz"]
    for line in run.programs():
        assert f"tested={'doctor' in line}" in line  # others show what fails the self-test
        assert line.endswith("=native")
    assert not list(tmp_path.glob("accumext-gpu*"))
    found = run.results()
    log = found.pop("fake-gpu_all.log")
    assert all(name.startswith("fake-gpu") and name.endswith(".json") for name in found)
    assert len(found) == 8
    for line in found.values():  # each part has written its own
        assert line.split(" --json")[0] in "".join(run.programs())
    assert log.count("much goes well") == len(run.programs()) == 1 + len(FIRST) + len(SECOND)
    (line,) = (line for line in run.programs() if "-m pytest" in line)
    need_a_gpu = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/**/test_*.py")
        if "skipif(not torch.cuda.is_available()" in path.read_text() and path != Path(__file__)
    }
    assert set(re.findall(r"\S+\.py", line)) == need_a_gpu


@pytest.mark.process
def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, "first", FAILING="gpu_checks.py decoder")
    output = run.finish()
    assert run.process.returncode == 1, output
    passed = dict.fromkeys(["libraries", *FIRST], "passed")
    assert run.parts() == passed | {"decode_loss": "failed: words of the error"}
    assert "failed: words of the error" in output


@pytest.mark.process
def test_a_run_that_is_killed_or_ended_leaves_what_its_parts_have_found(tmp_path: Path) -> None:
    killed = Run(tmp_path / "killed", "second", SLEEPING="bench/loops.py")
    killed.pid_of("bench/loops.py")
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.finish()
    assert killed.parts() == dict.fromkeys(["libraries", *SECOND[:5]], "passed")
    assert {"fake-gpu_beyond.json", "fake-gpu_masters.json"} < set(killed.results())
    ended = Run(tmp_path / "ended", "decoder", SLEEPING="bench/decoder.py")
    pid = ended.pid_of("bench/decoder.py")
    ended.process.terminate()
    ended.finish()
    assert ended.process.returncode == 128 + signal.SIGTERM
    assert ended.parts() == {"libraries": "passed"}
    assert "fake-gpu_decoder.json" in ended.results()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not list(tmp_path.glob("ended/accumext-gpu*"))


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


# --- the checks -----------------------------------------------------------------------------------

CPU = torch.device("cpu")
ROWS = {  # of each part some of the names, up to the precision
    "operators": {
        *_build.registered_ops("cuda"),
        *gpu_checks.PRODUCTS,
        "rnn_backward lstm wide B=33",
    },
    "decoder": {f"{prefix}{mode}" for prefix in ("", "captured, ") for mode in cases.MODES}
    | {"memory, greedy", "memory, teacher", "greedy, B=1", "greedy, B=63", "greedy, B=65"},
    "beyond": {
        f"{name}, {kind}" for name in (*cases.BESIDE, *cases.SEARCHES) for kind in cases.DECODERS
    }
    | {"own tokens, sample, gru", *cases.ROLLOUTS},
    "masters": {"masters, fused, nearest, in backward"},
}


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.process) for part in gpu_checks.PARTS]
)
def test_checks_pass_and_are_those_of_all_that_there_is(part: str) -> None:
    rows = [gpu_rows.examine(*row) for row in gpu_checks.PARTS[part](CPU, quick=True)]
    assert [row for row in rows if not row["passed"]] == []
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert ROWS[part] <= {re.split(r": |, b?float16", name)[0] for name in names}


def gradient(index: int) -> Callable[[Any], Any]:
    def change(found: Any) -> Any:
        found.gradients[index] *= 1 + 1e-6
        return found

    return change


def out(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda found: found._replace(
        out=found.out._replace(**{name: change(getattr(found.out, name))})
    )


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {  # what a run finds -> words of its check
    "a gradient": (gradient(0), "of the others"),
    "a gradient of the head": (gradient(-2), "of the (head|others)"),
    "the loss": (lambda f: f._replace(loss=f.loss * (1 + 1e-6)), "of the loss"),
    "a token": (out("tokens", lambda t: t.index_fill(0, torch.tensor([9]), 1)), "below the argmax"),
    "all tokens": (out("tokens", lambda t: (t + 1) % 211), "lengths|an input is not"),
    "inputs": (out("inputs", lambda t: t + 1), "input"),
    "lengths": (out("lengths", lambda t: t - 1), "lengths"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = WRONG[wrong]
    case = cases.Case({"feedback": "greedy", "eos": "seen"}, "lstm", layers=2)
    check = gpu_decoder.Check(case, cases.PRECISIONS["float64"], CPU)
    run = check.run
    monkeypatch.setattr(check, "run", lambda *args, **how: change(run(*args, **how)))
    with pytest.raises(AssertionError, match=words):
        check()


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


@pytest.mark.process
def test_the_program_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "checks.json"
    done = run_script("tests/cuda/gpu_checks.py", "operators", "--device=cpu", f"--json={path}")
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert {row["name"] for row in report["rows"]} > ROWS["operators"]
    assert report["backend"] == accumext.backend()
