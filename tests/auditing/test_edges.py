"""What an audit must tell apart: other optimizers, fused and wrapped ones, nested calls, losses
that were not scaled, models that torch.compile has translated; without a wait for the device."""

import gc
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from audited import SCALE, N, adam, copy_of, follow, network, of_rows, rows, scaler_of, sgd, train
from support.device import DeviceReads, cpu_as_device
from support.tensors import assert_equal
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
from torch.utils.checkpoint import checkpoint

import accumext
from accumext import AccumulatingOptimizer

NAN = float("nan")


def told(audit: accumext.Audit) -> list[tuple[str, Any]]:
    """What is found, then what is asked."""
    return [
        (one.id, pytest.approx(one.value, rel=1e-3)) for one in (*audit.findings, *audit.questions)
    ]


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
    assert told(audit) == [("clip.before_unscale", SCALE)]


def test_what_the_scaler_does_by_itself_is_not_the_loops():
    model = network()
    audit = train(accumext.audit, model, sgd(model), scaler=scaler_of())
    assert "unscale_" not in str(audit)


def test_scaled_gradients_of_a_fused_optimizer():
    """Which divides by the scale, and skips a step, by itself"""
    model = network()
    audit = train(accumext.audit, model, adam(model, fused=True), divisor=1, scaler=scaler_of())
    assert told(audit) == [("accumulation.divisor_missing", N)]
    optimizer = adam(model, fused=True)
    audit = train(accumext.audit, model, optimizer, with_nan(3, 1), n=1, scaler=scaler_of())
    assert told(audit) == [("step.skipped", 1)]


@pytest.mark.filterwarnings("ignore:.*a window was skipped")
def test_a_wrapper_skips_a_window():
    model = network()
    opt = AccumulatingOptimizer(sgd(model), window=2)
    with accumext.audit(model, opt) as audit:
        for x, y in with_nan(8, 3):
            opt.backward(of_rows(model, x, y))
            opt.step()
    assert told(audit) == [("step.skipped", 1)]
    assert audit.record.windows == 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_of_schedules_steps_once():
    model = network()
    optimizer = sgd(model)
    both = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)]
    schedule = SequentialLR(optimizer, both, milestones=[2])
    audit = train(accumext.audit, model, optimizer, end=lambda _: schedule.step())
    assert told(audit) == [("schedule.per_micro_batch", N)]
    (question,) = audit.questions
    assert question.cure.startswith("right if its length is counted in micro-batches; else ")


def test_backward_of_chosen_inputs():
    model = network()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        for x, y in rows(N):
            of_rows(model, x, y).backward(inputs=list(model.parameters()))
        optimizer.step()
    assert told(audit) == [("accumulation.divisor_missing", N)]


def test_a_pass_inside_of_a_pass():
    """A reentrant checkpoint runs a backward pass of its own, before the first layer's is due"""

    def loss_of(model, x, y):
        return cross_entropy(checkpoint(model[1:], model[0](x), use_reentrant=True), y)

    model = network()
    audit = train(accumext.audit, model, sgd(model), None, loss_of, divisor=1)
    assert told(audit) == [("accumulation.divisor_missing", N)]
    assert "4 x backward (8 targets)" in str(audit)


