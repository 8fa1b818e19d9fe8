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
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

_log = logging.getLogger("accumext")

_WAIT_S = 600.0  # several times the longest compile: a longer one hangs
_STALE_S = 24 * 3600.0  # no compile takes as long: a killed one left a folder of this age
_IN_SILENCE = contextlib.nullcontext()
_KINDS = {"folder": stat.S_IFDIR, "file": stat.S_IFREG}


# --- whose folder it is ------------------------------------------------------------------------


def open_cache() -> tuple[Path, str]:
    """Return the folder of the cache, and why it is a temporary one; "" if it lasts."""
    try:
        return lasting_cache(), ""
    except OSError as error:
        return _temporary_cache(_words(error))


def lasting_cache() -> Path:
    """Return this user's folder among torch's extensions; make it if need be. OSError if unsafe."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"user {os.geteuid()} has no home folder") from error
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions"
    root = _reached(Path(extensions)) / f"accumext-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    _require_own(root, "folder")
    return root


def writable_cache(root: Path) -> tuple[Path, str]:
    """Return the same cache, or a temporary one if it cannot be written to, and why."""
    if os.access(root, os.W_OK):
        return root, ""
    return _temporary_cache(f"{root} cannot be written to")


def _temporary_cache(why: str) -> tuple[Path, str]:
    """Make a cache that this process removes at its end; return it and why there is no other."""
    reason = f"{why}; set TORCH_EXTENSIONS_DIR to a folder of your own"
    _log.warning("nothing is kept for other processes: %s", reason)
    try:
        place = _reached(Path(tempfile.gettempdir()))
    except OSError as error:
        raise RuntimeError(f"{reason}. For temporary files: {_words(error)}; set TMPDIR") from error
    root = Path(tempfile.mkdtemp(prefix="accumext-", dir=place))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root, reason


def _require_own(path: Path, kind: str) -> None:
    """Raise OSError unless this is a "folder" or "file" that only this user can write to."""
    found = path.lstat()
    if stat.S_IFMT(found.st_mode) != _KINDS[kind]:
        raise OSError(f"{path} is not a {kind}")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")


def _reached(place: Path, links: int = 40) -> Path:
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
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode):
            if links == 0 or found.st_uid not in (0, os.geteuid()):
                raise PermissionError(f"{folder} is a symbolic link of user {found.st_uid}")
            target = folder.parent / os.readlink(folder)
            return _reached(target / place.relative_to(folder), links - 1)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"anyone can rename what is in {folder}")
    return place


def _words(error: OSError) -> str:
    """Return the text of an error, without its number."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


# --- kept libraries ----------------------------------------------------------------------------


def kept(root: Path, key: str, file: str) -> list[Path]:
    """Return the undamaged libraries in folders that match a key, the newest first."""
    libraries = [folder / file for folder in root.glob(key)]
    whole = [library for library in libraries if _is_whole(library)]
    return sorted(whole, key=lambda library: library.stat().st_mtime, reverse=True)


def _is_whole(library: Path) -> bool:
    try:
        _require_own(library.parent, "folder")
        for file in (library, _seal_path(library)):
            _require_own(file, "file")
        return _seal_path(library).read_bytes() == _seal(library)
    except PermissionError as error:
        _log.warning("%s is not loaded: %s", library, _words(error))
    except OSError:  # missing or damaged
        pass
    return False


def _seal_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _seal(library: Path) -> bytes:
    """Return the digest as a line that `sha256sum --check` reads."""
    return f"{sha256(library)}  {library.name}\n".encode()


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- putting something there -------------------------------------------------------------------


@contextlib.contextmanager
def turn(lock: Path, waiting: AbstractContextManager[None] = _IN_SILENCE) -> Iterator[None]:
    """Wait, in a context, for a process that compiles the same library, so that it is done once.

    The lock ends with its process, however that ends; torch's FileBaton would stay, and others
    would wait for ever. Nothing depends on the lock: without it, the same library is compiled
    twice, each time in a folder of its own.
    """
    with lock.open("a+b", buffering=0) as file:  # not "ab": a FIFO would block
        try:
            if not _locked(file):
                with waiting:
                    _wait_for(file, lock)
        except OSError as error:  # network file systems may have no locks
            _log.info("%s cannot be locked: %s", lock, error)
        yield


def _wait_for(file: FileIO, lock: Path) -> None:
    give_up = time.monotonic() + _WAIT_S
    while not _locked(file):
        if time.monotonic() > give_up:
            _log.warning("another process has held %s for %.0f s: not waited for", lock, _WAIT_S)
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


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """Make a temporary folder beside that of a library, to compile in; remove it at the end."""
    for left in folder.parent.glob("*.tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def keep(library: Path, folder: Path) -> None:
    """Move a library into its folder, and replace what is there; OSError if that fails."""
    with workshop(folder) as made:
        new = made / "new"
        new.mkdir()
        library = library.rename(new / library.name)
        _seal_path(library).write_bytes(_seal(library))
        for path in (library, _seal_path(library), new):
            path.chmod(0o700)  # whatever the umask is
        with contextlib.suppress(FileNotFoundError):
            folder.rename(made / "damaged")
        new.rename(folder)
