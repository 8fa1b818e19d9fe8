"""fp32 masters of half-precision parameters, which any optimizer can step on.

A half-precision parameter loses every update below half a unit in its last place. Its master, a
float32 copy, keeps such updates: gradients reach it unrounded, the optimizer steps on it, and the
parameter gets the rounded master after every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count, groupby, repeat
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumext import ops
from accumext.tensors import checks, memory_overlap
from accumext.tensors.kinds import (
    HALF_DTYPES,
    dense_storage,
    dense_storages,
    is_dtensor,
    main_dtype,
    versions,
)
from accumext.tensors.scalars import Scalar, as_tensor

Grads: TypeAlias = list[Tensor | None]
State: TypeAlias = dict[str, Any]  # of an optimizer, as its `state_dict` returns it

# Bytes of parameters that are rounded on the host before they are sent to their device: large
# enough for the bus's full speed, small enough that sending overlaps with rounding the next bundle.
BUNDLE_BYTES = 16 * 2**20

params_of = itemgetter("params")
_parameter_of = attrgetter("parameter")
_is_cpu = attrgetter("is_cpu")


@dataclass(eq=False)
class Master:
    """The parameter that a master stands for."""

    parameter: Tensor  # half precision
    stochastic: bool  # whether the master is rounded into it stochastically
    version: int | None = None  # of the parameter when it last was its rounded master, if known

    def __reduce__(self) -> tuple[Any, ...]:
        return Master, (self.parameter, self.stochastic)  # copies of tensors count writes anew

    @torch.no_grad()
    def sync(self, master: Tensor, write_master: bool) -> None:
        """Make parameter and master agree. Elements of the parameter that are no rounding of the
        master's are written into the master or, without `write_master`, rounded from it."""
        half, wide = dense_storage(self.parameter.detach()), dense_storage(master.detach())
        values = half.to(wide.device, wide.dtype)
        nearest = wide.to(half.dtype).to(wide.dtype)
        agree = nearest == values
        if self.stochastic:
            # Stochastic rounding may also give the neighbour on the other side of the master. The
            # two are neighbours if the number halfway between them is rounded to one of them.
            beyond = (nearest != wide) & ((nearest < wide) == (wide < values))
            halfway = (nearest * 0.5 + values * 0.5).to(half.dtype).to(wide.dtype)
            agree |= beyond & ((halfway == nearest) | (halfway == values))
        if write_master:
            wide.copy_(torch.where(agree, wide, values))
        else:
            half.copy_(torch.where(agree, values, wide))


def links_of(tensors: Iterable[Tensor]) -> dict[Tensor, Master]:
    """Return the masters among these tensors, with what each knows of its parameter."""
    return {t: link for t in tensors if (link := getattr(t, "master_of", None)) is not None}


