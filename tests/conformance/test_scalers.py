"""GradScaler, inf and NaN.

In most tests nothing is rounded: losses are linear in the parameters and every number has few bits.
Gradients are three times whole numbers, the learning rate is 1/8, windows have three micro-batches
and scales are powers of two. So parameters of any dtype must be those of a float64 calculation by
hand, bit for bit.
"""

from itertools import cycle

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import EXACT, INF, NAN, assert_close, make_batches, make_model
from support.tensors import dtype_id
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 3
COUNT = 3 * WINDOW
RATE = 0.125
SHAPES = [(3,), (2, 2)]
CULPRIT = 1  # the index of the parameter that gets the inf
BATCHES = make_batches(COUNT)
# Torch's `unscale_` multiplies with a reciprocal that is rounded to float32.
RECIPROCAL = 2.0**-24
POLICIES = ["skip_window", "skip_micro_batch", "raise"]

# The scaler is the wrapper's own / is called for each micro-batch / once, after the user's own
# accumulation into `.grad` in a window of one.
OWN = ["own", "own-accumulate", "own-step"]
EACH = ["each", "each-unscaled"]
ONCE = ["once", "once-unscaled"]
WEIGHTED = ["none", "own", "own-accumulate"]  # where a micro-batch can be given a weight

# The weights of the first window: any two of them sum to a power of two.
WEIGHTS = [2.0, 6.0, 2.0] + [1.0] * (COUNT - WINDOW)

# With every dtype that GradScaler takes: its `unscale_` refuses float16 gradients.
PROTOCOLS = [
    pytest.param(name, dtype, id=f"{name}-{dtype_id(dtype)}")
    for name in ["none", *OWN, *EACH, *ONCE]
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (name.endswith("unscaled") and dtype == torch.float16)
]
every_protocol = pytest.mark.parametrize(("protocol", "dtype"), PROTOCOLS)


def make_scaler(protocol, **settings):
    """Make a scaler that grows every second update, so inside windows as well."""
    settings = {"init_scale": 4.0, "growth_interval": 2, **settings}
    return None if protocol == "none" else torch.amp.GradScaler("cpu", **settings)


def make_parameters(dtype):
    starts = [torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) for shape in SHAPES]
    return [nn.Parameter((start / 16).to(dtype)) for start in starts]


def gradients(number):
    """Return the gradients of micro-batch `number`, in float64."""
    generator = torch.Generator().manual_seed(number)
    return [3.0 * torch.randint(-3, 4, shape, generator=generator).double() for shape in SHAPES]


def loss_of(parameters, number, poison=0.0):
    """Return its loss, with `poison` as the gradient of one element."""
    terms = [(p.float() * grad.float()).sum() for p, grad in zip(parameters, gradients(number))]
    return sum(terms) + (parameters[CULPRIT][0, 0].float() * poison if poison else 0.0)


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=RATE, **options)


def make_optimizer(protocol, parameters, scaler, *, fused=False, **options):
    """Make the wrapper as the protocol wants it."""
    options = {"window": 1 if protocol in ONCE else WINDOW, **options}
    scaler = scaler if protocol in OWN else None
    return AccumulatingOptimizer(sgd(parameters, fused=fused), scaler=scaler, **options)


def micro_batch(protocol, opt, scaler, loss, number, weight=1.0):
    """Train on one micro-batch as a training loop does."""
    if protocol in ("none", "own"):
        opt.backward(loss, weight)
        opt.step()
        return
    scaler.scale(loss / WINDOW if protocol in ONCE else loss).backward()
    if protocol == "own-accumulate":
        opt.accumulate(weight)
        opt.step()
    elif protocol == "own-step":
        opt.step()
        opt.zero_grad()
    elif protocol in EACH or number % WINDOW == WINDOW - 1:
        if protocol.endswith("unscaled"):
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def assert_exact(parameters, windows, weights=(1.0,) * COUNT):
    """Compare with steps by hand, in float64, on the weighted mean of each window."""
    truth = [p.detach() for p in make_parameters(torch.float64)]
    for window in windows:
        total = sum(weights[number] for number in window)
        for number in window:
            for p, grad in zip(truth, gradients(number)):
                p -= RATE * weights[number] * grad / total
    oracle.assert_equal([p.detach().double() for p in parameters], truth)


