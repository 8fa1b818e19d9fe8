"""Where compiled libraries are kept, for the next process or installation, and which are whole.

Verdicts of the self-test, which decide what is loaded, are kept in the same way: below, the library
may be such a file. setup.py loads this file by path, as it does _build.py: only the standard
library is imported here.

A library is code that runs as the user who loads it. So they are kept in a folder that belongs to
this user and that nobody else can write to, as do a library's own folder and files. torch, whose
folder of extensions this is in, asks for neither. One counts only if it is, byte for byte, what was
kept, and it appears whole, in one rename: neither a process that is killed, nor a full disk, nor a
loss of power leaves half of one.
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

_WAIT_S = 600.0  # several times the longest compile: beyond it the other process hangs
_STALE_S = 24 * 3600.0  # no compile takes as long: a folder of this age was left by a killed one
_IN_SILENCE = contextlib.nullcontext()
_KINDS = {"folder": stat.S_IFDIR, "file": stat.S_IFREG}


# --- whose folder it is ------------------------------------------------------------------------


def open_cache() -> tuple[Path, str]:
    """The folder that holds a folder per library, and "" if it lasts, else why it does not."""
    try:
        return lasting_cache(), ""
    except OSError as error:
        return _temporary_cache(_words(error))


def lasting_cache() -> Path:
    """This user's folder among torch's extensions, made if need be; OSError if it is not safe."""
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
    """The same folder, or one for this process if nothing can be added to it."""
    if os.access(root, os.W_OK):
        return root, ""
    return _temporary_cache(f"{root} cannot be written to")


def _temporary_cache(why: str) -> tuple[Path, str]:
    """A cache that this process removes, and why there is no better one."""
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
    """OSError unless this is a "folder" or "file" of this user that nobody else can write to."""
    found = path.lstat()
    if stat.S_IFMT(found.st_mode) != _KINDS[kind]:
        raise OSError(f"{path} is not a {kind}")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")


def _reached(place: Path, links: int = 40) -> Path:
    """A folder, made if need be, as a path without links; OSError if anyone can replace it.

    The contents of a folder can be renamed by whoever can write to it, unless it has the sticky
    bit. A symbolic link leads where its owner likes: those of root and of this user are followed,
    as many as Linux follows.
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
    """The undamaged libraries in the folders that a key names, or matches with *; newest first."""
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
    except OSError:  # damage
        pass
    return False


def _seal_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _seal(library: Path) -> bytes:
    """A line that `sha256sum --check` reads."""
    return f"{sha256(library)}  {library.name}\n".encode()


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- putting something there -------------------------------------------------------------------


@contextlib.contextmanager
def turn(lock: Path, waiting: AbstractContextManager[None] = _IN_SILENCE) -> Iterator[None]:
    """Wait, if need be in a context, for a process that compiles the same: so it is done once.

    A lock ends with its process, however that ends; torch's FileBaton would stay, and be waited for
    without end. Nothing depends on it: where a lock cannot be had, the same library is compiled
    twice, each time in a folder of its own.
    """
    with lock.open("a+b", buffering=0) as file:  # not to be written alone: a FIFO would wait
        try:
            if not _locked(file):
                with waiting:
                    _wait_for(file, lock)
        except OSError as error:  # file systems of other machines may know no locks
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
    """Tell whether a lock could be had."""
    import fcntl  # which Windows, where setup.py loads this file, does not have

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A new folder beside that of a library, to compile in; removed in the end."""
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
    """Move a library into its folder, in the place of what is there; OSError if that fails."""
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
