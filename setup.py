"""Compile the kernels against the torch of the environment; pyproject.toml says all else."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMPILING_COMMANDS = {"bdist_wheel", "build", "build_ext", "editable_wheel", "develop", "install"}


def load(name: str) -> Any:
    """Load a module of accumext/backends by path: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "accumext" / "backends" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, cache, progress = load("_build"), load("_cache"), load("_progress")
say = progress.announce  # into the build's output, which `pip install -v` shows
build.check_settings()
mode = build.setting("ACCUMEXT_BUILD")
compiler = shlex.join(build.cxx())
record: dict[str, Any] = {
    "sources": build.sources_key(),
    "torch": None,
    "torch_cuda": None,
    "nvcc": None,
    "archs": None,
    "compiled": [],
    "missing": {},
    "sha256": {},
}


def missing(library: str, reason: str, fix: str) -> None:
    """Note why a library is not compiled; stop if it was asked for."""
    required = mode == "require"
    if library == "cuda":
        wanted = build.setting("ACCUMEXT_CUDA") == "1"
        required = wanted or (required and record["torch_cuda"] is not None)
    if required:
        raise SystemExit(f"accumext: the {library} library cannot be compiled: {reason}. {fix}")
    say(f"the {library} library is not compiled: {reason}. {fix}")
    record["missing"][library] = {"reason": reason, "fix": fix}


def package_folder(command: Any, inplace: bool) -> Path:
    """Return the folder into which a command puts the package."""
    return (ROOT if inplace else Path(command.build_lib)) / "accumext"


def remove_libraries(folder: Path) -> None:
    """Remove what an earlier build left: a library that no longer compiles must not be shipped."""
    for path in folder.glob("_C_*.so"):
        path.unlink()


def copy_cached(library: str, key: str, to: Path) -> bool:
    """Copy a library that this user has compiled before; tell whether there is one."""
    try:
        cached = cache.libraries(cache.lasting_cache(), key, f"_C_{library}.so")
    except OSError:
        return False
    if not cached:
        return False
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(cached[0], to)
    say(f"the {library} library was compiled before, in {cached[0].parent}")
    return True


def cache_copy(library: str, key: str, path: Path) -> None:
    """Put a library into the cache, for the next installation, and for use without one."""
    try:
        folder = cache.lasting_cache() / key
        with cache.build_folder(folder) as build_folder:
            copy = build_folder / f"_C_{library}.so"
            shutil.copyfile(path, copy)
            cache.install(copy, folder)
    except OSError as error:
        say(f"the next installation compiles the {library} library again: {error}")


class BuildModules(build_py):
    """Copy the package, and record why nothing is compiled if nothing is."""

    def run(self) -> None:
        if self.editable_mode:
            remove_libraries(ROOT / "accumext" / "backends")
        else:
            shutil.rmtree(package_folder(self, False), ignore_errors=True)
        super().run()
        build.write_record(package_folder(self, self.editable_mode) / "backends", record)


