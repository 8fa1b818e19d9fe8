"""Programs of Python in forks of one process that has imported torch, which takes a second.

Such a program sees what that of a new interpreter does: its arguments, folder, environment, path of
modules, filters of warnings and streams, a session of its own, and an ordinary end. Torch alone is
there, with what it has read from the environment. What is about the start of Python or of torch, as
OMP_NUM_THREADS, needs a new interpreter.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

WORD = 8  # bytes of a number in an answer


class Forked:
    """`python *arguments` in such a fork; as a subprocess.Popen, as far as tests need one."""

    def __init__(self, *arguments: object, cwd: Path, env: Mapping[str, str]) -> None:
        self.args = [*map(str, arguments)]
        self._printed = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._answers, answer = os.pipe()
        request = json.dumps([self.args, str(cwd), dict(env)]).encode()
        socket.send_fds(server(), [request], [*self._printed, answer])
        os.close(answer)
        self.pid = self._answer(None)

    def _answer(self, timeout: float | None) -> int:
        if not select.select([self._answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        answer = os.read(self._answers, WORD)
        assert answer, "the process that forks has died"
        return int.from_bytes(answer, sys.byteorder)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return what was printed to both streams."""
        self.returncode = os.waitstatus_to_exitcode(self._answer(timeout))
        os.close(self._answers)
        return self._read(self._printed[0]), self._read(self._printed[1])

    def _read(self, stream: int) -> str:
        with open(stream, encoding="utf-8") as file:
            file.seek(0)
            return file.read()

    def kill(self) -> None:
        """End the program and what it has started."""
        os.killpg(self.pid, signal.SIGKILL)


def run(
    *arguments: object, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    program = Forked(*arguments, cwd=cwd, env=env)
    try:
        out, err = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


@functools.cache
def server() -> socket.socket:
    """Start the process that forks, once; return the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


# --- in the other process -------------------------------------------------------------------------


def program_of_a_fork(channel: socket.socket) -> list[str]:
    """Fork for each request; return, in the forks alone, what each is to run."""
    while True:
        request, files, *_ = socket.recv_fds(channel, 2**20, 3)
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG if request else 0)[0]:
                pass
        if not request:
            os._exit(0)
        if os.fork() == 0:  # this one waits for the program
            *streams, answer = files
            channel.close()
            if (pid := os.fork()) == 0:
                os.setsid()
                os.write(answer, os.getpid().to_bytes(WORD, sys.byteorder))
                os.close(answer)
                return prepared(streams, *json.loads(request))
            os.write(answer, os.waitpid(pid, 0)[1].to_bytes(WORD, sys.byteorder))
            os._exit(0)
        for file in files:
            os.close(file)


def prepared(
    streams: list[int], arguments: list[str], cwd: str, env: Mapping[str, str]
) -> list[str]:
    """Give this process its streams, folder, environment, modules and filters of warnings."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.warnoptions[:] = filter(None, env.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)
    return arguments


def run_as_main(first: str, *others: str) -> None:
    """What Python does with its command line."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        module, *others = others
        sys.argv = [first, *others]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        code, *others = others
        name = "<string>"
        sys.path.insert(0, "")
    else:
        name = main.__file__ = os.path.abspath(first)
        code = Path(name).read_text(encoding="utf-8")
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
    sys.argv = [first, *others]
    exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    import torch  # noqa: F401

    gc.freeze()
    run_as_main(*program_of_a_fork(socket.socket(fileno=int(sys.argv[1]))))
