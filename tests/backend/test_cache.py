"""The cache of libraries compiled on first use, under attack, damage and concurrency.

Each case is played in processes of its own on a tree whose kernel compiles in seconds; most begin
with a copy of a cache that was filled once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.source_tree import NATIVE, PROBE, REFERENCE, SHOW, Tree, as_user

from accumext.backend import _build, _cache

pytestmark = pytest.mark.build

OTHER_USER = 65534  # "nobody" on every Linux
HOMELESS_USER = 54321  # in no list of users

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A tree whose cache holds the compiled library."""
    tree = Tree(tmp_path_factory.mktemp("filled") / "tree")
    assert tree.show()[0] == NATIVE
    return tree


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that answers 666."""
    tree = Tree(tmp_path_factory.mktemp("planted") / "tree")
    tree.source.write_text(PROBE.replace("42", "666"))
    assert tree.show()[0] == "666.0"
    return library_of(tree).read_bytes()


@pytest.fixture(scope="module")
def empty_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that loads and has no operators."""
    folder = tmp_path_factory.mktemp("empty")
    source, library = folder / "empty.cpp", folder / "empty.so"
    source.write_text("int nothing = 0;\n")
    compiler = os.environ.get("CXX") or "c++"
    subprocess.run([*compiler.split(), "-shared", "-fPIC", source, "-o", library], check=True)
    return library.read_bytes()


@pytest.fixture
def tree(filled: Tree, tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "tree")
    shutil.copytree(filled.cache, tree.cache)
    return tree


@pytest.fixture
def open_tree() -> Iterator[Tree]:
    """A tree with an empty cache, in a folder that other users can enter."""
    as_user(OTHER_USER)  # skips where that cannot be
    folder = Path(tempfile.mkdtemp(prefix="accumext-test-"))
    folder.chmod(0o755)
    tree = Tree(folder / "tree")
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield tree
    shutil.rmtree(folder)


def library_of(tree: Tree) -> Path:
    return tree.built() / "_C_cpu.so"


def seal(library: Path) -> None:
    """Make the cache believe in a library, as one can who may write there."""
    library.with_name(f"{library.name}.sha256").write_bytes(_cache._seal(library))


def give(path: Path, user: int) -> None:
    for found in [path, *path.rglob("*")]:
        os.lchown(found, user, user)


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("accumext*/*.tmp*"))


def without_compiler() -> dict[str, str]:
    return {"CXX": "/nonexistent"}


# --- whose folder it is


@as_root
def test_a_library_planted_by_another_user_is_not_loaded(tree: Tree, planted: bytes) -> None:
    library = library_of(tree)
    library.write_bytes(planted)
    seal(library)
    assert tree.show()[0] == "666.0"
    give(library.parents[1], OTHER_USER)
    result, _, reason = tree.show()
    assert result == NATIVE
    assert f"belongs to user {OTHER_USER}; set TORCH_EXTENSIONS_DIR to a folder of your" in reason
    assert library.read_bytes() == planted