def scales_by_hand(protocol, bad=()):
    """Return the scale after each micro-batch, by the rule that GradScaler documents."""
    scale, good, scales = 4.0, 0, []
    for number in range(COUNT):
        since = range(number - WINDOW + 1, number + 1) if protocol not in EACH else [number]
        if protocol in EACH or number % WINDOW == WINDOW - 1:
            if any(i in bad for i in since):
                scale, good = scale / 2, 0
            else:
                good += 1
                if good == 2:
                    scale, good = scale * 2, 0
        scales.append(scale)
    return scales


# What is not finite in three windows, and what the policy does with it
BAD = [
    *((policy, set()) for policy in POLICIES),
    *(("skip_window", {WINDOW + position}) for position in range(WINDOW)),
    *(("skip_micro_batch", {position}) for position in range(WINDOW)),
    ("skip_micro_batch", {0, 1}),
    ("skip_micro_batch", {0, 2}),
    ("skip_micro_batch", set(range(WINDOW, 2 * WINDOW))),  # all of a window
]
RUNS = [
    pytest.param(*case, value, fused, id=f"{case[0]}-{sorted(case[1])}-{value}-{fused}")
    for case, value, fused in zip(BAD, cycle([INF, -INF, NAN]), cycle([False, True]))
]


@pytest.mark.parametrize(("policy", "bad", "value", "fused"), RUNS)
@every_protocol
def test_every_protocol(protocol, dtype, policy, bad, value, fused):
    """The wrapper's scaler or yours, `unscale_` or not, inf anywhere: exact, scales by the rule"""
    scaler = make_scaler(protocol)
    parameters = make_parameters(dtype)
    opt = make_optimizer(protocol, parameters, scaler, fused=fused, on_nonfinite=policy)
    dropped = policy == "skip_micro_batch" and bad & set(range(WINDOW))
    weights = WEIGHTS if protocol in WEIGHTED and dropped else [1.0] * COUNT
    reports, scales = [], []
    for number in range(COUNT):
        loss = loss_of(parameters, number, value if number in bad else 0.0)
        micro_batch(protocol, opt, scaler, loss, number, weights[number])
        if opt.last is not None and opt.last not in reports:
            reports.append(opt.last)
        scales.append(scaler and scaler.get_scale())
    windows = oracle.windows_of(range(COUNT), WINDOW)
    hit = [not bad.isdisjoint(window) for window in windows]
    # To the wrapper, what the user has accumulated is one micro-batch.
    drops = policy == "skip_micro_batch" and protocol not in ONCE
    if drops:
        windows = [[number for number in window if number not in bad] for window in windows]
    skipped = [(was and not drops) or not window for was, window in zip(hit, windows)]
    taken = [window for window, skips in zip(windows, skipped) if not skips]
    assert_exact(parameters, taken, weights)
    assert [report.skipped for report in reports] == skipped
    assert [report.nonfinite for report in reports] == [[CULPRIT] if was else [] for was in hit]
    if protocol not in ONCE:
        assert [report.micro_batches for report in reports] == list(map(len, windows))
    if scaler is not None:
        assert scales == scales_by_hand(protocol, bad)
        assert len(set(scales)) > 1


