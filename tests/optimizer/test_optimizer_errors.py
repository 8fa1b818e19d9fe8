"""What AccumulatingOptimizer refuses, in which words, and that nothing has changed when it does."""

from __future__ import annotations

import re

import pytest
import torch
from support.optimizer_oracle import (
    assert_close,
    assert_equal,
    fail_in_backward,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
)
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

NAN, INF = float("nan"), float("inf")
BATCHES = make_batches(4)
OP = "AccumulatingOptimizer"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def says(text):
    return "^" + re.escape(text)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"window": 0}, ValueError, f"{OP}: window must be at least 1, got 0"),
        ({"window": -2}, ValueError, f"{OP}: window must be at least 1, got -2"),
        ({"window": 2.0}, TypeError, f"{OP}: window must be an int, got float"),
        ({"window": True}, TypeError, f"{OP}: window must be an int, got bool"),
        ({"max_norm": NAN}, ValueError, f"{OP}: max_norm must be at least 0, got nan"),
        ({"max_norm": -1.0}, ValueError, f"{OP}: max_norm must be at least 0, got -1.0"),
        ({"max_norm": "1"}, TypeError, f"{OP}: max_norm must be a number, got str"),
        ({"norm_type": 0}, ValueError, f"{OP}: norm_type must be nonzero, got 0"),
        ({"norm_type": NAN}, ValueError, f"{OP}: norm_type must not be NaN, got nan"),
        ({"norm_type": None}, TypeError, f"{OP}: norm_type must be a number, got NoneType"),
        (
            {"scaler": 2.0},
            TypeError,
            f"{OP}: scaler must be a torch.amp.GradScaler or None, got float",
        ),
        (
            {"on_nonfinite": "skip"},
            ValueError,
            f"{OP}: on_nonfinite must be one of 'skip_window', 'skip_micro_batch', 'raise', "
            "got 'skip'",
        ),
        ({"on_nonfinite": None}, TypeError, f"{OP}: on_nonfinite must be one of"),
        ({"reduction": "none"}, ValueError, f"{OP}: reduction must be one of 'mean', 'sum'"),
        (
            {"process_group": 3},
            TypeError,
            f"{OP}: process_group must be a torch.distributed process group or None, got int",
        ),
        (
            {"accumulate_in_backward": 1},
            TypeError,
            f"{OP}: accumulate_in_backward must be a bool, got int",
        ),
        (
            {"accumulate_in_backward": True, "on_nonfinite": "skip_micro_batch"},
            ValueError,
            f"{OP}: accumulate_in_backward must be False for on_nonfinite='skip_micro_batch'",
        ),
        (
            {"accumulate_in_backward": True, "on_nonfinite": "raise"},
            ValueError,
            f"{OP}: accumulate_in_backward must be False for on_nonfinite='raise', which looks at",
        ),
        (
            {"reduce_in_backward": 1},
            TypeError,
            f"{OP}: reduce_in_backward must be a bool, got int",
        ),
        (
            {"reduce_in_backward": True, "on_nonfinite": "raise"},
            ValueError,
            f"{OP}: reduce_in_backward must be False for on_nonfinite='raise', which looks at",
        ),
    ],
    ids=str,
)
def test_constructor(arguments, error, text):
    with pytest.raises(error, match=says(text)):
        AccumulatingOptimizer(sgd(make_model().parameters()), **arguments)


def test_bad_micro_batches_are_dropped_on_one_device_only():
    parameters = [nn.Parameter(torch.zeros(1, device=device)) for device in ("cpu", "meta")]
    text = f"{OP}: on_nonfinite must be 'skip_window' or 'raise' where parameters are sharded"
    with pytest.raises(ValueError, match=says(text)):
        AccumulatingOptimizer(sgd(parameters), on_nonfinite="skip_micro_batch")


@pytest.mark.parametrize("wrong", [None, 3, make_model(), "wrapped"], ids=str)
def test_constructor_wants_an_unwrapped_optimizer(wrong):
    if wrong == "wrapped":
        wrong = AccumulatingOptimizer(sgd(make_model().parameters()))
    text = f"{OP}: optimizer must be a torch.optim.Optimizer that is not wrapped already, got"
    with pytest.raises(TypeError, match=says(text)):
        AccumulatingOptimizer(wrong)


def test_closure_optimizers_take_gradients_from_their_closure():
    model = make_model()
    opt = AccumulatingOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=says(f"{OP}.step: closure must be callable")):
        opt.step()
    loss = loss_of(model, BATCHES[0])
    for refused in (lambda: opt.backward(loss), opt.accumulate, opt.micro_batch().__enter__):
        with pytest.raises(RuntimeError, match="must step without a closure, got LBFGS"):
            refused()
    opt.flush()
    assert not opt.stepped


