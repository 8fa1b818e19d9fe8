"""Every way to install the package, each in a subprocess and a virtual environment of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.source_tree import COMPILER

import accumext

pytestmark = pytest.mark.build

SHIPPED = ["accumext", "csrc", "examples/demo", "setup.py", "pyproject.toml", "MANIFEST.in"]
SHIPPED += ["README.md", "LICENSE"]
NO_COMPILER = {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
BUILD_SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
WARNING = re.compile(r".*(?:Warning\b|\bwarning:).*")
BROKEN_SOURCE = "#error this source is meant to fail\n"


class Environment:
    """A virtual environment that sees the packages of this one, without accumext."""

    def __init__(self, folder: Path, hide: tuple[str, ...] = ()) -> None:
        venv.create(folder)
        self.python = str(folder / "bin" / "python")
        self.folder = folder
        self.extensions = folder / "extensions"
        seen = folder / "seen"
        seen.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("accumext", "__", *hide)):
                (seen / entry.name).symlink_to(entry)
        if not hide and not (seen / "torch").exists():  # torch in a user's or the system's packages
            for entry in Path(torch.__file__).parents[1].glob("torch*"):
                (seen / entry.name).symlink_to(entry)
        version = "python{}.{}".format(*sys.version_info)
        (folder / "lib" / version / "site-packages" / "seen.pth").write_text(f"{seen}\n")

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python, away from the sources."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCUMEXT_", "PYTHON"))}
        return subprocess.run(
            [self.python, *args],
            cwd=self.folder,
            env=clean | COMPILER | {"TORCH_EXTENSIONS_DIR": str(self.extensions)} | variables,
            capture_output=True,
            text=True,
            timeout=500,
        )

    def pip(self, *args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run pip without the package index."""
        options = ("--no-deps", "--no-index", "--no-build-isolation", "-v")
        return self.run("-m", "pip", *map(str, args), *options, **variables)

    def install(self, *args: object, **variables: str) -> str:
        """Install what is named; return what was printed."""
        return succeed(self.pip("install", *args, **variables))

    def wheel(self, source: Path, **variables: str) -> tuple[Path, str]:
        """Build a wheel; return it, and what was printed."""
        folder = self.folder / "wheel"
        output = succeed(self.pip("wheel", source, "-w", folder, **variables))
        (wheel,) = folder.glob("*.whl")
        return wheel, output

    def doctor(self, **variables: str) -> dict:
        """Return the report of the package installed here, whose self-test passed."""
        done = self.run("-m", "accumext", "doctor", "--json", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def project(tmp_path):
    """Make a clean copy of what is shipped."""
    return copy_project(tmp_path / "project")


def copy_project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


@pytest.fixture
def environment_without_torch(tmp_path):
    return Environment(tmp_path / "environment_without_torch", hide=("torch",))


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def packed(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def record_in(wheel: Path) -> dict:
    return json.loads(zipfile.ZipFile(wheel).read("accumext/backends/_build_info.json"))


def assert_links_lead_out_of_the_repository(wheel: Path) -> None:
    """Of README on the page of a package index."""
    (name,) = (name for name in packed(wheel) if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(name).decode()
    targets = re.findall(r'\]\(([^)]+)\)|\bsrc(?:set)?="([^"]+)"', text.partition("\n\n")[2])
    links = ["".join(target) for target in targets]
    assert [link for link in links if not link.startswith("https://")] == []
    for ours in (
        "github.com/accumext/accumext/blob",
        "raw.githubusercontent.com/accumext/accumext",
    ):
        files = [link.partition(f"{ours}/v{accumext.__version__}/")[2] for link in links]
        files = [name.partition("#")[0] for name in files if name]
        assert files
        assert all((ROOT / name).exists() for name in files), files


def expected_sources() -> set[str]:
    paths = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    ]
    return {f"accumext/_csrc/{path.relative_to(ROOT / 'csrc')}" for path in paths}


def listed_files() -> set[str]:
    """Return the names of the files in the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not in a git repository")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_sdist_builds_a_compiled_wheel_that_works_without_a_warning(tmp_path):
    environment = Environment(tmp_path / "environment", hide=("numpy",))  # torch warns of that
    source, files = tmp_path / "source", listed_files()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in ("tests/__pycache__/x.pyc", "accumext/backends/_C_cpu.abi3.so"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).touch()
    done = subprocess.run(
        [environment.python, "-W", "error", "-c", BUILD_SDIST],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert WARNING.findall(succeed(done)) == []
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as contents:
        packed_files = {entry.name.partition("/")[2] for entry in contents if entry.isfile()}
    generated = {name for name in packed_files if "egg-info" in name} | {"PKG-INFO", "setup.cfg"}
    assert packed_files - generated == {name for name in files if not name.startswith(".git")}

    wheel, output = environment.wheel(sdist)
    assert WARNING.findall(output) == []
    assert "accumext: compiling the cpu library, which takes about a minute on two cores" in output
    assert re.search(r"accumext: compiled the cpu library in \d+ s", output)

    modules = {
        f"accumext/{path.relative_to(ROOT / 'accumext')}"
        for path in (ROOT / "accumext").rglob("*.py")
    }
    expected = modules | expected_sources()
    expected |= {"accumext/py.typed", "accumext/backends/_C_cpu.abi3.so"}
    expected |= {f"accumext/demo/{path.name}" for path in (ROOT / "examples/demo").glob("*.py")}
    assert expected <= packed(wheel)
    assert not any(name.startswith(("tests", "csrc")) for name in packed(wheel))
    assert "-py3-none-linux" in wheel.name  # any Python 3
    assert record_in(wheel)["torch"] == torch.__version__
    assert_links_lead_out_of_the_repository(wheel)

    environment.install(wheel)
    report = environment.doctor(ACCUMEXT_BACKEND="native")
    assert report["backend"] == "cpu"
    assert "compiled at installation" in report["reason"]
    assert "docstrings to learn" in succeed(environment.run("-m", "accumext", "demo", "--help"))


def test_an_installation_copies_what_was_compiled_before(project, environment, tmp_path):
    assert "compiling the cpu library" in environment.install(project)
    another = copy_project(tmp_path / "another")
    output = environment.install("--force-reinstall", another)
    (kept,) = environment.extensions.glob("*/cpu-*/_C_cpu.so")
    assert f"the cpu library was compiled before, in {kept.parent}" in output
    assert environment.doctor(ACCUMEXT_BACKEND="native")["backend"] == "cpu"
    report = environment.doctor(ACCUMEXT_BACKEND="jit")
    assert f"compiled on this machine, in {kept.parent}" in report["reason"]

    kept.write_bytes(kept.read_bytes()[:-1])
    assert "compiling the cpu library" in environment.install("--force-reinstall", another)
    assert environment.doctor(ACCUMEXT_BACKEND="native")["backend"] == "cpu"


def test_editable_install_compiles_in_place(project, environment):
    environment.install("-e", project)
    assert environment.doctor(ACCUMEXT_BACKEND="native")["backend"] == "cpu"
    assert (project / "accumext" / "backends" / "_C_cpu.abi3.so").exists()

    header = project / "csrc" / "common" / "chunks.h"
    header.write_text(header.read_text() + "// changed\n")
    done = environment.run("-c", "import accumext", ACCUMEXT_BACKEND="native")
    assert "the sources have changed since they were compiled" in done.stderr

    environment.install("-e", project, ACCUMEXT_BUILD="off")
    assert not list((project / "accumext").rglob("*.so"))


@pytest.mark.network
@pytest.mark.parametrize("editable", [(), ("-e",)], ids=["regular", "editable"])
def test_isolated_install_finds_the_torch_of_the_environment(project, environment, editable):
    succeed(environment.run("-m", "pip", "install", "--no-deps", "-v", *editable, str(project)))
    assert environment.doctor(ACCUMEXT_BACKEND="native")["backend"] == "cpu"


def test_without_torch_a_pure_wheel_compiles_on_first_use(
    project, environment_without_torch, environment
):
    wheel, output = environment_without_torch.wheel(project)
    assert "no torch was visible to the build. The kernels are compiled on first use" in output
    assert wheel.name.endswith("-py3-none-any.whl")
    assert expected_sources() <= packed(wheel)
    assert record_in(wheel)["compiled"] == []

    environment.install(wheel)
    report = environment.doctor()
    assert report["backend"] == "cpu"
    assert "compiled on this machine" in report["reason"]


def test_without_a_compiler_the_install_succeeds_and_pytorch_answers(project, environment):
    output = environment.install(project, **NO_COMPILER)
    assert "no C++ compiler (/nonexistent/c++) was found. Install g++" in output
    report = environment.doctor(**NO_COMPILER)
    assert report["backend"] == "reference"
    assert report["fix"] == "Install g++, or set CXX"
    assert "no C++ compiler (/nonexistent/c++) was found" in report["reason"]


def test_a_source_that_does_not_compile_is_recorded(project, environment):
    (project / "csrc" / "cpu" / "broken.cpp").write_text(BROKEN_SOURCE)
    wheel, _ = environment.wheel(project)
    assert "accumext/backends/_C_cpu.abi3.so" not in packed(wheel)
    assert "cpu" in record_in(wheel)["missing"]
    assert record_in(wheel)["compiled"] == []


@pytest.mark.parametrize("obstacle", ["no torch", "no compiler", "a broken source"])
def test_require_fails_where_auto_would_go_without(
    project, environment, environment_without_torch, obstacle
):
    chosen = environment_without_torch if obstacle == "no torch" else environment
    variables = NO_COMPILER if obstacle == "no compiler" else {}
    if obstacle == "a broken source":
        (project / "csrc" / "cpu" / "broken.cpp").write_text(BROKEN_SOURCE)
    done = chosen.pip("install", project, ACCUMEXT_BUILD="require", **variables)
    assert done.returncode != 0
    assert "accumext: the cpu library cannot be compiled" in done.stdout + done.stderr


def test_cuda_kernels_cross_compile_and_stay_out_of_a_cpu_torch(project, environment, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc was not found")
    for path in (project / "csrc" / "cuda").rglob("*.cu"):
        if path.stem != "upload_cache":  # nothing is loaded
            path.unlink()  # .ci/nvcc.py compiles all
    wheel, _ = environment.wheel(project, ACCUMEXT_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0")
    assert "accumext/backends/_C_cuda.abi3.so" in packed(wheel)
    assert record_in(wheel)["archs"] == "9.0"
    with zipfile.ZipFile(wheel) as contents:
        library = contents.extract("accumext/backends/_C_cuda.abi3.so", tmp_path)
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "[libtorch_cuda.so]" in needed.stdout  # that of whatever torch loads it
    environment.install(wheel)
    if torch.version.cuda is None:
        assert environment.doctor()["backend"] == "cpu"


RELEASE = accumext.__version__
STATED = {
    "pyproject.toml": rf'^version = "{RELEASE}"$',
    "CITATION.cff": rf"^version: {RELEASE}$",
    "CHANGELOG.md": rf"^## \[{RELEASE}\] - ",
}


@pytest.mark.parametrize("file", STATED)
def test_the_version_is_the_same_everywhere(file):
    assert re.search(STATED[file], (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_citation_has_the_day_of_the_release():
    changelog, citation = ((ROOT / f).read_text("utf-8") for f in ("CHANGELOG.md", "CITATION.cff"))
    (day,) = re.findall(rf"^## \[{re.escape(RELEASE)}\] - (.+)$", changelog, re.MULTILINE)
    assert f'date-released: "{day}"\n' in citation