def test_a_loss_that_was_not_scaled():
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        for scale in (scaler.scale, nn.Identity()):
            scale(of_rows(model, *rows(1)[0]) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told(audit) == [("scaler.mixed", SCALE)]


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
    assert audit.record.optimizers[0].wrapped
    factors = re.findall(r"gradient: (\S+) times the mean of 16 losses", str(audit))
    assert [float(f) for f in factors] == [pytest.approx(1.0, rel=2**-7)] * 2  # bfloat16's


# --- which optimizers are followed, and what a step is --------------------------------------------


def windows_of(audit: accumext.Audit) -> dict[str, int]:
    """How many windows of each optimizer were seen."""
    return dict(Counter(audit.to_json()["optimizers"]))


def test_an_optimizer_made_before_the_block():
    """Nobody names it"""
    model = network()
    optimizer = sgd(model)
    audit = train(lambda *_: accumext.audit(), model, optimizer, divisor=1)
    assert told(audit) == [("accumulation.divisor_missing", N)]
    assert windows_of(audit) == {"SGD": 4}


def test_two_optimizers_with_windows_of_their_own():
    """Every second and every fourth micro-batch, each divided by what it holds; then one is not"""
    for divisor, expected in ((4, []), (1, [("accumulation.divisor_missing", 4)])):
        first, second = network(), network()
        ways = ((first, sgd(first), 2, 2), (second, adam(second), 4, divisor))
        with accumext.audit() as audit:
            for i, (x, y) in enumerate(rows(16)):
                for model, optimizer, size, by in ways:
                    (of_rows(model, x, y) / by).backward()
                    if (i + 1) % size == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        assert told(audit) == expected
        assert windows_of(audit) == {"SGD": 8, "Adam": 4}


@pytest.mark.parametrize("named", ["nothing", "wrapper", "wrapped"])
def test_a_wrapper_made_before_the_block(named):
    """It divides by itself, and clips: one window for each of its own"""
    model = network()
    inner = sgd(model)
    optimizer = AccumulatingOptimizer(inner, window=N, max_norm=0.1)
    given = {"nothing": (), "wrapper": (model, optimizer), "wrapped": (model, inner)}[named]
    with accumext.audit(*given) as audit:
        for x, y in rows():
            optimizer.backward(of_rows(model, x, y))
            optimizer.step()
    assert told(audit) == []
    assert windows_of(audit) == {"SGD": 4}
    assert audit.record.optimizers[0].wrapped


class Slow(torch.optim.Optimizer):
    """Steps an optimizer of torch, which is not in `.optimizer` as those in wrappers are, and goes
    half way back after every second step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.inner, self.count = optimizer, 0
        self.begun = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, begun in zip([p for g in self.param_groups for p in g["params"]], self.begun):
                begun.copy_(p.lerp_(begun, 0.5))


@pytest.mark.parametrize("named", [False, True], ids=["nothing", "outer"])
def test_an_optimizer_that_steps_another(named):
    """One window for each step, not one for each of the two"""
    model = network()
    watch = accumext.audit if named else lambda *_: accumext.audit()
    audit = train(watch, model, Slow(sgd(model)), divisor=1)
    assert told(audit) == [("accumulation.divisor_missing", N)]
    assert windows_of(audit) == {"Slow": 4}


class Raising(torch.optim.SGD):
    """The first step fails."""

    failed = False

    def step(self, closure: None = None) -> None:
        if not self.failed:
            self.failed = True
            raise KeyError("from the step")
        super().step()


def test_a_step_that_raises_once():
    """The loop takes it again; it is one window, as are those after it"""
    model = network()
    optimizer = Raising(model.parameters(), lr=0.1)

    def step():
        try:
            optimizer.step()
        except KeyError:
            optimizer.step()

    audit = train(lambda *_: accumext.audit(), model, optimizer, step=step)
    assert told(audit) == []
    assert windows_of(audit) == {"Raising": 4}


class Own:
    """No optimizer of torch: nothing tells that it steps."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


UNSEEN = {
    "named": (accumext.audit, "nothing was judged: 0 steps of Own after 16 backward passes"),
    "nothing": (lambda *_: accumext.audit(), "nothing was judged: 0 steps after 16 backward"),
    "another": (
        lambda model, _: accumext.audit(model, sgd(model)),
        "nothing was judged: 0 steps of SGD after 16 backward passes",
    ),
}


@pytest.mark.parametrize(("watch", "words"), UNSEEN.values(), ids=UNSEEN)
def test_one_that_is_no_optimizer_of_torch(watch, words):
    """That nothing was seen is not that nothing is wrong"""
    model = network()
    audit = train(watch, model, Own(model), divisor=1)
    assert told(audit) == []
    assert not audit.to_json()["seen"]
    with pytest.raises(RuntimeError, match=words) as raised:
        audit.check()
    assert "steps of optimizers of torch: none" in str(raised.value)
    assert "no step of a torch.optim.Optimizer ran" in str(raised.value)
    with pytest.raises(RuntimeError, match=words):
        audit.check(ignore=["accumulation"])


def test_a_loss_without_a_graph():
    """Made of a number: its pass ends there. Not that no backward() ran"""
    model = network()
    optimizer = sgd(model)
    with accumext.audit(model, optimizer) as audit:
        for x, y in rows(4):
            optimizer.zero_grad()
            torch.tensor(of_rows(model, x, y).item(), requires_grad=True).backward()
            optimizer.step()
    assert told(audit) == []
    with pytest.raises(RuntimeError, match=r"no backward\(\) went through a graph"):
        audit.check()


def test_another_optimizer_steps_than_the_one_named():
    model = network()
    with accumext.audit(model, adam(model)) as audit:
        train(lambda *_: nullcontext(), model, sgd(model))
    with pytest.raises(
        RuntimeError, match=r"0 steps of Adam after 16 .*\n.*SGD \(4\)\n.*pass  the"
    ):
        audit.check()


def test_a_scaler_that_skips_the_first_step():
    """By an overflow, which is no fault: a window, of the optimizer that nobody has named"""
    model = network()

    def sum_of_rows(model, x, y):
        return cross_entropy(model(x), y, reduction="sum")

    audit = train(
        lambda *_: accumext.audit(), model, sgd(model), rows(4), sum_of_rows, n=1,
        scaler=scaler_of(init_scale=2.0**127),
    )  # fmt: skip
    assert told(audit) == []
    assert [window[-1]["what"] for window in audit.to_json()["windows"]] == [
        "step skipped", "step", "step", "step",
    ]  # fmt: skip


# --- what is beside the steps ---------------------------------------------------------------------


@pytest.mark.parametrize("each", [False, True], ids=["step", "micro-batch"])
def test_a_deep_copy_that_follows(each):
    """Once per step, which is right, or with every micro-batch; nothing is named"""
    model = network()
    average = copy_of(model)

    def end(i):
        if each or (i + 1) % N == 0:
            follow(average, model, 0.01)

    audit = train(lambda *_: accumext.audit(), model, sgd(model), end=end)
    assert told(audit) == ([("average.per_micro_batch", N)] if each else [])


def test_an_optimizer_beside_the_chosen_one_that_has_not_stepped():
    """Its parameters are in no model that was given, and are not said to be in no optimizer."""
    generator, judge = nn.Linear(3, 16), network(16, 1)
    of_generator, of_judge = sgd(generator), sgd(judge)
    with accumext.audit(judge, of_judge) as audit:
        for _ in range(6):
            of_judge.zero_grad()
            judge(generator(torch.randn(8, 3))).square().mean().backward()
            of_judge.step()
        of_generator.step()
    assert told(audit) == []


def test_a_copy_that_is_made_later():
    """After two windows, when the model has long been looked at"""
    model = network()
    made: list[nn.Module] = []

    def end(i):
        if i + 1 == 2 * N:
            made.append(copy_of(model))
        for average in made:
            follow(average, model, 0.01)

    audit = train(lambda *_: accumext.audit(), model, sgd(model), end=end)
    assert told(audit) == [("average.per_micro_batch", N)]


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norms_left_in_eval(frozen):
    """Those whose parameters are trained; the model is not named"""
    model = nn.Sequential(network(), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    model[1:].requires_grad_(not frozen).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    audit = train(lambda *_: accumext.audit(), model, optimizer)
    assert told(audit) == ([] if frozen else [("modules.batchnorm_eval", 2)])


@pytest.mark.parametrize("own", [False, True], ids=["of all", "of their own"])
def test_a_group_of_biases_that_decay(own):
    """As the matrices do that are in it; a group of their own may have any rate"""
    model = network()
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": kind} for kind in (kinds if own else [kinds[0] + kinds[1]])]
    audit = train(accumext.audit, model, torch.optim.SGD(groups, lr=0.1, weight_decay=0.1))
    assert told(audit) == ([] if own else [("optimizer.decay", 2)])


@pytest.mark.parametrize("lost", [0, 1])
def test_the_first_parameter_that_is_not_finite(lost):
    """By the order of the backward pass: of a gradient that is lost behind a layer, or within"""
    model = network()

    def loss_of(model, x, y):
        hidden = model[0](x)
        first = hidden if lost == 0 else model[1](hidden)
        first.register_hook(lambda grad: grad * NAN)
        return cross_entropy(model[2](first if lost else model[1](hidden)), y)

    model[2].bias.register_hook(lambda grad: grad * (NAN if lost else 1))
    audit = train(accumext.audit, model, sgd(model), rows(4), loss_of, n=1)
    assert told(audit) == [("step.nonfinite", 4)]
    first = "2.bias" if lost else "0."
    assert f"in the backward pass first in that of {first}" in audit.findings[0].evidence


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
    assert_equal(*ends)
    assert told(audits[0]) == ([("accumulation.divisor_missing", N)] if divisor == 1 else [])


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
