"""`python -m accumext audit script.py`: what the script sees, what comes out, what is put back."""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.programs import run_script

from accumext.__main__ import main

TRAIN = """
import random, sys, time
import torch
from torch import nn
{begin}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {clear}
    for _ in range(2):
        x = {x}
        loss = nn.functional.mse_loss(model(x), torch.zeros(8, 2))
        (loss / {divisor}).backward()
    optimizer.step()
    print("after step", step)
{end}
"""


@pytest.fixture
def script(tmp_path):
    """Write a training script, right if nothing else is said, of six steps. Without `clear` every
    step but the first uses gradients of those before."""

    def write(
        begin="torch.manual_seed(0)",
        x="torch.randn(8, 4)",
        divisor=2,
        steps=6,
        clear="optimizer.zero_grad()",
        end="",
    ):
        path = tmp_path / "train.py"
        parts = {"begin": begin, "x": x, "divisor": divisor, "clear": clear, "end": end}
        path.write_text(TRAIN.format(steps=steps, **parts))
        return path

    return write


def audit(*arguments: object) -> int:
    return main(["audit", *map(str, arguments)])


@pytest.fixture(autouse=True)
def put_back():
    """What the command changes is as it was, however the script ends."""

    def state():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        patched = torch.Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.__init__
        return [*patched, hooks, sys.argv, [*sys.argv], [*sys.path], sys.modules["__main__"]]

    before = state()
    yield
    assert all(a is b or (type(a) is list and a == b) for a, b in zip(before, state(), strict=True))


# --- exit codes, and output -----------------------------------------------------------------------


@pytest.mark.parametrize("windows", [None, 1, 5])
def test_a_right_script_stops_after_so_many_windows(windows, script, capsys):
    options = [] if windows is None else ["--windows", windows]
    assert audit(*options, script()) == 0
    out, err = capsys.readouterr()
    number, plural = windows or 4, "" if windows == 1 else "s"
    assert f"no findings in {number} window{plural} of {2 * number} backward passes" in out
    assert out.count("after step") == number - 1
    assert not err


def test_a_wrapper_whose_last_window_is_the_last_observed_one(script, capsys):
    path = script("import accumext", steps=4)
    text = path.read_text()
    path.write_text(
        text.replace("for step", "optimizer = accumext.AccumulatingOptimizer(optimizer)\nfor step")
    )
    assert audit(path) == 0
    assert "no findings in 4 windows of 8 backward passes" in capsys.readouterr().out


def test_it_stops_through_what_the_script_catches(tmp_path, script, capsys):
    body = textwrap.indent(script().read_text(), "    ")
    ends = "except Exception:\n    print('caught')\nfinally:\n    print('cleaned up')\n"
    path = tmp_path / "catches.py"
    path.write_text(f"try:\n{body}\n{ends}")
    assert audit("--windows=2", path) == 0
    out = capsys.readouterr().out
    assert "caught" not in out
    assert out.index("cleaned up") < out.index("no findings in 2 windows")


REFUSED = {
    "missing.py": "no such file: missing.py",
    ".": "no such file: .",
    "--windows=0 train.py": "--windows must be at least 1, got 0",
    "--windows -2 train.py": "--windows must be at least 1, got -2",
    "--optimizer=0 train.py": "--optimizer must be at least 1, got 0",
    "--json=none/audit.json train.py": "no such folder: none",
    "--plot=none/audit.png train.py": "no such folder: none",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line, script, monkeypatch, capsys):
    monkeypatch.chdir(script(steps=0).parent)
    assert audit(*line.split()) == 2
    assert capsys.readouterr() == ("", f"accumext audit: {REFUSED[line]}\n")


def test_nothing_was_seen(script, capsys):
    """Passes without a step of an optimizer of torch, or neither: no success"""
    path = script(steps=0)
    assert audit(path) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("accumext audit: nothing was judged: 0 steps after 0 backward passes\n")
    path = script()
    path.write_text(path.read_text().replace("    optimizer.step()\n", ""))
    assert audit("--json", path.with_name("audit.json"), path) == 2
    err = capsys.readouterr().err
    assert err.startswith("accumext audit: nothing was judged: 0 steps after 12 backward passes\n")
    assert "seen  steps of optimizers of torch: none" in err
    assert "no step of a torch.optim.Optimizer ran: run as far as one" in err
    assert not path.with_name("audit.json").exists()


def test_a_question_is_no_failure(script, capsys):
    assert audit(script(divisor=1)) == 0
    out = capsys.readouterr().out
    assert "accumext audit: no findings, 1 question in 4 windows of 8 backward passes" in out
    assert "? divisor missing  (train.py:13)  accumulation.divisor_missing" in out
    assert (
        "is it  right if the sum of the losses is meant, as of the terms of one loss; else" in out
    )


