"""`step` is the wrapped one's: with keywords and closures, and in its answer."""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import INF, OP

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


class Talking(torch.optim.SGD):
    """A step with a keyword of its own, and something to say."""

    @torch.no_grad()
    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(factor * parameter.grad)
        return {"factor": factor}


@pytest.mark.parametrize("window", [1, 2])
def test_keywords_reach_the_wrapped_step_and_its_answer_comes_back(window):
    parameter = oracle.scalar()
    opt = AccumulatingOptimizer(Talking([parameter], lr=1.0), window=window)
    answers = []
    for _ in range(2 * window):
        opt.backward(parameter * 1)
        answers.append(opt.step(factor=3.0))
    assert answers == ([None] * (window - 1) + [{"factor": 3.0}]) * 2
    assert parameter.item() == -6.0


@pytest.mark.parametrize(("reduction", "gradient"), [("mean", 2.0), ("sum", 6.0)])
def test_a_closure_may_call_backward_with_a_weight(reduction, gradient):
    """The closure's gradient is used as without a closure; a GradScaler may come afterwards."""
    parameter, opt = oracle.wrapped_zeros(reduction=reduction)

    def closure():
        opt.zero_grad()
        loss = parameter * 2.0
        opt.backward(loss, weight=3.0)
        return loss

    opt.step(closure)
    opt.step()  # finds what is used up
    assert parameter.item() == -gradient
    opt.zero_grad()
    scaler = oracle.growing_scaler()
    scaler.scale(parameter * 1.0).backward()
    scaler.step(opt)
    assert parameter.item() == -gradient - 1.0


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise", "step"])
def test_a_closure_that_gives_no_finite_gradient(policy):
    parameter = oracle.scalar()
    opt = AccumulatingOptimizer(oracle.sgd([parameter], momentum=0.5), on_nonfinite=policy)

    def closure(factor):
        opt.zero_grad()
        loss = parameter * factor
        loss.backward()
        return loss

    assert opt.step(lambda: closure(2.0)).item() == 0.0
    assert opt.stepped
    if policy == "raise":
        with pytest.raises(RuntimeError, match="gradients must be finite"):
            opt.step(lambda: closure(INF))
    elif policy == "step":
        opt.step(lambda: closure(INF))
        assert not opt.last.skipped
        assert opt.last.nonfinite == []
        assert parameter.item() == -INF
        return
    else:
        opt.step(lambda: closure(INF))
        assert opt.last.skipped
        assert opt.last.nonfinite == [0]
        assert opt.last.micro_batches == opt.last.weight == (policy == "skip_window")
        assert opt.last.loss_scale == 1.0
    assert parameter.item() == -2.0


def test_closure_optimizers_take_gradients_from_their_closure():
    model = oracle.make_model()
    opt = AccumulatingOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=oracle.says(f"{OP}.step: closure must be callable")):
        opt.step()
    loss = oracle.loss_of(model, oracle.make_batches(1)[0])
    for refused in (lambda: opt.backward(loss), opt.accumulate, opt.micro_batch().__enter__):
        with pytest.raises(RuntimeError, match="must step without a closure, got LBFGS"):
            refused()
    opt.flush()
    assert not opt.stepped