def masters(
    parameters: Iterable[Tensor],
    device: torch.device | str | None = None,
    stochastic_rounding: bool = False,
) -> list[nn.Parameter]:
    """Return fp32 copies of half-precision parameters, for an optimizer to step on.

    `torch.optim.AdamW(masters)` in `AccumulatingOptimizer(..., masters=masters)` then sees the
    window's gradient in float32, and after every step each parameter becomes its rounded master.
    Masters cost 4 bytes per parameter; gradients of half precision are summed in float32 anyway.

    Args:
        parameters: such as `model.parameters()`; shards of `fully_shard`, too. Those that are not
            of half precision, or are frozen, are returned themselves.
        device: of the masters, and so of the gradients and the optimizer's state; None for that of
            each parameter. "cpu" keeps them in the host's memory, pinned for parameters on a GPU.
        stochastic_rounding: round to one of the two nearest numbers, with the probability that
            makes the expected value that of the master, instead of to the nearest.

    Returns:
        One master per parameter, in order; `master.master_of.parameter` is its parameter.

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
    module = isinstance(parameters, nn.Module)
    if (
        module
        or isinstance(parameters, (Tensor, dict, str))
        or not isinstance(parameters, Iterable)
    ):
        contract = "be an iterable of parameters"
        advice = "Pass model.parameters()" if module else None
        checks.fail_type(op, "parameters", contract, checks.type_name(parameters), advice)
    checks.instance(op, "stochastic_rounding", stochastic_rounding, bool, "be a bool")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        contract = "be None, for that of each parameter, or a device such as 'cpu'"
        checks.fail_value("masters", "device", contract, repr(device))
    result: list[nn.Parameter] = []
    masters_by_parameter: dict[Tensor, nn.Parameter] = {}
    for index, parameter in enumerate(parameters):
        _check_parameter(op, f"parameters[{index}]", parameter, place)
        if parameter not in masters_by_parameter:
            master = _master_of(parameter, place, stochastic_rounding)
            masters_by_parameter[parameter] = master
        result.append(masters_by_parameter[parameter])
    return result


def _check_parameter(op: str, name: str, parameter: Any, place: torch.device | None) -> None:
    checks.instance(op, name, parameter, Tensor, "be a parameter")
    if not parameter.is_leaf:
        checks.fail_value(op, name, "be a leaf", "a tensor with a graph")
    if place is not None and is_dtensor(parameter) and place.type != parameter.device.type:
        contract = f"be on {place} if its master is to be, since shards stay with their mesh"
        advice = "Shard with CPUOffloadPolicy, and leave device=None"
        checks.fail_value(op, name, contract, parameter.device, advice)


def _master_of(parameter: Tensor, place: torch.device | None, stochastic: bool) -> nn.Parameter:
    if parameter.dtype not in HALF_DTYPES or not parameter.requires_grad:
        return parameter  # type: ignore[return-value]
    values = parameter.detach().to(place or parameter.device, main_dtype(parameter))
    if values.is_cpu and not parameter.is_cpu:
        values = values.pin_memory()
    master = nn.Parameter(values)
    vars(master)["master_of"] = Master(parameter, stochastic, *versions([parameter]))
    return master


def _crossing(parameters: Iterable[Tensor], masters: Iterable[Tensor]) -> list[bool]:
    """Tell which parameters are on a device while their masters are in the host's memory."""
    places = zip(map(_is_cpu, parameters), map(_is_cpu, masters), strict=True)
    return [on_host and not here for here, on_host in places]


