"""The cache of compiled libraries, for the next process or installation, and its checks.

Verdicts of the self-test, which decide what is loaded, are kept in the same way: a "library" below
may be such a file. setup.py loads this file by path, as it does _build.py, so only the standard
library is imported here.

A library is code that runs as the user who loads it. So the cache, the folder of each library and
its files have to belong to this user, and nobody else may be able to write to them. torch, whose
folder of extensions holds the cache, asks for neither. A library is used only if its digest is the
recorded one. It appears whole, in one rename: a process that is killed, a full disk or a loss of
power cannot leave half of one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import TypeVar

_log = logging.getLogger("accumext")

T = TypeVar("T")

_WAIT_S = 600.0  # several times the longest compile: a longer one hangs
_STALE_S = 24 * 3600.0  # no compile takes as long: a killed one left a folder of this age
_KINDS = {"folder": stat.S_IFDIR, "file": stat.S_IFREG}


# --- whose folder it is ------------------------------------------------------------------------


def open_cache() -> tuple[Path, str]:
    """Return the folder of the cache, and why it is a temporary one; "" if it lasts."""
    try:
        return lasting_cache(), ""
    except OSError as error:
        return _temporary_cache(_text(error))


def lasting_cache() -> Path:
    """Return this user's folder among torch's extensions; make it if need be. OSError if unsafe."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"user {os.geteuid()} has no home folder") from error
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions"
    root = _safe_folder(Path(extensions)) / f"accumext-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    _require_own(root, "folder")
    return root


def _temporary_cache(why: str) -> tuple[Path, str]:
    """Make a cache that this process removes at its end; return it and why there is no other."""
    reason = f"{why}; set TORCH_EXTENSIONS_DIR to a folder of your own"
    _log.warning("nothing is kept for other processes: %s", reason)
    try:
        place = _safe_folder(Path(tempfile.gettempdir()))
    except OSError as error:
        raise RuntimeError(f"{reason}. For temporary files: {_text(error)}; set TMPDIR") from error
    root = Path(tempfile.mkdtemp(prefix="accumext-", dir=place))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root, reason


def _require_own(path: Path, kind: str) -> None:
    """Raise OSError unless this is a "folder" or "file" that only this user can write to."""
    status = path.lstat()
    if stat.S_IFMT(status.st_mode) != _KINDS[kind]:
        raise OSError(f"{path} is not a {kind}")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")


def _safe_folder(place: Path, links: int = 40) -> Path:
    """Make a folder if need be; return its path without links. OSError if anyone can replace it.

    Whoever can write to a folder can rename what is in it, unless the folder has the sticky bit.
    A symbolic link can be changed by its owner, so only those of root and of this user are
    followed, as many as Linux follows.
    """
    place = Path(os.path.abspath(place))
    for folder in (*reversed(place.parents), place):
        if not os.path.lexists(folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o755)
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode):
            if links == 0 or status.st_uid not in (0, os.geteuid()):
                raise PermissionError(f"{folder} is a symbolic link of user {status.st_uid}")
            target = folder.parent / os.readlink(folder)
            return _safe_folder(target / place.relative_to(folder), links - 1)
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(f"anyone can rename what is in {folder}")
    return place


def _text(error: OSError) -> str:
    """Return the text of an error, without its number."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


# --- its libraries -----------------------------------------------------------------------------


def find_or_make(
    key: str,
    find: Callable[[Path], T | None],  # called with the cache
    make: Callable[[Path], T],  # called with the folder of this key, to `install` into
    waiting: AbstractContextManager[None],
) -> tuple[T, str]:
    """Return what was found in the cache or else made, and why it does not last ("" if it does).

    One process makes it. Others wait for that, in a context, and find it.
    """
    cache, why_temporary = open_cache()
    result = find(cache)
    if result is None:
        if not why_temporary and not os.access(cache, os.W_OK):
            cache, why_temporary = _temporary_cache(f"{cache} cannot be written to")
        with file_lock(cache / f"{key}.lock", waiting):
            result = find(cache)
            if result is None:
                result = make(cache / key)
    return result, why_temporary


def libraries(cache: Path, key: str, file: str) -> list[Path]:
    """Return the undamaged libraries in folders that match a key, the newest first."""
    intact = [folder / file for folder in cache.glob(key) if _is_intact(folder / file)]
    return sorted(intact, key=lambda library: library.stat().st_mtime, reverse=True)


def _is_intact(library: Path) -> bool:
    try:
        _require_own(library.parent, "folder")
        for file in (library, _checksum_file(library)):
            _require_own(file, "file")
        return _checksum_file(library).read_bytes() == _checksum_line(library)
    except PermissionError as error:
        _log.warning("%s is not loaded: %s", library, _text(error))
    except OSError:  # missing or damaged
        pass
    return False


def _checksum_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _checksum_line(library: Path) -> bytes:
    """Return the digest as a line that `sha256sum --check` reads."""
    return f"{sha256(library)}  {library.name}\n".encode()


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder beside that of a library, to compile in; remove it at the end."""
    for old in folder.parent.glob("*.tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def install(library: Path, folder: Path) -> None:
    """Move a library from its build folder into the cache, and replace what is there.

    Raises:
        OSError: that fails; the cache is as it was, has no such folder, or has that of a process
            that was quicker.
    """
    new = library.parent / "new"
    new.mkdir()
    library = library.rename(new / library.name)
    checksum = _checksum_file(library)
    checksum.write_bytes(_checksum_line(library))
    for path in (library, checksum, new):
        path.chmod(0o700)  # whatever the umask is
    with contextlib.suppress(FileNotFoundError):
        folder.rename(library.parents[1] / "old")
    new.rename(folder)


# --- one process at a time ---------------------------------------------------------------------


@contextlib.contextmanager
def file_lock(path: Path, waiting: AbstractContextManager[None]) -> Iterator[None]:
    """Hold a lock between processes, so that only one compiles a library.

    The lock ends with its process, however that ends; torch's FileBaton would stay, and others
    would wait for ever. Nothing depends on the lock: without it, the same library is compiled
    twice, each time in a folder of its own.
    """
    with path.open("a+b", buffering=0) as file:  # not "ab": a FIFO would block
        try:
            if not _locked(file):
                with waiting:
                    _wait_for(file, path)
        except OSError as error:  # network file systems may have no locks
            _log.info("%s cannot be locked: %s", path, error)
        yield


def _wait_for(file: FileIO, path: Path) -> None:
    give_up = time.monotonic() + _WAIT_S
    while not _locked(file):
        if time.monotonic() > give_up:
            _log.warning("another process has held %s for %.0f s: not waited for", path, _WAIT_S)
            return
        time.sleep(0.1)


def _locked(file: FileIO) -> bool:
    """Try to lock a file; tell whether this succeeded."""
    import fcntl  # Windows lacks it, and setup.py loads this file there

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
