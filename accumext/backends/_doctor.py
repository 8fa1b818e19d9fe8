"""`python -m accumext doctor`: what is in use and why, what is better, and whether it is right."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

from accumext.backends import _build, _cache, _libraries, _self_test, _verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print the report; return 1 if the self-test fails."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["passed"] else 1


def examine() -> dict[str, Any]:
    """Return the whole report as plain data."""
    self_test = _outcomes()  # first: it decides which kernels are used
    backend, reason = _backend()
    return {
        "backend": backend,
        "reason": reason,
        "fix": _fix(backend),
        "versions": _versions(),
        "settings": {name: os.environ.get(name) for name in _build.CHOICES},
        "installation": _build.read_record(),
        "changed": _changed_libraries(),
        "self_test": self_test,
        "passed": all(outcome == _self_test.OK for outcome in self_test.values()),
    }


def _changed_libraries() -> list[str]:
    """Return the installed libraries that have changed since they were compiled, as by strip."""
    digests: dict[str, str] = _build.read_record().get("sha256", {})
    paths = {name: _build.installation() / name for name in sorted(digests)}
    return [n for n, path in paths.items() if path.exists() and _cache.sha256(path) != digests[n]]


def _backend() -> tuple[str, str]:
    try:
        return _libraries.backend(), _libraries.backend_reason()
    except RuntimeError as error:
        return "none", str(error)


def _fix(backend: str) -> str | None:
    """Return the remedy that gets better kernels; None if there are none."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == best:
        return None
    if _build.setting("ACCUMEXT_BACKEND") == "reference":
        return "unset ACCUMEXT_BACKEND"
    obstacle = _build.obstacle(torch)
    if obstacle is not None:
        return obstacle[1]
    if best == "cuda" and (cuda := _build.cuda(torch)).home is None:
        return cuda.fix
    return "see the reason; pip install -v --force-reinstall --no-deps . shows the compiler's words"


def _versions() -> dict[str, str | None]:
    cuda = _build.cuda(torch)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "accumext": _distribution("accumext"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "GPU": gpu,
        "instruction set": torch.backends.cpu.get_cpu_capability(),  # the kernels follow torch
        "compiler": _build.output([*_build.cxx(), "--version"]).partition("\n")[0] or None,
        "nvcc": f"{cuda.version} in {cuda.home}" if cuda.home else f"not used: {cuda.reason}",
        "ninja": _distribution("ninja"),
    }


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _outcomes() -> dict[str, str]:
    """Return the self-test's outcome of each operator on each device: OK, or what went wrong."""
    tested, cpu = _libraries.tested_anew(), torch.device("cpu")
    if cpu not in tested:  # its kernels run without a test, so they are tested here
        here = {name: _self_test.outcome(name, cpu) for name in _self_test.cases()}
        tested = {cpu: here} | tested
    return {
        f"{name} on {_verify.name_of(device)}": outcome
        for device, outcomes in tested.items()
        for name, outcome in outcomes.items()
    }


# --- text --------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    rows = [("backend", report["backend"]), ("reason", report["reason"])]
    rows += [("fix", report["fix"] or "none needed")]
    rows += report["versions"].items()
    rows += [(name, value or "auto (unset)") for name, value in report["settings"].items()]
    rows += _installation_rows(report["installation"])
    rows += [(name, "not as compiled: its digest differs") for name in report["changed"]]
    rows += [(f"self-test {name}", outcome) for name, outcome in report["self_test"].items()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value if value is not None else 'none'}")
    print(f"self-test {'passed' if report['passed'] else 'FAILED'}")


def _installation_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    if not record:
        return [("installation", "none; running from the sources")]
    compiled = ", ".join(record["compiled"]) or "nothing"
    rows = [("installation", f"compiled {compiled}, with torch {record['torch']}")]
    for library, why in record["missing"].items():
        # The obstacle at installation may be gone, so the remedy is for the one that is left.
        now = _build.jit_obstacle(library, torch)
        fix = now[1] if now is not None else f"{_build.ON_FIRST_USE}, or {_libraries.REINSTALL}"
        rows.append((f"no {library} library", f"at installation: {why['reason']}. {fix}"))
    return rows