class Wheel(bdist_wheel):
    """Make a wheel for one platform and any Python 3, whose interface the libraries do not use."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


def build_kernels(keys: dict[str, str], cpp_extension: Any) -> type:
    """Return the build_ext command of this torch: each library is compiled, or fails, alone."""

    class BuildKernels(cpp_extension.BuildExtension):
        extensions: list[Extension]

        def run(self) -> None:
            folder = package_folder(self, bool(self.inplace)) / "backends"
            super().run()
            libraries = folder.glob("_C_*.so")
            record["sha256"] = {path.name: cache.sha256(path) for path in libraries}
            build.write_record(folder, record)

        def build_extensions(self) -> None:
            self.extensions = [wanted for wanted in self.extensions if self.obtain(wanted)]

        def obtain(self, extension: Extension) -> bool:
            """Copy a library of the cache, or compile and cache it; tell whether it is there."""
            library = extension.name.rpartition("_")[2]
            path = Path(self.get_ext_fullpath(extension.name))
            key = keys[library]
            if not copy_cached(library, key, path):
                begin = time.monotonic()
                words = f"compiling the {library} library"
                more = f", which takes {build.COMPILE_TIMES[library]}"
                objects = Path(self.build_temp, os.path.relpath(build.csrc(), ROOT), library)
                how_far = progress.files_done(objects, build.efforts(library))
                self.extensions = [extension]
                # The flags of the environment, but not those that Python was built with.
                flags = (os.environ.get(name, "") for name in ("CFLAGS", "CPPFLAGS"))
                self.compiler.compiler_so[1:] = ["-fPIC", *shlex.split(" ".join(flags))]
                try:
                    with (
                        tempfile.TemporaryDirectory() as stubs,
                        progress.announced(words, more, how_far),
                    ):
                        if library == "cuda":
                            extension.extra_link_args += build.torch_cuda_flags(Path(stubs))
                        super().build_extensions()
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    reason = f"{reason}, with {compiler}"
                    missing(library, reason, "pip install -v . shows the compiler's words")
                    return False
                say(f"compiled the {library} library in {time.monotonic() - begin:.0f} s")
                cache_copy(library, key, path)
            record["compiled"].append(library)
            return True

    return BuildKernels


def extensions(torch: Any, cpp_extension: Any) -> list[Extension]:
    """Return the libraries that this machine is to compile."""

    def library(name: str, **extra_flags: list[str]) -> Any:
        return cpp_extension.CppExtension(
            f"accumext.backends._C_{name}",
            [os.path.relpath(path, ROOT) for path in build.sources(name)],
            include_dirs=[str(build.csrc())],
            extra_compile_args={"cxx": build.cxx_flags(name), **extra_flags},
            py_limited_api=True,
        )

    chosen = [library("cpu")]
    cuda = build.cuda(torch)
    if cuda.home is None:
        missing("cuda", cuda.reason, cuda.fix)
    else:
        cpp_extension.CUDA_HOME = cuda.home
        record.update(nvcc=cuda.version, archs=build.archs(torch))
        chosen.append(library("cuda", nvcc=build.nvcc_flags() + build.arch_flags(torch)))
    return chosen


def usable_torch() -> Any | None:
    """Return the torch to compile against; None, with the reason noted, if nothing can be."""
    if mode == "off":
        missing("cpu", "ACCUMEXT_BUILD=off", build.ON_FIRST_USE)
        return None
    torch = build.find_torch()
    if torch is None:
        missing("cpu", "no torch was visible to the build", build.NO_TORCH_FIX)
        return None
    record.update(torch=torch.__version__, torch_cuda=torch.version.cuda)
    obstacle = build.obstacle(torch)
    if obstacle is not None:
        missing("cpu", *obstacle)
        return None
    return torch


def readme() -> str:
    """Return README with links to the files of this release, as a package index has none."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert version is not None
    repository = "https://{}/accumext/accumext/{}v" + version[1] + "/"
    text = (ROOT / "README.md").read_text("utf-8")
    pictures = repository.format("raw.githubusercontent.com", "")
    text = re.sub(r'(\bsrc(?:set)?=")(?!https:)', rf"\g<1>{pictures}", text)
    return re.sub(r"\]\((?!https:|#)", f"]({repository.format('github.com', 'blob/')}", text)


commands: dict[str, type] = {"build_py": BuildModules, "bdist_wheel": Wheel}
modules: list[Extension] = []
if COMPILING_COMMANDS & set(sys.argv[1:]) and (torch := usable_torch()) is not None:
    cpp_extension = build.cpp_extension()
    modules = extensions(torch, cpp_extension)
    libraries = [module.name.rpartition("_")[2] for module in modules]
    keys = {library: build.cache_key(library, torch) for library in libraries}
    commands["build_ext"] = build_kernels(keys, cpp_extension)
with tempfile.TemporaryDirectory() as folder, build.environment(Path(folder)):
    setup(
        ext_modules=modules,
        cmdclass=commands,
        long_description=readme(),
        long_description_content_type="text/markdown",
    )