@pytest.fixture
def halfway():
    """An optimizer with one of two micro-batches in; the test may break nothing of it."""
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    opt.backward(loss_of(model, BATCHES[0]))
    yield model, opt
    assert all(p.grad is None for p in model.parameters())
    opt.backward(loss_of(model, BATCHES[1]))
    opt.step()
    assert opt.stepped
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[:2], 2))


@pytest.mark.parametrize(
    ("weight", "error", "text"),
    [
        (-1.0, ValueError, "weight must be at least 0, got -1.0"),
        (NAN, ValueError, "weight must be at least 0, got nan"),
        (INF, ValueError, "weight must be finite, got inf"),
        ("1", TypeError, "weight must be a number, got str"),
        (None, TypeError, "weight must be a number, got NoneType"),
        (torch.tensor(-1.0), ValueError, "weight must be at least 0, got -1.0"),
        (torch.tensor(INF), ValueError, "weight must be finite, got inf"),
        (torch.ones(2), ValueError, "weight must be a number or a 0-dim tensor, got shape [2]"),
        (torch.tensor(True), TypeError, "weight must be a real number, got a bool tensor"),
    ],
    ids=str,
)
def test_weight(halfway, weight, error, text):
    model, opt = halfway
    with pytest.raises(error, match=says(f"{OP}.backward: {text}")):
        opt.backward(loss_of(model, BATCHES[1]), weight)
    loss_of(model, BATCHES[1]).backward()
    with pytest.raises(error, match=says(f"{OP}.accumulate: {text}")):
        opt.accumulate(weight)
    opt.zero_grad()


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (1.0, TypeError, "loss must be a tensor, got float"),
        (torch.ones(2, requires_grad=True), ValueError, "loss must be 0-dim, got shape [2]"),
        (torch.tensor(1.0), ValueError, "loss must have a graph, got a tensor without one"),
    ],
    ids=["float", "vector", "no-graph"],
)
def test_loss(halfway, loss, error, text):
    with pytest.raises(error, match=says(f"{OP}.backward: {text}")):
        halfway[1].backward(loss)


def test_accumulate_needs_new_gradients(halfway):
    text = f"{OP}.accumulate: .grad must hold new gradients, got none"
    with pytest.raises(RuntimeError, match=says(text)):
        halfway[1].accumulate()


def test_calls_that_a_micro_batch_cannot_contain(halfway):
    _, opt = halfway
    calls = (
        opt.accumulate,
        opt.step,
        opt.flush,
        opt.discard,
        opt.micro_batch().__enter__,
        lambda: opt.load_accumulation_state_dict({}),
    )
    for call in calls:
        with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
            call()


@pytest.mark.parametrize("second", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_a_micro_batch_has_one_weight(halfway, second):
    model, opt = halfway

    def two_weights():
        with opt.micro_batch():
            opt.backward(loss_of(model, BATCHES[1]), 1.0)
            opt.backward(loss_of(model, BATCHES[1]), second)

    text = f"{OP}.backward: weight must be that of the whole micro-batch, 1, got 2.0"
    with pytest.raises(ValueError, match=says(text)):
        two_weights()


@pytest.mark.parametrize("wrong", [3, lambda x: x], ids=["int", "function"])
def test_micro_batch_wants_a_module(halfway, wrong):
    text = f"{OP}.micro_batch: model must be a torch.nn.Module or None"
    with pytest.raises(TypeError, match=says(text)):
        halfway[1].micro_batch(wrong).__enter__()


def test_micro_batch_refuses_wrappers_it_does_not_know(halfway):
    class Sharded(nn.Module):
        def no_sync(self):
            raise AssertionError

    text = f"{OP}.micro_batch: model must be a DistributedDataParallel or fully_shard model"
    with pytest.raises(TypeError, match=says(text)):
        halfway[1].micro_batch(Sharded()).__enter__()


def test_main_grad_wants_a_parameter_of_the_optimizer(halfway):
    text = f"{OP}.main_grad: parameter must be a parameter of this optimizer"
    with pytest.raises(ValueError, match=says(text)):
        halfway[1].main_grad(torch.zeros(4, 3))


def changed(**entries):
    return lambda saved: {**saved, **entries}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda saved: None, TypeError, "state_dict must be a dict, got NoneType"),
        (lambda saved: {}, ValueError, "state_dict must have the keys"),
        (changed(more=1), ValueError, "state_dict must have the keys"),
        (changed(micro_batches=-1), ValueError, "state_dict['micro_batches'] must be an int"),
        (changed(micro_batches=1.0), ValueError, "state_dict['micro_batches'] must be an int"),
        (changed(held_back=1), TypeError, "state_dict['held_back'] must be a bool, got int"),
        (changed(weight=None), TypeError, "state_dict['weight'] must be a number"),
        (changed(weight=NAN), ValueError, "state_dict['weight'] must be finite"),
        (changed(unit_scale="1"), TypeError, "state_dict['unit_scale'] must be a number"),
        (changed(loss_scale=torch.ones(2)), ValueError, "state_dict['loss_scale'] must be a"),
        (changed(norm=1.0), TypeError, "state_dict['norm'] must be a 0-dim tensor or None"),
        (changed(main_grads=[]), TypeError, "state_dict['main_grads'] must be a dict, got list"),
        (
            changed(main_grads={4: torch.zeros(2)}),
            ValueError,
            "state_dict['main_grads'][4] must be one of the 4 parameters, got index 4",
        ),
        (
            changed(main_grads={0: torch.zeros(2, dtype=torch.float64)}),
            ValueError,
            "state_dict['main_grads'][0] must have shape [4, 3], got [2]",
        ),
        (
            changed(main_grads={0: torch.zeros(4, 3, dtype=torch.int64)}),
            TypeError,
            "state_dict['main_grads'][0] must be a torch.float64 tensor, got an int64 tensor",
        ),
        (
            changed(main_grads={0: 1.0}),
            TypeError,
            "state_dict['main_grads'][0] must be a tensor, got float",
        ),
    ],
)
def test_load_accumulation_state_dict(halfway, change, error, text):
    opt = halfway[1]
    with pytest.raises(error, match=says(f"{OP}.load_accumulation_state_dict: {text}")):
        opt.load_accumulation_state_dict(change(opt.accumulation_state_dict()))


