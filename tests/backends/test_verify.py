"""The self-test that kernels pass before they are used: what it finds, what is kept of it, and who
answers then.

Processes run it on libraries with wrong, crashing and hanging kernels, which answer for tensors of
the CPU; in the trees of these tests the CPU's library is one of those that are tested.
"""

import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import executable
from support.source_tree import Tree
from support.tensors import HALF_DTYPES
from torch import Tensor

import accumext
from accumext.backends import _build, _cache, _libraries, _self_test, _verify
from accumext.tensors.torch_private import call_default_kernel, operator, tree_leaves

CPU = torch.device("cpu")
BATCHES = {5, 9, 17, 33, 65}
WRONG, HANG, RIGHT = "scale_.scalar", "total_norm.scalar", "large_pages"
CRASHES = {
    "accumulate_.scalar": "the process ended with SIGSEGV",
    "unscale_check_clip_accumulate_.scalar": "the process ended with SIGABRT: last words",
}
LATE = "no time was left for it"
Patch = pytest.MonkeyPatch

INCLUDES = """
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using Tensor = torch::stable::Tensor;
"""
FAULTS = (
    INCLUDES
    + """
void Crash(StableIValue*, uint64_t, uint64_t) { raise(SIGSEGV); }
void Abort(StableIValue*, uint64_t, uint64_t) { fputs("first\\nlast words\\n", stderr); abort(); }
void Hang(StableIValue*, uint64_t, uint64_t) { for (;;) pause(); }
void Nothing(std::vector<Tensor>, double) {}
void Pages(Tensor) {}

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("accumulate_.scalar", &Crash);
  m.impl("large_pages", TORCH_BOX(&Pages));
  m.impl("scale_.scalar", TORCH_BOX(&Nothing));
  m.impl("total_norm.scalar", &Hang);
  m.impl("unscale_check_clip_accumulate_.scalar", &Abort);
}
"""
)
# Nothing is right; a fault can be asked for, and tells that this kernel answers.
PAGES = (
    INCLUDES
    + """
void Pages(Tensor memory) {
  const char* fault = getenv("FAULT");
  const std::string name = fault == nullptr ? "" : fault;
  if (name == "wrong") *static_cast<float*>(memory.data_ptr()) = 42;
  if (name == "crash") raise(SIGSEGV);
  while (name == "hang") pause();
}

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) { m.impl("large_pages", TORCH_BOX(&Pages)); }
"""
)


# --- the calls ---------------------------------------------------------------------------------


def test_every_operator_with_a_compiled_kernel_has_calls():
    names = {*_build.registered_ops("cpu"), *_build.registered_ops("cuda")}
    assert len(_build.registered_ops("cuda")) >= 13
    assert names == set(_self_test.cases())
    assert _self_test.outcome("another", CPU) == "there is no call of it in the self-test"


@pytest.mark.parametrize("name", sorted(_self_test.cases()))
def test_the_kernels_of_this_run_pass(name):
    assert _self_test.outcome(name, CPU) == _self_test.OK


Arguments = dict[str, Any]


def results(result: object, call: Arguments) -> list[Tensor]:
    """All tensors that a call returns or may write, but for those without elements."""
    leaves = tree_leaves((result, call))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]


def written(case: _self_test.Case) -> list[int]:
    """Return which results of plain PyTorch are new or have changed, and begin with a number."""
    before = results(torch.full((), torch.nan), case.arguments)  # where nothing has been returned
    call = case._on(CPU)
    result = call_default_kernel(operator(case.name), **call)
    if not isinstance(result, Tensor):
        before = before[1:]
    pairs = enumerate(zip(before, results(result, call)))
    changed = ((i, new) for i, (old, new) in pairs if not torch.equal(old, new.to(old.dtype)))
    return [i for i, new in changed if bool(new[(0,) * new.dim()].isfinite())]


