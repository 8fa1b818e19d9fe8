"""How trainers accumulate gradients: every program here, in environments of its own.

    python bench/trainers [--json bench/results/trainers_cpu.json] [--only TEXT]
    python bench/trainers --audit --json bench/results/trainers_audit_cpu.json

A group of programs shares the packages that `requirements/<group>.txt` pins, and those of
`<group>_without_dependencies.txt`, if there is one, without theirs. Its environment is made in a
temporary folder, or in `--environments DIR`, where it is kept and found again. With `--only`,
entries of other programs stay in the file as they are. A program that cannot be installed, fails or
takes too long is an entry with its error. With `--audit` the same trainings run inside of
`accumext.audit`, and its findings are written.

On a machine without a GPU, give pip the CPU builds of torch; the programs use no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
import _results  # noqa: E402

INSTALL, TRAIN = 1800, 600  # seconds that a group and a program may take
GROUPS = {  # programs by the environment that they share
    "hub": (
        "lightning",
        "fabric",
        "accelerate",
        "trainer",
        "trl",
        "sentence_transformers",
        "ignite",
        "skorch",
        "keras",
        "sb3_contrib",
    ),
    "vision": ("fastai", "timm", "ultralytics"),
    "composer": ("composer",),
    "other": ("deepspeed", "speechbrain", "spacy"),
    "forecast": ("darts", "neuralforecast", "gluonts"),
}


def environment(group: str, folder: Path) -> Path:
    """The interpreter of a group's environment, which is made unless it is there."""
    pins = HERE / "requirements" / f"{group}.txt"
    alone = pins.with_stem(f"{group}_without_dependencies")
    asked = "".join(file.read_text(encoding="utf-8") for file in (pins, alone) if file.exists())
    home = folder / group
    python, done = home / "bin" / "python", home / "installed.txt"
    if not done.exists() or done.read_text(encoding="utf-8") != asked:
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*install, "-r", str(pins)], check=True, timeout=INSTALL)
        if alone.exists():
            install.append("--no-deps")
            subprocess.run([*install, "-r", str(alone)], check=True, timeout=INSTALL)
        done.write_text(asked, encoding="utf-8")
    return python


def ran(command: list[str], folder: Path) -> dict[str, Any]:
    """What a program wrote, or its error."""
    written = folder / "written.json"
    written.unlink(missing_ok=True)
    paths = os.pathsep.join([str(HERE), str(ROOT)])
    variables = {"PYTHONPATH": paths, "ACCUMEXT_BACKEND": "reference", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, "--json", str(written)],
            env=os.environ | variables,
            cwd=folder,  # trainers leave files where they are started
            timeout=TRAIN,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {TRAIN} seconds"}
    if not written.exists():
        lines = done.stderr.strip().splitlines() or [""]
        return {"error": f"exit status {done.returncode}: {lines[-1][:300]}"}
    content: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return content


def result(found: dict[str, Any], audit: bool) -> dict[str, Any]:
    """The content of the file, in the order of the groups."""
    order = [name for programs in GROUPS.values() for name in programs if name in found]
    named = "accumext" if audit else "torch"
    versions = (found[name].get("versions", {}).get(named) for name in order)
    facts = {named: next(filter(None, versions), "-"), "python": platform.python_version()}
    machine = {"command": _results.command(), **facts}
    return {"machine": machine, "trainers": {name: found[name] for name in order}}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python bench/trainers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="a part of a program's name")
    parser.add_argument("--environments", type=Path, help="where they are kept")
    parser.add_argument("--audit", action="store_true")
    args = parser.parse_args()
    before = args.only and args.json and args.json.exists()
    found = json.loads(args.json.read_text(encoding="utf-8"))["trainers"] if before else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.environments or Path(temporary)).resolve()
        for group, programs in GROUPS.items():
            for name in (name for name in programs if args.only in name):
                print(name, flush=True)
                program = [str(HERE / f"with_{name}.py")]
                if args.audit:
                    program.insert(0, str(HERE / "_audit.py"))
                try:
                    python = str(environment(group, folder))
                except subprocess.SubprocessError as error:
                    found[name] = {"error": f"cannot be installed: {error}"[:300]}
                else:
                    found[name] = ran([python, *program], Path(temporary))
                _results.write(args.json, result(found, args.audit))
    if args.json is None:
        print(_results.as_text(result(found, args.audit)))


if __name__ == "__main__":
    main()
