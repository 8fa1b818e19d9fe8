"""The choice of kernels, with its reasons: the module that loads compiled libraries.

A library adds kernels to operators that `accumext.ops` has defined; the dispatcher does the rest. A
library that is not installed is compiled on first use, and one for GPUs is tested on first use.
Until then a small Python kernel stands in for each of its operators. When it is called, it loads
the library, removes itself, and calls the operator again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from accumext.backends import _build
from accumext.backends._progress import announce, announced, error_line, files_done
from accumext.tensors.torch_private import (
    call_default_kernel,
    compiled_kernel,
    has_kernel,
    operator,
    remove_kernels,
    tree_leaves,
)

_log = logging.getLogger("accumext")
_log.addHandler(logging.NullHandler())

REINSTALL = "in the accumext sources: pip install --force-reinstall --no-deps ."
_MORE_ROOM = "set TORCH_EXTENSIONS_DIR and TMPDIR to folders with more room"


class _Library:
    """The kernels of one device: installed, compiled on first use, or absent."""

    def __init__(self, name: str, *, tested: bool) -> None:
        self.name = name  # "cpu" or "cuda"
        self.label = name.upper()  # also the dispatch key
        self.loaded = False
        self.reason = ""  # a clause: why the kernels are, or are not, in use
        # Whether kernels have to pass the self-test before they run, as those for GPUs have.
        self.tested, self.test_anew = tested, False
        self.outcomes: dict[torch.device, dict[str, str]] = {}  # by operator
        self._failed: dict[str, set[torch.device]] = {}  # by operator; PyTorch answers there
        self._kernels: dict[str, Callable[..., Any]] = {}  # the compiled ones of these operators
        self._stand_ins: torch.library.Library | None = None
        self._first_use: Callable[[], None] | None = None  # the pending action
        self._refusal: str | None = None
        self._lock = threading.RLock()

    def choose(self, mode: str) -> None:
        """Load the installed library, or arrange for what happens on first use."""
        if mode == "reference":
            self.reason = "ACCUMEXT_BACKEND=reference"
            return
        if not _build.has_sources():  # nor the names of operators, which are read from them
            self.reason = ". ".join(_build.obstacle(torch) or ())
            if mode in ("native", "jit"):
                refusal = f"ACCUMEXT_BACKEND={mode} needs {self.label} kernels: {self.reason}"
                raise RuntimeError(f"accumext: {refusal}")
            return
        if self.name == "cuda" and torch.version.cuda is None:
            self.reason = f"torch {torch.__version__} has no CUDA"
            return
        absence = self._absence()
        if mode != "jit" and absence is None:
            if self.tested:
                self._wait_for_use(self._load_installed)
            else:
                self._load_installed()
        elif mode != "native":
            self._wait_for_use(self._compile)
        elif self.name == "cpu":
            raise RuntimeError(self._native_refusal(str(absence)))
        else:  # asking now whether a GPU is there would initialise CUDA, which forbids forking
            self._refuse(self._native_refusal(str(absence)))

    def resolve(self) -> None:
        """Do what is pending until first use; RuntimeError if kernels must work and do not."""
        with self._lock:
            if self._first_use is not None:
                first_use, self._first_use = self._first_use, None
                self._remove_stand_ins()
                self.reason = "loading on first use was interrupted"
                try:
                    first_use()
                except RuntimeError as error:
                    self._refuse(str(error))
            if self._refusal is not None:
                raise RuntimeError(self._refusal)

    # --- installed

    def _absence(self) -> str | None:
        """Return why no installed library can be used; None if one can."""
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
            f"To compile them, {REINSTALL}"
        )

    def _load_installed(self) -> None:
        record = _build.read_record()
        try:
            self._check_record(record)
            _check_length(self._path())
            self._open(self._path())
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"accumext: the installed {self.label} kernels do not load: {error}. "
                f"To compile them again, {REINSTALL}; to do without: ACCUMEXT_BACKEND=reference"
            ) from error
        self._accept(f"compiled at installation, with torch {record.get('torch', 'unknown')}")

    def _check_record(self, record: dict[str, Any]) -> None:
        if _build.torch_is_too_old(torch):
            raise RuntimeError(f"torch {torch.__version__} is too old for them")
        nvcc, cuda = record.get("nvcc"), str(torch.version.cuda)
        if self.name == "cuda" and nvcc and nvcc.partition(".")[0] != cuda.partition(".")[0]:
            raise RuntimeError(f"compiled for CUDA {nvcc}, torch is for CUDA {cuda}")

    def _open(self, path: Path) -> None:
        """Load a library; raise RuntimeError if it lacks an operator that it should have.

        The self-test comes first. Plain PyTorch answers for operators that fail it.
        """
        names = _build.registered_ops(self.name)
        if self.tested:
            from accumext.backends import _verify

            self.outcomes = _verify.verdicts(path, self.name, announce, anew=self.test_anew)
            self._failed = _verify.failures(self.outcomes)
        torch.ops.load_library(path)
        for name in names:
            if not has_kernel(f"accumext::{name}", self.label):
                raise RuntimeError(f"{path} has no {self.label} kernel of {name}")
        if self._failed:
            for name in self._failed:
                self._kernels[name] = compiled_kernel(f"accumext::{name}", self.label)
            self._stand_in(self._answer, self._failed)
        self.loaded = any(len(self._failed.get(n, ())) < max(1, len(self.outcomes)) for n in names)

    def _answer(self, name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Call plain PyTorch on devices on which the compiled kernel failed, else the kernel."""
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next(tensor.device for tensor in tensors if tensor.device.type == self.name)
        if device in self._failed[name]:
            return call_default_kernel(op, *args, **kwargs)
        return self._kernels[name](*args, **kwargs)

    def _accept(self, reason: str) -> None:
        self.reason = reason
        if not self._failed:
            _log.info("%s kernels are in use: %s", self.label, reason)
            return
        from accumext.backends import _verify

        words = f"the self-test failed {_verify.described(self.outcomes)}"
        if (mode := _build.setting("ACCUMEXT_BACKEND")) in ("native", "jit"):
            self._refuse(f"accumext: ACCUMEXT_BACKEND={mode} needs {self.label} kernels: {words}")
            return
        self.reason = f"{reason}; {words}"
        warnings.warn(f"accumext: plain PyTorch answers where {words}", stacklevel=1)

    # --- stand-ins

    def _wait_for_use(self, action: Callable[[], None]) -> None:
        self._first_use = action
        self._stand_in(self._resolve_and_call_again, _build.registered_ops(self.name))

    def _resolve_and_call_again(self, name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.resolve()
        return op(*args, **kwargs)

    def _refuse(self, refusal: str) -> None:
        """Make every later call an error: the kernels that were asked for are not available."""
        self._refusal, self.reason, self.loaded = refusal, refusal, False
        self._stand_in(self._resolve_and_call_again, _build.registered_ops(self.name))

    def _stand_in(self, kernel: Callable[..., Any], names: Iterable[str]) -> None:
        """Have a Python kernel answer for operators, over compiled kernels that they have."""
        self._remove_stand_ins()
        self._stand_ins = torch.library.Library("accumext", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in names:
                op = operator(name)
                self._stand_ins.impl(op, functools.partial(kernel, name, op), self.label)

    def _remove_stand_ins(self) -> None:
        if self._stand_ins is not None:
            remove_kernels(self._stand_ins)
            self._stand_ins = None

    # --- compiling on first use

    def _compile(self) -> None:
        try:
            reason = self._load_or_compile()
        except Exception as error:
            self._give_up(error)
        else:
            self._accept(reason)

    def _give_up(self, error: Exception) -> None:
        _log.debug("the whole error: %s", error)
        reason = f"compiling on first use failed: {error_line(error)}"
        if os.strerror(errno.ENOSPC) in str(error):
            reason += f"; {_MORE_ROOM}"
        if (absence := self._absence()) is not None:
            reason = f"{absence}; {reason}"
        if _build.setting("ACCUMEXT_BACKEND") == "jit":
            self._refuse(f"accumext: ACCUMEXT_BACKEND=jit needs {self.label} kernels: {reason}")
            return
        self.reason = reason
        _log.warning("%s tensors are served by pure PyTorch: %s", self.label, reason)

    def _load_or_compile(self) -> str:
        """Load the library from the cache, after compiling it if need be; say where it is."""
        from accumext.backends import _cache

        key = _build.cache_key(self.name, torch)
        waiting = announced(f"waiting for a process that compiles the {self.label} kernels")
        load = functools.partial(self._load_cached, key)
        (folder, not_kept), temporary = _cache.find_or_make(key, load, self._compile_into, waiting)
        reason = f"compiled on this machine, in {folder}"
        why = not_kept or temporary
        return f"{reason}, for this process alone: {why}" if why else reason

    def _load_cached(self, key: str, cache: Path) -> tuple[Path, str] | None:
        """Load an undamaged library; return its folder, and "". If there is none: None, or a
        RuntimeError if none can be compiled."""
        from accumext.backends import _cache

        for library in _cache.libraries(cache, key, f"_C_{self.name}.so"):
            try:
                self._open(library)
            except (OSError, RuntimeError) as error:
                _log.warning("%s does not load and is compiled again: %s", library, error)
            else:
                return library.parent, ""
        if (obstacle := _build.jit_obstacle(self.name, torch)) is not None:
            raise RuntimeError(". ".join(obstacle))
        return None

    def _compile_into(self, folder: Path) -> tuple[Path, str]:
        """Compile the library, load it, and install it in a folder of the cache; return the folder,
        and why it could not be installed.

        Only a library that loads and has its operators is installed.
        """
        from accumext.backends import _cache

        with _cache.build_folder(folder) as build_folder:
            words = f"compiling the {self.label} kernels on first use"
            more = f", which takes {_build.COMPILE_TIMES[self.name]}"
            how_far = files_done(build_folder, _build.efforts(self.name))
            with announced(words, more, how_far):
                self._run_compiler(build_folder)
            library = build_folder / f"_C_{self.name}.so"
            self._open(library)
            try:
                _cache.install(library, folder)
            except OSError as error:
                _log.warning("%s is not kept: %s", folder, error)
                return folder, f"it could not be kept ({error.strerror}); {_MORE_ROOM}"
        return folder, ""

    def _run_compiler(self, folder: Path) -> None:
        cpp_extension = _build.cpp_extension()
        arguments = _build.load_arguments(self.name, torch)
        if self.name == "cuda":
            home = _build.cuda(torch).home
            assert home is not None  # else `jit_obstacle` has refused
            cpp_extension.CUDA_HOME = home
            arguments["extra_ldflags"] = _build.cudart_flags(home, folder)
        with _build.environment(folder):
            cpp_extension.load(**arguments, build_directory=str(folder))


def _check_length(path: Path) -> None:
    """Raise OSError if a library's file is shorter than its headers say.

    The loader maps the length in the headers, and a read beyond the end of the file kills the
    process. A recorded size would not do: packagers strip libraries and rewrite search paths.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:
            return  # the loader reports all but 64-bit ELF files itself
        segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
        segment_bytes, segments, section_bytes, sections = struct.unpack_from("<4H", header, 54)
        file.seek(segments_at)
        table = file.read(segments * segment_bytes)
    ends = [segments_at + segments * segment_bytes, sections_at + sections * section_bytes]
    for at in range(0, len(table) - segment_bytes + 1, segment_bytes):
        offset, _, _, length = struct.unpack_from("<4Q", table, at + 8)
        ends.append(offset + length)
    size = path.stat().st_size
    if size < max(ends):
        raise OSError(f"{path} is cut short: {size} bytes of {max(ends)}")


_CPU, _CUDA = _Library("cpu", tested=False), _Library("cuda", tested=True)


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
    """Name the kernels in use: compiled ones for the GPU or the CPU, or pure PyTorch.

    Kernels that wait for their first use are compiled, or tested, by this call.

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
    """Return one sentence on why these kernels are in use, and why no better ones are.

    It names the operators for which plain PyTorch answers because they failed the self-test.

    Returns:
        The sentence; with a GPU, about its kernels first.

    Raises:
        RuntimeError: ACCUMEXT_BACKEND asks for kernels that cannot be had.

    Example:
        >>> print(accumext.backend_reason())
        CPU kernels are in use (compiled at installation, with torch 2.13.0+cpu).
    """
    clauses = []
    for library in _best_first():
        if library.loaded:
            clauses.append(f"{library.label} kernels are in use ({library.reason})")
            break
        clauses.append(f"{library.label} tensors are served by pure PyTorch ({library.reason})")
    return "; ".join(clauses) + "."


def tested_anew() -> dict[torch.device, dict[str, str]]:
    """Load kernels as on first use, but repeat tests with a known verdict; return the outcomes."""
    for library in (_CPU, _CUDA):
        library.test_anew = True
    with contextlib.suppress(RuntimeError):  # `backend()` raises the same
        _best_first()
    return _CPU.outcomes | _CUDA.outcomes


def _best_first() -> list[_Library]:
    libraries = [_CUDA, _CPU] if torch.cuda.is_available() else [_CPU]
    for library in libraries:
        library.resolve()
    return libraries