class SteppedTensors:
    """The tensors an optimizer steps on: the model's parameters, or masters of some of them."""

    def __init__(self, op: str, optimizer: Optimizer, masters: Any) -> None:
        known = () if masters is None else masters
        if not isinstance(known, (list, tuple)) or not all(isinstance(m, Tensor) for m in known):
            contract = "be what accumext.masters returned, or None"
            checks.fail_type(op, "masters", contract, checks.type_name(masters))
        self._optimizer = optimizer
        self.links = links_of(self.stepped_on())  # by master
        self._known = len(self.stepped_on())  # how many tensors `links` was made of
        self.is_parameters = not self.links  # whether it steps on the parameters themselves
        self.roundings = 0  # seed of the next stochastic rounding: equal on all processes
        if not self.links.keys() <= set(known):
            contract = "hold every master that the optimizer steps on"
            got = "None" if masters is None else "a list without some"
            checks.fail_value(op, "masters", contract, got, "Pass what accumext.masters returned")
        if not {link.parameter for link in links_of(known).values()}.isdisjoint(self.stepped_on()):
            contract = "be what the optimizer steps on"
            advice = "Make the optimizer of the masters, not of the model's parameters"
            checks.fail_value(op, "masters", contract, "masters of its parameters", advice)
        _check_one_each(op, "masters", self.links)

    def stepped_on(self) -> list[Tensor]:
        """Return the tensors that the optimizer holds."""
        return list(chain.from_iterable(map(params_of, self._optimizer.param_groups)))

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, which autograd gives gradients, in the same order."""
        stepped_on = self.stepped_on()
        if self.is_parameters:
            return stepped_on
        if len(stepped_on) != self._known:  # somebody has added a group to the optimizer itself
            self.know()
        links = self.links
        return [links[p].parameter if p in links else p for p in stepped_on]

    def goes_to_host(self) -> list[bool]:
        """Tell for which parameters gradients are sent to the host, to sums there; [] if none."""
        if not any(_crossing(map(_parameter_of, self.links.values()), self.links)):
            return []
        return _crossing(self.parameters(), self.stepped_on())

    def send(self, grads: Grads) -> Callable[[], Grads]:
        """Begin to send gradients to the devices of their sums; return a function that waits."""
        if not (to_host := self.goes_to_host()):
            return lambda: grads
        sent, devices = list(grads), set()
        for i, (grad, far) in enumerate(zip(grads, to_host, strict=True)):
            if far and grad is not None:
                sent[i] = grad.detach().to("cpu", non_blocking=True)  # in pinned memory
                devices.add(grad.device)
        streams = [torch.accelerator.current_stream(d) for d in devices if d.type != "cpu"]
        events = [stream.record_event() for stream in streams]

        def wait() -> Grads:
            for event in events:
                event.synchronize()
            return sent

        return wait

    @torch.no_grad()
    def set_master_grads(self) -> None:
        """Set `.grad` of the masters to the present gradients of their parameters."""
        for master, link in self.links.items():
            grad = link.parameter.grad
            master.grad = None if grad is None else grad.to(master.device, master.dtype)

    def clear_master_grads(self) -> None:
        """Set `.grad` of the masters to None."""
        for master in self.links:
            master.grad = None

    def follow_parameters(self) -> None:
        """Set masters from parameters that others have written, as versions of these tell."""
        now = versions([link.parameter for link in self.links.values()])
        for (master, link), version in zip(self.links.items(), now, strict=True):
            if version is None or version != link.version:
                link.sync(master, write_master=True)
                link.version = version

    def rounding(self, skip: Scalar = 0.0, *, every: bool = False) -> Rounding:
        """Return the rounding of masters into their parameters: of those that have a gradient, or
        of all with `every`. If `skip` is not 0, nothing is written."""
        return Rounding(self, [m for m in self.links if every or m.grad is not None], skip)

    def followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of an optimizer's method that rounds masters that the method wrote into
        their parameters."""
        if self.is_parameters:
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.follow_parameters()
            masters = list(self.links)
            before = versions(masters)
            try:
                value = method(*args, **kwargs)
                self._round_written(masters, before)
            except BaseException:
                self._round_written(masters, before)
                raise
            return value

        return call

    def _round_written(self, masters: list[Tensor], before: list[int | None]) -> None:
        """Round masters whose versions are not those of `before` into their parameters."""
        pairs = zip(masters, before, versions(masters), strict=True)
        Rounding(self, [master for master, old, new in pairs if old != new]).write()

    def check_added(self, op: str, param_group: Any) -> None:
        """Raise if masters forbid a group; the optimizer itself checks the group otherwise."""
        params = param_group.get("params", ()) if isinstance(param_group, dict) else ()
        if isinstance(params, Iterator):  # it can be read only once
            params = param_group["params"] = list(params)
        members = [params] if isinstance(params, Tensor) else params
        members = [m[1] if isinstance(m, tuple) and len(m) == 2 else m for m in members]
        tensors = [m for m in members if isinstance(m, Tensor)]
        added = links_of(tensors)
        if added and self.is_parameters:
            contract = "hold masters only if the optimizer was made with some"
            advice = "Pass AccumulatingOptimizer(..., masters=...)"
            checks.fail_value(op, "params", contract, "a master", advice)
        if not {link.parameter for link in self.links.values()}.isdisjoint(tensors):
            contract = "hold masters in place of their parameters"
            checks.fail_value(op, "params", contract, "a parameter that has a master here")
        _check_one_each(op, "params", self.links | added)

    def know(self) -> None:
        """Find the masters again, after parameters were added to the optimizer."""
        stepped_on = self.stepped_on()
        self.links |= links_of(stepped_on)
        self._known = len(stepped_on)

    def state_dict(self, packed: State) -> State:
        """Return the optimizer's state; if it has masters, with them and the count of roundings."""
        mine = {i: p.detach() for i, p in enumerate(self.stepped_on()) if p in self.links}
        saved = {"parameters": mine, "roundings": self.roundings}
        return {**packed, "masters": saved} if mine else packed

    def load_state_dict(self, op: str, packed: State, load: Callable[[State], None]) -> None:
        """Check the state, `load` it into the optimizer, and round saved masters into their
        parameters. If no masters were saved, they are set from their parameters. After an exception
        all of that is done, or nothing."""
        saved = None if self.is_parameters else packed.get("masters")
        mine = {i: p for i, p in enumerate(self.stepped_on()) if p in self.links}
        if saved is not None:
            _check_saved(op, saved, mine)
        groups = self._optimizer.param_groups
        try:
            load(packed)
            self._load_masters(mine, saved)
        except BaseException:
            if self._optimizer.param_groups is not groups:  # the optimizer has been loaded
                self._load_masters(mine, saved)
            raise

    @torch.no_grad()
    def _load_masters(self, mine: dict[int, Tensor], saved: Any) -> None:
        for index, master in mine.items():
            link = self.links[master]
            source = link.parameter if saved is None else saved["parameters"][index]
            master.copy_(source.detach())
            link.sync(master, write_master=False)
        if saved is not None:
            self.roundings = saved["roundings"]


