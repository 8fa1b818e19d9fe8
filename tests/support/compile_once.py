"""A compiler that compiles the same source with the same flags once: in a session of tests, or, of
`python -m support.compile_once FOLDER`, in all of .ci/run.

The differences between copies of a project, the folders of sources, objects and torch, are left out
of the comparison, as is what only tells Python's modules apart where a source is none; the source
and every header of the copy's csrc are part of it. All else, linking above all, is the compiler's
own.
"""

import sys
from pathlib import Path

from support.programs import compiler

SCRIPT = """#!{python} -SE
import fcntl, hashlib, os, re, shutil, subprocess, sys

REAL, OBJECTS = {real!r}, {objects!r}


def value(flag):  # ninja files say -c twice
    behind = [word for before, word in zip(sys.argv, sys.argv[1:]) if before == flag != word]
    return behind[-1] if behind else None


def main():
    command, source, target = [*REAL, *sys.argv[1:]], value("-c"), value("-o")
    found = source and target and re.match(r"(.*/_?csrc)/", os.path.abspath(source))
    if not found:
        os.execvp(command[0], command)
    root, read = found[1], [source]
    for folder, _, files in os.walk(root):
        read += [os.path.join(folder, name) for name in files if name.endswith((".h", ".cuh"))]
    digest = hashlib.sha256()
    for path in sorted(read):
        with open(path, "rb") as file:
            digest.update(file.read())
    with open(source, encoding="utf-8") as file:
        is_module = "TORCH_EXTENSION_NAME" in file.read()
    flags = set()  # the order of ours, and of these folders, is no matter
    for before, word in zip(sys.argv, sys.argv[1:]):
        if word.startswith("-I") or before == "-isystem":
            word = os.path.realpath(word.removeprefix("-I"))
            found = any(files for _, _, files in os.walk(word))  # a new environment's has none
            of_python = os.path.exists(os.path.join(word, "Python.h"))
            word = "-I" + word if found and (is_module or not of_python) else ""
        elif word == target or word in (value("-MF"), "-isystem"):
            continue
        elif not is_module and word.startswith(("-DTORCH_EXTENSION_NAME", "-DPy_LIMITED_API")):
            continue
        word = os.path.abspath(word) if word == source else word
        flags.add(word.replace(os.path.realpath(root), "csrc").replace(root, "csrc"))
    digest.update(" ".join(sorted(flags)).encode())
    kept = os.path.join(OBJECTS, digest.hexdigest())
    with open(kept + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(kept):
            status = subprocess.run(command).returncode
            if status != 0:
                sys.exit(status)
            shutil.copy(target, kept + ".new")
            os.rename(kept + ".new", kept)
            return
    shutil.copy(kept, target)
    if value("-MF"):
        with open(value("-MF"), "w") as file:
            file.write(target + ": " + source + "\\n")


main()
"""


def write(folder: Path) -> None:
    """The compiler, as `folder`/g++; its objects lie beside it."""
    (folder / "objects").mkdir(parents=True)
    script = folder / "g++"  # a name that torch knows
    text = SCRIPT.format(python=sys.executable, real=compiler(), objects=str(folder / "objects"))
    script.write_text(text)
    script.chmod(0o755)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
