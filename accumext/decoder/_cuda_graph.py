"""A window of steps as a CUDA graph, captured once per call and replayed for later windows, so that
the host does not launch every kernel of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class StepBuffers(NamedTuple):
    """What torch's modules read and write per step; states have a row more, before and after."""

    states: list[Tensor]  # per layer h, and c of an LSTM: [T + 1, B, H]
    inputs: Tensor  # int64 [T, B]
    teacher: Tensor  # int64 [T, B]
    targets: Tensor  # int64 [T, B]
    tokens: Tensor  # int64 [T, B]
    teacher_mask: Tensor | None  # bool [T, B]
    live: Tensor | None  # bool [T, B]
    uniforms: Tensor | None  # fp64 [T, B]
    dropout_mask: Tensor | None  # bool [T, L - 1, B, H]: units that dropout keeps

    def zeros(self, steps: int) -> StepBuffers:
        """Buffers of zeros for so many steps; 0 is a valid token."""
        states = [s.new_zeros(steps + 1, *s.shape[1:]) for s in self.states]
        others = (None if t is None else t.new_zeros(steps, *t.shape[1:]) for t in self[1:])
        return StepBuffers(states, *others)  # type: ignore[arg-type]


class WindowGraph:
    """`run(buffers, end=steps)`: the first `steps` steps of buffers of its own, replayed at any
    place of longer ones."""

    def __init__(self, like: StepBuffers, steps: int, run: Callable[..., object]) -> None:
        self._steps = steps
        self._buffers = like.zeros(steps + 1)  # the last row is what the window leads to
        self._replay = capture(lambda: run(self._buffers, end=steps), like.inputs.device)

    def replay(self, buffers: StepBuffers, begin: int) -> None:
        """Run the steps from `begin` on; at least one more must follow them."""
        end, own = begin + self._steps, self._buffers
        for state, own_state in zip(buffers.states, own.states, strict=True):
            own_state[0] = state[begin]
        for given, buffer in zip(buffers[1:], own[1:], strict=True):
            if isinstance(given, Tensor) and isinstance(buffer, Tensor):
                buffer.copy_(given[begin : end + 1])
        self._replay()
        for state, own_state in zip(buffers.states, own.states, strict=True):
            state[begin + 1 : end + 1] = own_state[1:-1]
        buffers.inputs[begin + 1 : end + 1] = own.inputs[1:]
        buffers.tokens[begin:end] = own.tokens[:-1]
        if buffers.live is not None and own.live is not None:
            buffers.live[begin:end] = own.live[:-1]
            buffers.live[end:] &= own.live[-1]  # rows that have ended stay so


def capture(body: Callable[[], object], device: torch.device) -> Callable[[], None]:
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
