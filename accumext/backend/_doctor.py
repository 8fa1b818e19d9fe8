"""`python -m accumext doctor`: what is in use and why, what is better, and whether it is right."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import accumext
from accumext import reference
from accumext.backend import _build

_RTOL, _ATOL = 1e-10, 1e-12  # float64 in two orders of summation
# Four roundings of float32, in which most tensors of a list are summed whatever the dtype of the
# result: one order of summation or another, and on a GPU a power, may differ by two.
_NORM_TOLERANCE = 4 * torch.finfo(torch.float32).eps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if the self-test fails."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["passed"] else 1


def examine() -> dict[str, Any]:
    """The whole report as plain data."""
    backend, reason = _backend()
    self_test = _self_test()
    return {
        "backend": backend,
        "reason": reason,
        "fix": _fix(backend),
        "versions": _versions(),
        "settings": {name: os.environ.get(name) for name in _build.CHOICES},
        "installation": _build.read_record(),
        "changed": _build.changed_libraries(),
        "self_test": self_test,
        "passed": all(outcome == "ok" for outcome in self_test.values()),
    }


def _backend() -> tuple[str, str]:
    try:
        return accumext.backend(), accumext.backend_reason()
    except RuntimeError as error:
        return "none", str(error)


def _fix(backend: str) -> str | None:
    """What to type for better kernels; None if there are none."""
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
        "compiler": _first_line(os.environ.get("CXX") or "c++", "--version"),
        "nvcc": f"{cuda.version} in {cuda.home}" if cuda.home else f"not used: {cuda.reason}",
        "ninja": _distribution("ninja"),
    }


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).partition("\n")[0]


# --- the self-test -----------------------------------------------------------------------------

_GRADIENT_OPS: dict[str, Callable[[Any, list[Tensor], list[Tensor]], Any]] = {
    "accumulate_": lambda ops, main_grads, grads: ops.accumulate_(main_grads, grads, inv_scale=0.5),
    "unscale_check_clip_accumulate_": lambda ops, main_grads, grads: (
        ops.unscale_check_clip_accumulate_(main_grads, grads, inv_scale=0.5, max_norm=1.0)
    ),
    "total_norm": lambda ops, main_grads, grads: ops.total_norm(grads, norm_type=3.0),
    "scale_": lambda ops, main_grads, grads: ops.scale_(main_grads, 0.75),
    "copy_rounded_": lambda ops, main_grads, grads: ops.copy_rounded_(
        main_grads, grads, seed=torch.full((), 7, device=grads[0].device)
    ),
}


def _self_test() -> dict[str, str]:
    """Each operation on each device: "ok", or what went wrong."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    outcomes = {}
    for device in devices:
        for name, call in _GRADIENT_OPS.items():
            outcomes[f"{name} on {device}"] = _outcome(_test_gradient_op, call, device)
        outcomes[f"decode_loss on {device}"] = _outcome(_test_decoder, device)
    return outcomes


def _outcome(test: Callable[..., None], *args: Any) -> str:
    try:
        test(*args)
    except Exception as error:  # a report names every failure, whatever it is
        return f"{type(error).__name__}: {error}"
    return "ok"


def _lists(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Main gradients and gradients of mixed dtypes and shapes, some transposed."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    main_grads, grads = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        main_dtype = torch.promote_types(dtype, torch.float32)
        main_grads += [draw(*shape, dtype=main_dtype) for shape in ((), (0,), (7,), (33, 65))]
        grads += [draw(*shape, dtype=dtype) for shape in ((), (0,), (7,))]
        grads.append(draw(65, 33, dtype=dtype).mT)
    return main_grads, grads


def _test_gradient_op(call: Callable[..., Any], device: str) -> None:
    actual, expected = _lists(device), _lists(device)
    norm, expected_norm = call(accumext, *actual), call(reference, *expected)
    tolerance = _NORM_TOLERANCE  # absolute, too: the norm goes into gradients that it keeps below 1
    for got, want in ((norm, expected_norm), (actual, expected)):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def _test_decoder(device: str) -> None:
    """Loss and gradients of a tiny GRU against plain autograd."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(11, 3).to(device, torch.float64)
        cell = torch.nn.GRUCell(3, 4).to(device, torch.float64)
        head = torch.nn.Linear(4, 11).to(device, torch.float64)
        targets = torch.randint(11, (5, 2)).to(device)
    state = torch.zeros(2, 4, dtype=torch.float64, device=device)
    loss = accumext.decode_loss(embedding, cell, head, targets, state, feedback="teacher").loss
    logits, hidden = [], state
    for tokens in [torch.zeros_like(targets[0]), *targets[:-1]]:
        hidden = cell(embedding(tokens), hidden)
        logits.append(head(hidden))
    expected = functional.cross_entropy(torch.cat(logits), targets.flatten())
    parameters = [*embedding.parameters(), *cell.parameters(), *head.parameters()]
    torch.testing.assert_close(loss, expected, rtol=_RTOL, atol=_ATOL)
    actual_grads = torch.autograd.grad(loss, parameters)
    expected_grads = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=_RTOL, atol=_ATOL)


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
        rows.append((f"no {library} library", f"{why['reason']}. {why['fix']}"))
    return rows
