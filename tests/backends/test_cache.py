"""The cache of libraries compiled on first use, under attack, damage and concurrency.

Each case is played in processes of its own on a tree whose kernel compiles in seconds; most begin
with a copy of a cache that was filled once.
"""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.forks import Forked
from support.programs import compiler, executable
from support.source_tree import NATIVE, PROBE, REFERENCE, SHARED, SHOW, Tree

from accumext.backends import _build, _cache

pytestmark = pytest.mark.build

OTHER_USER = 65534  # "nobody" on every Linux
NO_COMPILER = {"CXX": "/nonexistent"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A tree whose cache holds the compiled library."""
    tree = Tree(tmp_path_factory.mktemp("filled") / "tree")
    assert tree.show()[0] == NATIVE
    return tree


@pytest.fixture(scope="module")
def empty_library(tmp_path_factory):
    """A library that loads and has no operators."""
    folder = tmp_path_factory.mktemp("empty")
    source, library = folder / "empty.cpp", folder / "empty.so"
    source.write_text("int nothing = 0;\n")
    subprocess.run([*compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    return library.read_bytes()


@pytest.fixture
def tree(filled, tmp_path):
    tree = Tree(tmp_path / "tree")
    shutil.copytree(filled.cache, tree.cache)
    return tree


def library_of(tree: Tree) -> Path:
    return tree.built() / "_C_cpu.so"


def seal(library: Path) -> None:
    """Make the cache believe in a library, as one can who may write there."""
    library.with_name(f"{library.name}.sha256").write_bytes(_cache._checksum_line(library))


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("accumext*/*.tmp*"))


# --- whose folder it is


@pytest.fixture
def cached_library(tmp_path):
    """Keep a file that passes for a library, while the umask forbids nothing."""
    before = os.umask(0)
    try:
        with _cache.build_folder(tmp_path / "key") as build_folder:
            (build_folder / "library.so").write_bytes(b"compiled")
            _cache.install(build_folder / "library.so", tmp_path / "key")
    finally:
        os.umask(before)
    return tmp_path / "key" / "library.so"


def parts_of(library: Path) -> list[Path]:
    """All that a library is loaded by."""
    return [library.parent, library, _cache._checksum_file(library)]


def believed(library: Path) -> bool:
    return _cache.libraries(library.parents[1], library.parent.name, library.name) == [library]


def only_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")


def give_away(path: Path) -> str:
    only_root()
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
def test_what_others_can_write_to_is_not_loaded(expose, part, cached_library, caplog):
    assert believed(cached_library)
    why = expose(parts_of(cached_library)[part])
    assert not believed(cached_library)
    assert f"{cached_library} is not loaded: {why}" in caplog.text


@EXPOSED
def test_a_folder_that_others_can_write_to_is_not_used(expose, tmp_path, monkeypatch):
    root, reason = opened(tmp_path, monkeypatch)
    assert (root, reason) == (tmp_path / f"accumext-{os.geteuid()}", "")
    why = expose(root)
    root, reason = opened(tmp_path, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(f"{why}; set TORCH_EXTENSIONS_DIR to a folder of your own")


def test_every_byte_counts(cached_library):
    cached_library.write_bytes(b"Compiled")
    assert not believed(cached_library)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", range(3), ids=["folder", "library", "record"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("moved")])
def test_what_is_no_file_in_a_folder_is_damage(make, part, cached_library):
    path = parts_of(cached_library)[part]
    path.rename(path.with_name("moved"))
    make(path)
    assert not believed(cached_library)


def file_lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    return _cache.file_lock(folder / "lock", contextlib.nullcontext())


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_a_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with file_lock(tmp_path):
        pass


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
    only_root()
    link = place / "link"
    link.symlink_to(place)
    os.lchown(link, OTHER_USER, OTHER_USER)
    return link / "place", f"{link} is a symbolic link of user {OTHER_USER}; set"


@pytest.mark.parametrize("link", [in_place_of_the_folder, in_a_circle, of_another_user])
def test_a_link_is_not_followed(link, tmp_path, monkeypatch):
    place, why = link(tmp_path)
    root, reason = opened(place, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(why)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_place_where_anyone_can_rename_is_not_used(depth, tmp_path, monkeypatch):
    place = tmp_path / "shared" / "place"
    place.mkdir(parents=True)
    exposed = (place, place.parent)[depth]
    exposed.chmod(0o777)
    root, reason = opened(place, monkeypatch)
    assert not root.is_relative_to(tmp_path)
    assert reason.startswith(f"anyone can rename what is in {exposed}; set TORCH_EXTENSIONS_DIR")
    exposed.chmod(0o1777)
    assert opened(place, monkeypatch) == (place / f"accumext-{os.geteuid()}", "")


def test_links_of_this_user_are_followed(tmp_path, monkeypatch):
    place = tmp_path / "real" / "place"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to("../second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    root, reason = opened(tmp_path / "links" / "first" / "place", monkeypatch)
    assert (root, reason) == (place / f"accumext-{os.geteuid()}", "")


def test_folders_on_the_way_are_closed_to_others(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        root, reason = opened(tmp_path / "new" / "place", monkeypatch)
    finally:
        os.umask(before)
    assert reason == ""
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent, tmp_path / "new")]
    assert modes == [0o700, 0o755, 0o755]


def test_nothing_is_compiled_where_no_folder_is_safe(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(RuntimeError, match=r"set TORCH_EXTENSIONS_DIR to .*; set TMPDIR"):
        opened(tmp_path / "place", monkeypatch)


def test_the_default_place_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    root, _ = opened("", monkeypatch)
    assert root == tmp_path / ".cache" / "torch_extensions" / f"accumext-{os.geteuid()}"


def test_a_user_without_a_home_compiles_for_one_process(monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    root, reason = opened("", monkeypatch)
    assert root.parent == Path(tempfile.gettempdir()).resolve()
    assert reason.startswith(f"user {os.geteuid()} has no home folder; set TORCH_EXTENSIONS_DIR")


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
def test_a_damaged_library_is_compiled_again(damage, tree, empty_library):
    library = library_of(tree)
    damage(library, empty_library)
    result, backend, reason = tree.show()
    assert (result, backend) == (NATIVE, "cpu")
    assert reason == f"CPU kernels are in use (compiled on this machine, in {library.parent})."
    assert leftovers(tree.cache) == []
    assert tree.show(**NO_COMPILER) == (result, backend, reason)  # not compiled any more


def test_a_damaged_library_without_a_compiler_leaves_pytorch(tree, empty_library):
    without_operators(library_of(tree), empty_library)
    result, backend, reason = tree.show(**NO_COMPILER)
    assert (result, backend) == (REFERENCE, "reference")
    assert reason.endswith("no C++ compiler (/nonexistent) was found. Install g++, or set CXX).")


# --- installed libraries


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9999, None], ids=str)
def test_an_installed_library_that_does_not_load_is_an_error_with_the_command(
    part, tree, empty_library
):
    """Cut short, or without operators."""
    tree.install()
    if part is None:
        tree.installed.write_bytes(empty_library)
    else:
        os.truncate(tree.installed, int(tree.installed.stat().st_size * part))
    done = tree.run("import accumext")
    assert done.returncode == 1
    assert "RuntimeError: accumext: the installed CPU kernels do not load: " in done.stderr
    assert part is not None or "has no CPU kernel of scale_.scalar. To compile" in done.stderr
    assert "pip install --force-reinstall --no-deps ." in done.stderr
    assert tree.show(ACCUMEXT_BACKEND="reference")[0] == REFERENCE


def test_a_library_that_was_stripped_is_used_and_the_doctor_says_so(tree):
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("strip was not found")
    tree.install()
    code = "from accumext.backends import _doctor; print(_doctor._changed_libraries())"
    assert tree.run(code).stdout.strip() == "[]"
    before = tree.installed.stat().st_size
    subprocess.run([strip, tree.installed], check=True)
    assert tree.installed.stat().st_size < before
    assert tree.show()[0] == NATIVE
    assert tree.run(code).stdout.strip() == f"['{tree.installed.name}']"


@pytest.mark.parametrize("content", ["", '{"sources": ', "null", "[]"])
def test_a_damaged_record_of_the_installation_is_as_good_as_none(content, tree):
    (tree.folder / "accumext" / "backends" / "_build_info.json").write_text(content)
    assert tree.show()[0] == NATIVE


# --- at the same time, or not to the end


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_a_killed_compile_neither_hangs_nor_harms_the_next(tmp_path):
    tree, slow = Tree(tmp_path / "tree"), tmp_path / "slow"
    executable(slow, 'case "$*" in *probe.cpp*) sleep 300;; esac\n' + SHARED)
    process = tree.start(SHOW, CXX=str(slow))
    wait_for(lambda: any(folder.glob("build.ninja") for folder in leftovers(tree.cache)))
    process.kill()
    process.communicate(timeout=100)
    executable(slow, SHARED)  # the same compiler, mended
    (left,) = leftovers(tree.cache)
    assert tree.show(CXX=str(slow))[0] == NATIVE
    assert left.exists()  # its process could be alive
    a_day_ago = time.time() - 25 * 3600
    os.utime(left, (a_day_ago, a_day_ago))
    tree.source.write_text(PROBE.replace("42", "43"))
    assert tree.show(CXX=str(slow))[0] == "43.0"
    assert leftovers(tree.cache) == []


def test_a_compile_that_takes_too_long_is_not_waited_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_cache, "_WAIT_S", 0.2)
    with file_lock(tmp_path), file_lock(tmp_path):
        assert "another process has held" in caplog.text


NO_LOCKS = """
import errno, fcntl

def flock(file, operation):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
"""


def test_processes_that_cannot_lock_each_keep_a_whole_library(tmp_path):
    tree = Tree(tmp_path / "tree")
    processes = [tree.start(NO_LOCKS + SHOW) for _ in range(3)]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [out.partition("|")[0] for out, _ in outputs] == [NATIVE] * 3, outputs
    assert leftovers(tree.cache) == []
    assert tree.show(**NO_COMPILER)[0] == NATIVE


REPAIR = """
import sys
from pathlib import Path
from accumext.backends import _cache

folder, content = Path(sys.argv[1]), bytes(100_000)
for _ in range(60):
    with _cache.build_folder(folder) as build_folder:
        (build_folder / "library.so").write_bytes(content)
        try:
            _cache.install(build_folder / "library.so", folder)
        except OSError:
            pass  # another process was quicker
"""


@contextlib.contextmanager
def descriptor_of(folder: Path):
    """Open a folder: while it is open, no new folder gets its inode number."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_library_is_whole_or_absent_while_processes_replace_it(tmp_path):
    folder = tmp_path / "cpu-key"
    env = os.environ | {"PYTHONPATH": str(Path(_cache.__file__).parents[2])}
    processes = [Forked("-c", REPAIR, folder, cwd=tmp_path, env=env) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(process.communicate, timeout=100) for process in processes]
        seen = 0
        while not all(end.done() for end in ends):
            with contextlib.suppress(FileNotFoundError), descriptor_of(folder) as descriptor:
                files = sorted(os.listdir(descriptor))
                if os.path.samestat(os.fstat(descriptor), folder.stat()):  # else it is removed
                    assert files == ["library.so", "library.so.sha256"]
                    seen += 1
    assert [process.returncode for process in processes] == [0, 0]
    assert seen > 0
    assert _cache.libraries(tmp_path, "cpu-key", "library.so") == [folder / "library.so"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu-key"]


READ_ONLY = """
import os
access = os.access
os.access = lambda path, *how: "extensions/accumext-" not in str(path) and access(path, *how)
"""  # for root, too


def test_a_library_is_used_from_a_folder_that_cannot_be_written_to(tree):
    assert f"{NATIVE}|cpu|" in tree.run(READ_ONLY + SHOW, **NO_COMPILER).stdout
    folder = tree.built()
    shutil.rmtree(folder)
    result, _, reason = tree.run(READ_ONLY + SHOW).stdout.split("|")
    assert result == NATIVE
    assert f"for this process alone: {folder.parent} cannot be written to; set" in reason


def test_a_disk_that_is_full_while_compiling_leaves_pytorch(tmp_path):
    words = f"c++: error: {os.strerror(errno.ENOSPC)}"
    script = f'case "$*" in *probe.cpp*) echo "{words}" >&2; exit 1;; esac'
    tree = Tree(tmp_path / "tree")
    result, backend, reason = tree.show(CXX=executable(tmp_path / "full", script))
    assert (result, backend) == (REFERENCE, "reference")
    assert reason.endswith("set TORCH_EXTENSIONS_DIR and TMPDIR to folders with more room).")
    assert leftovers(tree.cache) == []


FULL_WHEN_KEEPING = """
import errno, os
from pathlib import Path

def write_bytes(path, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

Path.write_bytes = write_bytes
"""


def test_a_library_that_cannot_be_kept_is_used_all_the_same(tmp_path):
    tree = Tree(tmp_path / "tree")
    done = tree.run(FULL_WHEN_KEEPING + SHOW)
    result, backend, reason = done.stdout.strip().split("|")
    assert (result, backend) == (NATIVE, "cpu")
    assert "it could not be kept (No space left on device); set TORCH_EXTENSIONS_DIR" in reason
    assert list(tree.cache.glob("accumext*/*/")) == []


# --- what decides on the name


def key(**variables: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name in _build._COMPILER_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return _build.cache_key("cpu", torch)


def test_what_compiles_is_in_the_key(tmp_path, monkeypatch):
    """The variables that compilers read, the compiler, its version, and where it was found."""
    keys = [key(), *(key(**{name: "-O0"}) for name in _build._COMPILER_VARIABLES[1:])]
    for folder, version in (("first", 13), ("first", 14), ("second", 13)):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = executable(tmp_path / folder / "c++", f"echo g++ {version}")
        keys.append(key(CXX=path))
        assert key(CXX=path) == keys[-1]
        monkeypatch.setenv("PATH", f"{tmp_path / folder}:/usr/bin:/bin")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    assert len({name.split("-")[1] for name in keys}) == 1


def test_what_is_compiled_is_in_the_key(monkeypatch):
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


def test_cuda_and_its_architectures_are_in_the_key(tmp_path, monkeypatch):
    def cuda_key() -> str:
        return _build.cache_key("cuda", torch)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_build, "cuda", lambda torch: _build.Cuda(str(tmp_path), "13.0", "", ""))
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "nvcc", "echo 13.0")
    keys = [cuda_key()]
    for change in (
        lambda: monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0"),
        lambda: monkeypatch.setattr(torch.version, "cuda", "13.2"),
        lambda: monkeypatch.setattr(_build, "nvcc_flags", lambda: ["-O1"]),
        lambda: executable(tmp_path / "bin" / "nvcc", "echo 13.1"),
    ):
        change()
        keys.append(cuda_key())
    assert len(set(keys)) == len(keys)
    monkeypatch.setattr(_build, "cuda", lambda torch: _build.Cuda(None, None, "no nvcc", "get it"))
    assert cuda_key().endswith("-*")
    assert _build.jit_obstacle("cuda", torch) == ("no nvcc", "get it")


def test_without_a_compiler_any_of_the_same_sources_will_do():
    prefix, _, compiler = key().rpartition("-")
    assert key(CXX="/nonexistent") == f"{prefix}-*"
    assert compiler != "*"
