"""The persistent kernel of csrc/cuda on the host; see __init__.py. The arguments are those of
decode_steps in accumext/decoder/_operators.py."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from host_cuda import Request, execute

SHARED_BYTES = 227 << 10  # of a block on an H100


class HostPersistent:
    """decode_steps with a head, by persistent.cpp."""

    def __init__(self, driver: Path) -> None:
        self._driver = driver

    def decode_steps(
        self, table, cell, states, kind, dropout_mask, dropout_scale, input_mask, input_scale,
        output_mask, output_scale, inputs, teacher, teacher_mask, live, eos, pad, uniforms,
        temperature, head_weight, head_bias, targets, tokens, exps, stats, rows, logit_rows, begin,
        end, *, runs, shared_bytes=SHARED_BYTES, resident=True, stages=0,
    ) -> int:  # fmt: skip
        """The second number of a run is how many blocks there are. Of `shared_bytes` of shared
        memory follows whether the cells' weights stay there, and how many stages the head's has:
        `resident` and `stages` are what is expected, 0 anything."""
        assert (input_mask, output_mask) == (None, None)  # the loop's work
        steps, batch = inputs.shape
        layers = len(cell) // 4
        parts = len(states) // layers
        request = Request()
        request.put_integers(shared_bytes)
        request.put_integers(kind, layers, batch, table.shape[1], states[0].shape[2])
        request.put_integers(head_weight.shape[0], steps, begin, end, eos, pad, len(table))
        request.put_numbers(temperature, dropout_scale)
        _put_matrix(request, table)
        for layer in range(layers):
            w_ih, w_hh, *biases = cell[4 * layer : 4 * layer + 4]
            _put_matrix(request, w_ih)
            _put_matrix(request, w_hh)
            for bias in biases:
                request.put_tensor(bias if bias.numel() else None)
            request.put_place(states[layer * parts])
            request.put_place(states[layer * parts + 1] if parts == 2 else None)
        for tensor in (dropout_mask, inputs, teacher, teacher_mask, live, uniforms):
            assert tensor is None or tensor.is_contiguous()
            request.put_place(tensor)
        _put_matrix(request, head_weight)
        request.put_tensor(head_bias)
        request.put_place(targets)
        request.put_place(tokens)
        _put_matrix(request, exps)
        _put_matrix(request, stats)
        request.put_place(rows)
        request.put_integers(resident, stages)
        request.take_back(execute(self._driver, request=request.bytes(runs)), runs)
        return (end - begin) * batch


def _put_matrix(request: Request, matrix: Tensor | None) -> None:
    request.put_tensor(matrix)
    request.put_integers(*((0, 0) if matrix is None else matrix.stride()))
