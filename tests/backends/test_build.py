"""The build settings: which CUDA toolkit is taken, among toolkits made of a script that answers."""

import logging
import subprocess
from pathlib import Path

import pytest
from support.programs import compiler, executable, run_python

from accumext.backends import _build


class FakeTorch:
    __version__ = "2.13.0"

    def __init__(self, folder: Path, cuda: str | None) -> None:
        self.__file__ = str(folder / "torch" / "__init__.py")
        self.version = type("version", (), {"cuda": cuda})


def toolkit(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    script = f'echo "#$ TOP={home}" >&2\necho "release {version}, V{version}.1"'
    executable(home / "bin" / "nvcc", script)
    return home


@pytest.fixture
def no_toolkit(tmp_path, monkeypatch):
    """Hide every CUDA toolkit but those that a test makes under tmp_path."""
    for name in ("CUDA_HOME", "CUDA_PATH", "ACCUMEXT_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(_build, "_DEFAULT_CUDA_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(_build.sysconfig, "get_path", lambda name: str(tmp_path / "purelib"))
    return monkeypatch


def test_a_toolkit_without_a_gpu_is_nothing_to_be_warned_of(monkeypatch, caplog):
    def imported(name: str) -> str:
        log = logging.getLogger(name)
        log.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
        log.warning("something else")
        return name

    monkeypatch.setattr(_build.importlib, "import_module", imported)
    assert _build.cpp_extension() == "torch.utils.cpp_extension"
    assert caplog.messages == ["something else"]
    imported("torch.utils.cpp_extension")  # only the import is silent
    assert len(caplog.messages) == 3


NO_TOOLKIT = 'pip install "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.0.*"'
IN_PYPIS = "nvidia/cu13"
TOOLKITS = {  # by folder; torch's CUDA and ACCUMEXT_CUDA; what is taken, or the reason
    "none": ({}, "13.0", "auto", None, "nvcc was not found"),
    "a torch without CUDA": ({"default": "13.0"}, None, "auto", None, "torch 2.13.0 has no CUDA"),
    "asked for": ({"default": "13.0"}, None, "1", "default", ""),
    "forbidden": ({"default": "13.0"}, "13.0", "0", None, "ACCUMEXT_CUDA=0"),
    "another major version": (
        *({"default": "12.8"}, "13.0", "auto", None),
        "nvcc is 12.8 and torch was built for CUDA 13.0",
    ),
    "torch's major version": ({"default": "12.8", IN_PYPIS: "13.2"}, "13.0", "auto", IN_PYPIS, ""),
}


@pytest.mark.parametrize("case", TOOLKITS)
def test_the_toolkit_that_is_taken(case, no_toolkit, tmp_path):
    toolkits, cuda, asked, taken, reason = TOOLKITS[case]
    for folder, version in toolkits.items():
        toolkit(tmp_path / folder, version)
    no_toolkit.setenv("ACCUMEXT_CUDA", asked)
    found = _build.cuda(FakeTorch(tmp_path, cuda))
    assert found.home == (taken and str(tmp_path / taken))
    assert not taken or found.version == toolkits[taken]
    assert found.reason == reason
    assert toolkits or found.fix == NO_TOOLKIT


def test_cuda_home_is_asked_of_an_nvcc_that_is_a_wrapper(no_toolkit, tmp_path):
    home = toolkit(tmp_path / "real", "13.0")
    (tmp_path / "path").mkdir()
    executable(tmp_path / "path" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    assert _build.cuda(FakeTorch(tmp_path, "13.0")).home == str(home)


def test_libcudart_gets_the_name_that_the_linker_looks_for(tmp_path):
    folder, library = tmp_path / "folder", tmp_path / "cu13" / "lib"
    folder.mkdir()
    library.mkdir(parents=True)
    assert _build.cudart_flags(str(library.parent), folder) == []
    (library / "libcudart.so.13").touch()
    assert _build.cudart_flags(str(library.parent), folder) == [f"-L{folder}"]
    assert (folder / "libcudart.so").resolve() == library / "libcudart.so.13"
    (library / "libcudart.so").touch()
    assert _build.cudart_flags(str(library.parent), folder) == []


def compiled(source: str, folder: Path, name: str, *flags: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "source.cpp").write_text(source)
    library = folder / name
    command = [*compiler(), "-shared", "-fPIC", str(folder / "source.cpp"), "-o", str(library)]
    subprocess.run([*command, *flags], check=True, timeout=60)
    return library


@pytest.mark.build
def test_a_library_finds_the_libtorch_cuda_that_torch_has_loaded(tmp_path):
    """Torch loads it for itself alone, and the torch that was compiled against may have none."""
    stub = tmp_path / "stub"
    stub.mkdir()
    flags = _build.torch_cuda_flags(stub)
    ours = compiled(
        'extern "C" int of_torch(); extern "C" int ours() { return of_torch(); }',
        tmp_path / "ours",
        "ours.so",
        "-Wl,--as-needed",
        *flags,
    )
    torchs = compiled(
        'extern "C" int of_torch() { return 42; }',
        tmp_path / "torch",
        "libtorch_cuda.so",
        "-Wl,-soname,libtorch_cuda.so",
    )
    program = "import ctypes, sys; print([ctypes.CDLL(path) for path in sys.argv[1:]][-1].ours())"
    assert run_python("-c", program, torchs, ours).stdout == "42\n"
    alone = run_python("-c", program, ours).stderr
    assert "libtorch_cuda.so: cannot open shared object file" in alone
