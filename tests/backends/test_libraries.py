"""The kernels that answer: each case in a process of its own, on a tree with one tiny kernel."""

import pytest
import torch
from support.programs import executable
from support.source_tree import CALL, NATIVE, PROBE, REFERENCE, SHARED, SHOW

import accumext
from accumext.backends import _build, _libraries


@pytest.mark.process
@pytest.mark.parametrize("mode", ["auto", "jit", "reference"])
def test_import_prints_nothing_compiles_nothing_and_initialises_nothing(tree, mode):
    code = """
import sys, torch
before = set(sys.modules)
import accumext
new = set(sys.modules) - before
assert not [name for name in new if name.startswith(("setuptools", "torch.utils.cpp_ext"))], new
assert not torch.cuda.is_initialized()
"""
    done = tree.run(code, ACCUMEXT_BACKEND=mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not tree.cache.exists()


CHOICES = {
    "ACCUMEXT_BACKEND": "auto, native, jit, reference",
    "ACCUMEXT_BUILD": "auto, require, off",
    "ACCUMEXT_CUDA": "auto, 0, 1",
}


@pytest.mark.build
@pytest.mark.parametrize("name", CHOICES)
def test_a_bad_value_is_an_error_that_lists_the_choices(tree, name):
    done = tree.run("import accumext", **{name: "yes"})
    expected = f"ValueError: accumext: {name} must be one of {CHOICES[name]}, got 'yes'"
    assert done.stderr.strip().endswith(expected)


def test_this_run_uses_what_it_was_asked_for():
    asked = _build.setting("ACCUMEXT_BACKEND")
    assert (accumext.backend() == "reference") == (asked == "reference")
    assert accumext.backend_reason().endswith(".")


def test_every_operator_found_in_the_sources_is_registered_by_the_library():
    names = _build.registered_ops("cpu")
    assert {"accumulate_", "scale_", "total_norm", "scale_.scalar"} <= set(names)
    native = accumext.backend() != "reference"
    for name in names:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"accumext::{name}", "CPU")
        assert has_kernel == native, name


# --- installed


@pytest.mark.build
def test_an_installed_library_is_loaded_at_import(tree):
    tree.install()
    result, backend, reason = tree.show(ACCUMEXT_BACKEND="native")
    assert (result, backend) == (NATIVE, "cpu")
    assert reason == "CPU kernels are in use (compiled at installation, with torch 2.13.0)."
    assert not tree.cache.exists()


@pytest.mark.build
def test_native_without_a_library_is_an_error_with_the_command(tree):
    done = tree.run("import accumext", ACCUMEXT_BACKEND="native")
    assert "RuntimeError: accumext: ACCUMEXT_BACKEND=native needs installed CPU" in done.stderr
    assert "pip install --force-reinstall --no-deps ." in done.stderr


@pytest.mark.build
def test_a_library_older_than_its_sources_is_not_used(tree):
    tree.install()
    tree.source.write_text(PROBE.replace("42", "43"))
    assert tree.show()[0] == "43.0"
    done = tree.run("import accumext", ACCUMEXT_BACKEND="native")
    assert "the sources have changed since they were compiled" in done.stderr


def test_cuda_kernels_of_another_major_version_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "_C_cuda.abi3.so").touch()
    monkeypatch.setattr(_build, "installation", lambda: tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    record = {"nvcc": "12.8", "sources": _build.sources_key()}
    monkeypatch.setattr(_build, "read_record", lambda: record)
    library = _libraries._Library("cuda", tested=True)
    library.choose("auto")
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"for CUDA 12\.8, torch is for CUDA 13\.0"):
                library.resolve()
    finally:
        library._remove_stand_ins()


def test_cuda_kernels_stay_out_of_a_cpu_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    library = _libraries._Library("cuda", tested=True)
    library.choose("native")
    assert library.reason == f"torch {torch.__version__} has no CUDA"


COMPILING = (
    "accumext: compiling the CPU kernels on first use, which takes about a minute on two cores"
)


def said(stderr: str) -> list[str]:
    """The lines, but for those that say after ten seconds that it goes on."""
    return [line for line in stderr.splitlines() if not line.startswith("accumext: still ")]


