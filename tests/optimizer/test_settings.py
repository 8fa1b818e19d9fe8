"""Settings, arguments and calls that are refused, and in which words; nothing changes."""

import re
from types import SimpleNamespace

import pytest
import torch
from support.optimizer_oracle import INF, NAN, OP, make_model, says, sgd, wrapped, wrapped_zeros
from torch import nn

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

POLICIES = "one of 'skip_window', 'skip_micro_batch', 'raise', 'step'"
SETTINGS = [
    ("window", 0, ValueError, "at least 1, got 0"),
    ("window", 2.0, TypeError, "an int, got float"),
    ("max_norm", NAN, ValueError, "not be NaN, got nan"),
    ("max_norm", -1, ValueError, "positive, got -1.0. Pass None not to clip"),
    ("max_norm", 0, ValueError, "positive, got 0.0. Pass None not to clip"),
    ("max_norm", "1", TypeError, "a number, got str"),
    ("norm_type", 0, ValueError, "nonzero, got 0"),
    ("norm_type", None, TypeError, "a number, got NoneType"),
    ("scaler", 2.0, TypeError, "a torch.amp.GradScaler or None, got float"),
    ("on_nonfinite", "skip", ValueError, f"{POLICIES}, got 'skip'"),
    ("reduction", "none", ValueError, "one of 'mean', 'sum'"),
    ("process_group", [0], TypeError, "a torch.distributed process group or None, got list"),
    ("synchronize", "step", ValueError, "one of 'backward', 'window', got 'step'"),
    ("accumulate_in_backward", 1, TypeError, "a bool, got int"),
    ("reduce_in_backward", 1, TypeError, "a bool, got int"),
]
# Values that do not go with another setting, or with an optimizer that needs a closure.
TOGETHER = [
    (name, True, {other: value}, f"False for {other}={value!r}")
    for name in ("accumulate_in_backward", "reduce_in_backward")
    for other, value in (
        ("synchronize", "window"),
        ("on_nonfinite", "skip_micro_batch"),
        ("on_nonfinite", "raise"),
    )
] + [("on_nonfinite", "raise", {"synchronize": "window"}, "'skip_window' for synchronize='window'")]
CLOSURE = "for LBFGS, which needs a closure, got"
WITH_CLOSURE = [
    ("window", 2, f"1 {CLOSURE} 2"),
    ("max_norm", 1.0, f"None {CLOSURE}"),
    ("scaler", torch.amp.GradScaler("cpu"), f"None {CLOSURE}"),
    ("accumulate_in_backward", True, f"False {CLOSURE}"),
    ("reduce_in_backward", True, f"False {CLOSURE}"),
]
CASES = [
    *((sgd, {}, name, value, error, text) for name, value, error, text in SETTINGS),
    (sgd, {}, "norm_type", NAN, ValueError, "not be NaN, got nan"),
    *((sgd, others, name, value, ValueError, text) for name, value, others, text in TOGETHER),
    *((torch.optim.LBFGS, {}, name, value, ValueError, text) for name, value, text in WITH_CLOSURE),
]


@pytest.mark.parametrize(
    ("make", "others", "name", "value", "error", "text"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value).partition(" object at ")[0]),
)
def test_a_setting_is_checked_in_the_constructor_and_when_it_is_assigned(
    make, others, name, value, error, text
):
    pattern = says(f"{OP}: {name} must {'' if text.startswith('not ') else 'be '}{text}")
    with pytest.raises(error, match=pattern):
        wrapped(make_model(), make, **others, **{name: value})
    opt = wrapped(make_model(), make, **others)
    before = getattr(opt, name)
    with pytest.raises(error, match=pattern):
        setattr(opt, name, value)
    assert getattr(opt, name) == before


def test_an_assigned_setting_is_in_force():
    parameter, opt = wrapped_zeros(2, shape=2)
    values = {"window": 1, "max_norm": 0.5, "norm_type": INF, "reduction": "sum"}
    for name, value in values.items():
        setattr(opt, name, value)
        assert getattr(opt, name) == value
    opt.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert opt.scaler is None
    opt.backward(parameter.sum(), weight=3.0)
    opt.step()
    assert opt.last.total_norm == 3.0
    assert parameter.tolist() == pytest.approx([-0.5] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("accumulate_in_backward", True), ("reduce_in_backward", True), ("synchronize", "window")],
)
def test_never_looking_goes_with_what_the_default_goes_with(name, value):
    opt = wrapped(make_model(), on_nonfinite="step", **{name: value})
    opt.on_nonfinite = "skip_window"
    opt.on_nonfinite = "step"
    assert opt.on_nonfinite == "step"