@pytest.mark.parametrize("bad", range(WINDOW), ids=["first", "middle", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("protocol", ["none", *OWN, *EACH])
def test_the_surviving_sum_is_that_of_the_good_ones_bit_for_bit(protocol, dtype, bad):
    """`"skip_micro_batch"`: the sum is bit for bit that of the finite micro-batches alone"""
    scaler, model = make_scaler(protocol), make_model(dtype)
    parameters, weights = list(model.parameters()), WEIGHTS if protocol in WEIGHTED else [1.0] * 3
    options = {"window": WINDOW + 1, "on_nonfinite": "skip_micro_batch"}
    opt = make_optimizer(protocol, parameters, scaler, **options)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for number, batch in enumerate(make_batches(WINDOW, dtype)):
        loss = oracle.loss_of(model, batch).float()
        if number == bad:
            loss = loss + parameters[CULPRIT][0].float() * NAN
        else:
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            sums = [s + grad.float() * weights[number] for s, grad in zip(sums, grads)]
        micro_batch(protocol, opt, scaler, loss, number, weights[number])
    assert not opt.stepped
    oracle.assert_equal([opt.main_grad(p) for p in parameters], sums)


@pytest.mark.parametrize("bad", range(WINDOW), ids=["first", "middle", "last"])
@every_protocol
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
    oracle.assert_equal(
        list(after.pop("main_grads").values()), list(before.pop("main_grads").values())
    )
    assert str(after) == str(before)
    assert not opt.stepped
    assert_exact(parameters, [])
    opt.zero_grad()  # what the user does who catches the error
    if protocol in (*EACH, *ONCE):
        scale = scaler.get_scale()
        scaler.update()  # the record holds the inf
        assert scaler.get_scale() == scale / 2
    bad = None
    for number in range(again, WINDOW):
        run(number)
    assert opt.stepped
    assert_exact(parameters, [range(WINDOW)])


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_names_where_the_optimizer_has_names(max_norm):
    """`opt.last.nonfinite` names the parameters where the optimizer has `named_parameters`"""
    model = make_model()
    opt = AccumulatingOptimizer(oracle.adam(model.named_parameters()), window=2, max_norm=max_norm)
    opt.backward(oracle.loss_of(model, BATCHES[0]))
    opt.backward(oracle.loss_of(model, BATCHES[1]) + (model[2].bias * INF).sum())
    opt.step()
    assert opt.last.nonfinite == ["2.bias"]
    assert opt.stats()["skipped"] == 1.0


def test_what_skips_beside_an_inf():
    """A `found_inf` summed over devices skips; a norm whose squares overflow does not, and clips"""
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(oracle.adam(model.parameters(), fused=True))
    oracle.loss_of(model, BATCHES[0].float()).backward()
    opt.grad_scale, opt.found_inf = None, torch.tensor(2.0)
    opt.step()
    assert opt.last.skipped

    opt = AccumulatingOptimizer(oracle.sgd(model.parameters()), max_norm=1.0)
    before = model[0].weight.detach().clone()
    opt.backward((model[0].weight * 1e30).sum())
    opt.step()
    assert not opt.last.skipped
    torch.testing.assert_close(model[0].weight.detach(), before - 1.0 / 12**0.5)


@pytest.mark.parametrize("on_nonfinite", POLICIES)
@pytest.mark.parametrize("change", ["grows-by-1.5", "set-to-24", "is-disabled"])
@pytest.mark.parametrize("protocol", [*OWN, *EACH])
def test_the_scale_may_change_inside_a_window(protocol, change, on_nonfinite):
    """A scale that grows or is set inside a window, by no power of two, or a disabled scaler"""
    settings = {
        "grows-by-1.5": {"growth_factor": 1.5},
        "set-to-24": {"growth_interval": 100},
        "is-disabled": {"enabled": False},
    }
    scaler, model = make_scaler(protocol, **settings[change]), make_model()
    opt = make_optimizer(protocol, model.parameters(), scaler, on_nonfinite=on_nonfinite)
    scales = []
    for number, batch in enumerate(BATCHES):
        if number == 4 and change == "set-to-24":
            scaler.update(24.0)
        scales.append(scaler.get_scale())
        micro_batch(protocol, opt, scaler, oracle.loss_of(model, batch), number)
    unscaled = protocol == "each-unscaled"
    assert (len(set(scales)) > 1) == (change != "is-disabled")
    assert opt.last.loss_scale == (1.0 if unscaled else scales[-1])
    expected = oracle.train_by_hand(sgd, BATCHES, WINDOW)
    assert_close(oracle.parameters_of(model), expected, RECIPROCAL if unscaled else EXACT)


@pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. a clip after scaler.unscale_")
@pytest.mark.parametrize("window", [1, 3])
def test_clipping_between_unscale_and_step(window):
    """Your own clip between `scaler.unscale_` and `scaler.step` clips each micro-batch"""
    max_norm = 0.1
    reference, model = make_model(), make_model()
    by_hand, scaler = oracle.ByHand(reference.parameters(), sgd), make_scaler("each")
    opt = make_optimizer("each", model.parameters(), scaler, window=window)
    for number, batch in enumerate(BATCHES, 1):
        loss = oracle.loss_of(reference, batch)
        grads = torch.autograd.grad(loss, list(reference.parameters()), retain_graph=True)
        coef = max_norm / (torch.cat([grad.flatten() for grad in grads]).norm().item() + 1e-6)
        assert coef < 1.0
        by_hand.add(coef * loss)
        if number % window == 0:
            by_hand.step()
        scaler.scale(oracle.loss_of(model, batch)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert_close(oracle.parameters_of(model), oracle.parameters_of(reference))
