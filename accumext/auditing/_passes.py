"""The backward passes of a loop: their gradients as sketches, their losses, and what they keep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from accumext.auditing._events import Constant, Pass
from accumext.auditing._graph import Losses, SavedTensors, inner_nodes, same_number
from accumext.auditing._sketch import Sketches, dense, sample, sketch
from accumext.auditing._torch_private import is_dtensor, is_half

UNNAMED = "parameter"  # with its number, the name of a parameter that is in no module
_PART = 2**20  # elements that are converted to float32 at once


def stands_for(tensor: Tensor) -> Tensor:
    """Return the half-precision parameter of a master, and any other parameter itself."""
    link = getattr(tensor, "master_of", None)
    return tensor if link is None else link.parameter


class Parameters:
    """The parameters that an audit knows, by number: the optimizer's, then the model's others."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by id
        self.trainable: set[int] = set()  # numbers of those that have required a gradient
        self._names: dict[int, str] = {}

    def add(self, tensor: Tensor, name: str | None = None) -> None:
        number = self.numbers.setdefault(id(stands_for(tensor)), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(stands_for(tensor))
        if stands_for(tensor).requires_grad:
            self.trainable.add(number)
        if name is not None:
            self._names[number] = name.removeprefix("module.")

    def number(self, tensor: Tensor) -> int | None:
        return self.numbers.get(id(stands_for(tensor)))

    def among(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of the known ones among these tensors."""
        return frozenset(n for t in tensors if (n := self.number(t)) is not None)

    def bytes_of(self, numbers: Iterable[int]) -> int:
        return sum(self.tensors[n].numel() * self.tensors[n].element_size() for n in numbers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names.get(i, f"{UNNAMED} {i}") for i in range(len(self.tensors)))

    def take(self, tensors: Iterable[Tensor]) -> Sketches:
        """Return the sketches of the gradients that these tensors have in `.grad`."""
        found = Sketches(self.tensors)
        for tensor in tensors:
            if tensor.grad is not None and (number := self.number(tensor)) is not None:
                found.add(number, tensor.grad)
        return found


class Passes:
    """The backward passes of a loop, which hooks observe while they run."""

    def __init__(self, known: Parameters) -> None:
        self.saved = SavedTensors()
        self._known = known
        self._nodes: dict[int, Any] = {}  # kept: a leaf makes its node anew once nobody holds it
        self._hooks = ExitStack()
        self.running: Sketches | None = None
        self._added: dict[int, tuple[Tensor, Tensor]] = {}  # sums, and their sketches before a pass
        self._retained = frozenset[int]()  # numbers of the nodes that the last pass has kept
        self._sums: dict[int, Tensor] | None = {}  # of half-precision gradients, in float32

    def sum_nothing(self) -> None:
        """Leave half-precision gradients to a wrapper, which sums them in float32."""
        self._sums = None

    def close(self) -> None:
        self.saved.watching, self._sums = False, None
        self._added.clear()
        self._hooks.close()
        self._nodes.clear()

    def run(
        self, backward: Callable[[], Any], root: Tensor, norms: dict[str, nn.Module], retains: bool
    ) -> tuple[Any, Callable[..., Pass] | None]:
        """Run a pass. Return its result, and a function that makes its event, or None if it reached
        no known parameter. `norms`: the batch norms in eval mode; `retains`: it keeps its graph."""
        known, start = self._known, perf_counter()
        before_it = sample([t for t in known.tensors if t.requires_grad])
        self._hook()
        losses = Losses(root.grad_fn)
        scale, unscaled = losses.scaled or (None, root.detach().sum().clone())
        graph, shares = self.saved.graph(losses), self._shares(root, retains)
        shards = [t for t in known.tensors if is_dtensor(t)]  # summed before they reach `.grad`
        before = known.take(shards)
        running = self.running = Sketches(known.tensors)
        try:
            result = backward()
            for number, (total, earlier) in self._added.items():
                running.add(number, total, earlier)
        finally:
            self.running = None
            self._added.clear()
            read = losses.end()
        if shards:
            after = known.take(shards)
            running.present.update(after.present)
            running.values += after.values - before.values
        asleep = tuple(
            name for name, norm in norms.items()
            if known.among(norm.parameters(recurse=False)) & running.present.keys()
        )  # fmt: skip

        def event(where: str, time: float, *, reduced: frozenset[int], **fields: Any) -> Pass:
            of_losses, coefficient, constants = read()
            factor = 1.0 if scale is None else float(scale)
            return Pass(
                where,
                time,
                start,
                gradient=running.on_host(len(known.tensors)),
                order=tuple(running.present),
                losses=of_losses,
                constants=_without_scale(constants, factor),
                coefficient=coefficient,
                scale=factor,
                value=float(unscaled),
                graph=graph,
                sent=known.bytes_of(reduced & running.present.keys()),
                weights=tuple(before_it.tolist()),
                eval_norms=asleep,
                shares=shares,
                **fields,
            )

        return result, event if running.present else None

    def _shares(self, root: Tensor, retains: bool) -> bool:
        """Tell whether the pass goes through nodes that the pass before has retained."""
        before = self._retained
        own = inner_nodes(root.grad_fn) if retains or before else frozenset()
        self._retained = own if retains else frozenset()
        return bool(own & before)

    def _hook(self) -> None:
        """Register hooks that see every gradient which is about to be added to a `.grad`."""
        for number, tensor in enumerate(self._known.tensors):
            if tensor.requires_grad and number not in self._nodes and not is_dtensor(tensor):
                node = self._nodes[number] = get_gradient_edge(tensor).node
                handle = node.register_prehook(functools.partial(self._see, number))
                self._hooks.callback(handle.remove)

    def see_sum(self, parameter: Tensor, total: Tensor) -> None:
        """Note a wrapper's sum to which an operator is about to add, instead of to a `.grad`."""
        number = self._known.number(parameter)
        if self.running is not None and number is not None and number not in self._added:
            self._added[number] = total, sketch(total)

    @torch.no_grad()
    def _see(self, number: int, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[0]
        if self.running is None or grad is None:
            return
        self.running.add(number, grad)
        if self._sums is not None and is_half(grad):
            flat = dense(grad).reshape(-1)
            known = self._sums.get(number)
            if known is None:
                self._sums[number] = flat.float()
            else:  # in parts: a sum of two dtypes makes a copy
                for total, part in zip(known.split(_PART), flat.split(_PART), strict=True):
                    total += part

    @torch.no_grad()
    def half_sums(self) -> list[tuple[Tensor, ...]]:
        """Return the fields of a `HalfSum` for each sum in half precision; the sums begin anew."""
        rows: list[tuple[Tensor, ...]] = []
        for number, total in (self._sums or {}).items():
            grad = self._known.tensors[number].grad
            if grad is not None and is_half(grad):
                rows.append(_half_sum(dense(grad).reshape(-1), total))
        if self._sums is not None:
            self._sums.clear()
        return rows


def _without_scale(constants: tuple[Constant, ...], scale: float) -> tuple[Constant, ...]:
    """Return the factors of a loss without that of the GradScaler, which came last."""
    first = constants[0].value if constants and scale != 1.0 else 0.0
    return constants[1:] if same_number(first, scale) else constants


def _half_sum(summed: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of a `HalfSum`, without copies of the gradients in float32."""
    parts = list(zip(summed.split(_PART), total.split(_PART), strict=True))
    square = torch.stack([t.square().sum() for _, t in parts]).sum()
    factor = torch.stack([s.float() @ t for s, t in parts]).sum() / square
    once = torch.stack([(t.to(s.dtype).float() - t).square().sum() for s, t in parts]).sum()
    rest = torch.stack([(s.float() / factor - t).square().sum() for s, t in parts]).sum()
    return factor, rest / square, square, once
