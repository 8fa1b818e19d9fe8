"""Build settings, for setup.py and the JIT loader alike: what is compiled, where, with which flags.

setup.py loads this file by path, before the package or torch can be imported, so only the standard
library is imported here; functions that need torch get it as an argument.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TORCH_MINIMUM = (2, 10)
COMPILE_TIMES = {"cpu": "about a minute on two cores", "cuda": "several minutes on two cores"}

CHOICES = {
    "ACCUMEXT_BACKEND": ("auto", "native", "jit", "reference"),
    "ACCUMEXT_BUILD": ("auto", "require", "off"),
    "ACCUMEXT_CUDA": ("auto", "0", "1"),
}
_EFFORTS = {"kernels_avx512": 21, "kernels_avx2": 16, "kernels_portable": 9}  # most take 3 s
_FOLDER = Path(__file__).resolve().parent  # which gets the libraries that an installation compiles
_PACKAGE = _FOLDER.parent
_DEFAULT_CUDA_HOME = "/usr/local/cuda"
_DEFAULT_ARCHS = "8.0;9.0"  # A100 and H100, if the build sees no GPU
_BYTES_PER_JOB = 3 << 30  # nvcc's peak for one file of csrc, with room to spare


def setting(name: str) -> str:
    """Return the value of one ACCUMEXT_* variable; a ValueError lists the choices."""
    choices = CHOICES[name]
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"accumext: {name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_settings() -> None:
    """Raise ValueError if an ACCUMEXT_* variable has a value that is none of its choices."""
    for name in CHOICES:
        setting(name)


# --- sources and flags -------------------------------------------------------------------------


def in_checkout() -> bool:
    """Tell whether the package runs from its source tree (also an editable install)."""
    return not (_PACKAGE / "_csrc").is_dir()


def csrc() -> Path:
    """Return the folder of the sources: inside an installed package, beside it in a checkout."""
    return _PACKAGE.parent / "csrc" if in_checkout() else _PACKAGE / "_csrc"


def sources(library: str) -> list[str]:
    """Return the source files of library "cpu", "cuda" or "bind", in a fixed order."""
    pattern = {"cpu": "cpu/**/*.cpp", "cuda": "cuda/**/*.cu", "bind": "module.cpp"}[library]
    return sorted(str(path) for path in csrc().glob(pattern))


def efforts(library: str) -> dict[str, int]:
    """Return the seconds that each source takes on one core, about, by its name without suffix."""
    return {(name := Path(path).stem): _EFFORTS.get(name, 3) for path in sources(library)}


def has_sources() -> bool:
    """Tell whether there are sources: a zip archive that Python imports from has none."""
    return bool(sources("cpu"))


def registered_ops(library: str) -> list[str]:
    """Return the operators that a library implements, read from its sources."""
    text = "".join(Path(path).read_text(encoding="utf-8") for path in sources(library))
    return sorted(set(re.findall(r'\.impl\(\s*"(?:accumext::)?([\w.]+)"', text)))


def cxx_flags(library: str) -> list[str]:
    """Return the flags of the host compiler.

    Contraction is off because elementwise results must equal PyTorch's bit for bit; there is no
    -march, so that a wheel runs on any CPU: the kernels choose their instruction set when they run.
    -Wno-psabi: only inlined functions take vectors, so the calling convention for them has no
    effect.
    """
    flags = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wno-psabi"]
    return flags if library == "bind" else [*flags, _target_define()]


def nvcc_flags() -> list[str]:
    """Return the flags of nvcc; -fmad=false for the same reason as -ffp-contract=off."""
    flags = ["-std=c++20", "-O3", "-fmad=false", "-DUSE_CUDA", _target_define()]
    flags.append("-Xcompiler=-ffp-contract=off,-fvisibility=hidden")
    # torch's build disables the conversions of the half types, which the kernels use.
    hidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
    return flags + [f"-U__CUDA_NO_{name}__" for name in hidden]


def _target_define() -> str:
    major, minor = TORCH_MINIMUM
    return f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000"


def load_arguments(library: str, torch: Any = None) -> dict[str, Any]:
    """Return arguments for `torch.utils.cpp_extension.load`, to compile a library by hand.

    Set ACCUMEXT_BACKEND=reference before importing accumext, so that no operator gets two kernels.

    Args:
        library: "cpu", "cuda" or "bind".
        torch: the torch module; needed for "cuda", whose flags depend on the visible GPUs.

    Returns:
        Keyword arguments.

    Example:
        >>> from torch.utils.cpp_extension import load
        >>> module = load(**load_arguments("bind"))  # doctest: +SKIP
    """
    arguments = {
        "name": "_bind" if library == "bind" else f"_C_{library}",
        "sources": sources(library),
        "extra_cflags": cxx_flags(library),
        "extra_include_paths": [str(csrc())],
        "is_python_module": library == "bind",
    }
    if library == "cuda":
        arguments |= {"extra_cuda_cflags": nvcc_flags() + arch_flags(torch), "with_cuda": True}
    return arguments


# --- torch -------------------------------------------------------------------------------------


def find_torch() -> Any | None:
    """Return the torch of the environment into which accumext is being installed, or None.

    pip builds in isolation, but with the interpreter of that environment: only its site-packages
    have to be added to the path. They are appended, so that setuptools and ninja remain those of
    the build.
    """
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    torch = _imported_torch()
    if torch is None:
        for folder in folders:
            if os.path.isdir(folder) and folder not in sys.path:
                site.addsitedir(folder)
        torch = _imported_torch()
    return torch


def _imported_torch() -> Any | None:
    with warnings.catch_warnings():
        # Without NumPy torch warns when it is imported; a build does not need it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        try:
            return importlib.import_module("torch")
        except ImportError:
            return None


def cpp_extension() -> Any:
    """Import `torch.utils.cpp_extension` without its warning about a CUDA toolkit and no GPU."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("No CUDA runtime is found")

    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(is_news)
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.removeFilter(is_news)


