"""The test of a library's kernels on a device: in another process, once per machine.

A kernel that was compiled for a GPU may still be wrong there, crash, or never end. So none runs in
a user's process before the self-test (_self_test.py) has passed on such a device, in a process that
may crash. That process names each operator before it tries it. If it dies, or is silent for too
long, another process goes on without that operator. The verdict is kept beside the libraries that
were compiled on first use, in a folder of this user (_cache.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, NamedTuple

import torch

from accumext.backends import _build, _cache, _self_test
from accumext.backends._self_test import OK

Outcomes = dict[str, str]  # by operator: OK, or what went wrong

START_S = 120.0  # to import torch, a minute from a slow disk, and to find the GPU
CALL_S = 60.0  # a driver that compiles a kernel for a newer GPU may take half of that
TOTAL_S = 300.0  # for all operators: no program waits longer, whatever hangs
_END_S = 10.0  # if the driver does not let a process end, it is left behind
_FILE = "verdict.json"
_UNTESTED = "not tested"  # begins the outcome if no process can start; not kept
# The search path is set first: the working folder could hold a module of the same name.
_PROGRAM = """import sys
sys.path[:] = sys.argv[1].split("\\n")
from accumext.backends import _verify
_verify.serve(*sys.argv[2:])"""


def verdicts(
    library: Path, kind: str, announce: Callable[[str], None], *, anew: bool
) -> dict[torch.device, Outcomes]:
    """Return the outcomes on each device that this process sees, from the cache or by a test.
    Devices that differ in their number only share the outcomes.

    Nothing here uses a device in this process, or waits for it: a CUDA graph may be recording.

    Args:
        library: its path.
        kind: "cpu" or "cuda".
        announce: is called with a line when something begins that takes seconds.
        anew: whether to repeat tests whose outcome is known.
    """
    known: dict[str, Outcomes] = {}
    result = {}
    for device in _devices(kind):
        trial = _Trial(library, _build.registered_ops(kind), device)
        key = trial.key()
        if key not in known:
            try:
                known[key] = trial.verdict(key, announce, anew)
            except (OSError, RuntimeError) as error:  # no folder can be written to
                known[key] = dict.fromkeys(trial.names, f"{_UNTESTED}: {error}")
        result[device] = known[key]
    return result


def failures(verdicts: dict[torch.device, Outcomes]) -> dict[str, set[torch.device]]:
    """Return the operators that failed, with the devices on which they did."""
    failed: dict[str, set[torch.device]] = {}
    for device, outcomes in verdicts.items():
        for name, outcome in outcomes.items():
            if outcome != OK:
                failed.setdefault(name, set()).add(device)
    return failed


def described(verdicts: dict[torch.device, Outcomes]) -> str:
    """Describe on which devices which operators failed, how, and what can be done."""
    parts: dict[str, None] = {}  # an ordered set
    for device, outcomes in verdicts.items():
        failed = {name: outcome for name, outcome in outcomes.items() if outcome != OK}
        words = ", ".join(f"{name} ({outcome})" for name, outcome in failed.items())
        if len(failed) == len(outcomes) and len(set(failed.values())) == 1:
            words = f"all operators ({next(iter(failed.values()))})"
        if failed:
            parts[f"on {name_of(device)} in {words}"] = None
    return f"{', and '.join(parts)}; `python -m accumext doctor` repeats it"


def name_of(device: torch.device) -> str:
    """Return the name that its maker gives a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _devices(kind: str) -> list[torch.device]:
    """Return the devices that this process sees, the current one first."""
    if kind == "cpu":
        return [torch.device(kind)]
    current = torch.cuda.current_device()
    others = [index for index in range(torch.cuda.device_count()) if index != current]
    return [torch.device(kind, index) for index in (current, *others)]


