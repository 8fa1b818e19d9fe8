"""`python -m accumext` as a program: its help, and Ctrl-C."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from support import ROOT

import accumext
from accumext.__main__ import main

DEMO = ["demo", "--steps=2", "--batch=4", "--length=12", "--hidden=16", "--vocab=300"]
# The command, with words of one package: to read those of the whole library takes seconds.
FEW_WORDS = """
import asyncio, functools, pathlib, sys
from accumext.__main__ import module_of, run_as_program
demo, few = module_of("demo"), pathlib.Path(asyncio.__file__).parent
demo.load_text = functools.partial(demo.load_text, root=few)
sys.exit(run_as_program())
"""


def interruptible() -> None:
    """Let Ctrl-C end a new process as on a terminal, also if these tests run under nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: str, preexec_fn=interruptible) -> subprocess.Popen[str]:
    """Start `python` with these arguments, its output in pipes."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=preexec_fn,
    )


def test_without_a_command_it_prints_the_help(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert all(word in out for word in ("usage: python -m accumext", "doctor", "demo", "--version"))


@pytest.mark.parametrize("command", ["doctor", "demo", "audit"])
def test_the_help_of_a_command_names_its_options(command, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    assert f"usage: python -m accumext {command} " in (out := capsys.readouterr().out)
    assert "--json" in out


def test_a_script_in_place_of_a_command_is_told_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        main([__file__, "--steps", "2"])
    assert end.value.code == 2
    words = f"is a file. To see what its loop does: audit {__file__}"
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["demonstrate"])
    assert "invalid choice: 'demonstrate'" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("line", ["A GRU learns", "step   1: ", "comparing: times, repetition 1"])
def test_an_interrupt_of_the_demo_leaves_no_traceback(line):
    program = start("-c", FEW_WORDS, *DEMO)
    while line not in (read := program.stdout.readline()):
        assert read, program.communicate()
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 130, (out, err)
    assert "interrupted" in out
    assert "Traceback" not in err


@pytest.mark.process
def test_an_interrupt_of_a_command_that_does_not_catch_it():
    code = """
        import signal, sys
        import accumext.__main__ as command_line
        from accumext.backends import _doctor
        def interrupted(args):
            signal.raise_signal(signal.SIGINT)
        _doctor.main = interrupted
        sys.argv = ["accumext", "doctor"]
        sys.exit(command_line.run_as_program())
    """
    program = start("-c", textwrap.dedent(code))
    assert program.communicate(timeout=60) == ("", "")
    assert program.returncode == 130


@pytest.mark.process
def test_a_reader_that_leaves_gets_no_traceback():
    with start("-m", "accumext", "doctor") as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 141


@pytest.mark.process
def test_the_package_leaves_signals_alone():
    before = "import signal; before = signal.getsignal(signal.SIGINT)"
    check = f"{before}; import accumext; assert signal.getsignal(signal.SIGINT) is before"
    program = start("-c", check)
    assert program.communicate(timeout=60) == ("", "")


@pytest.mark.process
def test_an_ignored_interrupt_stays_ignored():
    """As under nohup, or in the background of a shell script."""
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    program = start("-m", "accumext", "--version", preexec_fn=ignore)
    while program.poll() is None:
        program.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, err = program.communicate()
    assert (program.returncode, err) == (0, "")
    assert out.startswith(f"accumext {accumext.__version__} (torch ")
