"""Gradients of which little can be seen: of one number; added to a wrapper's sum by an operator."""

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumext

X = torch.tensor([4.0, 2.0])
DIVIDED = {  # by what each of two losses is divided, and what is asked
    2.0: set(),
    1.0: {"accumulation.divisor_missing"},
    3.0: {"accumulation.divided_by_more"},
}


def one_number() -> tuple[torch.Tensor, torch.optim.Optimizer]:
    w = torch.tensor(1.0, requires_grad=True)
    return w, torch.optim.SGD([w], lr=0.01)


@pytest.mark.parametrize("divisor", DIVIDED)
def test_a_model_of_one_number(divisor):
    """y = w x: where the step used the plain sum of the passes, its factors are known"""
    w, optimizer = one_number()
    with accumext.audit(optimizer=optimizer) as audit:
        for _ in range(2):
            for x in X:
                (mse_loss(w * x, 2 * x) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.findings == ()
    assert {one.id for one in audit.questions} == DIVIDED[divisor]
    assert f"gradient: {2 / divisor:.4g} times the mean of 2 losses" in str(audit)


def test_one_number_that_is_no_plain_sum():
    """Any factor would explain it: nothing is said of it, and why"""
    w, optimizer = one_number()
    with accumext.audit(optimizer=optimizer) as audit:
        (mse_loss(w * X, 2 * X)).backward()
        w.grad *= 0.7
        optimizer.step()
    assert (audit.findings, audit.questions) == ((), ())
    assert audit.judgement.unjudged[0].startswith("factors of 1 window: a gradient of one number")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"accumulate_in_backward": True}], ids=["", "in backward"])
def test_gradients_that_decode_loss_adds_to_the_sum(options, dtype):
    """Autograd never sees them; the window is judged all the same, and no bit changes"""
    ends = []
    for windows in (1, 3):
        torch.manual_seed(0)
        parts = [nn.Embedding(40, 16), nn.GRUCell(16, 16), nn.Linear(16, 40)]
        model = nn.ModuleList(parts).to(dtype)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.1, **options)
        with accumext.audit(windows=windows) as audit:
            for _ in range(12):
                targets, state = torch.randint(40, (6, 3)), torch.randn(3, 16, dtype=dtype)
                loss = accumext.decode_loss(*parts, targets, state, feedback="greedy").loss
                opt.backward(loss)
                opt.step()
        assert audit.findings == audit.questions == ()
        assert f"factors of {windows} window" in audit.judgement.checked[0]
        factors = re.findall(r"gradient: (\S+) times the mean of 4 losses", str(audit))
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
        assert [*map(float, factors)] == pytest.approx([1.0] * windows, rel=rounding)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