def torch_is_too_old(torch: Any) -> bool:
    """Tell whether a torch lacks the part of the stable ABI that the libraries use."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_MINIMUM


# --- the compiler ---------------------------------------------------------------------------

NO_SOURCES_FIX = (
    "Install accumext by pip, not into an archive; with PyInstaller: --collect-all accumext"
)
ON_FIRST_USE = "The kernels are compiled on first use"
NO_TORCH_FIX = (
    f"{ON_FIRST_USE}; to compile them now: pip install torch, then "
    "pip install --no-build-isolation --no-deps --force-reinstall ."
)


def cxx() -> list[str]:
    """Return the command of the C++ compiler: CXX, a program with or without arguments, or c++."""
    return _command("CXX", "c++")


def _command(variable: str, default: str) -> list[str]:
    """Return the words of a variable that names a program, as a path that any folder can use."""
    value = os.environ.get(variable, "").strip() or default
    words = [value]  # if the value is a path that contains spaces
    if shutil.which(value) is None:
        with contextlib.suppress(ValueError):  # unbalanced quotation marks
            words = shlex.split(value)
    if os.sep in words[0]:
        words[0] = os.path.abspath(words[0])
    return words


def obstacle(torch: Any) -> tuple[str, str] | None:
    """Return the obstacle to compiling any library, and the remedy; None if there is none."""
    if not has_sources():
        return f"{_PACKAGE} is not a folder with the sources", NO_SOURCES_FIX
    if torch_is_too_old(torch):
        minimum = ".".join(map(str, TORCH_MINIMUM))
        reason = f"torch {torch.__version__} is older than {minimum}"
        return reason, f'pip install "torch>={minimum}"'
    command, fix = cxx(), "Install g++, or set CXX"
    if shutil.which(command[0]) is None:
        return f"no C++ compiler ({command[0]}) was found", fix
    if failure := _failure([*command, "--version"]):
        return f"the C++ compiler does not work: {shlex.join(command)} --version {failure}", fix
    return None


def _failure(command: list[str]) -> str:
    """Describe how a command failed; "" if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"
    said = (done.stderr + done.stdout).strip().partition("\n")[0]
    status = f"exited with status {done.returncode}"
    return f"{status} and said {said or 'nothing'}" if done.returncode else ""


# --- CUDA --------------------------------------------------------------------------------------


class Cuda(NamedTuple):
    """The decision on CUDA kernels: the toolkit to compile them with, or the reason for none."""

    home: str | None
    version: str | None  # of nvcc, such as "13.0"
    reason: str
    fix: str


