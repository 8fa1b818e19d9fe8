"""Inf and NaN."""

from __future__ import annotations

import pytest
import torch
from scaler_protocols import (
    DTYPES,
    EACH,
    ONCE,
    OWN,
    WEIGHTED,
    WEIGHTS,
    WINDOW,
    assert_exact,
    loss_of,
    make_optimizer,
    make_parameters,
    make_scaler,
    micro_batch,
    parameters_by_hand,
    protocols,
    scales_by_hand,
)
from support.optimizer_oracle import INF, adam, assert_equal, make_batches, make_model
from support.optimizer_oracle import loss_of as model_loss

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

NAN = float("nan")
COUNT = 3 * WINDOW
POSITIONS = pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "middle", "last"])
CULPRIT = 1  # the index of the parameter that gets the inf


def train(protocol, dtype, bad, *, value=INF, weights=None, **options):
    """Three windows; the gradients of the micro-batches in `bad` are not finite."""
    scaler = make_scaler(protocol)
    parameters = make_parameters(dtype)
    opt = make_optimizer(protocol, parameters, scaler, **options)
    reports, scales = [], []
    for number in range(COUNT):
        loss = loss_of(parameters, number, value if number in bad else 0.0)
        weight = weights[number] if weights else 1.0
        micro_batch(protocol, opt, scaler, loss, number, weight)
        if opt.last is not None and opt.last not in reports:
            reports.append(opt.last)
        scales.append(None if scaler is None else scaler.get_scale())
    return parameters, reports, scales


def windows_without(bad):
    windows = [range(start, start + WINDOW) for start in range(0, COUNT, WINDOW)]
    return [[number for number in window if number not in bad] for window in windows]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=["inf", "-inf", "nan"])
@POSITIONS
@pytest.mark.parametrize(("protocol", "dtype"), protocols("none", *OWN, *EACH, *ONCE))
def test_skip_window(protocol, dtype, bad, value, fused):
    """`"skip_window"`, inf in the first, middle or last micro-batch: no step, a smaller scale"""
    bad += WINDOW  # of the second window
    parameters, reports, scales = train(protocol, dtype, {bad}, value=value, fused=fused)
    windows = [range(WINDOW), range(2 * WINDOW, COUNT)]
    assert_exact(parameters, parameters_by_hand(windows, [[1.0] * WINDOW] * 2))
    assert [report.skipped for report in reports] == [False, True, False]
    assert [report.nonfinite for report in reports] == [[], [CULPRIT], []]
    if protocol != "none":
        assert scales == scales_by_hand(protocol, COUNT, {bad})


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
@POSITIONS
@pytest.mark.parametrize(("protocol", "dtype"), protocols("none", *OWN, *EACH))
def test_skip_micro_batch(protocol, dtype, bad, several, fused):
    """`"skip_micro_batch"`: the mean over those that are finite, by their weights"""
    all_bad = {bad, (bad + 1) % WINDOW} if several else {bad}
    weights = [1.0] * COUNT
    if protocol in WEIGHTED:
        weights[:WINDOW] = WEIGHTS
    parameters, reports, scales = train(
        protocol, dtype, all_bad, weights=weights, fused=fused, on_nonfinite="skip_micro_batch"
    )
    windows = windows_without(all_bad)
    its_weights = [[weights[number] for number in window] for window in windows]
    assert_exact(parameters, parameters_by_hand(windows, its_weights))
    assert not any(report.skipped for report in reports)
    assert [report.nonfinite for report in reports] == [[CULPRIT], [], []]
    assert [report.micro_batches for report in reports] == [len(window) for window in windows]
    assert [report.weight.item() for report in reports] == [sum(its) for its in its_weights]
    if protocol != "none":
        assert scales == scales_by_hand(protocol, COUNT, all_bad)


@pytest.mark.parametrize(("protocol", "dtype"), protocols("none", *OWN, *EACH))
def test_a_window_without_survivors_is_skipped(protocol, dtype):
    """`"skip_micro_batch"` where none of a window is finite: no step"""
    bad = range(WINDOW, 2 * WINDOW)
    parameters, reports, scales = train(protocol, dtype, bad, on_nonfinite="skip_micro_batch")
    windows = [range(WINDOW), range(2 * WINDOW, COUNT)]
    assert_exact(parameters, parameters_by_hand(windows, [[1.0] * WINDOW] * 2))
    assert [report.skipped for report in reports] == [False, True, False]
    assert [report.micro_batches for report in reports] == [WINDOW, 0, WINDOW]
    if protocol != "none":
        assert scales == scales_by_hand(protocol, COUNT, set(bad))


@POSITIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("protocol", ["none", *OWN, "each"])
def test_the_surviving_sum_is_that_of_the_good_ones_bit_for_bit(protocol, dtype, bad):
    """`"skip_micro_batch"`: the sum is bit for bit that of the finite micro-batches alone"""
    scaler = make_scaler(protocol)
    model, weights = make_model(dtype), WEIGHTS if protocol in WEIGHTED else [1.0] * WINDOW
    parameters = list(model.parameters())
    opt = AccumulatingOptimizer(
        adam(parameters),
        window=WINDOW + 1,
        scaler=scaler if protocol in OWN else None,
        on_nonfinite="skip_micro_batch",
    )
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for number, batch in enumerate(make_batches(WINDOW, dtype)):
        loss = model_loss(model, batch).float()
        if number == bad:
            loss = loss + parameters[CULPRIT][0].float() * NAN
        else:
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            sums = [s + grad.float() * weights[number] for s, grad in zip(sums, grads)]
        micro_batch(protocol, opt, scaler, loss, number, weights[number])
    assert not opt.stepped
    assert_equal([opt.main_grad(p) for p in parameters], sums)


@POSITIONS
@pytest.mark.parametrize(("protocol", "dtype"), protocols("none", *OWN, *EACH, *ONCE))
def test_raise_leaves_everything_as_it_was(protocol, dtype, bad):
    """`"raise"`: an error that names the parameter, before anything is taken in; then go on"""
    scaler = make_scaler(protocol)
    parameters = make_parameters(dtype)
    named = [("first", parameters[0]), ("second", parameters[1])]
    opt = make_optimizer(protocol, named, scaler, on_nonfinite="raise")

    def run(number):
        loss = loss_of(parameters, number, INF if number == bad else 0.0)
        micro_batch(protocol, opt, scaler, loss, number)

    # To the wrapper, what the user has accumulated is one micro-batch, taken in at the end.
    raising, again = (WINDOW - 1, 0) if protocol in ONCE else (bad, bad)
    for number in range(raising):
        run(number)
    before = opt.accumulation_state_dict()
    with pytest.raises(RuntimeError, match=r"gradients must be finite, got inf or NaN in second$"):
        run(raising)
    after = opt.accumulation_state_dict()
    assert_equal(list(after.pop("main_grads").values()), list(before.pop("main_grads").values()))
    assert str(after) == str(before)
    assert not opt.stepped
    assert_equal([p.detach() for p in parameters], [p.detach() for p in make_parameters(dtype)])
    opt.zero_grad()  # what the user does who catches the error
    if protocol in (*EACH, *ONCE):
        scale = scaler.get_scale()
        scaler.update()  # the record holds the inf
        assert scaler.get_scale() == scale / 2
    bad = None
    for number in range(again, WINDOW):
        run(number)
    assert opt.stepped
    assert_exact(parameters, parameters_by_hand([range(WINDOW)], [[1.0] * WINDOW]))


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
def test_a_window_of_one_is_left_out(scaled, policy):
    """`window=1`: the step of a micro-batch that is not finite is left out, by either policy"""
    protocol = "own" if scaled else "none"
    scaler = make_scaler(protocol)
    parameters = make_parameters(torch.float32)
    inner = torch.optim.SGD(parameters, lr=0.125)
    opt = AccumulatingOptimizer(inner, scaler=scaler, on_nonfinite=policy)
    for number in range(COUNT):
        opt.backward(loss_of(parameters, number, INF if number == 1 else 0.0))
        opt.step()
        assert opt.last.skipped == (number == 1)
    windows = [[number] for number in range(COUNT) if number != 1]
    assert_exact(parameters, parameters_by_hand(windows, [[1.0]] * len(windows)))


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_names_where_the_optimizer_has_names(max_norm):
    """`opt.last.nonfinite` names the parameters where the optimizer has `named_parameters`"""
    model, batches = make_model(), make_batches(2)
    opt = AccumulatingOptimizer(adam(model.named_parameters()), window=2, max_norm=max_norm)
    opt.backward(model_loss(model, batches[0]))
    opt.backward(model_loss(model, batches[1]) + (model[2].bias * INF).sum())
    opt.step()
    assert opt.last.nonfinite == ["2.bias"]
    assert opt.stats()["skipped"] == 1.0


def test_a_found_inf_that_was_summed_over_devices_skips_too():
    """A `found_inf` that GradScaler has summed over several devices skips fused optimizers too"""
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(adam(model.parameters(), fused=True))
    model_loss(model, make_batches(1, torch.float32)[0]).backward()
    opt.grad_scale, opt.found_inf = None, torch.tensor(2.0)
    opt.step()
    assert opt.last.skipped
    assert opt.stats()["skipped"] == 1.0


def test_a_norm_that_overflows_skips_instead_of_clipping_to_zero():
    """A norm that overflows skips the step, where a clip would have made every gradient zero"""
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(adam(model.parameters()), max_norm=1.0)
    opt.backward((model[0].weight * 1e30).sum())
    opt.step()
    assert opt.last.skipped
    assert not opt.optimizer.state
