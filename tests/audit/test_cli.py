"""`python -m accumext audit script.py`: what the script sees, what comes out, what is put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT

from accumext.__main__ import main
from accumext.audit import _observe

TRAIN = """
import random, sys, time
import torch
from torch import nn
{begin}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    for _ in range(2):
        x = {x}
        loss = nn.functional.mse_loss(model(x), torch.zeros(8, 2))
        (loss / {divisor}).backward()
    optimizer.step()
    print("after step", step)
{end}
"""

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a training script, right if nothing else is said, of six steps."""

    def write(
        begin: str = "torch.manual_seed(0)",
        x: str = "torch.randn(8, 4)",
        divisor: int = 2,
        steps: int = 6,
        end: str = "",
    ) -> Path:
        text = TRAIN.format(begin=begin, x=x, divisor=divisor, steps=steps, end=end)
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def audit(*arguments: object) -> int:
    return main(["audit", *map(str, arguments)])


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """What the command changes is as it was, however the script ends."""

    def state() -> list[object]:
        seen = [(owner, name) for owner, name, _ in _observe.Observer._patches(unused)]
        values = [vars(owner)[name] for owner, name in seen]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return [*values, hooks, sys.argv, [*sys.argv], [*sys.path], sys.modules["__main__"]]

    unused = _observe.Observer(None, None, 1)
    before = state()
    yield
    after = state()
    assert len(before) == len(after) > 15
    assert all(a is b or (type(a) is list and a == b) for a, b in zip(before, after, strict=True))


# --- exit codes, and output -----------------------------------------------------------------------


def test_a_right_script(script: Script, capsys: pytest.CaptureFixture[str]):
    assert audit(script()) == 0
    out, err = capsys.readouterr()
    assert "accumext audit: no findings in 4 windows of 8 backward passes" in out.split("\n")
    assert not err


def test_a_wrong_script(script: Script, capsys: pytest.CaptureFixture[str]):
    path = script(divisor=1)
    line = 1 + path.read_text().split("\n").index("        (loss / 1).backward()")
    assert audit(path) == 1
    out = capsys.readouterr().out
    assert f"1. divisor missing  (train.py:{line})" in out
    assert out.count("accumext audit:") == 1


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_it_stops_after_so_many_windows(
    windows: int, script: Script, capsys: pytest.CaptureFixture[str]
):
    assert audit("--windows", windows, script()) == 0
    out = capsys.readouterr().out
    assert out.count("after step") == windows - 1
    assert f"in {windows} window" in out


def test_it_stops_through_what_the_script_catches(
    tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
):
    body = textwrap.indent(script().read_text(), "    ")
    ends = "except Exception:\n    print('caught')\nfinally:\n    print('cleaned up')\n"
    path = tmp_path / "catches.py"
    path.write_text(f"try:\n{body}\n{ends}")
    assert audit("--windows=2", path) == 0
    out = capsys.readouterr().out
    assert "caught" not in out
    assert out.index("cleaned up") < out.index("no findings in 2 windows")


def test_a_script_without_a_step(script: Script, capsys: pytest.CaptureFixture[str]):
    assert audit(script(steps=0)) == 2
    words = "accumext audit: the script ended before a step of an optimizer\n"
    assert capsys.readouterr() == ("", words)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_script_that_is_done_sooner(
    steps: int, script: Script, capsys: pytest.CaptureFixture[str]
):
    assert audit(script(steps=steps, end="print('at the end')")) == 0
    out = capsys.readouterr().out
    assert out.index("at the end") < out.index(f"no findings in {steps} window")