def test_an_unknown_attribute_is_an_error_with_the_nearest_name():
    opt = wrapped(make_model())
    for name, near in (("max_nrom", "max_norm"), ("param_group", "param_groups")):
        with pytest.raises(AttributeError, match=f"has '{name}'; did you mean '{near}'"):
            setattr(opt, name, 1.0)
    with pytest.raises(AttributeError, match=r"neither AccumulatingOptimizer nor SGD has 'xyz'$"):
        opt.xyz = 1
    opt._trainers_own = 1
    assert opt._trainers_own == 1
    opt.optimizer.rate_of_decay = 1
    opt.rate_of_decay = 2
    assert opt.optimizer.rate_of_decay == 2


def test_bad_micro_batches_are_dropped_on_one_device_only():
    parameters = [nn.Parameter(torch.zeros(1, device=device)) for device in ("cpu", "meta")]
    text = f"{OP}: on_nonfinite must be 'skip_window', 'raise' or 'step' if parameters are sharded"
    with pytest.raises(ValueError, match=says(text)):
        AccumulatingOptimizer(sgd(parameters), on_nonfinite="skip_micro_batch")


@pytest.mark.parametrize("wrong", [None, 3, make_model(), wrapped_zeros()[1]], ids=str)
def test_constructor_wants_an_unwrapped_optimizer(wrong):
    text = f"{OP}: optimizer must be a torch.optim.Optimizer that is not wrapped already, got"
    with pytest.raises(TypeError, match=says(text)) as raised:
        AccumulatingOptimizer(wrong)
    is_one = isinstance(wrong, torch.optim.Optimizer)
    assert is_one != str(raised.value).endswith("such as torch.optim.AdamW(model.parameters())")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, nn.Linear])
def test_a_class_is_to_be_made_first(kind):
    got = f"not wrapped already, got the class {kind.__name__}. "
    cure = "Make one: AdamW(model.parameters())" if kind is torch.optim.AdamW else "Pass one such"
    with pytest.raises(TypeError, match=re.escape(got + cure)):
        AccumulatingOptimizer(kind)


class HoldsBack(nn.Module):
    """A wrapper of somebody's."""

    def no_sync(self):
        raise AssertionError


