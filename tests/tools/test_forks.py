"""support.forks: a program in a fork is, for all that it can see, one of a new interpreter."""

import os
import subprocess
import sys

import pytest
from support import forks

# What a program can see, a warning that is an error, and what comes after its last line.
SEEN = """
import atexit, json, os, sys, threading, time, warnings
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
import beside
names = "__name__", "__file__", "__doc__"
print(json.dumps([sys.argv, os.getcwd(), [globals().get(name) for name in names], beside.__file__]))
print(os.getsid(0) == os.getpid(), sys.stdin.read(), sys.stdout.isatty(), sys.warnoptions)
print(sorted(os.environ.items()), [p for p in sys.path if "site-packages" not in p][:3])
try:
    warnings.warn("ours: an error")
except UserWarning as error:
    print(error)
warnings.warn("another")
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "sys.exit('words')": 1,
    "1 / 0": 1,
    "os._exit(4)": 4,
    "os.kill(os.getpid(), 15)": -15,
    "os.abort()": -6,
}


@pytest.fixture
def ways(tmp_path):
    """The ways to name a program, and its variables."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").touch()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "library"), "GIVEN": "ä"}
    env |= {"PYTHONWARNINGS": "error:ours:UserWarning,ignore:theirs"}
    del env["PATH"]

    def both(*arguments):
        """What a new interpreter does with it, and what a fork."""
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        new = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, start_new_session=True, **streams
        )
        return new, forks.run(*arguments, cwd=tmp_path, env=env, timeout=60)

    return both


@pytest.mark.process
@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_a_program_sees_the_same(way, ways, tmp_path):
    (tmp_path / "program.py").write_text(SEEN)
    first = {"-c": ["-c", SEEN], "-m": ["-m", "program"], "script": ["program.py"]}[way]
    new, forked = ways(*first, "argument", "-x")
    assert "at exit" in new.stdout
    assert forked.stdout == new.stdout
    assert forked.stderr == new.stderr
    assert (new.returncode, forked.returncode) == (0, 0)


@pytest.mark.process
def test_it_ends_the_same(ways):
    for code, status in ENDS.items():
        new, forked = ways("-c", f"import os, sys; print('said', flush=True); {code}")
        assert (new.returncode, forked.returncode) == (status, status), code
        assert new.stdout == forked.stdout == "said\n"
        assert new.stderr.splitlines()[-1:] == forked.stderr.splitlines()[-1:]


@pytest.mark.process
def test_one_that_takes_too_long_is_killed(ways, tmp_path):
    program = forks.Forked("-c", "import time; time.sleep(60)", cwd=tmp_path, env=os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        program.communicate(timeout=0.1)
    program.kill()
    assert program.communicate(timeout=10) == ("", "")
    assert program.returncode == -9