REFUSED = {
    "missing.py": "no such file: missing.py",
    ".": "no such file: .",
    "--windows=0 train.py": "--windows must be at least 1, got 0",
    "--windows -2 train.py": "--windows must be at least 1, got -2",
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_arguments(
    line: str, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(script().parent)
    assert audit(*line.split()) == 2
    assert capsys.readouterr() == ("", f"accumext audit: {REFUSED[line]}\n")


@pytest.mark.parametrize("arguments", [[], ["--windows=x", "train.py"], ["--unknown", "train.py"]])
def test_arguments_that_argparse_refuses(arguments: list[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        audit(*arguments)


# --- what a script sees ---------------------------------------------------------------------------

SEES = """
import json, sys
import beside
from pathlib import Path
class Here:
    known: int
seen = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].Here is Here, "beside": beside.NAME,
    "annotation": str(Here.__annotations__["known"]), "doc": __doc__,
}
Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
sys.argv.append("more")
sys.path.insert(0, "elsewhere")
"""


@pytest.fixture
def sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script that writes down what it sees, beside a module that it imports."""
    (tmp_path / "beside.py").write_text("NAME = __name__")
    (tmp_path / "sees.py").write_text(SEES)
    monkeypatch.chdir(tmp_path.parent)
    yield tmp_path / "sees.py"
    sys.modules.pop("beside", None)


def told(sees: Path) -> dict:
    return json.loads(sees.with_name("seen.json").read_text())


ARGUMENTS = [[], ["a", "--b=1", "-c", "--windows", "7", "--json", "x"]]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["alone", "arguments"])
def test_a_script_sees_itself(relative: bool, arguments: list[str], sees: Path):
    given = str(sees.relative_to(Path.cwd()) if relative else sees)
    assert audit("--windows=2", given, *arguments) == 2  # it has no step
    assert told(sees) == {
        "argv": [given, *arguments],
        "path": str(sees.parent),
        "name": "__main__",
        "file": str(sees),
        "main": True,
        "beside": "beside",
        "annotation": "<class 'int'>",
        "doc": None,
    }


@pytest.mark.process
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["alone", "arguments"])
def test_a_script_sees_what_python_shows_it(arguments: list[str], sees: Path):
    given = str(sees.relative_to(Path.cwd()))
    assert audit(given, *arguments) == 2
    ours = told(sees)
    subprocess.run([sys.executable, given, *arguments], check=True)
    assert ours == told(sees)


@pytest.mark.process
def test_as_a_program(script: Script):
    for divisor, code in ((1, 1), (2, 0)):
        done = subprocess.run(
            [sys.executable, "-m", "accumext", "audit", str(script(divisor=divisor))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert "in 4 windows of 8 backward passes" in done.stdout


# --- files ----------------------------------------------------------------------------------------


def test_findings_and_windows_in_a_file(tmp_path: Path, script: Script):
    path = tmp_path / "audit.json"
    assert audit("--json", path, "--windows=3", script(divisor=1)) == 1
    read = json.loads(path.read_text())
    assert [finding["name"] for finding in read["findings"]] == ["divisor missing"]
    assert read["findings"][0]["value"] == pytest.approx(2)
    kinds = [[event["what"].split()[0] for event in window] for window in read["windows"]]
    assert kinds == [["zero_grad", "backward", "backward", "step"]] * 3


def test_a_picture_in_a_file(tmp_path: Path, script: Script):
    pytest.importorskip("matplotlib")
    assert audit("--plot", tmp_path / "audit.png", script()) == 0
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


# --- twice ----------------------------------------------------------------------------------------

DIFFER = {
    "random": "torch.randn(8, 4) + random.random()",
    "time": "torch.randn(8, 4) + time.perf_counter() % 1",
}


@pytest.mark.parametrize("x", DIFFER.values(), ids=DIFFER)
def test_runs_that_differ(x: str, script: Script, capsys: pytest.CaptureFixture[str]):
    path = script(x=x)
    assert audit(path) == 0
    assert audit("--twice", path) == 1
    out = capsys.readouterr().out
    assert "1. runs differ  (train.py:" in out
    assert "1 finding in 4 windows of 8 backward passes" in out


SAME = {
    "seeded": ("torch.manual_seed(3)", "torch.randn(8, 4)"),
    "torch's own seed": ("", "torch.randn(8, 4)"),
    "random seeded": ("random.seed(3)", "torch.randn(8, 4) + random.random()"),
    "arguments": ("", "torch.randn(8, 4) * len(sys.argv)"),
    "a module that seeds": ("import common", "torch.randn(8, 4)"),
    "a module's data": ("import common", "next(common.batches)"),
}


@pytest.mark.parametrize(("begin", "x"), SAME.values(), ids=SAME)
def test_runs_that_are_the_same(
    begin: str, x: str, tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "common.py").write_text(
        "import torch\ntorch.manual_seed(5)\nbatches = (torch.randn(8, 4) for _ in range(99))\n"
    )
    try:
        assert audit("--twice", script(begin, x), "argument") == 0
    finally:
        sys.modules.pop("common", None)
    assert capsys.readouterr().out.count("after step") == 2 * 3


def test_installed_modules_are_loaded_once(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
):
    """Also where the environment is below the script, as in many projects; as numpy asks for."""
    packages = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "once.py").write_text("import sys\nsys.loaded.append(__name__)")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(sys, "loaded", [], raising=False)
    assert audit("--twice", script("torch.manual_seed(0); import once")) == 0
    sys.modules.pop("once", None)
    assert sys.loaded == ["once"]


def test_a_mistake_is_found_in_two_runs(script: Script, tmp_path: Path):
    assert audit("--twice", "--json", tmp_path / "a.json", script(divisor=1)) == 1
    read = json.loads((tmp_path / "a.json").read_text())
    assert [finding["name"] for finding in read["findings"]] == ["divisor missing"]


# --- scripts that end otherwise -------------------------------------------------------------------

ENDS = {
    "raises": ("raise KeyError('from the script')", KeyError, "'from the script'"),
    "interrupted": ("raise KeyboardInterrupt", KeyboardInterrupt, ""),
    "exit 3": ("sys.exit(3)", SystemExit, "3"),
    "exit with words": ("sys.exit('no data')", SystemExit, "no data"),
}


@pytest.mark.parametrize(("end", "kind", "words"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("twice", [[], ["--twice"]], ids=["once", "twice"])
def test_an_error_of_the_script_comes_out(
    end: str, kind: type[BaseException], words: str, steps: int, twice: list[str], script: Script
):
    path = script("sys.path.insert(0, 'x')\nsys.argv = ['x']", steps=steps, end=end)
    with pytest.raises(kind) as caught:
        audit(*twice, path)
    assert str(caught.value) == words


def test_an_error_in_a_backward_pass_comes_out(script: Script):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        audit(script(x="torch.randn(8, 4 + step)"))


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "sys.exit(None)", "raise SystemExit"])
@pytest.mark.parametrize("divisor", [1, 2])
def test_a_script_that_exits_well_is_reported(
    end: str, divisor: int, script: Script, capsys: pytest.CaptureFixture[str]
):
    assert audit(script(steps=2, divisor=divisor, end=end)) == (1 if divisor == 1 else 0)
    assert "in 2 windows of 4 backward passes" in capsys.readouterr().out