@pytest.mark.build
def test_stand_ins_compile_on_first_use_and_leave(tree):
    code = CALL.replace("tensor = ", "tensor = first = ") + (
        "assert tensor.item() == 42\n"
        "from accumext.backends import _libraries\n"
        "assert _libraries._CPU._stand_ins is None\n"
        "accumext.scale_([tensor.fill_(1)], 0.5)\n"
        "assert tensor.item() == 42\n"
        "print(accumext.backend_reason())"
    )
    done = tree.run(code, ACCUMEXT_BACKEND="jit")
    assert done.returncode == 0, done.stderr
    expected = f"CPU kernels are in use (compiled on this machine, in {tree.built()})."
    assert done.stdout.strip() == expected
    assert said(done.stderr) == [COMPILING]


# A call with a terminal for its stderr; prints what arrived there.
ON_A_TERMINAL = f"""
import os, pty
leader, follower = pty.openpty()
os.dup2(follower, 2)
{CALL}
os.write(follower, b"-")
arrived = b""
while not arrived.endswith(b"-"):
    arrived += os.read(leader, 1000)
print(arrived.decode())
"""


@pytest.mark.build
def test_a_terminal_is_told_once_that_kernels_are_compiled(tree):
    assert said(tree.run(ON_A_TERMINAL).stdout) == [COMPILING, "-"]
    assert said(tree.run(ON_A_TERMINAL).stdout) == ["-"]


@pytest.mark.build
def test_backend_compiles_what_is_pending(tree):
    done = tree.run("import accumext; print(accumext.backend())")
    assert done.stdout.strip() == "cpu"
    assert tree.built().is_dir()


@pytest.mark.build
def test_two_processes_compile_once(tree):
    log = tree.folder / "compilations"
    compiler = executable(tree.folder / "compiler", f'echo "$@" >> {log}\n{SHARED}')
    processes = [tree.start(SHOW, CXX=compiler) for _ in range(2)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [output.partition("|")[0] for output in outputs] == [NATIVE, NATIVE]
    compilations = [line for line in log.read_text().splitlines() if "probe.cpp" in line]
    assert len(compilations) == 1


@pytest.mark.build
def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(tree):
    tree.cache.write_text("a file where a folder should be")
    temporary = tree.folder / "temporary"
    temporary.mkdir()
    result, _, reason = tree.show(TMPDIR=str(temporary))
    assert result == NATIVE
    assert str(temporary) in reason
    assert list(temporary.iterdir()) == []


@pytest.mark.build
def test_a_failed_compile_leaves_pytorch_and_the_compilers_words(tree):
    tree.source.write_text(PROBE + "#error on purpose\n")
    result, backend, reason = tree.show()
    assert (result, backend) == (REFERENCE, "reference")
    assert reason.startswith(
        "CPU tensors are served by pure PyTorch (not installed; compiling on first use failed: "
        f"{tree.source}:"
    )
    assert reason.endswith(": error: #error on purpose).")


@pytest.mark.build
def test_jit_fails_where_auto_would_go_without(tree):
    variables = {"ACCUMEXT_BACKEND": "jit", "CXX": "/nonexistent"}
    again = CALL.replace("accumext.scale_", "for _ in range(2):\n  try: accumext.scale_")
    again += "  except RuntimeError as error: print(error)\n"
    done = tree.run(again, **variables)
    lines = done.stdout.strip().splitlines()
    expected = (
        "accumext: ACCUMEXT_BACKEND=jit needs CPU kernels: not installed; compiling on first use "
        "failed: no C++ compiler (/nonexistent) was found. Install g++, or set CXX"
    )
    assert lines == [expected, expected], done.stderr


@pytest.mark.build
def test_one_log_line_says_which_kernels_are_in_use(tree):
    code = "import logging; logging.basicConfig(level='INFO', format='%(name)s: %(message)s')"
    done = tree.run(code + CALL, ACCUMEXT_BACKEND="reference")
    assert done.stderr == "accumext: pure PyTorch answers: ACCUMEXT_BACKEND=reference\n"
    done = tree.run(code + CALL)
    first, line = (line for line in said(done.stderr) if line.startswith("accumext: "))
    assert first == COMPILING
    assert line.startswith("accumext: CPU kernels are in use: compiled on this machine, in ")


def test_native_refuses_cuda_tensors_when_first_used(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    library = _libraries._Library("cuda", tested=True)
    monkeypatch.setattr(library, "_absence", lambda: "not installed")
    library.choose("native")
    try:
        with pytest.raises(RuntimeError, match="needs installed CUDA kernels: not installed"):
            library.resolve()
    finally:
        library._remove_stand_ins()
