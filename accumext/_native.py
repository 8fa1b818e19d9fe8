"""Which kernels answer, and why: the only room that knows that compiled libraries exist.

A library adds kernels to operators that `accumext.ops` has defined; the dispatcher does the rest. A
library that is not installed is compiled on first use: until then, a small Python kernel stands in
for each of its operators, which compiles and loads the library, leaves, and calls again.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from accumext import _build

_log = logging.getLogger("accumext")
_log.addHandler(logging.NullHandler())

_LOCK_TIMEOUT_S = 600.0  # several times the longest compile: beyond it the other process hangs
_REINSTALL = "in the accumext sources: pip install --force-reinstall --no-deps ."


class _Library:
    """The kernels of one device: installed, compiled on first use, or absent."""

    def __init__(self, name: str) -> None:
        self.name = name  # "cpu" or "cuda"
        self.label = name.upper()  # also the dispatch key
        self.loaded = False
        self.reason = ""  # a clause: why the kernels are, or are not, in use
        self._stand_ins: torch.library.Library | None = None
        self._refusal: str | None = None
        self._lock = threading.RLock()

    def choose(self, mode: str) -> None:
        """Load the installed library, or arrange for what happens on first use."""
        if mode == "reference":
            self.reason = "ACCUMEXT_BACKEND=reference"
            return
        if self.name == "cuda" and torch.version.cuda is None:
            self.reason = f"torch {torch.__version__} has no CUDA"
            return
        absence = self._absence()
        if mode != "jit" and absence is None:
            self._load_installed()
        elif mode != "native":
            self._stand_in(self._compile_and_call_again)
        elif self.name == "cpu":
            raise RuntimeError(self._native_refusal(str(absence)))
        else:  # asking now whether a GPU is there would initialise CUDA, which forbids forking
            self._refuse(self._native_refusal(str(absence)))

    def settle(self) -> None:
        """Compile the library if that is pending; RuntimeError if it must work and does not."""
        with self._lock:
            if self._stand_ins is not None and self._refusal is None:
                self._leave()
                self._compile()
            if self._refusal is not None:
                raise RuntimeError(self._refusal)

    # --- installed

    def _absence(self) -> str | None:
        """Why no installed library can be used; None if one can."""
        record = _build.read_record()
        if not self._path().exists():
            missing = record.get("missing", {}).get(self.name)
            return (
                f"not compiled at installation: {missing['reason']}" if missing else "not installed"
            )
        if _build.in_checkout() and record.get("sources") != _build.sources_key():
            return "the sources have changed since they were compiled"
        return None

    def _path(self) -> Path:
        return _build.installation() / f"_C_{self.name}.abi3.so"

    def _native_refusal(self, absence: str) -> str:
        return (
            f"accumext: ACCUMEXT_BACKEND=native needs installed {self.label} kernels: {absence}. "
            f"To compile them, {_REINSTALL}"
        )

    def _load_installed(self) -> None:
        record = _build.read_record()
        try:
            self._check_record(record)
            self._open(self._path())
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"accumext: the installed {self.label} kernels do not load: {error}. "
                f"To compile them again, {_REINSTALL}; to do without: ACCUMEXT_BACKEND=reference"
            ) from error
        self._accept(f"compiled at installation, with torch {record.get('torch', 'unknown')}")

    def _check_record(self, record: dict[str, Any]) -> None:
        if _build.torch_is_too_old(torch):
            raise RuntimeError(f"torch {torch.__version__} is too old for them")
        nvcc = record.get("nvcc")
        if self.name == "cuda" and nvcc and _major(nvcc) != _major(str(torch.version.cuda)):
            raise RuntimeError(f"compiled for CUDA {nvcc}, torch is for CUDA {torch.version.cuda}")

    def _open(self, path: Path) -> None:
        if self.name == "cuda":
            # torch opens its libraries for itself alone; ours needs their CUDA symbols made global.
            torch_cuda = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
            ctypes.CDLL(str(torch_cuda), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(path)

    def _accept(self, reason: str) -> None:
        self.loaded, self.reason = True, reason
        _log.info("%s kernels are in use: %s", self.label, reason)

    # --- stand-ins

    def _stand_in(self, kernel: Callable[..., Any]) -> None:
        self._stand_ins = torch.library.Library("accumext", "IMPL")
        for name in _build.registered_ops(self.name):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.accumext, packet), overload or "default")
            self._stand_ins.impl(op, _bound(kernel, op), self.label)

    def _leave(self) -> None:
        assert self._stand_ins is not None
        self._stand_ins._destroy()
        self._stand_ins = None

    def _compile_and_call_again(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return op(*args, **kwargs)

    def _refuse(self, refusal: str) -> None:
        """From now on every call is an error: what was asked for cannot be had."""
        self._refusal, self.reason = refusal, refusal
        self._stand_in(self._compile_and_call_again)

    # --- compiling on first use

    def _compile(self) -> None:
        self.reason = "compiling on first use was interrupted"
        try:
            folder = self._compiled()
        except Exception as error:
            self._give_up(error)
        else:
            self._accept(f"compiled on first use, in {folder}")

    def _give_up(self, error: Exception) -> None:
        _log.debug("the whole error: %s", error)
        reason = f"compiling on first use failed: {_telling_line(error)}"
        if (absence := self._absence()) is not None:
            reason = f"{absence}; {reason}"
        if _build.setting("ACCUMEXT_BACKEND") == "jit":
            self._refuse(f"accumext: ACCUMEXT_BACKEND=jit needs {self.label} kernels: {reason}")
            return
        self.reason = reason
        _log.warning("%s tensors are served by pure PyTorch: %s", self.label, reason)

    def _compiled(self) -> Path:
        """Load the library from the cache, after compiling it if need be; returns its folder."""
        from filelock import FileLock

        key = _build.jit_key(self.name, torch)
        root = _cache_root()
        folder = root / key
        with FileLock(root / f"{key}.lock", timeout=_LOCK_TIMEOUT_S):
            library = folder / f"_C_{self.name}.so"
            complete = folder / "complete"
            if complete.exists():
                self._open(library)
            else:
                self._run_compiler(folder)
                complete.touch()
        return folder

    def _run_compiler(self, folder: Path) -> None:
        obstacle = _build.obstacle(torch)
        if obstacle is not None:
            raise RuntimeError(". ".join(obstacle))
        from torch.utils import cpp_extension

        folder.mkdir(exist_ok=True)
        # The lock of torch's own loader outlives a killed process, and then all wait for ever. We
        # hold a lock of our own around it, so one found here belongs to nobody.
        (folder / "lock").unlink(missing_ok=True)
        arguments = _build.load_arguments(self.name, torch)
        if self.name == "cuda":
            cuda = _build.cuda(torch)
            if cuda.home is None:
                raise RuntimeError(f"{cuda.reason}. {cuda.fix}")
            cpp_extension.CUDA_HOME = cuda.home
            arguments["extra_ldflags"] = _build.cudart_flags(cuda.home, folder)
        with _environment(_build.environment()):
            cpp_extension.load(**arguments, build_directory=str(folder))


def _bound(kernel: Callable[..., Any], op: Any) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return kernel(op, *args, **kwargs)

    return stand_in


def _telling_line(error: Exception) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if " error: " in line), lines[0]).strip()


def _major(version: str) -> str:
    return version.split(".")[0]


def _cache_root() -> Path:
    """accumext's folder among torch's extensions; where that is read-only, one for this process."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not folder:
        from torch.utils.cpp_extension import get_default_build_root

        folder = get_default_build_root()
    root = Path(folder, "accumext")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        root = Path(tempfile.mkdtemp(prefix="accumext-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        _log.info("compiling in %s, which this process removes: %s", root, error)
        return root


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for the length of a compile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_CPU, _CUDA = (_Library(name) for name in _build.LIBRARIES)


def load_installed() -> None:
    """Load what is installed, as ACCUMEXT_BACKEND says; the operators must be defined already.

    Raises:
        ValueError: an ACCUMEXT_* variable is not one of its choices.
        RuntimeError: an installed library does not load, or `native` finds none.
    """
    _build.check_settings()
    mode = _build.setting("ACCUMEXT_BACKEND")
    if mode == "reference":
        _log.info("pure PyTorch answers: ACCUMEXT_BACKEND=reference")
    for library in (_CPU, _CUDA):
        library.choose(mode)


def backend() -> str:
    """Which kernels are in use: compiled ones for the GPU or the CPU, or pure PyTorch.

    Kernels that are to be compiled on first use are compiled now.

    Returns:
        "cuda", "cpu" or "reference".

    Raises:
        RuntimeError: ACCUMEXT_BACKEND asks for kernels that cannot be had.

    Example:
        >>> accumext.backend()
        'cpu'
    """
    return next((library.name for library in _best_first() if library.loaded), "reference")


def backend_reason() -> str:
    """One sentence on why `backend()` is what it is, and why it is not something better.

    Raises:
        RuntimeError: ACCUMEXT_BACKEND asks for kernels that cannot be had.
    """
    clauses = []
    for library in _best_first():
        if library.loaded:
            clauses.append(f"{library.label} kernels are in use ({library.reason})")
            break
        clauses.append(f"{library.label} tensors are served by pure PyTorch ({library.reason})")
    return "; ".join(clauses) + "."


def bindings() -> types.ModuleType | None:
    """The installed pybind11 module, typed in _bind.pyi; None where nothing was compiled."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _build.installation() / f"_bind{suffix}"
        spec = importlib.util.spec_from_file_location("accumext._bind", path)
        if path.exists() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def _best_first() -> list[_Library]:
    libraries = [_CUDA, _CPU] if torch.cuda.is_available() else [_CPU]
    for library in libraries:
        library.settle()
    return libraries