def test_outer_scaler_beside_an_own_one():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    opt = AccumulatingOptimizer(sgd(model.parameters()), scaler=scaler)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    text = f"{OP}.step: step must be called directly, not through scaler.step, got an outer"
    with pytest.raises(RuntimeError, match=says(text)):
        scaler.step(opt)
    assert "grad_scale" not in vars(opt)
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[:1], 1))


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_outer_scaler_too_late(window, earlier):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=window)
    for _ in range(earlier):
        opt.backward(loss_of(model, BATCHES[0]))
        opt.step()
    before = [p.detach().clone() for p in model.parameters()]
    opt.backward(scaler.scale(loss_of(model, BATCHES[0])))
    text = f"{OP}.step: step must be called directly, not through scaler.step, got gradients taken"
    with pytest.raises(RuntimeError, match=says(text)):
        scaler.step(opt)
    assert_equal([p.detach() for p in model.parameters()], before)


def test_own_scaler_wants_scaled_losses():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
    loss_of(model, BATCHES[0]).backward()
    for name in ("accumulate", "step"):
        text = f"{OP}.{name}: the loss must be scaled first, got a scaler that has not scaled any"
        with pytest.raises(RuntimeError, match=says(text)):
            getattr(opt, name)()


def test_an_error_in_the_first_backward_pass_leaves_the_window_empty():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    with pytest.raises(ZeroDivisionError):
        opt.backward(fail_in_backward(model, BATCHES[0]))
    assert all(p.grad is None for p in model.parameters())
    assert all(opt.main_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise"])
def test_an_error_in_a_later_backward_pass_leaves_the_window_as_it_was(policy):
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2, on_nonfinite=policy)
    opt.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(ZeroDivisionError):
        opt.backward(fail_in_backward(model, BATCHES[1]))
    opt.backward(loss_of(model, BATCHES[1]))
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[:2], 2))


def test_an_error_while_autograd_adds_in_place_drops_the_window_and_says_so():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2, accumulate_in_backward=True)
    opt.backward(loss_of(model, BATCHES[0]))
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        opt.backward(fail_in_backward(model, BATCHES[1]))
    error = raised.value
    assert "the open window was dropped" in str(error) + "".join(getattr(error, "__notes__", ()))
    assert all(p.grad is None for p in model.parameters())
    for batch in BATCHES[2:]:
        opt.backward(loss_of(model, batch))
        opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[2:], 2))


@pytest.mark.parametrize("window", [1, 2])
def test_an_error_in_the_wrapped_step_leaves_the_window_open(window):
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=window, max_norm=0.01)
    for batch in BATCHES[:window]:
        opt.backward(loss_of(model, batch))
    handle = opt.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    handle.remove()
    assert not opt.stepped
    opt.step()
    assert opt.stepped
    expected = train_by_hand(sgd, BATCHES[:window], window, max_norm=0.01)
    assert_close([p.detach() for p in model.parameters()], expected)


def test_a_step_of_an_outer_scaler_that_is_refused_leaves_nothing_of_it():
    """What GradScaler lays on an optimizer would scale the next step that is called directly."""
    model = make_model()
    opt, scaler = AccumulatingOptimizer(sgd(model.parameters())), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
        scaler.step(opt)
    opt.discard()
    opt.zero_grad()
    loss_of(model, BATCHES[1]).backward()
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[1:2], 1))