IGNORED = {  # by what follows --ignore: the exit code
    "accumulation.counted_again": 0,
    "accumulation": 0,
    "accepted.txt": 0,
    "clip": 1,
    "accumulation.lost": 1,
    "others.txt": 1,
}


@pytest.mark.parametrize("ignore", IGNORED)
def test_findings_that_are_accepted(ignore, script, capsys, monkeypatch):
    """By id, by the first word of ids, or by a file of these; they are reported all the same"""
    path = script(clear="pass")
    monkeypatch.chdir(path.parent)
    accepted = "# since 2024\naccumulation.counted_again  # of the warm-up\n\n"
    Path("accepted.txt").write_text(accepted)
    Path("others.txt").write_text("clip\n#accumulation\n")
    assert audit("--ignore", ignore, path) == IGNORED[ignore]
    assert audit("--ignore=clip", "--ignore", ignore, path) == IGNORED[ignore]
    out = capsys.readouterr().out
    assert out.count("1 finding in 4 windows") == 2
    assert out.count("\n\naccepted: accumulation.counted_again\n") == 2 * (not IGNORED[ignore])


@pytest.mark.parametrize("ignore", ["counted_again", "accepted.txt", "mine.txt"])
def test_what_is_no_id_is_refused(ignore, script, capsys, monkeypatch):
    path = script()
    monkeypatch.chdir(path.parent)
    Path("mine.txt").write_text("accumulation.lots\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        audit("--ignore", ignore, path)
    out, err = capsys.readouterr()
    assert not out
    assert err.endswith(f"argument --ignore: no id, and no file of ids: {ignore}\n")


# --- which optimizers -----------------------------------------------------------------------------

SEVERAL = """
import torch
from torch import nn
unused = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
first, second = nn.Linear(4, 2), nn.Linear(4, 2)
of_first = torch.optim.SGD(first.parameters(), lr=0.1)
of_second = torch.optim.Adam(second.parameters())
for _ in range(6):
    for model in (first, second):
        model(torch.randn(8, 4)).square().mean().backward()
    of_first.step()
    of_second.step()
    of_first.zero_grad()
"""  # the second's gradients are never cleared
FOLLOWED = {
    (): (1, {"SGD": 4, "Adam": 4}),
    ("--optimizer=1",): (0, {"SGD": 4}),
    ("--optimizer", "2"): (1, {"Adam": 4}),
    ("--optimizer=2", "--windows=1"): (0, {"Adam": 1}),
}


@pytest.mark.parametrize("options", FOLLOWED, ids="".join)
def test_every_optimizer_that_steps_is_followed(options, tmp_path, capsys):
    """Not the one that was made first; or the one of a number alone"""
    path, result = tmp_path / "several.py", tmp_path / "audit.json"
    path.write_text(SEVERAL)
    code, windows = FOLLOWED[options]
    assert audit(*options, "--json", result, path) == code
    read = json.loads(result.read_text())
    assert Counter(read["optimizers"]) == windows
    expected = ["accumulation.counted_again"] if code else []
    assert [finding["id"] for finding in read["findings"]] == expected
    assert ("several.py:12" in capsys.readouterr().out) == bool(code)


def test_a_number_that_no_optimizer_has(tmp_path, capsys):
    path = tmp_path / "several.py"
    path.write_text(SEVERAL)
    assert audit("--optimizer=3", path) == 2
    err = capsys.readouterr().err
    assert "nothing was judged: 0 steps after 12 backward passes" in err
    assert "seen  steps of optimizers of torch: SGD (6), Adam (6)" in err


# --- what a script sees ---------------------------------------------------------------------------

LAZY = """
import sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(f"lazy import of {name} failed")
lazy = Lazy("lazy_thing")
for name in ("__loader__", "__spec__", "__package__"):
    vars(lazy).pop(name)
sys.modules["lazy_thing"] = lazy
"""


@pytest.mark.parametrize("twice", [[], ["--twice"]], ids=["once", "twice"])
@pytest.mark.process
def test_a_module_that_raises_when_it_is_asked(twice, tmp_path, script):
    """As lazy modules do whose package is missing, which a script never uses; in a process, since
    torch looks at all modules when it is first needed"""
    path = script(LAZY + "torch.manual_seed(0)")
    done = run_script("-m", "accumext", "audit", *twice, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no findings in 4 windows of 8 backward passes" in done.stdout


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


def test_a_script_sees_what_python_shows_it(tmp_path, monkeypatch):
    """Its arguments, also those that look like the command's; itself, and modules beside it."""
    (tmp_path / "beside.py").write_text("NAME = __name__")
    (tmp_path / "sees.py").write_text(SEES)
    monkeypatch.chdir(tmp_path.parent)
    script = f"{tmp_path.name}/sees.py"
    arguments = ["a", "--b=1", "-c", "--windows", "7", "--json", "x"]
    assert audit("--windows=2", script, *arguments) == 2  # nothing was seen
    assert "beside" not in sys.modules
    ours = json.loads((tmp_path / "seen.json").read_text())
    subprocess.run([sys.executable, script, *arguments], check=True)
    assert ours == json.loads((tmp_path / "seen.json").read_text())


@pytest.mark.process
def test_as_a_program(script):
    path = script(clear="pass")
    line = 1 + path.read_text().split("\n").index("    optimizer.step()")
    done = run_script("-m", "accumext", "audit", path)
    assert (done.returncode, done.stderr) == (1, "")
    words = f"1. micro-batches counted again  (train.py:{line})  accumulation.counted_again"
    assert words in done.stdout
    assert "in 4 windows of 8 backward passes" in done.stdout


# --- files ----------------------------------------------------------------------------------------


def test_findings_and_windows_in_files(tmp_path, script):
    path, picture = tmp_path / "audit.json", tmp_path / "audit.png"
    pytest.importorskip("matplotlib")
    wrong = script(divisor=1, clear="pass")
    assert audit("--json", path, "--plot", picture, "--windows=3", wrong) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    read = json.loads(path.read_text())
    assert read["seen"]
    ((found,), (question,)) = read["findings"], read["questions"]
    assert (found["id"], found["value"]) == ("accumulation.counted_again", 3)
    assert question["id"] == "accumulation.divisor_missing"
    assert question["value"] == pytest.approx(2)
    kinds = [[event["what"].split()[0] for event in window] for window in read["windows"]]
    assert kinds == [["backward", "backward", "step"]] * 3


# --- twice ----------------------------------------------------------------------------------------


def test_runs_that_differ(script, capsys):
    path = script(x="torch.randn(8, 4) + random.random()")
    assert audit(path) == 0
    assert audit("--twice", path) == 1
    out = capsys.readouterr().out
    assert "1. runs differ  (train.py:" in out
    assert "1 finding in 4 windows of 8 backward passes" in out


SAME = {
    "torch's own seed": ("", "torch.randn(8, 4)"),
    "random seeded": ("random.seed(3)", "torch.randn(8, 4) + random.random()"),
    "arguments": ("", "torch.randn(8, 4) * len(sys.argv)"),
    "a module that seeds": ("import common", "torch.randn(8, 4)"),
    "a module's data": ("import common", "next(common.batches)"),
}


@pytest.mark.parametrize(("begin", "x"), SAME.values(), ids=SAME)
def test_runs_that_are_the_same(begin, x, tmp_path, script, capsys):
    (tmp_path / "common.py").write_text(
        "import torch\ntorch.manual_seed(5)\nbatches = (torch.randn(8, 4) for _ in range(99))\n"
    )
    assert audit("--twice", script(begin, x), "argument") == 0
    out = capsys.readouterr().out
    assert out.count("after step") == 2 * 3
    assert ", the gradients of 8 passes in two runs\n" in out


def test_installed_modules_are_loaded_once(tmp_path, script, monkeypatch):
    """Also where the environment is below the script, as in many projects; as numpy asks for."""
    packages = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "once.py").write_text("import sys\nsys.loaded.append(__name__)")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(sys, "loaded", [], raising=False)
    assert audit("--twice", script("torch.manual_seed(0); import once")) == 0
    sys.modules.pop("once", None)
    assert sys.loaded == ["once"]


# --- scripts that end otherwise -------------------------------------------------------------------

ENDS = {
    "raises": ("raise KeyError('from the script')", KeyError, "'from the script'"),
    "interrupted": ("raise KeyboardInterrupt", KeyboardInterrupt, ""),
    "exit 3": ("sys.exit(3)", SystemExit, "3"),
    "exit with words": ("sys.exit('no data')", SystemExit, "no data"),
}


@pytest.mark.parametrize(("end", "kind", "words"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("twice", [[], ["--twice"]], ids=["once", "twice"])
def test_an_error_of_the_script_comes_out(end, kind, words, twice, script, capsys):
    """After what was seen until then"""
    path = script("sys.path.insert(0, 'x')\nsys.argv = ['x']", steps=2, end=end)
    with pytest.raises(kind) as caught:
        audit(*twice, path)
    assert str(caught.value) == words
    assert "no findings in 2 windows of 4 backward passes" in capsys.readouterr().out


def test_an_error_in_a_backward_pass_comes_out(script, capsys):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        audit(script(x="torch.randn(8, 4 + step)"))
    assert "no findings in 1 window of 2 backward passes" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise SystemExit"])
def test_a_script_that_ends_well_is_reported(end, script, capsys):
    """Also where it is done sooner"""
    assert audit(script(steps=2, clear="pass", end=end)) == 1
    assert "in 2 windows of 4 backward passes" in capsys.readouterr().out


@pytest.mark.process
def test_a_loop_in_a_thread_ends_quietly(script):
    """Its windows are complete, and the report comes without a traceback of the thread"""
    path = script()
    body = textwrap.indent(path.read_text(), "    ")
    start = "from threading import Thread\nt = Thread(target=loop)\nt.start()\nt.join()"
    path.write_text(f"def loop():\n{body}\n{start}\nprint('joined')\n")
    done = run_script("-m", "accumext", "audit", "--windows=2", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("joined") < done.stdout.index("no findings in 2 windows")


DIES = {  # a loop that torch ends, and what the cure names
    "a state that is not detached": (
        "model = nn.GRUCell(4, 4)",
        "state = torch.zeros(8, 4)",
        "state = model(x, state); loss = state.square().mean()",
        "Trying to backward through the graph a second time",
        (
            "accumext.decode_loss",
            "accumext.tbptt(k1=1)",
            "out.state.detach()",
            "accumext.chunked_loss",
            "does not call backward",
        ),
    ),
    "a step between forward and backward": (
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))",
        "kept = []",
        "kept.append(model(x).square().mean()); loss = kept[0] if len(kept) < 2 else kept[1]; "
        "optimizer.step()",
        "modified by an inplace operation",
        ("step after the last backward pass", "torch.where"),
    ),
}


@pytest.mark.parametrize("name", DIES)
def test_the_cure_of_an_error_that_is_known(name, tmp_path, capsys):
    """Before its traceback, also where no step was seen: by which call, and where more is said"""
    model, before, loop, error, named = DIES[name]
    path = tmp_path / "dies.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        f"{model}\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{before}\n"
        f"for _ in range(3):\n    x = torch.randn(8, 4)\n    {loop}\n    loss.backward()\n"
    )
    with pytest.raises(RuntimeError, match=error):
        audit(path)
    words = " ".join(capsys.readouterr().out.split())
    assert "the script ends with an error whose cure is known" in words
    assert all(name in words for name in named)
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert any(line.startswith("## ") and error in line for line in page.read_text().splitlines())
    assert "See docs/troubleshooting.md, under these words" in words


def test_another_error_has_no_cure(script, capsys):
    with pytest.raises(KeyError):
        audit(script(steps=1, end="raise KeyError('backward')"))
    assert "whose cure is known" not in capsys.readouterr().out


WRAPPED = """
import sys
import accumext, torch
from torch import nn
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = nn.ModuleList([nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)])
opt = accumext.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), window=2)
def step(token, state):
    state = model[1](model[0](token), state)
    {in_step}
    return model[2](state), state
for i in range({number}):
    targets, state = torch.randint(20, (3, 4)), torch.zeros(4, 8)
    with opt.micro_batch():
        accumext.tbptt(step, targets, state, criterion=cross_entropy, k1=3, backward=opt.backward)
        {in_block}
    opt.step()
{end}
"""
WRAPPED_ENDS = {  # in what the script ends, if i is its last: exit status, or what it raises
    "at its end": ({}, 0),
    "by an exit": ({"end": "sys.exit()"}, 0),
    "without its optimizer": ({"end": "del opt, model, step"}, 0),
    "by an exit inside a micro-batch": ({"in_block": "if i == {last}: sys.exit()"}, 0),
    "by an error inside a micro-batch": ({"in_block": "if i == {last}: raise KeyError"}, KeyError),
    "by an error inside tbptt": ({"in_step": "if i == {last}: raise KeyError"}, KeyError),
}


@pytest.mark.parametrize("number", [3, 4, 5])
@pytest.mark.parametrize("name", WRAPPED_ENDS)
def test_a_script_with_a_wrapper_that_ends_around_the_last_window(name, number, tmp_path, capsys):
    """Two windows of two micro-batches are observed, the wrapper says of a window only when the
    next call comes that it is complete: whatever comes first, the report is that of what ran"""
    parts, end = WRAPPED_ENDS[name]
    given = dict.fromkeys(("in_step", "in_block"), "pass") | {"end": ""}
    given |= {k: v.format(last=number - 1) for k, v in parts.items()}
    path = tmp_path / "wrapped.py"
    path.write_text(WRAPPED.format(number=number, **given))
    whole = number if name in ("at its end", "by an exit", "without its optimizer") else number - 1
    if end == 0 or number == 5:  # of the fifth micro-batch nothing runs
        assert audit("--windows=2", path) == 0
    else:
        with pytest.raises(end):
            audit("--windows=2", path)
    windows = whole // 2
    words = f"in {windows} window{'s' * (windows > 1)} of {2 * windows} backward passes"
    assert words in capsys.readouterr().out