def _machine(device: torch.device) -> list[str]:
    """Return the facts that results may depend on, beside the library and torch."""
    if device.type != "cuda":
        return [device.type]
    gpu, cuda = torch.cuda.get_device_properties(device), ctypes.c_int()
    facts = [gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count]
    with contextlib.suppress(OSError):  # the driver's CUDA version, and its release
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
        facts.append(cuda.value)
        facts.append(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    return [str(fact) for fact in facts]


class _Trial(NamedTuple):
    """Operators of a library on a device."""

    library: Path
    names: list[str]
    device: torch.device

    def key(self) -> str:
        """Return the name of the verdict's folder: a digest of all that it depends on."""
        files = (self.library, Path(_self_test.__file__))
        facts = [*map(_cache.sha256, files), torch.__version__, *_machine(self.device)]
        return f"verdict-{_build.digest(facts)}"

    def verdict(self, key: str, announce: Callable[[str], None], anew: bool) -> Outcomes:
        """Return the cached outcomes, or test: one process does, others that want them wait."""

        def find(cache: Path) -> Outcomes | None:
            return None if anew else _cached(cache, key)

        def test(folder: Path) -> Outcomes:
            device = name_of(self.device)
            announce(f"testing the kernels on {device}, once, which takes some seconds")
            outcomes = self.outcomes()
            if not any(outcome.startswith(_UNTESTED) for outcome in outcomes.values()):
                _install(outcomes, folder)
            return outcomes

        outcomes, _ = _cache.find_or_make(key, find, test, contextlib.nullcontext())
        return outcomes

    def outcomes(self) -> Outcomes:
        """Return the outcomes of all operators, from as many processes as it takes."""
        outcomes: Outcomes = {}
        give_up = time.monotonic() + TOTAL_S
        while untried := [name for name in self.names if name not in outcomes]:
            if time.monotonic() > give_up:
                return outcomes | dict.fromkeys(untried, "no time was left for it")
            for name, outcome in self._messages(untried, give_up):
                if not name:
                    return outcomes | dict.fromkeys(untried, f"{_UNTESTED}: {outcome}")
                outcomes[name] = outcome
        return outcomes

    def _messages(self, names: Sequence[str], give_up: float) -> Iterator[tuple[str, str]]:
        """Yield operators and outcomes from one process; an empty name: why it cannot start."""
        facts = json.dumps([str(self.library), str(self.device), _machine(self.device), names])
        trying, limit = "", START_S
        try:
            with _process(facts) as (process, receiver, stderr_file):
                try:
                    while receiver.poll(max(0.0, min(limit, give_up - time.monotonic()))):
                        trying, outcome = receiver.recv()
                        limit = CALL_S if trying else START_S
                        if outcome:
                            yield trying, outcome
                            trying = ""
                    fault = "it did not end in time"
                except EOFError:
                    fault = _ending_of(process, stderr_file)
        except OSError as error:
            fault = str(error)
        if trying or limit == START_S:
            yield trying, fault


def _cached(cache: Path, key: str) -> Outcomes | None:
    for file in _cache.libraries(cache, key, _FILE):
        outcomes: Outcomes = json.loads(file.read_text(encoding="utf-8"))
        return outcomes
    return None


def _install(outcomes: Outcomes, folder: Path) -> None:
    """Cache outcomes; if that fails, the next process tests again."""
    with contextlib.suppress(OSError), _cache.build_folder(folder) as build_folder:
        file = build_folder / _FILE
        file.write_text(json.dumps(outcomes), encoding="utf-8")
        _cache.install(file, folder)


@contextlib.contextmanager
def _process(facts: str) -> Iterator[tuple[subprocess.Popen[bytes], Connection, IO[bytes]]]:
    """Start a process that tries kernels; yield it, its messages and stderr. Kill it at the end."""
    if getattr(sys, "frozen", False):
        raise OSError("a frozen program has no Python to start")
    receiver, sender = Pipe(duplex=False)
    with receiver, tempfile.TemporaryFile() as stderr_file:
        with sender:
            search = "\n".join(map(str, sys.path))
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, search, str(sender.fileno()), facts],
                env=os.environ | {"ACCUMEXT_BACKEND": "reference"},  # it loads one library, by path
                pass_fds=[sender.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr_file,
                start_new_session=True,  # Ctrl-C reaches only this process, which kills the other
            )
        try:
            yield process, receiver, stderr_file
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _ending_of(process: subprocess.Popen[bytes], stderr_file: IO[bytes]) -> str:
    """Describe how a process ended, with the last line that it wrote."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    status = process.returncode
    how = signal.Signals(-status).name if status and status < 0 else f"status {status}"
    stderr_file.seek(0)
    lines = stderr_file.read().decode(errors="replace").strip().splitlines()
    return ": ".join([f"the process ended with {how}", *lines[-1:]])


# --- in the other process ----------------------------------------------------------------------


def serve(connection: str, facts: str) -> None:
    """Try operators: send the name before every call, and with its outcome after the last."""
    signal.alarm(int(START_S + TOTAL_S))  # in case the parent is gone
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would take long
    sender = Connection(int(connection), readable=False)
    library, name, machine, names = json.loads(facts)
    device = torch.device(name)
    try:
        if _machine(device) != machine:
            raise RuntimeError(f"{device} is another device in another process")
        torch.ops.load_library(library)
        _require_usable(device)
        torch.set_float32_matmul_precision("highest")  # containers may lower it by a variable
    except Exception as error:
        sender.send(("", _self_test.words(error)))
        return
    for name in names:
        sender.send((name, _self_test.outcome(name, device, partial(sender.send, (name, "")))))
        try:
            _require_usable(device)
        except RuntimeError:  # a kernel crashed: the next operator needs a new process
            return


def _require_usable(device: torch.device) -> None:
    """Raise RuntimeError if the device cannot be used, for instance after a crash of a kernel."""
    torch.zeros((), device=device).item()