def cuda(torch: Any) -> Cuda:
    """Decide on CUDA kernels for this torch, by ACCUMEXT_CUDA and the toolkits at hand."""
    wish = setting("ACCUMEXT_CUDA")
    wanted: str | None = torch.version.cuda
    if wish == "0":
        return Cuda(None, None, "ACCUMEXT_CUDA=0", "Unset ACCUMEXT_CUDA")
    if wanted is None and wish == "auto":
        reason = f"torch {torch.__version__} has no CUDA"
        return Cuda(None, None, reason, "Install a CUDA build of torch")
    major = None if wanted is None else wanted.split(".")[0]
    toolkits = [(home, version) for home in _cuda_homes(torch) if (version := _nvcc_version(home))]
    for home, version in toolkits:
        if major is None or version.split(".")[0] == major:
            return Cuda(home, version, "", "")
    if toolkits:
        reason = f"nvcc is {toolkits[0][1]} and torch was built for CUDA {wanted}"
    else:
        reason = "nvcc was not found"
    release = f"{wanted}.*" if wanted else "13.*"
    fix = f'pip install "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={release}"'
    return Cuda(None, None, reason, fix)


def _cuda_homes(torch: Any) -> list[str]:
    """Return the folders in which a toolkit may be, best first."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _home_of_nvcc_on_path()]
    homes.append(_DEFAULT_CUDA_HOME)
    site_packages = {str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib")}
    for folder in sorted(site_packages):
        homes += sorted(map(str, Path(folder).glob("nvidia/cu[0-9]*")), reverse=True)
    return [home for home in homes if home and os.access(f"{home}/bin/nvcc", os.X_OK)]


def _home_of_nvcc_on_path() -> str | None:
    """Return the toolkit of the nvcc on PATH. nvcc itself says it: the file may be a wrapper."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    match = re.search(r"TOP=(\S+)", output([nvcc, "--dryrun", "-x", "cu", "/dev/null"]))
    return os.path.realpath(match[1]) if match else None