OF_A_LOSS = "without a graph, got one with. Pass weight.detach(), or a loss as opt.backward(loss)"
LOAD = "load_accumulation_state_dict"
WEIGHTS = [
    (-1.0, ValueError, "at least 0, got -1.0"),
    (NAN, ValueError, "at least 0, got nan"),
    (INF, ValueError, "finite, got inf"),
    ("1", TypeError, "a number, got str"),
    (None, TypeError, "a number, got NoneType"),
    (torch.tensor(-1.0), ValueError, "at least 0, got -1.0"),
    (torch.tensor(INF), ValueError, "finite, got inf"),
    (torch.ones(2), ValueError, "a number or a 0-dim tensor, got shape [2]"),
    (torch.tensor(True), TypeError, "a real number, got a bool tensor"),
    (torch.ones((), requires_grad=True) * 1, ValueError, OF_A_LOSS),
]
SAVED = [  # entries of a saved window
    ("micro_batches", -1, ValueError, "an int"),
    ("micro_batches", 1.0, ValueError, "an int"),
    ("held_back", 1, TypeError, "a bool, got int"),
    ("through_backward", None, TypeError, "a bool, got NoneType"),
    ("weight", None, TypeError, "a number"),
    ("weight", NAN, ValueError, "finite"),
    ("unit_scale", "1", TypeError, "a number"),
    ("unit_weight", 0.0, ValueError, "positive"),
    ("loss_scale", torch.ones(2), ValueError, "a"),
    ("norm", 1.0, TypeError, "a 0-dim tensor or None"),
    ("main_grads", [], TypeError, "a dict, got list"),
]
MAINS = [  # of a parameter
    (4, torch.zeros(2), ValueError, "be one of the 4 parameters, got index 4"),
    (0, torch.zeros(2, dtype=torch.float64), ValueError, "have shape [4, 3], got [2]"),
    (0, torch.zeros(1, dtype=torch.int64), TypeError, "be a torch.float64 tensor, got an int64"),
    (0, 1.0, TypeError, "be a tensor, got float"),
]
HOLDS = SimpleNamespace(loss=torch.ones((), requires_grad=True))
DETACHED = accumext.tbptt(
    lambda token, state: (state, state + 0),
    torch.zeros(1, 3),
    torch.zeros(3, requires_grad=True),
    criterion=nn.functional.mse_loss,
    feedback="teacher",
)
A_TENSOR, A_GRAPH = "loss must be a tensor, got ", "loss must have a graph, got "
OF_TBPTT = (
    "Compute it from the parameters with gradients enabled. tbptt has run backward already: call "
    "tbptt(..., backward=opt.backward) inside `with opt.micro_batch():`"
)
CALLS = [
    ("backward", 1.0, TypeError, "loss must be a tensor, got float. Leave out .item()"),
    (
        "backward",
        HOLDS,
        TypeError,
        f"{A_TENSOR}SimpleNamespace. Take the loss that it holds: out.l",
    ),
    ("backward", DETACHED, TypeError, f"{A_TENSOR}TBPTTResult. {OF_TBPTT}"),
    ("backward", (1, 2), TypeError, f"{A_TENSOR}tuple"),
    ("backward", torch.ones(2, requires_grad=True), ValueError, "loss must be 0-dim, got"),
    ("backward", DETACHED.loss, ValueError, f"{A_GRAPH}a tensor without one. {OF_TBPTT}"),
    ("accumulate", 2.0, RuntimeError, ".grad must hold new gradients, got none"),
    ("main_grad", torch.ones(4, 3), ValueError, "parameter must be a parameter of this"),
    ("micro_batch", 3, TypeError, "model must be a torch.nn.Module or None, got int"),
    ("micro_batch", len, TypeError, "model must be a torch.nn.Module or None, got builtin"),
    ("micro_batch", HoldsBack(), TypeError, "model must be a DistributedDataParallel or fully"),
    (LOAD, None, TypeError, "state_dict must be a dict, got NoneType"),
    (LOAD, {}, ValueError, "state_dict must have the keys"),
    (LOAD, {"more": 1}, ValueError, "state_dict must have the keys"),
    ("step", torch.tensor(1.0), TypeError, "closure must be a function or None, got a float32"),
    *((LOAD, {k: v}, e, f"state_dict['{k}'] must be {text}") for k, v, e, text in SAVED),
    *(
        (LOAD, {"main_grads": {i: v}}, e, f"state_dict['main_grads'][{i}] must {text}")
        for i, v, e, text in MAINS
    ),
    *(("accumulate", weight, error, f"weight must be {text}") for weight, error, text in WEIGHTS),
]


@pytest.mark.parametrize(("name", "argument", "error", "text"), CALLS, ids=str)
def test_a_call_is_refused(halfway, name, argument, error, text):
    model, opt = halfway
    if name == LOAD and argument:
        argument = {**opt.accumulation_state_dict(), **argument}
    if text.startswith("weight"):
        model[0].weight.sum().backward()
    with pytest.raises(error, match=says(f"{OP}.{name}: {text}")):
        getattr(opt, name)(argument).__enter__()  # of `micro_batch`; the others have raised
    opt.zero_grad()


@pytest.mark.parametrize(("weight", "error", "text"), WEIGHTS, ids=str)
def test_a_weight_is_checked_before_the_backward_pass(halfway, weight, error, text):
    model, opt = halfway
    with pytest.raises(error, match=says(f"{OP}.backward: weight must be {text}")):
        opt.backward(model[0].weight.sum(), weight)


@pytest.mark.parametrize("name", ["accumulate", "step", "flush", "discard", "micro_batch", LOAD])
def test_calls_that_a_micro_batch_cannot_contain(halfway, name):
    opt = halfway[1]
    with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
        getattr(opt, name)(*[{}][: name == LOAD]).__enter__()