class Rounding:
    """Rounds masters into their parameters: once, unless the masters are written again."""

    def __init__(self, target: SteppedTensors, masters: list[Tensor], skip: Scalar = 0.0) -> None:
        self._target, self._masters = target, masters
        self._skip = skip  # not zero: nothing is written
        self._first_seed = target.roundings
        self._written: list[int | None] = []  # versions of the masters at the last `write`

    @torch.no_grad()
    def write(self) -> None:
        """Write the parameters. After an interrupt another call writes the same."""
        if self._written and self._written == versions(self._masters):
            return
        links = [self._target.links[master] for master in self._masters]
        halves = dense_storages([link.parameter.detach() for link in links])
        wides = dense_storages([master.detach() for master in self._masters])
        calls: dict[tuple[torch.device, bool, bool], list[tuple[Tensor, Tensor]]] = {}
        for link, far, half, wide in zip(links, _crossing(halves, wides), halves, wides):
            calls.setdefault((wide.device, far, link.stochastic), []).append((half, wide))
        numbers, skip = count(self._first_seed), self._skip
        for (device, far, stochastic), pairs in calls.items():
            seeds: Iterator[Tensor | None] = repeat(None)
            if stochastic:
                seeds = (as_tensor(number, torch.int64, device) for number in numbers)
            if not far:
                parameters, masters = map(list, zip(*pairs, strict=True))
                flag = skip.to(device, torch.float32) if isinstance(skip, Tensor) else None
                ops.copy_rounded_(parameters, masters, seed=next(seeds), found_inf=flag)
            elif not skip:  # if `skip` is on a device, this waits for it
                _send_rounded(pairs, seeds)
        self._target.roundings = next(numbers)
        for link, version in zip(links, versions([link.parameter for link in links]), strict=True):
            link.version = version
        self._written = versions(self._masters)


def _send_rounded(pairs: list[tuple[Tensor, Tensor]], seeds: Iterator[Tensor | None]) -> None:
    """Round masters on the host in bundles; each is sent while the next one is rounded."""
    ends = accumulate(parameter.nbytes for parameter, _ in pairs)
    entries = zip(pairs, ends, strict=True)
    for _, together in groupby(entries, key=lambda entry: entry[1] // BUNDLE_BYTES):
        bundle = [pair for pair, _ in together]
        rounded = [torch.empty_like(m, dtype=p.dtype, pin_memory=not p.is_cpu) for p, m in bundle]
        ops.copy_rounded_(rounded, [master for _, master in bundle], seed=next(seeds))
        for (parameter, _), values in zip(bundle, rounded, strict=True):
            parameter.copy_(values, non_blocking=True)


def _check_one_each(op: str, name: str, links: dict[Tensor, Master]) -> None:
    """Raise if two masters would be rounded into the same memory."""
    parameters = [link.parameter for link in links.values()]
    if len(set(parameters)) < len(parameters):
        advice = "Call accumext.masters once, with all parameters"
        checks.fail_value(op, name, "hold one master of a parameter", "two", advice)
    if memory_overlap.any_shared([dense_storage(p.detach()) for p in parameters]):
        contract = "be of parameters that share no memory"
        advice = "Tie parameters by using one, not by views of it"
        checks.fail_value(op, name, contract, "some of the same elements", advice)


def _check_saved(op: str, saved: Any, mine: dict[int, Tensor]) -> None:
    """Raise unless `saved` is what `SteppedTensors.state_dict` saves of masters by index."""
    name = "state_dict['masters']"
    if not isinstance(saved, dict) or saved.keys() != {"parameters", "roundings"}:
        contract = "be what the state_dict of an optimizer with masters has there"
        checks.fail_value(op, name, contract, checks.type_name(saved))
    checks.integer(op, f"{name}['roundings']", saved["roundings"])
    values = saved["parameters"]
    checks.instance(op, f"{name}['parameters']", values, dict, "be a dict")
    if values.keys() != mine.keys():
        checks.fail_value(op, name, f"be of the parameters {list(mine)}", list(values))
    for index, master in mine.items():
        part, value = f"{name}['parameters'][{index}]", values[index]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            checks.fail_type(op, part, "be a floating-point tensor", checks.type_name(value))
        if value.shape != master.shape:
            checks.fail_value(op, part, f"have shape {list(master.shape)}", list(value.shape))