def _nvcc_version(home: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", output([f"{home}/bin/nvcc", "--version"]))
    return match[1] if match else None


def output(command: list[str]) -> str:
    """Return what a command writes; "" if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def archs(torch: Any) -> str:
    """Return the GPU architectures to compile for, as TORCH_CUDA_ARCH_LIST writes them."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        return listed
    devices = range(torch.cuda.device_count())
    visible = {"{}.{}".format(*torch.cuda.get_device_capability(device)) for device in devices}
    return ";".join(sorted(visible)) or _DEFAULT_ARCHS


def arch_flags(torch: Any) -> list[str]:
    """Return nvcc's architecture flags if torch cannot derive them (it would fail)."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count() > 0:
        return []
    numbers = [arch.replace(".", "") for arch in _DEFAULT_ARCHS.split(";")]
    return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]


def cudart_flags(home: str, folder: Path) -> list[str]:
    """Return flags to link libcudart: toolkits from PyPI lack the name that the linker wants."""
    versioned: list[Path] = []
    for library in (Path(home, "lib64"), Path(home, "lib")):
        if (library / "libcudart.so").exists():
            return []
        versioned += library.glob("libcudart.so.*")
    if not versioned:
        return []
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(versioned[0])
    return [f"-L{folder}"]


def torch_cuda_flags(folder: Path) -> list[str]:
    """Return flags that link libtorch_cuda by name only, with an empty library in the folder.

    The library then uses the libtorch_cuda of the torch that loads it, whatever torch it was
    compiled with. A torch without CUDA has none to link, and one that torch has already loaded is
    found by name only.
    """
    stub = folder / "libtorch_cuda.so"
    command = [*cxx(), "-shared", "-x", "c++", os.devnull]
    subprocess.run([*command, "-o", str(stub), f"-Wl,-soname,{stub.name}"], check=True, timeout=60)
    return [f"-L{folder}", "-Wl,--push-state,--no-as-needed", "-ltorch_cuda", "-Wl,--pop-state"]


# --- the compile -------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(folder: Path) -> Iterator[None]:
    """Set environment variables during a compile that has a folder of its own."""
    variables = _ninja_variables()
    for variable, name in (("CXX", "c++"), ("CC", "cc")):
        variables |= _compiler_variable(folder, variable, name)
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


def _compiler_variable(folder: Path, variable: str, name: str) -> dict[str, str]:
    """Return the variable with the compiler as one word, since torch takes no more: with arguments,
    or if its path needs quotes, as a script."""
    command = _command(variable, name)
    plain = len(command) == 1 and shlex.quote(command[0]) == os.environ.get(variable)
    if variable not in os.environ or plain:
        return {}
    script = folder / name  # torch does not know this name, so it asks for the version
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return {variable: str(script)}


def _ninja_variables() -> dict[str, str]:
    """Return variables for a compile: this Python's ninja on PATH, jobs that fit into memory."""
    variables = {}
    try:
        ninja = importlib.import_module("ninja")
    except ImportError:
        pass  # use the one on PATH; without one, torch says what to install
    else:
        variables["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    if "MAX_JOBS" not in os.environ:
        variables["MAX_JOBS"] = str(_jobs())
    return variables


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return cores or 1
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    fitting = int(match[1]) * 1024 // _BYTES_PER_JOB if match else 1
    return max(1, min(cores or 1, fitting))


@functools.cache
def sources_key() -> str:
    """Return a digest of every source and header: equal keys mean equal C++ and CUDA code."""
    digest = hashlib.sha256()
    root = csrc()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def jit_obstacle(library: str, torch: Any) -> tuple[str, str] | None:
    """Return the obstacle to compiling one library on first use, and the remedy, or None."""
    general = obstacle(torch)
    if library == "cuda" and general is None and (toolkit := cuda(torch)).home is None:
        return toolkit.reason, toolkit.fix
    return general


def cache_key(library: str, torch: Any) -> str:
    """Return the name of a cached library's folder: digests of the code and of the compilers.

    The first covers the sources, torch, the machine and the flags; the second the compilers and
    the variables that they obey. Without a compiler the second is `*`, a pattern that matches any.
    Neither covers Python, whose interface the libraries do not use.
    """
    machine = f"{platform.machine()} {platform.libc_ver()}"
    what = [sources_key(), torch.__version__, str(torch.version.git_version), machine]
    what += cxx_flags(library)
    if library == "cuda":
        what += [str(torch.version.cuda), archs(torch), *nvcc_flags(), *arch_flags(torch)]
    how = "*" if jit_obstacle(library, torch) else digest(_compilers(library, torch))
    return f"{library}-{digest(what)}-{how}"


_COMPILER_VARIABLES = (
    *("CXX", "CC", "CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "TORCH_NO_COMPILER_WRAPPER"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "PYTORCH_NVCC", "CUDA_INC_PATH"),
)


def _compilers(library: str, torch: Any) -> list[str]:
    """Return the compilers that a build runs, and the environment that they obey."""
    facts = [f"{name}={os.environ.get(name, '')}" for name in _COMPILER_VARIABLES]
    command = cxx()
    facts += [str(shutil.which(command[0])), output([*command, "--version"])]
    if library == "cuda":
        home = cuda(torch).home
        facts += [str(home), output([f"{home}/bin/nvcc", "--version"])]
    return facts


def digest(facts: list[str]) -> str:
    """Return a name for facts: equal names mean equal facts."""
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


# --- the record --------------------------------------------------------------------------------

_RECORD = "_build_info.json"


def write_record(folder: str, record: dict[str, Any]) -> None:
    """Write what an installation compiled, or why it did not, beside the package's modules."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    Path(folder, _RECORD).write_text(text, encoding="utf-8")


def installation() -> Path:
    """Return the folder into which an installation put the libraries and their record.

    A checkout from which the package was installed counts as installed: `python -m accumext`
    imports the checkout if it is the working folder, and would find no libraries there.
    """
    if in_checkout() and not (_FOLDER / _RECORD).exists():
        installed = Path(sysconfig.get_path("platlib"), "accumext", "backends")
        if _record_in(installed).get("sources") == sources_key():
            return installed
    return _FOLDER


def read_record() -> dict[str, Any]:
    """Return the record of the installation; empty if the package was never installed."""
    return _record_in(installation())


def _record_in(folder: Path) -> dict[str, Any]:
    """Return the record in a folder; empty if there is none, or a damaged one."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
