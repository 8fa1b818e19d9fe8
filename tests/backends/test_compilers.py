"""What CXX may be, what is said of a compiler that fails, and that nobody waits in silence."""

import os
import re
import shutil
import subprocess

import pytest
import torch
from support import ROOT
from support.programs import executable
from support.source_tree import CALL, COMPILER, NATIVE, PROBE, REFERENCE, SHARED, SHOW, Tree

from accumext.backends import _build, _doctor, _progress

HONOURED = {
    "arguments": "{cxx} -pipe",
    "a launcher": "env LANG=C {cxx}",
    "a quoted path with spaces": "'{folder}/with spaces/g++' -pipe",
    "a path with spaces": "{folder}/with spaces/g++",
    "a relative path": "./g++",
    "nothing": "",
}


def value_of_cxx(name: str, tree: Tree) -> str:
    (tree.folder / "with spaces").mkdir()
    for folder in (tree.folder, tree.folder / "with spaces"):
        executable(folder / "g++", SHARED)
    return HONOURED[name].format(cxx=COMPILER["CXX"], folder=tree.folder)


@pytest.mark.build
@pytest.mark.parametrize("name", HONOURED)
def test_a_compiler_may_have_arguments_and_any_path(name, tree):
    done = tree.run(SHOW, CXX=value_of_cxx(name, tree))
    assert done.stdout.startswith(f"{NATIVE}|cpu|"), done.stdout
    assert "not compatible" not in done.stderr  # as torch says of a compiler that it cannot run


