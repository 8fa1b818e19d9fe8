"""A window of steps as a CUDA graph: captured once per call, replayed over buffers that stay where
they are, so that the host is not asked for every kernel of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Tape(NamedTuple):
    """What a run has per step; states have a row more, for before and after."""

    states: list[Tensor]  # per layer h, and c of an LSTM: [T + 1, B, H]
    inputs: Tensor  # int64 [T, B]
    teacher: Tensor  # int64 [T, B]
    targets: Tensor  # int64 [T, B]
    tokens: Tensor  # int64 [T, B]
    forced: Tensor | None  # bool [T, B]
    live: Tensor | None  # bool [T, B]
    uniforms: Tensor | None  # fp64 [T, B]
    kept: Tensor | None  # bool [T, L - 1, B, H]

    def blank(self, steps: int) -> Tape:
        """Buffers for so many steps, in which every token is a word."""

        def of(rows: int, tensor: Tensor) -> Tensor:
            return tensor.new_zeros(rows, *tensor.shape[1:])

        states = [of(steps + 1, state) for state in self.states]
        rest = (None if t is None else of(steps, t) for t in self[1:])
        return Tape(states, *rest)  # type: ignore[arg-type]


class WindowGraph:
    """`body(tape, steps)` on the first `steps` of a tape, at any place of a longer one."""

    def __init__(self, like: Tape, steps: int, body: Callable[[Tape, int], None]) -> None:
        self._steps = steps
        self._tape = like.blank(steps + 1)  # the last row is what the window leads to
        self._replay = capture(lambda: body(self._tape, steps), like.inputs.device)

    def replay(self, tape: Tape, begin: int) -> None:
        """The steps from `begin` on; there must be one more behind them."""
        end, mine = begin + self._steps, self._tape
        for state, own in zip(tape.states, mine.states, strict=True):
            own[0] = state[begin]
        for given, buffer in zip(tape[1:], mine[1:], strict=True):
            if isinstance(given, Tensor) and isinstance(buffer, Tensor):
                buffer.copy_(given[begin : end + 1])
        self._replay()
        for state, own in zip(tape.states, mine.states, strict=True):
            state[begin + 1 : end + 1] = own[1:-1]
        tape.inputs[begin + 1 : end + 1] = mine.inputs[1:]
        tape.tokens[begin:end] = mine.tokens[:-1]
        if tape.live is not None and mine.live is not None:
            tape.live[begin:end] = mine.live[:-1]
            tape.live[end:] &= mine.live[-1]  # who has ended stays so


def capture(body: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays `body`. Nothing waits for the device, unlike in `torch.cuda.graph`."""
    graph = torch.cuda.CUDAGraph()
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph.replay
