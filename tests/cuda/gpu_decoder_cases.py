"""Decoders and calls of decode_loss that gpu_decoder.py checks, and the precisions."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

STEPS, IGNORED = 10, -100


class Precision(NamedTuple):
    parameters: torch.dtype
    autocast: torch.dtype | None = None
    last_places: float = 0.0  # what is due where plain autograd happens to be exact


PRECISIONS = {
    "float64": Precision(torch.float64, None, 1e-13),
    "float32": Precision(torch.float32, None, 1e-6),
    "bfloat16": Precision(torch.bfloat16, None, 2.0**-8),
    "bf16 autocast": Precision(torch.float32, torch.bfloat16, 2.0**-8),
    "fp16 autocast": Precision(torch.float32, torch.float16, 2.0**-11),  # with a GradScaler
}
TWO_PRECISIONS = ("float64", "bf16 autocast")  # of cases whose kernels others have run in all


class Case(NamedTuple):
    """A decoder and a call: options of decode_loss, of which the tensors are made by name."""

    options: dict[str, Any]
    cell: str = "gru"
    layers: int = 0  # 0: a cell of one step
    batch: int = 5
    vocabulary: int = 211
    size: int = 48
    steps: int = STEPS
    tied: bool = False
    bias: float = 0.0  # added to the head's
    called: bool = False  # the cell is a function of its own, with a context
    accumulated: bool = False  # by an AccumulatingOptimizer, during the backward pass


TEACHER, GREEDY, SAMPLE = ({"feedback": mode} for mode in ("teacher", "greedy", "sample"))
SCHEDULED = {"feedback": "scheduled", "teacher_forcing": 0.5}
MODES = {
    "teacher": TEACHER,
    "greedy": GREEDY,
    "sample": SAMPLE,
    "scheduled": SCHEDULED,
    "mask": {"feedback": "mask"},
}
CRITERIA: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 0.01},
    "class weight": {"class_weight": "class_weight"},
    "ignore index": {"ignore_index": 7},
    "no reduction": {"reduction": "none"},
}
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "class_weight": "class_weight"}


def large(quick: bool) -> Iterator[tuple[str, Case]]:
    if not quick:
        shape = {"vocabulary": 50_257, "size": 1024, "batch": 32}
        yield "greedy, V=50257, H=1024, B=32", Case(GREEDY, **shape)
        yield "teacher, V=50257, H=1024, B=32", Case(TEACHER, **shape)


def modes() -> Iterator[tuple[str, Case]]:
    """Of feedback; a kernel that stays resident takes windows of at most 64 rows, by eights."""
    for batch in (1, 2, 16, 33, 63, 64, 65, 129):
        yield f"greedy, B={batch}", Case(GREEDY, batch=batch)
        yield f"sample, B={batch}, lengths", Case(SAMPLE | {"lengths": "lengths"}, batch=batch)
    for batch in (16, 33, 64):
        yield f"greedy, all logits below 0, B={batch}", Case(GREEDY, batch=batch, bias=-50.0)
    for name, mode in MODES.items():
        yield name, Case(mode)
    # Known inputs by cuDNN, and with a budget by the steps of the operators.
    for cell, layers in (("gru", 0), ("lstm", 2)):
        for name, mode in (("cuDNN", TEACHER), ("operators", TEACHER | {"memory_budget": 2**28})):
            yield f"teacher by {name}, {cell}", Case(mode, cell, layers, size=96, steps=30)


def others(quick: bool) -> Iterator[tuple[str, Case]]:
    """The criteria, and what else a call may ask for."""
    for criterion, asked in CRITERIA.items():
        yield f"teacher, {criterion}", Case(TEACHER | asked)
        yield f"greedy, {criterion}", Case(GREEDY | asked)
    for name, mode in MODES.items():
        yield f"{name}, lengths", Case(mode | {"lengths": "lengths"})
        yield f"{name}, eos", Case(mode | {"eos": "seen"})
        yield (
            f"{name}, eos, lengths, LSTM",
            Case(mode | {"eos": "seen", "lengths": "lengths"}, "lstm"),
        )
        yield f"{name}, all criteria", Case(mode | EVERYTHING | {"lengths": "lengths"}, "lstm")
    for name, mode in (("teacher", TEACHER), ("greedy", GREEDY)):
        for cell in ("lstm", "rnn", "relu"):
            yield f"{name}, {cell}", Case(mode, cell)
        for cell in ("gru", "lstm", "rnn"):
            yield f"{name}, 2 layers, {cell}", Case(mode, cell, layers=2)
        yield f"{name}, 3 layers", Case(mode, "lstm", layers=3)
        for k1, k2 in ((1, 1), (3, 3), (2, 5)):
            windows = mode | {"k1": k1, "k2": k2}
            yield f"{name}, k1={k1}, k2={k2}", Case(windows)
            yield f"{name}, k1={k1}, k2={k2}, 2 layers", Case(windows, "lstm", layers=2)
            yield f"{name}, k1={k1}, k2={k2}, called", Case(windows, called=True)
        yield f"{name}, tied", Case(mode, tied=True)
        yield f"{name}, called", Case(mode, called=True)
        yield (
            f"{name}, called, lengths, eos",
            Case(mode | {"lengths": "lengths", "eos": "seen"}, called=True),
        )
        for tied in (False, True):
            told = "accumulated, tied" if tied else "accumulated"
            yield f"{name}, {told}", Case(mode, tied=tied, accumulated=True)
        yield f"{name}, called, accumulated", Case(mode, called=True, accumulated=True)
    yield "sample, called", Case(SAMPLE, called=True)
    for vocabulary, size in ((7, 1), (1009, 33), (1013, 65), (4099, 128), (8192, 256)):
        if not quick or vocabulary < 1000:
            shape = {"vocabulary": vocabulary, "size": size}
            yield f"greedy, V={vocabulary}, H={size}", Case(GREEDY, **shape)
            yield f"greedy, V={vocabulary}, H={size}, LSTM", Case(GREEDY, "lstm", **shape)


def captured() -> Iterator[tuple[str, Case]]:
    """Those whose training steps are put into a CUDA graph."""
    yield from {
        **{name: Case(mode) for name, mode in MODES.items()},
        "greedy, lengths, eos": Case(GREEDY | {"lengths": "lengths", "eos": "seen"}),
        "greedy, 2 layers": Case(GREEDY, "lstm", layers=2),
        "greedy, B=65": Case(GREEDY, batch=65),
        "greedy, called": Case(GREEDY, called=True),
    }.items()


def remembered() -> Iterator[tuple[str, Case]]:
    """Those whose peak memory is compared with what decode_memory says."""
    yield "greedy", Case(GREEDY, vocabulary=20_000, size=128, batch=32, steps=64)
    yield "teacher", Case(TEACHER, vocabulary=20_000, size=128, batch=32, steps=64)
    yield "greedy, states", Case(GREEDY, layers=2, size=256, batch=32, steps=128)
    yield "teacher, GRU", Case(TEACHER, layers=1, size=256, batch=32, steps=128)
    yield "teacher, inputs", Case(TEACHER, "lstm", layers=2, size=256, batch=32, steps=128)


# Options that plain autograd in gpu_decoder.py does not have: beside the CPU.
SOFT = {
    "soft_temperature": 2.0, "soft_weight": 0.7, "entropy_weight": 0.1, "z_loss": 0.01,
    "label_smoothing": 0.1,
}  # fmt: skip
LENGTHS = {"lengths": "lengths"}
BESIDE: dict[str, dict[str, Any]] = {
    "token weights": {"token_weight": "token_weight"},
    "resets": {"resets": "resets"},
    "resets, lengths": {"resets": "resets", **LENGTHS},
    "outputs": {"return_outputs": True},
    "outputs, lengths": {"return_outputs": True, **LENGTHS},
    "entropy": {"entropy_weight": 0.1},
    "taught words": {"soft_targets": "words", **SOFT},
    "taught all words, lengths": {"soft_targets": "all words", **SOFT, **LENGTHS},
    "taught by a head": {"soft_targets": "head", **SOFT},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "generate, greedy": {},
    "generate, samples": {"search": "sample", "temperature": 0.7},
    "generate, top_k": {"search": "sample", "top_k": 20},
    "generate, top_p": {"search": "sample", "top_p": 0.8},
    "generate, both": {"search": "sample", "top_k": 50, "top_p": 0.8},
    "generate, both, many": {"search": "sample", "top_k": 100, "top_p": 0.9},
    "generate, beams": {"search": "beam", "beams": 3},
}
SEARCHES |= {f"{name}, eos": {**SEARCHES[name], **LENGTHS, "eos": 3} for name in SEARCHES}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "rollout, segments": {"checkpoint": 4},
    "rollout, k1=2, k2=3": {"k1": 2, "k2": 3},
}
DECODERS = {"gru": Case({}), "lstm": Case({}, "lstm", layers=2), "called": Case({}, called=True)}


def beside(calls: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Case]]:
    """Each of these calls of each decoder."""
    for kind, case in DECODERS.items():
        for name, options in calls.items():
            yield f"{name}, {kind}", case._replace(options=options)
