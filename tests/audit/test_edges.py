"""What an audit must tell apart: other optimizers, fused and wrapped ones, nested calls, losses
that were not scaled, models that torch.compile has translated; without a wait for the device."""

import gc
import re
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from audited import SCALE, N, adam, network, of_rows, rows, scaler_of, sgd, train
from support.device import DeviceReads, cpu_as_device
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
from torch.utils.checkpoint import checkpoint

import accumext
from accumext import AccumulatingOptimizer

NAN = float("nan")


def told(audit: accumext.Audit) -> list[tuple[str, Any]]:
    return [(finding.name, pytest.approx(finding.value, rel=1e-3)) for finding in audit.findings]


def with_nan(count: int, *broken: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of which some are not finite."""
    return [(x * NAN if i in broken else x, y) for i, (x, y) in enumerate(rows(count))]


def test_another_optimizer_is_unscaled():
    model, other, scaler = network(), network(), scaler_of()
    optimizer, of_other = sgd(model), sgd(other)
    with accumext.audit(model, optimizer) as audit:
        for x, y in rows(1):
            scaler.scale(of_rows(model, x, y) + of_rows(other, x, y)).backward()
        scaler.unscale_(of_other)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.step(of_other)
        scaler.update()
    assert told(audit) == [("clip before unscale", SCALE)]


def test_what_the_scaler_does_by_itself_is_not_the_loops():
    model = network()
    audit = train(accumext.audit, model, sgd(model), scaler=scaler_of())
    assert "unscale_" not in str(audit)


def test_scaled_gradients_of_a_fused_optimizer():
    """Which divides by the scale, and skips a step, by itself"""
    model = network()
    audit = train(accumext.audit, model, adam(model, fused=True), divisor=1, scaler=scaler_of())
    assert told(audit) == [("divisor missing", N)]
    optimizer = adam(model, fused=True)
    audit = train(accumext.audit, model, optimizer, with_nan(3, 1), n=1, scaler=scaler_of())
    assert told(audit) == [("steps skipped", 1)]


@pytest.mark.filterwarnings("ignore:.*a window was skipped")
def test_a_wrapper_skips_a_window():
    model = network()
    opt = AccumulatingOptimizer(sgd(model), window=2)
    with accumext.audit(model, opt) as audit:
        for x, y in with_nan(8, 3):
            opt.backward(of_rows(model, x, y))
            opt.step()
    assert told(audit) == [("steps skipped", 1)]
    assert audit.record.windows == 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_of_schedules_steps_once():
    model = network()
    optimizer = sgd(model)
    both = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)]
    schedule = SequentialLR(optimizer, both, milestones=[2])
    audit = train(accumext.audit, model, optimizer, end=lambda _: schedule.step())
    assert told(audit) == [("scheduler steps per micro-batch", N)]


def test_backward_of_chosen_inputs():
    model = network()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        for x, y in rows(N):
            of_rows(model, x, y).backward(inputs=list(model.parameters()))
        optimizer.step()
    assert told(audit) == [("divisor missing", N)]


def test_a_pass_inside_of_a_pass():
    """A reentrant checkpoint runs a backward pass of its own, before the first layer's is due"""

    def loss_of(model, x, y):
        return cross_entropy(checkpoint(model[1:], model[0](x), use_reentrant=True), y)

    model = network()
    audit = train(accumext.audit, model, sgd(model), None, loss_of, divisor=1)
    assert told(audit) == [("divisor missing", N)]
    assert "4 x backward (8 targets)" in str(audit)


def test_a_loss_that_was_not_scaled():
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        for scale in (scaler.scale, nn.Identity()):
            scale(of_rows(model, *rows(1)[0]) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told(audit) == [("scales mixed in one sum", SCALE)]


class Shell:
    """As Accelerate and Lightning have one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_a_wrapper_in_shells():
    """Its scaled micro-batches, its clip and its sum in float32 are no mistakes"""
    model = network().bfloat16()
    optimizer = AccumulatingOptimizer(
        sgd(model), window=16, max_norm=0.01, scaler=scaler_of(init_scale=8.0)
    )
    with accumext.audit(model, Shell(Shell(optimizer)), windows=2) as audit:
        for x, y in rows(32):
            optimizer.backward(cross_entropy(model(x.bfloat16()).float(), y))
            optimizer.step()
    assert audit.findings == ()
    assert audit.record.wrapped
    factors = re.findall(r"gradient: (\S+) times the mean of 16 losses", str(audit))
    assert [float(f) for f in factors] == [pytest.approx(1.0, rel=2**-7)] * 2  # bfloat16's


@pytest.mark.parametrize(("whole", "divisor"), [(False, N), (True, 1)], ids=["model", "loss"])
def test_compiled(whole, divisor):
    """The same bits, no break of the graph. `whole`: what the loss counts cannot be seen."""
    ends, audits = [], []
    for watch in (accumext.audit, lambda *_: nullcontext()):
        torch._dynamo.reset()
        model = network()
        compiled = torch.compile(of_rows if whole else model, fullgraph=True, backend="aot_eager")

        def loss_of(model, x, y, compiled=compiled):
            return compiled(model, x, y) if whole else of_rows(compiled, x, y)

        audits.append(train(watch, model, sgd(model), rows(2 * N), loss_of, divisor=divisor))
        ends.append(list(model.parameters()))
    assert all(map(torch.equal, *ends))
    assert told(audits[0]) == ([("divisor missing", N)] if divisor == 1 else [])


def test_nothing_is_left_on_nodes_that_live_on():
    """As those of DistributedDataParallel do"""
    model = network()
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    with accumext.audit(model, sgd(model)) as audit:
        passes = weakref.ref(audit._observer._passes)
        of_rows(model, *rows(1)[0]).backward()
    gc.collect()
    assert passes() is None
    assert len(nodes) == 4


def reads_of(audited: bool, wrapped: bool, scaled: bool) -> tuple[int, int]:
    """Of values and of lists, before the block closes."""
    model, scaler = network(), scaler_of() if scaled else None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if wrapped:
        optimizer = AccumulatingOptimizer(optimizer, window=N, max_norm=1.0)

    def clip():
        if scaler is not None:
            scaler.unscale_(optimizer)
        if not wrapped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with accumext.audit(model, optimizer) if audited else nullcontext():
        with cpu_as_device(), DeviceReads() as reads:
            train(
                lambda *_: nullcontext(), model, optimizer, n=1 if wrapped else N,
                scaler=scaler, before=clip,
            )  # fmt: skip
        return reads.count, reads.lists


@pytest.mark.parametrize(
    ("wrapped", "scaled"), [(False, False), (False, True), (True, False)],
    ids=["bare", "scaler", "wrapper"],
)  # fmt: skip
def test_as_many_reads_of_the_device_as_without(wrapped, scaled):
    assert reads_of(True, wrapped, scaled) == reads_of(False, wrapped, scaled)