SETUP = """
import runpy, sys
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.build
@pytest.mark.parametrize("name", ["arguments", "a quoted path with spaces", "a relative path"])
def test_so_it_may_for_an_installation(name, tree):
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree.folder)
    done = tree.run(SETUP, CXX=value_of_cxx(name, tree), ACCUMEXT_BUILD="require")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree.show(ACCUMEXT_BACKEND="native")[0] == NATIVE


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_compile_gets_one_program_and_leaves_the_variable(variable, tmp_path, monkeypatch):
    """As nvcc wants of CC, and torch of CXX."""
    monkeypatch.setenv(variable, "echo 'two words' $HOME")
    with _build.environment(tmp_path):
        program = os.environ[variable]
        done = subprocess.run([program, "an argument"], capture_output=True, text=True, check=True)
    assert done.stdout == "two words $HOME an argument\n"
    assert os.environ[variable] == "echo 'two words' $HOME"


ONLY_ITS_VERSION = 'case "$*" in *-version* | *-v*) exec c++ "$@";; esac\n'
FAILING = {  # scripts, and what is said of them
    "no compiler": (
        "echo a licence is missing; exit 3",
        "the C++ compiler does not work: {cxx} --version exited with status 3 and said a licence "
        "is missing. Install g++, or set CXX",
    ),
    "silent": (
        "exit 1",
        "the C++ compiler does not work: {cxx} --version exited with status 1 and said nothing. "
        "Install g++, or set CXX",
    ),
    "silent when it compiles": (
        f"{ONLY_ITS_VERSION}exit 1",
        "a command failed and said nothing: {cxx} -MMD ",
    ),
    "another language": (f"{ONLY_ITS_VERSION}echo Lizenz abgelaufen; exit 1", "Lizenz abgelaufen"),
}


@pytest.mark.build
@pytest.mark.parametrize("name", FAILING)
def test_a_compiler_that_fails_is_named_with_its_words(name, tree):
    script, words = FAILING[name]
    compiler = executable(tree.folder / "compiler", script)
    result, backend, reason = tree.show(CXX=compiler)
    assert (result, backend) == (REFERENCE, "reference")
    assert f"compiling on first use failed: {words.format(cxx=compiler)}" in reason


@pytest.mark.parametrize("value", ["nosuch", "nosuch -O1", "g++ 'without an end"])
def test_a_compiler_that_is_not_there(value, monkeypatch):
    monkeypatch.setenv("CXX", value)
    name = value if "'" in value else "nosuch"
    expected = (f"no C++ compiler ({name}) was found", "Install g++, or set CXX")
    assert _build.obstacle(torch) == expected


# --- while it compiles

IMPATIENT = "from accumext.backends import _progress; _progress._REMINDER_S = 0.3\n"


@pytest.mark.build
def test_a_log_is_told_what_takes_so_long_and_that_it_goes_on(tree):
    slow = executable(tree.folder / "slow", f"sleep 0.5; {SHARED}")
    processes = [tree.start(IMPATIENT + CALL, CXX=slow) for _ in range(2)]
    lines = [process.communicate(timeout=100)[1].splitlines() for process in processes]
    compiles, waits = sorted(lines, key=lambda found: found[0])
    words = "compiling the CPU kernels on first use"
    assert compiles[0] == f"accumext: {words}, which takes about a minute on two cores"
    assert waits[0] == "accumext: waiting for a process that compiles the CPU kernels"
    assert_each(compiles[1:], rf"accumext: still {words}: [01] of 1 files after \d+ s")
    assert_each(waits[1:], rf"accumext: still {waits[0][10:]}, after \d+ s")


def assert_each(lines: list[str], pattern: str) -> None:
    assert len(lines) > 1
    assert all(re.fullmatch(pattern, line) for line in lines), lines


@pytest.mark.build
def test_so_is_the_log_of_an_installation(tree):
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree.folder)
    second = tree.source.with_name("second.cpp")
    second.write_text("void Second() {}\n")
    module = tree.folder / "accumext" / "backends" / "_progress.py"
    text = module.read_text()
    assert "_REMINDER_S = 10.0" in text
    module.write_text(text.replace("_REMINDER_S = 10.0", "_REMINDER_S = 0.3"))
    # One at a time, and each in seconds, so that something is said between them.
    script = f'case "$*" in *-c\\ *) sleep 2;; esac; {SHARED}'
    slow = executable(tree.folder / "slow", script)
    done = tree.run(SETUP, CXX=slow, MAX_JOBS="1", ACCUMEXT_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if "compil" in line and "cuda" not in line]
    begin, *lines, end = said
    words = "compiling the cpu library"
    assert begin == f"accumext: {words}, which takes about a minute on two cores"
    assert re.fullmatch(r"accumext: compiled the cpu library in \d+ s", end)
    assert_each(lines, rf"accumext: still {words}: \d of 2 files after \d+ s(, about \d+ s more)?")
    assert any(re.search(": 1 of 2 files after .* s, about ", line) for line in lines)


@pytest.mark.build
def test_a_log_is_told_that_it_failed(tree):
    tree.source.write_text(PROBE + "#error on purpose\n")
    _, last = tree.run(CALL).stderr.splitlines()
    failed = "accumext: compiling the CPU kernels on first use failed: "
    assert last.startswith(failed)
    assert last.endswith("error: #error on purpose")


def test_what_is_left_is_estimated_by_what_is_done(tmp_path):
    efforts = {"small": 1, "medium": 2, "large": 6}
    how_far = _progress.files_done(tmp_path, efforts)
    assert how_far(10) == ": 0 of 3 files after 10 s"
    for name in ("small.o", "medium.cuda.o"):  # as torch calls that of a CUDA source
        (tmp_path / name).touch()
    assert how_far(20) == ": 2 of 3 files after 20 s, about 40 s more"
    assert how_far(30) == ": 2 of 3 files after 30 s, about 30 s more"  # the third goes on
    assert how_far(70) == ": 2 of 3 files after 70 s"  # longer than was thought
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "large.o").touch()
    assert how_far(50) == ": 3 of 3 files after 50 s"

    how_far = _progress.files_done(tmp_path, efforts)  # how many are compiled again, ninja knows
    assert how_far(1) == ": 0 files after 1 s"
    os.utime(tmp_path / "small.o", (1, 1))
    assert how_far(2) == ": 1 file after 2 s"


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_where_nobody_can_be_told_nothing_fails(stderr, monkeypatch, tmp_path):
    file = (tmp_path / "log").open("w")
    file.close()
    monkeypatch.setattr("sys.stderr", file if stderr else None)
    with _progress.announced("compiling"):
        pass


# --- later

OLD_RECORD = {
    "compiled": ["cpu"],
    "torch": "2.13.0+cpu",
    "missing": {
        "cuda": {
            "reason": "torch 2.13.0+cpu has no CUDA",
            "fix": "Install a CUDA build of torch",
        }
    },
}


@pytest.mark.parametrize(
    ("toolkit", "advice"),
    [
        (_build.Cuda("/usr/local/cuda", "13.0", "", ""), "The kernels are compiled on first use, "),
        (_build.Cuda(None, None, "nvcc was not found", "pip install nvcc"), "pip install nvcc"),
    ],
    ids=["nvcc", "no nvcc"],
)
def test_the_doctors_advice_is_for_the_torch_of_today(toolkit, advice, monkeypatch):
    """One with CUDA, in the place of the one without that accumext was installed for."""
    monkeypatch.setattr(_build, "cuda", lambda torch: toolkit)
    _, (name, text) = _doctor._installation_rows(OLD_RECORD)
    assert name == "no cuda library"
    assert text.startswith(f"at installation: torch 2.13.0+cpu has no CUDA. {advice}")


# --- imported from an archive


@pytest.fixture
def archive(tree):
    """The package, without its sources, in a zip file on the path."""
    path = shutil.make_archive(str(tree.folder / "archive"), "zip", tree.folder, "accumext")
    shutil.rmtree(tree.folder / "accumext")
    shutil.rmtree(tree.folder / "csrc")
    return tree, {"PYTHONPATH": path}, f"{path}/accumext is not a folder with the sources"


ADVICE = "Install accumext by pip, not into an archive; with PyInstaller: --collect-all accumext"


@pytest.mark.build
def test_from_an_archive_plain_pytorch_answers(archive):
    tree, path, reason = archive
    result, backend, words = tree.show(**path)
    assert (result, backend) == (REFERENCE, "reference")
    assert words == f"CPU tensors are served by pure PyTorch ({reason}. {ADVICE})."
    _, report = tree.doctor(**path)
    assert (report["backend"], report["fix"], report["passed"]) == ("reference", ADVICE, True)


@pytest.mark.build
@pytest.mark.parametrize("mode", ["native", "jit"])
def test_from_an_archive_compiled_kernels_cannot_be_had(archive, mode):
    tree, path, reason = archive
    done = tree.run("import accumext", ACCUMEXT_BACKEND=mode, **path)
    words = f"ACCUMEXT_BACKEND={mode} needs CPU kernels: {reason}. {ADVICE}"
    assert done.stderr.strip().endswith(f"RuntimeError: accumext: {words}")