class Off:
    """An operator one of whose results is another in its first element: by 3 percent, or 0 or 1."""

    def __init__(self, name: str, index: int) -> None:
        self.real, self.index = operator(name), index
        self._op_dk = self.real._op_dk  # the default kernel

    def __call__(self, **call: Any) -> object:
        result = call_default_kernel(self.real, **call)
        changed = results(result, call)[self.index]
        first = changed[(0,) * changed.dim()]
        if first.is_floating_point():
            first.add_(0.03 * (1 + first.abs()).copysign(first))
        else:
            first.copy_(first == 0)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*_self_test.cases()} - {RIGHT}))
def test_every_result_of_every_call_is_looked_at(name, monkeypatch):
    count = 0
    for case in _self_test.cases()[name]:
        found = written(case)
        for index in found[:: 1 + len(found) // 8]:  # of lists some
            monkeypatch.setattr(_self_test, "operator", functools.partial(Off, index=index))
            with pytest.raises(AssertionError):
                case.check(CPU)
            count += 1
    assert count > 0


@pytest.mark.parametrize(
    ("name", "batches"), [("head_forward", {9, 33}), ("decode_steps", BATCHES)]
)
def test_logits_are_all_below_zero_in_batches_of_every_width(name, batches):
    """There a row that is not its own maximum's, but 0, is found, from the ninth row on as well."""
    seen = set()
    for case in _self_test.cases()[name]:
        call = case._on(CPU)
        if call["uniforms"] is None:
            call_default_kernel(operator(name), **call)
            assert float(call["stats"][0].amax()) < 0
            weight = call["weight" if name == "head_forward" else "head_weight"]
            seen.add((weight.dtype, call["tokens"].shape[-1]))
    halves = {(dtype, batch) for dtype in HALF_DTYPES for batch in batches}
    assert halves <= seen
    assert {(torch.float32, 9), (torch.float32, 33)} <= seen


# --- the process -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions" / f"accumext-{os.geteuid()}"


@pytest.fixture
def library(tmp_path):
    """A file to take a digest of."""
    path = tmp_path / "library.so"
    path.write_bytes(b"kernels")
    return path


def verdict(library: Path, *, anew: bool = False) -> dict[str, str]:
    return _verify.verdicts(library, "cpu", lambda _: None, anew=anew)[CPU]


@pytest.mark.build
@pytest.mark.usefixtures("cache")
def test_each_fault_is_found_by_name(tree, monkeypatch):
    """Wrong results, crashes and a hang, and what is between them is tried all the same."""
    tree.source.write_text(FAULTS)
    tree.show()
    names = sorted(re.findall(r'impl\("([\w.]+)"', FAULTS))
    monkeypatch.setattr(_build, "registered_ops", lambda _: names)
    monkeypatch.setattr(_verify, "CALL_S", 5.0)
    found = verdict(tree.built() / "_C_cpu.so")
    assert found.pop(RIGHT) == "ok"
    assert re.fullmatch(r"AssertionError: \d+ of \d+ numbers .* \(call 1 of 2\)", found.pop(WRONG))
    assert found.pop(HANG) == "it did not end in time"
    assert found == CRASHES


@pytest.mark.process
def test_a_process_that_does_not_begin_leaves_operators_untested(
    cache, library, monkeypatch, tmp_path
):
    """The outcome is not kept: another time there may be memory, or a Python."""

    def why() -> str:
        (outcome,) = set(verdict(library).values())
        return outcome

    assert why().startswith("not tested: OSError: ")  # of the loader
    sleeper = executable(tmp_path / "python", "exec sleep 100")
    for owner, name, value, words in (
        (_verify, "_machine", lambda _: ["another"], "RuntimeError: cpu is another device in"),
        (sys, "path", [], "the process ended with status 1: "),
        (sys, "executable", "/nonexistent", "[Errno 2] No such file"),
        (sys, "frozen", True, "a frozen program has no Python to start"),
        (sys, "executable", sleeper, "it did not end in time"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            if value is sleeper:
                patch.setattr(_verify, "START_S", 0.5)
            assert why().startswith(f"not tested: {words}")
    assert not list(cache.glob("verdict-*/*"))


def test_no_program_is_held_up_for_longer_than_all_operators_may_take(library, monkeypatch):
    monkeypatch.setattr(_verify, "TOTAL_S", 0.005)

    def hangs(self: object, names: list[str], give_up: float) -> Iterator[tuple[str, str]]:
        time.sleep(0.01)
        yield names[0], "it did not end in time"

    monkeypatch.setattr(_verify._Trial, "_messages", hangs)
    found = _verify._Trial(library, ["a", "b", "c"], CPU).outcomes()
    assert found == {"a": "it did not end in time", "b": LATE, "c": LATE}


# --- the verdict -------------------------------------------------------------------------------


class Tries:
    """In place of processes: counts the trials, each of which finds the same."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.found = {"scale_": "ok", "decode_steps": "wrong"}
        self.devices: list[torch.device] = []

        def outcomes(trial: _verify._Trial) -> dict[str, str]:
            self.devices.append(trial.device)
            time.sleep(0.2)  # for those that come at once
            return self.found

        monkeypatch.setattr(_verify._Trial, "outcomes", outcomes)


@pytest.fixture
def tries(monkeypatch):
    return Tries(monkeypatch)


def test_a_verdict_is_kept_and_found_again(cache, library, tries):
    assert [verdict(library) for _ in range(3)] == [tries.found] * 3
    assert len(tries.devices) == 1
    assert len(list(cache.glob("verdict-*/verdict.json"))) == 1
    tries.found = {"scale_": "ok", "decode_steps": "ok"}
    assert verdict(library, anew=True) == verdict(library) == tries.found
    assert len(tries.devices) == 2


@pytest.mark.usefixtures("cache")
def test_a_verdict_is_of_a_library_a_torch_a_machine_and_these_calls(
    library, tries, monkeypatch, tmp_path
):
    verdict(library)
    library.write_bytes(b"other kernels")
    verdict(library)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    verdict(library)
    monkeypatch.setattr(_verify, "_machine", lambda _: ["a GPU", "8", "0", "108", "13000"])
    verdict(library)
    monkeypatch.setattr(_self_test, "__file__", str(tmp_path / "library.so"))
    verdict(library)
    assert len(tries.devices) == 5


def test_processes_that_come_at_once_wait_for_one_trial(cache, library, tries):
    """Threads here: locks of a file that is opened twice keep them apart, too."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(verdict, [library] * 4))
    assert len(tries.devices) == 1
    assert len(list(cache.glob("verdict-*.lock"))) == 1


def test_what_others_could_have_written_or_is_damaged_is_found_anew(cache, library, tries):
    verdict(library)
    (file,) = cache.glob("verdict-*/verdict.json")
    file.chmod(0o666)
    verdict(library)
    (file,) = cache.glob("verdict-*/verdict.json")
    file.write_text('{"scale_": "ok", "decode_steps": "ok"}')
    assert verdict(library) == tries.found
    assert len(tries.devices) == 3


def test_without_a_cache_the_verdict_is_for_this_process(cache, library, tries):
    cache.parent.write_text("a file where a folder should be")
    assert verdict(library) == tries.found


@pytest.mark.usefixtures("tries")
def test_without_any_folder_nothing_is_tested(library, monkeypatch):
    def open_cache() -> object:
        raise RuntimeError("no folder; set TMPDIR")

    monkeypatch.setattr(_cache, "open_cache", open_cache)
    assert set(verdict(library).values()) == {"not tested: no folder; set TMPDIR"}


@pytest.mark.usefixtures("cache")
def test_gpus_of_one_name_are_tried_once_and_each_name_for_itself(library, tries, monkeypatch):
    devices = [torch.device("cuda", index) for index in range(4)]
    names = dict(zip(devices, ("H100", "T4", "H100", "H100")))
    monkeypatch.setattr(_verify, "_devices", lambda _: devices)
    monkeypatch.setattr(_verify, "_machine", lambda device: [names[device]])
    monkeypatch.setattr(_verify, "name_of", names.get)
    found = _verify.verdicts(library, "cuda", lambda _: None, anew=False)
    assert tries.devices == devices[:2]
    tries.found = dict.fromkeys(tries.found, "not tested: no memory")  # and not kept
    _verify.verdicts(library, "cuda", lambda _: None, anew=True)
    assert tries.devices == devices[:2] * 2
    assert list(found) == devices
    assert _verify.failures(found) == {"decode_steps": set(devices)}
    assert _verify.described(found) == (
        "on H100 in decode_steps (wrong), and on T4 in decode_steps (wrong); "
        "`python -m accumext doctor` repeats it"
    )
    assert _verify.described({devices[0]: {"a": "bad", "b": "bad"}, devices[1]: {"a": "ok"}}) == (
        "on H100 in all operators (bad); `python -m accumext doctor` repeats it"
    )


# --- who answers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A tree with an installed library that is right unless it is asked to be wrong."""
    tree = Tree(tmp_path_factory.mktemp("pages") / "tree")
    tree.source.write_text(PAGES)
    tree.install()
    return tree


@pytest.fixture
def tested(compiled, tmp_path):
    """A copy whose CPU library has to pass the self-test."""
    tree = Tree(tmp_path / "tested")
    tree.source.write_text(PAGES)
    for file in (compiled.installed, compiled.installed.with_name("_build_info.json")):
        shutil.copy(file, tree.installed.parent)
    for module, old, new in (
        ("_libraries", '_Library("cpu", tested=False)', '_Library("cpu", tested=True)'),
        ("_verify", "CALL_S = 60.0", "CALL_S = 5.0"),
    ):
        path = tree.installed.with_name(f"{module}.py")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return tree


# `answer()` says whose kernel answers: the compiled one can be asked for a wrong result.
ANSWER = """
import os, sys, torch, accumext
from accumext.backends import _libraries
def answer():
    pages = torch.zeros(4)
    torch.ops.accumext.large_pages(pages)
    os.environ["FAULT"] = "wrong"
    torch.ops.accumext.large_pages(pages)
    return "compiled" if pages[0] == 42 else "plain"
"""
SHOW = ANSWER + "print(answer(), accumext.backend(), accumext.backend_reason(), sep='|')"
WARNING = "UserWarning: accumext: plain PyTorch answers where the self-test failed on cpu in "


def shown(tree: Tree, **variables: str) -> tuple[list[str], str]:
    done = tree.run(SHOW, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|"), done.stderr


TESTING = "accumext: testing the kernels on cpu, once, which takes some seconds\n"


@pytest.mark.build
def test_import_tests_nothing_and_first_use_tests_before_a_kernel_runs(tested):
    code = """
assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
assert not _libraries._CPU.loaded
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    torch.ops.accumext.large_pages(torch.empty(3))
assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
if os.fork() == 0:
    os._exit(0 if answer() == "compiled" else 1)
assert os.wait()[1] == 0
print(answer(), _libraries._CPU._stand_ins, accumext.backend_reason())
"""
    done = tested.run(ANSWER + code, ACCUMEXT_BACKEND="native")
    reason = "CPU kernels are in use (compiled at installation, with torch 2.13.0)."
    assert (done.stdout.strip(), done.stderr) == (f"compiled None {reason}", TESTING)


@pytest.mark.build
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("wrong", "AssertionError: 1 of 1048576 numbers differ"),
        ("crash", "the process ended with SIGSEGV"),
        ("hang", "it did not end in time"),
    ],
)
def test_plain_pytorch_answers_for_what_fails_until_the_doctor_finds_it_well(
    tested, fault, outcome
):
    words = f"{WARNING}all operators ({outcome}"
    (who, backend, reason), said = shown(tested, FAULT=fault)
    assert (who, backend) == ("plain", "reference")
    assert reason.startswith("CPU tensors are served by pure PyTorch (compiled at installation, ")
    assert outcome in reason
    assert said.count(words) == said.count("Warning") == 1
    assert "`python -m accumext doctor` repeats it" in said
    (who, _, _), said = shown(tested)  # it would pass now, but is not tried again
    assert who == "plain"
    assert words in said
    if fault == "crash":
        status, report = tested.doctor(FAULT=fault)
        assert status == 1
        assert report["self_test"]["large_pages on cpu"].startswith(outcome)
        status, report = tested.doctor()
        assert (status, report["backend"]) == (0, "cpu"), report
        assert shown(tested)[0][0] == "compiled"


@pytest.mark.build
def test_native_makes_it_an_error(tested):
    code = """
for use in (answer, answer, accumext.backend):
    try:
        print(use())
    except RuntimeError as error:
        print(error)
"""
    done = tested.run(ANSWER + code, ACCUMEXT_BACKEND="native", FAULT="crash")
    expected = (
        "accumext: ACCUMEXT_BACKEND=native needs CPU kernels: the self-test failed on cpu in all "
        "operators (the process ended with SIGSEGV); `python -m accumext doctor` repeats it"
    )
    assert done.stdout.splitlines() == [expected] * 3
    assert done.stderr == TESTING


@pytest.mark.build
def test_a_library_compiled_on_first_use_is_tested_before_it_is_loaded(tested):
    tested.installed.unlink()
    (who, _, reason), said = shown(tested, FAULT="wrong")
    assert who == "plain"
    assert "compiled on this machine, in " in reason
    assert said.count(WARNING) == 1
    done = tested.run(SHOW, ACCUMEXT_BACKEND="jit", FAULT="wrong")
    assert "RuntimeError: accumext: ACCUMEXT_BACKEND=jit needs CPU kernels: the self" in done.stderr


@pytest.mark.build
def test_where_no_process_can_begin_plain_pytorch_answers(tested):
    done = tested.run(SHOW.replace("print(", "sys.executable = '/nonexistent'; print("))
    assert done.stdout.startswith("plain|reference|CPU tensors are served by pure PyTorch (")
    assert f"{WARNING}all operators (not tested: [Errno 2] No such file" in done.stderr
    assert shown(tested)[0][0] == "compiled"


def test_one_operator_or_one_device_that_fails_leaves_the_others(monkeypatch):
    if accumext.backend() == "reference":
        pytest.skip("no compiled kernels")
    defaults = []

    def default(op: Any, *args: Any, **kwargs: Any) -> object:
        defaults.append(op.name())
        return call_default_kernel(op, *args, **kwargs)

    outcomes = dict.fromkeys(_build.registered_ops("cpu"), "ok") | {"scale_.scalar": "wrong"}
    found = {CPU: outcomes}
    monkeypatch.setattr(_libraries, "call_default_kernel", default)
    monkeypatch.setattr(_verify, "verdicts", lambda *_, **__: found)
    monkeypatch.setenv("ACCUMEXT_BACKEND", "auto")
    library = _libraries._Library("cpu", tested=True)
    tensor = torch.ones(3)
    try:
        with pytest.warns(UserWarning, match=r"on cpu in scale_.scalar \(wrong\); `python -m acc"):
            library._load_installed()
        accumext.scale_([tensor], 0.5)
        accumext.scale_([tensor], torch.tensor(0.5))
        assert defaults == ["accumext::scale_.scalar"]
        assert library.loaded
        library._failed = {"scale_.scalar": {torch.device("cuda", 0)}}
        accumext.scale_([tensor], 0.5)
        assert defaults == ["accumext::scale_.scalar"]
    finally:
        library._remove_stand_ins()
    assert tensor.tolist() == [0.125] * 3