@as_root
def test_two_users_share_a_place_and_no_library(open_tree: Tree) -> None:
    open_tree.cache.mkdir()
    open_tree.cache.chmod(0o1777)
    processes = [open_tree.start(SHOW, user) for user in (None, OTHER_USER)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [out.partition("|")[0] for out, _ in outputs] == [NATIVE, NATIVE], outputs
    libraries = sorted(open_tree.cache.glob("accumext-*/*/_C_cpu.so"))
    assert [library.stat().st_uid for library in libraries] == [0, OTHER_USER]
    modes = {stat.S_IMODE(library.parents[1].stat().st_mode) for library in libraries}
    assert modes == {0o700}


@pytest.fixture
def kept_library(tmp_path: Path) -> Path:
    """Keep a file that passes for a library, while the umask forbids nothing."""
    before = os.umask(0)
    try:
        with _cache.workshop(tmp_path / "key") as workshop:
            (workshop / "library.so").write_bytes(b"compiled")
            _cache.keep(workshop / "library.so", tmp_path / "key")
    finally:
        os.umask(before)
    return tmp_path / "key" / "library.so"


def parts_of(library: Path) -> list[Path]:
    """All that a library is loaded by."""
    return [library.parent, library, _cache._seal_path(library)]


def believed(library: Path) -> bool:
    return _cache.kept(library.parents[1], library.parent.name, library.name) == [library]


def give_away(path: Path) -> str:
    as_user(OTHER_USER)  # skips where that cannot be
    os.chown(path, OTHER_USER, OTHER_USER)
    return f"{path} belongs to user {OTHER_USER}"


def open_to(mode: int) -> Callable[[Path], str]:
    def change(path: Path) -> str:
        path.chmod(mode)
        return f"others can write to {path}"

    return change


EXPOSED = pytest.mark.parametrize(
    "expose", [open_to(0o770), open_to(0o707), give_away], ids=["group", "others", "another's"]
)


@pytest.mark.parametrize("part", range(3), ids=["folder", "library", "record"])
@EXPOSED
def test_what_others_can_write_to_is_not_loaded(
    expose: Callable[[Path], str],
    part: int,
    kept_library: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert believed(kept_library)
    why = expose(parts_of(kept_library)[part])
    assert not believed(kept_library)
    assert f"{kept_library} is not loaded: {why}" in caplog.text


@EXPOSED
def test_a_folder_that_others_can_write_to_is_not_used(
    expose: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, reason = opened(tmp_path, monkeypatch)
    assert (root, reason) == (tmp_path / f"accumext-{os.geteuid()}", "")
    why = expose(root)
    root, reason = opened(tmp_path, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(f"{why}; set TORCH_EXTENSIONS_DIR to a folder of your own")


def test_every_byte_counts(kept_library: Path) -> None:
    kept_library.write_bytes(b"Compiled")
    assert not believed(kept_library)


def test_the_record_is_one_that_sha256sum_reads(kept_library: Path) -> None:
    command = shutil.which("sha256sum")
    if command is None:
        pytest.skip("sha256sum was not found")
    command = [command, "--check", "library.so.sha256"]
    assert subprocess.run(command, cwd=kept_library.parent, check=False).returncode == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", range(3), ids=["folder", "library", "record"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("moved")])
def test_what_is_no_file_in_a_folder_is_damage(
    make: Callable[[Path], None], part: int, kept_library: Path
) -> None:
    path = parts_of(kept_library)[part]
    path.rename(path.with_name("moved"))
    make(path)
    assert not believed(kept_library)


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with _cache.turn(tmp_path / "lock"):
        pass


def test_a_library_that_others_could_write_is_compiled_again(tree: Tree, planted: bytes) -> None:
    library = library_of(tree)
    library.write_bytes(planted)
    seal(library)
    library.parent.chmod(0o777)
    result, _, reason = tree.show()
    assert (result, f"in {library.parent})" in reason) == (NATIVE, True)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert tree.show(**without_compiler())[0] == NATIVE


def opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The cache of this process, for a TORCH_EXTENSIONS_DIR."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place))
    return _cache.open_cache()


def in_place_of_the_folder(place: Path) -> tuple[Path, str]:
    link = place / f"accumext-{os.geteuid()}"
    (place / "elsewhere").mkdir()
    link.symlink_to(place / "elsewhere")
    return place, f"{link} is not a folder"


def in_a_circle(place: Path) -> tuple[Path, str]:
    (place / "circle").symlink_to("circle")
    return place / "circle", f"{place}/circle is a symbolic link"


def of_another_user(place: Path) -> tuple[Path, str]:
    as_user(OTHER_USER)  # skips where that cannot be
    link = place / "link"
    link.symlink_to(place)
    os.lchown(link, OTHER_USER, OTHER_USER)
    return link / "place", f"{link} is a symbolic link of user {OTHER_USER}; set"


@pytest.mark.parametrize("link", [in_place_of_the_folder, in_a_circle, of_another_user])
def test_a_link_is_not_followed(
    link: Callable[[Path], tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, why = link(tmp_path)
    root, reason = opened(place, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(why)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_place_where_anyone_can_rename_is_not_used(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "shared" / "place"
    place.mkdir(parents=True)
    exposed = (place, place.parent)[depth]
    exposed.chmod(0o777)
    root, reason = opened(place, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(f"anyone can rename what is in {exposed}; set TORCH_EXTENSIONS_DIR")
    exposed.chmod(0o1777)
    assert opened(place, monkeypatch) == (place / f"accumext-{os.geteuid()}", "")


def test_links_of_this_user_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "real" / "place"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to("../second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    root, reason = opened(tmp_path / "links" / "first" / "place", monkeypatch)
    assert (root, reason) == (place / f"accumext-{os.geteuid()}", "")


def test_folders_on_the_way_are_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        root, reason = opened(tmp_path / "new" / "place", monkeypatch)
    finally:
        os.umask(before)
    assert reason == ""
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent, tmp_path / "new")]
    assert modes == [0o700, 0o755, 0o755]


def test_nothing_is_compiled_where_no_folder_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(RuntimeError, match=r"set TORCH_EXTENSIONS_DIR to .*; set TMPDIR"):
        opened(tmp_path / "place", monkeypatch)


@as_root
def test_a_user_without_a_home_compiles_for_one_process(open_tree: Tree) -> None:
    nowhere = {"HOME": None, "XDG_CACHE_HOME": None, "TORCH_EXTENSIONS_DIR": None}
    temporary = open_tree.folder.parent / "tmp"
    open_tree.folder.chmod(0o1777)  # or `~` could not be made here, whoever tries
    result, _, reason = open_tree.show(HOMELESS_USER, **nowhere, TMPDIR=str(temporary))
    assert result == NATIVE
    assert f"for this process alone: user {HOMELESS_USER} has no home folder; set" in reason
    assert not (open_tree.folder / "~").exists()
    assert list(temporary.iterdir()) == []


def test_the_default_place_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    root, _ = opened("", monkeypatch)
    assert root == tmp_path / ".cache" / "torch_extensions" / f"accumext-{os.geteuid()}"


# --- damage


def cut(library: Path, empty: bytes) -> None:
    os.truncate(library, library.stat().st_size // 2)


def missing(library: Path, empty: bytes) -> None:
    library.unlink()


def without_operators(library: Path, empty: bytes) -> None:
    library.write_bytes(empty)
    seal(library)


def not_a_library(library: Path, empty: bytes) -> None:
    library.write_bytes(b"not a library")
    seal(library)


@pytest.mark.parametrize("damage", [cut, missing, without_operators, not_a_library])
def test_a_damaged_library_is_compiled_again(
    damage: Callable[[Path, bytes], None], tree: Tree, empty_library: bytes
) -> None:
    library = library_of(tree)
    damage(library, empty_library)
    result, backend, reason = tree.show()
    assert (result, backend) == (NATIVE, "cpu")
    assert reason == f"CPU kernels are in use (compiled on first use, in {library.parent})."
    assert leftovers(tree.cache) == []
    assert tree.show(**without_compiler()) == (result, backend, reason)  # not compiled any more


def test_a_damaged_library_without_a_compiler_leaves_pytorch(
    tree: Tree, empty_library: bytes
) -> None:
    without_operators(library_of(tree), empty_library)
    result, backend, reason = tree.show(**without_compiler())
    assert (result, backend) == (REFERENCE, "reference")
    assert reason.endswith("no C++ compiler (/nonexistent) was found. Install g++, or set CXX).")


# --- installed libraries


@pytest.fixture
def installed(tree: Tree) -> Tree:
    tree.install()
    return tree


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9999])
def test_an_installed_library_cut_short_is_an_error_with_the_command(
    part: float, installed: Tree
) -> None:
    os.truncate(installed.installed, int(installed.installed.stat().st_size * part))
    done = installed.run("import accumext")
    assert done.returncode == 1
    assert "RuntimeError: accumext: the installed CPU kernels do not load: " in done.stderr
    assert "pip install --force-reinstall --no-deps ." in done.stderr
    assert installed.show(ACCUMEXT_BACKEND="reference")[0] == REFERENCE


def test_an_installed_library_without_operators_is_an_error_with_the_command(
    installed: Tree, empty_library: bytes
) -> None:
    installed.installed.write_bytes(empty_library)
    done = installed.run("import accumext")
    assert "the installed CPU kernels do not load: " in done.stderr
    assert "has no CPU kernel of scale_.scalar. To compile them again, in the" in done.stderr


def test_a_library_that_was_stripped_is_used_and_the_doctor_says_so(installed: Tree) -> None:
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("strip was not found")
    code = "from accumext.backend import _doctor; print(_doctor._changed_libraries())"
    assert installed.run(code).stdout.strip() == "[]"
    before = installed.installed.stat().st_size
    subprocess.run([strip, installed.installed], check=True)
    assert installed.installed.stat().st_size < before
    assert installed.show()[0] == NATIVE
    assert installed.run(code).stdout.strip() == f"['{installed.installed.name}']"


@pytest.mark.parametrize("content", ["", '{"sources": ', "null", "[]"])
def test_a_damaged_record_of_the_installation_is_as_good_as_none(content: str, tree: Tree) -> None:
    (tree.folder / "accumext" / "backend" / "_build_info.json").write_text(content)
    assert tree.show()[0] == NATIVE


# --- at the same time, or not to the end


@pytest.fixture
def slow_compiler(tmp_path: Path) -> str:
    """A compiler that does not come back."""
    compiler = tmp_path / "slow"
    compiler.write_text('#!/bin/sh\ncase "$*" in *probe.cpp*) sleep 300;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    return str(compiler)


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_a_killed_compile_neither_hangs_nor_harms_the_next(
    tmp_path: Path, slow_compiler: str
) -> None:
    tree = Tree(tmp_path / "tree")
    process = tree.start(SHOW, CXX=slow_compiler)
    wait_for(lambda: any(folder.glob("build.ninja") for folder in leftovers(tree.cache)))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    Path(slow_compiler).write_text('#!/bin/sh\nexec c++ "$@"\n')  # the same compiler, mended
    (left,) = leftovers(tree.cache)
    assert tree.show(CXX=slow_compiler)[0] == NATIVE
    assert left.exists()  # its process could be alive
    a_day_ago = time.time() - 25 * 3600
    os.utime(left, (a_day_ago, a_day_ago))
    tree.source.write_text(PROBE.replace("42", "43"))
    assert tree.show(CXX=slow_compiler)[0] == "43.0"
    assert leftovers(tree.cache) == []


def test_a_compile_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cache, "_WAIT_S", 0.2)
    with _cache.turn(tmp_path / "lock"), _cache.turn(tmp_path / "lock"):
        assert "another process has held" in caplog.text


NO_LOCKS = """
import errno, fcntl

def flock(file, operation):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
"""


def test_processes_that_cannot_lock_each_keep_a_whole_library(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    processes = [tree.start(NO_LOCKS + SHOW) for _ in range(3)]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [out.partition("|")[0] for out, _ in outputs] == [NATIVE] * 3, outputs
    assert leftovers(tree.cache) == []
    assert tree.show(**without_compiler())[0] == NATIVE


REPAIR = """
import sys
from pathlib import Path
from accumext.backend import _cache

folder, content = Path(sys.argv[1]), bytes(100_000)
for _ in range(60):
    with _cache.workshop(folder) as workshop:
        (workshop / "library.so").write_bytes(content)
        try:
            _cache.keep(workshop / "library.so", folder)
        except OSError:
            pass  # another process was quicker
"""


def test_a_library_is_whole_or_absent_while_processes_replace_it(tmp_path: Path) -> None:
    folder = tmp_path / "cpu-key"
    command = [sys.executable, "-c", REPAIR, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(_cache.__file__).parents[2])}
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    seen = 0
    while any(process.poll() is None for process in processes):
        with contextlib.suppress(FileNotFoundError):
            before, files = folder.stat(), sorted(os.listdir(folder))
            if os.path.samestat(before, folder.stat()):  # else it was listed while it was removed
                assert files == ["library.so", "library.so.sha256"]
                seen += 1
    assert [process.returncode for process in processes] == [0, 0]
    assert seen > 0
    assert _cache.kept(tmp_path, "cpu-key", "library.so") == [folder / "library.so"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-key"]


@as_root
def test_a_library_is_used_from_a_folder_that_cannot_be_written_to(open_tree: Tree) -> None:
    open_tree.cache.mkdir()
    open_tree.cache.chmod(0o1777)
    assert open_tree.show(OTHER_USER)[0] == NATIVE
    folder = open_tree.built()
    folder.parent.chmod(0o500)
    result, _, reason = open_tree.show(OTHER_USER)
    assert (result, str(folder) in reason) == (NATIVE, True)
    folder.parent.chmod(0o700)
    shutil.rmtree(folder)
    folder.parent.chmod(0o500)
    result, _, reason = open_tree.show(OTHER_USER, TMPDIR=str(open_tree.folder.parent / "tmp"))
    assert result == NATIVE
    assert f"for this process alone: {folder.parent} cannot be written to; set" in reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of 64 KiB: too few for an object file and a library."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_while_compiling_leaves_pytorch(
    tmp_path: Path, small_disk: Path
) -> None:
    tree = Tree(tmp_path / "tree")
    result, backend, reason = tree.show(TORCH_EXTENSIONS_DIR=str(small_disk))
    assert (result, backend) == (REFERENCE, "reference")
    assert reason.endswith("set TORCH_EXTENSIONS_DIR and TMPDIR to folders with more room).")
    assert leftovers(small_disk) == []


FULL_WHEN_KEEPING = """
import errno, os

def fsync(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

os.fsync = fsync
"""


def test_a_library_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    done = tree.run(FULL_WHEN_KEEPING + SHOW)
    result, backend, reason = done.stdout.strip().split("|")
    assert (result, backend) == (NATIVE, "cpu")
    assert "it could not be kept (No space left on device); set TORCH_EXTENSIONS_DIR" in reason
    assert list(tree.cache.glob("accumext*/*/")) == []


# --- what decides on the name


def key(**variables: str) -> str:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for name in _build._COMPILER_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return _build.cache_key("cpu", torch)


def named_compiler(path: Path, version: str) -> str:
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_what_compiles_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that compilers read, the compiler, its version, and where it was found."""
    keys = [key(), *(key(**{name: "-O0"}) for name in _build._COMPILER_VARIABLES[1:])]
    for folder, version in (("first", 13), ("first", 14), ("second", 13)):
        (tmp_path / folder).mkdir(exist_ok=True)
        compiler = named_compiler(tmp_path / folder / "c++", f"g++ {version}")
        keys.append(key(CXX=compiler))
        assert key(CXX=compiler) == keys[-1]
        monkeypatch.setenv("PATH", f"{tmp_path / folder}:/usr/bin:/bin")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    assert len({name.split("-")[1] for name in keys}) == 1


def test_what_is_compiled_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    keys = [key()]
    for owner, name, other in (
        (_build, "sources_key", lambda: "other"),
        (_build, "cxx_flags", lambda library: ["other"]),
        (_build.platform, "machine", lambda: "other"),
        (_build.platform, "libc_ver", lambda: "other"),
        (torch.version, "git_version", "another commit"),
        (torch, "__version__", "2.99.0"),
    ):
        monkeypatch.setattr(owner, name, other)
        keys.append(key())
    assert len({name.split("-")[1] for name in keys}) == len(keys)
    assert len({name.split("-")[2] for name in keys}) == 1


def test_cuda_and_its_architectures_are_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def cuda_key() -> str:
        return _build.cache_key("cuda", torch)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_build, "cuda", lambda torch: _build.Cuda(str(tmp_path), "13.0", "", ""))
    (tmp_path / "bin").mkdir()
    named_compiler(tmp_path / "bin" / "nvcc", "13.0")
    keys = [cuda_key()]
    for change in (
        lambda: monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0"),
        lambda: monkeypatch.setattr(torch.version, "cuda", "13.2"),
        lambda: monkeypatch.setattr(_build, "nvcc_flags", lambda: ["-O1"]),
        lambda: named_compiler(tmp_path / "bin" / "nvcc", "13.1"),
    ):
        change()
        keys.append(cuda_key())
    assert len(set(keys)) == len(keys)
    monkeypatch.setattr(_build, "cuda", lambda torch: _build.Cuda(None, None, "no nvcc", "get it"))
    assert cuda_key().endswith("-*")
    assert _build.jit_obstacle("cuda", torch) == ("no nvcc", "get it")


def test_without_a_compiler_any_of_the_same_sources_will_do() -> None:
    prefix, _, compiler = key().rpartition("-")
    assert key(CXX="/nonexistent") == f"{prefix}-*"
    assert compiler != "*"
