"""fp32 masters of half-precision parameters, which any optimizer can step on.

A half-precision parameter loses every update below half a unit in its last place. Its master, the
same number in float32, keeps them: gradients reach it unrounded, the optimizer steps on it, and the
parameter gets the rounded master after every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumext import _checks, _memory_overlap, ops
from accumext._scalars import Scalar
from accumext._tensor_kinds import HALF_DTYPES, dense_storage, is_dtensor, main_dtype, versions
from accumext.masters._host_transfer import Sending, crosses, send_rounded
from accumext.masters._parameters import Parameters, parameters_of


class Link(NamedTuple):
    """What a master stands for."""

    parameter: Tensor  # half precision
    stochastic: bool  # whether the parameter gets the master rounded stochastically
    version: int | None = None  # of the parameter when the master was made; None: not known

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (self.parameter, self.stochastic)  # copies of tensors count their writes anew


def _link_of(master: Tensor) -> Link | None:
    return getattr(master, "master_of", None)


def masters(
    parameters: Iterable[Tensor],
    device: torch.device | str | None = None,
    stochastic_rounding: bool = False,
) -> list[nn.Parameter]:
    """fp32 copies of half-precision parameters, for an optimizer to step on.

    `torch.optim.AdamW(masters)` in `AccumulatingOptimizer(..., masters=masters)` then sees the
    window's gradient in float32, and after every step each parameter becomes its rounded master.
    Masters cost 4 bytes per parameter; gradients of half precision are summed in float32 anyway.

    Args:
        parameters: as of `model.parameters()`; shards of `fully_shard`, too. Those that are not of
            half precision, or are frozen, are returned themselves.
        device: of the masters, and so of the gradients and the optimizer's state; None for that of
            each parameter. "cpu" keeps them in the host's memory, pinned where there is a GPU.
        stochastic_rounding: round to one of the two nearest numbers, with the probability that
            makes the expected value that of the master, instead of to the nearest.

    Returns:
        One per parameter, in order; `master.master_of.parameter` is the one that it stands for.

    Raises:
        TypeError: an element is no tensor.
        ValueError: a parameter is no leaf, or is sharded and on another device than `device`.

    Example:
        >>> masters = accumext.masters(model.parameters())
        >>> adam = torch.optim.AdamW(masters, lr=1e-4, fused=True)
        >>> opt = accumext.AccumulatingOptimizer(adam, masters=masters, window=8, max_norm=1.0)

    Source: Micikevicius et al., "Mixed Precision Training" (2018), 3.1.
    """
    op = "masters"
    if isinstance(parameters, (Tensor, dict, str)) or not isinstance(parameters, Iterable):
        contract = "be an iterable of parameters"
        _checks.fail_type(op, "parameters", contract, _checks.type_name(parameters))
    place = None if device is None else torch.device(device)
    if not isinstance(stochastic_rounding, bool):
        got = _checks.type_name(stochastic_rounding)
        _checks.fail_type(op, "stochastic_rounding", "be a bool", got)
    given = list(parameters)
    for index, parameter in enumerate(given):
        _check_parameter(op, f"parameters[{index}]", parameter, place)
    made: dict[Tensor, nn.Parameter] = {}
    for parameter in given:
        if parameter not in made:
            made[parameter] = _master_of(parameter, place, stochastic_rounding)
    return [made[parameter] for parameter in given]


def _check_parameter(op: str, name: str, parameter: Any, place: torch.device | None) -> None:
    if not isinstance(parameter, Tensor):
        _checks.fail_type(op, name, "be a parameter", _checks.type_name(parameter))
    if not parameter.is_leaf:
        _checks.fail_value(op, name, "be a leaf", "a tensor with a graph")
    if place is not None and is_dtensor(parameter) and place.type != parameter.device.type:
        contract = f"be on {place} where its master is to be, for its shards stay with their mesh"
        advice = "Shard with CPUOffloadPolicy, and leave device=None"
        _checks.fail_value(op, name, contract, parameter.device, advice)


def _master_of(parameter: Tensor, place: torch.device | None, stochastic: bool) -> nn.Parameter:
    if parameter.dtype not in HALF_DTYPES or not parameter.requires_grad:
        return parameter  # type: ignore[return-value]
    values = parameter.detach().to(place or parameter.device, main_dtype(parameter))
    if values.is_cpu and not parameter.is_cpu:
        values = values.pin_memory()
    master = nn.Parameter(values)
    vars(master)["master_of"] = Link(parameter, stochastic, *versions([parameter]))
    return master


def _links_of(tensors: Iterable[Tensor]) -> dict[Tensor, Link]:
    """The masters among these, and what each stands for."""
    return {t: link for t in tensors if (link := _link_of(t)) is not None}


def _check_one_each(op: str, links: dict[Tensor, Link], name: str = "masters") -> None:
    """Raise unless every element that masters are rounded into has one master."""
    if len({link.parameter for link in links.values()}) < len(links):
        contract = "hold one master of a parameter"
        advice = "Call accumext.masters once, with all parameters"
        _checks.fail_value(op, name, contract, "two", advice)
    parameters = [dense_storage(link.parameter.detach()) for link in links.values()]
    if _memory_overlap.any_shared(parameters):
        contract = "be of parameters that share no memory"
        advice = "Tie parameters by using one, not by views of it"
        _checks.fail_value(op, name, contract, "some of the same elements", advice)


def target_of(op: str, optimizer: Optimizer, given: Any) -> Target:
    """What an optimizer that was given `masters` steps on.

    Raises:
        TypeError: `given` is no list of parameters.
        ValueError: the optimizer steps on a master that is not among them, or on a parameter that
            has a master among them.
    """
    if given is not None and (
        not isinstance(given, (list, tuple)) or not all(isinstance(m, Tensor) for m in given)
    ):
        contract = "be what accumext.masters returned, or None"
        _checks.fail_type(op, "masters", contract, _checks.type_name(given))
    stepped_on = parameters_of(optimizer)
    known = set(given or ())
    links = _links_of(stepped_on)
    if not links.keys() <= known:
        contract = "hold every master that the optimizer steps on"
        got = "None" if given is None else "a list without some"
        _checks.fail_value(op, "masters", contract, got, "Pass what accumext.masters returned")
    halves = {link.parameter for link in _links_of(known).values()}
    if not halves.isdisjoint(stepped_on):
        contract = "be what the optimizer steps on"
        advice = "Make the optimizer of the masters, not of the model's parameters"
        _checks.fail_value(op, "masters", contract, "masters of its parameters", advice)
    _check_one_each(op, links)
    return MasterWeights(optimizer, links) if links else Parameters(optimizer)


class MasterWeights:
    """The masters that an optimizer steps on, and the parameters that they stand for."""

    is_parameters = False

    def __init__(self, optimizer: Optimizer, links: dict[Tensor, Link]) -> None:
        self._optimizer = optimizer
        self._links = links  # by master
        self._roundings = 0  # what seeds the next stochastic rounding: alike on all processes
        # Of the parameters when they were last rounded to. None: perhaps written since.
        self._versions = [link.version for link in links.values()]

    def __getstate__(self) -> dict[str, Any]:
        # Copies of tensors begin their counts anew.
        return {**self.__dict__, "_versions": [None] * len(self._links)}

    # Who stands for whom

    def stepped_on(self) -> list[Tensor]:
        return parameters_of(self._optimizer)

    def parameters(self) -> list[Tensor]:
        links = self._links
        return [links[p].parameter if p in links else p for p in self.stepped_on()]

    # Gradients on their way to the masters

    def goes_to_host(self) -> list[bool]:
        if not any(crosses(link.parameter, master) for master, link in self._links.items()):
            return []
        return list(map(crosses, self.parameters(), self.stepped_on()))

    def send(self, grads: list[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        far = self.goes_to_host()
        return Sending(grads, far).wait if far else lambda: grads

    @torch.no_grad()
    def lend_grads(self) -> None:
        for master, link in self._links.items():
            grad = link.parameter.grad
            master.grad = None if grad is None else grad.to(master.device, master.dtype)

    def take_grads_back(self) -> None:
        for master in self._links:
            master.grad = None

    # Rounding the masters into the parameters

    def take_over(self) -> None:
        """Let a master follow its parameter where that was written by others: loaded, averaged.

        That is every element that is no rounding of the master's. Only parameters whose version
        tells of a write are looked at.
        """
        before, after = self._versions, self._parameter_versions()
        if before == after:
            return
        with torch.no_grad():
            for (master, link), old, new in zip(self._links.items(), before, after, strict=True):
                if old != new or new is None:
                    _follow_parameter(master, link)
        self._versions = after

    def rounding(self, skip: Scalar = 0.0, *, every: bool = False) -> Rounding:
        mine = self._links.items()
        links = {m: link for m, link in mine if every or m.grad is not None}
        return Rounding(links, self._roundings, skip, self._rounded)

    def followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the optimizer, after which parameters follow the masters that it wrote."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            masters = list(self._links)
            before = versions(masters)
            try:
                return method(*args, **kwargs)
            finally:
                pairs = zip(masters, before, versions(masters), strict=True)
                links = {m: self._links[m] for m, old, new in pairs if old != new}
                Rounding(links, self._roundings, 0.0, self._rounded).write()

        return call

    def _rounded(self, roundings: int) -> None:
        self._roundings, self._versions = roundings, self._parameter_versions()

    def check_added(self, op: str, given: Sequence[Tensor]) -> None:
        """Raise unless every parameter is stepped on once, with these given later.

        Raises:
            ValueError: one is a second master of a parameter, or has a master here.
        """
        if any(link.parameter is p for link in self._links.values() for p in given):
            contract = "hold masters in place of their parameters"
            _checks.fail_value(op, "params", contract, "a parameter that has a master here")
        _check_one_each(op, self._links | _links_of(given), "params")

    def know(self) -> None:
        new = {m: k for m, k in _links_of(self.stepped_on()).items() if m not in self._links}
        self._links |= new
        self._versions += [link.version for link in new.values()]

    def _parameter_versions(self) -> list[int | None]:
        return versions([link.parameter for link in self._links.values()])

    # Checkpoints

    def state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        """With the masters by index of the optimizer's parameters, and the count of roundings."""
        mine = {i: p.detach() for i, p in self._mine().items()}
        return {**packed, "masters": {"parameters": mine, "roundings": self._roundings}}

    def _mine(self) -> dict[int, Tensor]:
        """The masters by index."""
        return {i: p for i, p in enumerate(self.stepped_on()) if p in self._links}

    @torch.no_grad()
    def load_state_dict(
        self, op: str, packed: dict[str, Any], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Masters are rounded into the parameters; where none were saved, they follow those."""
        saved, mine = packed.get("masters"), self._mine()
        if saved is not None:
            _check_state(op, saved, mine)
        load(packed)
        for index, master in mine.items():
            link = self._links[master]
            if saved is None:
                master.copy_(link.parameter)
            else:
                master.copy_(saved["parameters"][index])
                _follow_master(master, link)
        if saved is not None:
            self._roundings = saved["roundings"]
        self._versions = self._parameter_versions()


def _check_state(op: str, state: Any, mine: dict[int, Tensor]) -> None:
    """Raise unless this is what `state_dict` returned for these masters by index."""
    name = "state_dict['masters']"
    if not isinstance(state, dict) or set(state) != {"parameters", "roundings"}:
        contract = "be what the state_dict of an optimizer with masters has there"
        _checks.fail_value(op, name, contract, _checks.type_name(state))
    roundings = state["roundings"]
    if isinstance(roundings, bool) or not isinstance(roundings, int):
        kind = _checks.type_name(roundings)
        _checks.fail_type(op, f"{name}['roundings']", "be an int", kind)
    if not isinstance(state["parameters"], dict):
        kind = _checks.type_name(state["parameters"])
        _checks.fail_type(op, f"{name}['parameters']", "be a dict", kind)
    if state["parameters"].keys() != mine.keys():
        got = sorted(state["parameters"])
        _checks.fail_value(op, name, f"be of the parameters {sorted(mine)}", got)
    for index, master in mine.items():
        saved = state["parameters"][index]
        part = f"{name}['parameters'][{index}]"
        if not isinstance(saved, Tensor) or not saved.is_floating_point():
            contract = "be a floating-point tensor"
            _checks.fail_type(op, part, contract, _checks.type_name(saved))
        if saved.shape != master.shape:
            contract = f"have shape {list(master.shape)}"
            _checks.fail_value(op, part, contract, list(saved.shape))


class Rounding:
    """Masters on their way into their parameters: once, unless they are written again."""

    def __init__(
        self,
        links: dict[Tensor, Link],  # by master
        roundings: int,
        skip: Scalar,  # not zero: nothing is written
        done: Callable[[int], None],  # told how many roundings there have been then
    ) -> None:
        self._links, self._roundings, self._skip, self._done = links, roundings, skip, done
        self._written: list[int | None] = []  # versions of the masters then

    @torch.no_grad()
    def write(self) -> None:
        """Write the parameters. After an interrupt another call writes the same."""
        if self._written and self._written == versions(list(self._links)):
            return
        numbers = count(self._roundings)
        for (device, far, stochastic), (parameters, masters) in self._calls().items():
            seeds = None
            if stochastic:
                seeds = (torch.full((), n, dtype=torch.int64, device=device) for n in numbers)
            if far:
                if not self._skip:  # a device's word of it has to be waited for here
                    send_rounded(parameters, masters, seeds)
                continue
            seed = None if seeds is None else next(seeds)
            flag = self._skip.to(device, torch.float32) if isinstance(self._skip, Tensor) else None
            ops.copy_rounded_(parameters, masters, seed=seed, found_inf=flag)
        self._done(next(numbers))
        self._written = versions(list(self._links))

    def _calls(self) -> dict[tuple[torch.device, bool, bool], tuple[list[Tensor], list[Tensor]]]:
        """Parameters and masters of one call each: their device, whether they cross, and how."""
        calls: dict[tuple[torch.device, bool, bool], tuple[list[Tensor], list[Tensor]]] = {}
        for master, (parameter, stochastic, _) in self._links.items():
            key = (master.device, crosses(parameter, master), stochastic)
            parameters, masters = calls.setdefault(key, ([], []))
            parameters.append(dense_storage(parameter.detach()))
            masters.append(dense_storage(master.detach()))
        return calls


def _follow_parameter(master: Tensor, link: Link) -> None:
    """Take over the elements of a parameter that are no rounding of its master's."""
    parameter, mine = dense_storage(link.parameter.detach()), dense_storage(master.detach())
    values = parameter.to(mine.device, mine.dtype)
    mine.copy_(torch.where(_rounds_to(mine, values, link), mine, values))


def _follow_master(master: Tensor, link: Link) -> None:
    """Round the elements of a master that its parameter is no rounding of."""
    parameter, mine = dense_storage(link.parameter.detach()), dense_storage(master.detach())
    values = parameter.to(mine.device, mine.dtype)
    parameter.copy_(torch.where(_rounds_to(mine, values, link), values, mine))


def _rounds_to(master: Tensor, values: Tensor, link: Link) -> Tensor:
    """Where a master may have been rounded to these values of its parameter."""
    dtype = link.parameter.dtype
    nearest = master.to(dtype).to(master.dtype)
    if not link.stochastic:
        return nearest == values
    # The other neighbour lies beyond the master, and nothing lies between the two: what is halfway
    # is rounded to one of them.
    halfway = (nearest * 0.5 + values * 0.5).to(dtype).to(master.dtype)
    beyond = ((nearest < master) & (master < values)) | ((values < master) & (master < nearest))
    return (nearest == values) | (beyond & ((halfway == nearest) | (halfway == values)))


Target: TypeAlias = Parameters | MasterWeights  # what an optimizer steps on
