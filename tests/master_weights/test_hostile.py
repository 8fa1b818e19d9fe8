"""Changes to a model, its masters and their optimizer by others at awkward moments."""

import copy

import pytest
import torch
from support.masters import BATCHES, rounded, train, values, with_masters
from support.optimizer_oracle import assert_equal, closure_of, make_model, sgd
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


class Still(torch.optim.SGD):
    """An optimizer that leaves everything where it is."""

    def look(self):
        """A method that writes nothing."""


def still(parameters):
    return Still(parameters, lr=0.0)


def write(model, value=0.5):
    """As `load_state_dict` does: one counted write of every parameter."""
    model.load_state_dict({k: torch.full_like(v, value) for k, v in model.state_dict().items()})


def assert_all(tensors, value=0.5):
    for tensor in tensors:
        assert torch.equal(tensor.detach(), torch.full_like(tensor, value))


LOADED_BEFORE = ["the optimizer is wrapped", "a group is added", "a method", "an empty step"]


@pytest.mark.parametrize("before", LOADED_BEFORE)
def test_what_is_loaded_stays(before):
    model = make_model(torch.bfloat16)
    masters = accumext.masters(model.parameters())
    if before == "the optimizer is wrapped":
        write(model)
    opt = AccumulatingOptimizer(still(masters), masters=masters)
    if before != "the optimizer is wrapped":
        train(opt, model)
        opt.zero_grad()
        write(model)
    if before == "a group is added":
        others = make_model(torch.bfloat16).parameters()
        opt.add_param_group({"params": accumext.masters(others)})
    elif before == "a method":
        opt.look()
    elif before == "an empty step":
        opt.step()
    train(opt, model)
    assert_all([*model.parameters(), *masters])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_what_is_loaded_into_a_copy_stays(steps):
    """A copy of a tensor begins its count of writes anew."""
    model, opt, _ = with_masters(still)
    train(opt, model, BATCHES[:steps])
    for writes in range(1, 6):
        theirs, its = copy.deepcopy((model, opt))
        for _ in range(writes):
            write(theirs)
        train(its, theirs)
        assert_all(theirs.parameters())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
def test_a_written_neighbour_of_the_stochastic_rounding_is_taken_over(dtype):
    """1.75 is exact, so it is rounded to itself alone: another number was written by others."""
    weight = nn.Parameter(torch.full((4,), 1.75, dtype=dtype))
    masters = accumext.masters([weight], stochastic_rounding=True)
    opt = AccumulatingOptimizer(still(masters), masters=masters)
    unit = torch.finfo(dtype).eps
    written = torch.tensor([1.75 + unit, 1.75 - unit, 1.75, 1.75 + 2 * unit], dtype=dtype)
    with torch.no_grad():
        weight.copy_(written)
    opt.backward(weight.sum())
    opt.step()
    assert_equal([weight.detach()], [written])


def test_masters_loaded_by_hand_before_the_first_step_stay():
    """As from a float32 checkpoint: the parameters have not been written."""
    model, opt, masters = with_masters(still)
    with torch.no_grad():
        for master in masters:
            master.fill_(0.3)
    train(opt, model)
    assert_all(masters, 0.3)
    assert_equal(values(model.parameters()), rounded(masters))


@pytest.mark.parametrize("views", [(lambda m: m, lambda m: m[1:]), (lambda m: m.expand(4, 3),)])
def test_parameters_that_share_memory_are_refused_at_once(views):
    """Two masters would round into the same elements, and a step would fail half-way."""
    memory = torch.zeros(4, 1, dtype=torch.bfloat16)
    masters = accumext.masters([nn.Parameter(view(memory)) for view in views])
    with pytest.raises(ValueError, match="memory"):
        AccumulatingOptimizer(sgd(masters), masters=masters)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


@pytest.mark.parametrize("written", [False, True])
def test_a_closure_that_gives_nan_moves_nothing(written):
    model, opt, masters = with_masters(lbfgs)
    if written:
        write(model)
    before = values(model.parameters())
    opt.step(closure_of(opt, model, BATCHES[0] * float("nan")))
    assert opt.last.skipped
    assert_equal(values(model.parameters()), before)
    assert_equal(rounded(masters), before)


class Sharpness(torch.optim.Optimizer):
    """Evaluates its closure twice, and writes through `.data`, which no version tells of."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        for _ in range(2):
            loss = closure()
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.5)
        return loss


def test_the_model_follows_an_optimizer_with_a_closure_at_every_evaluation():
    model, opt, masters = with_masters(Sharpness)
    seen, after, closure = [], [], closure_of(opt, model, BATCHES[0])

    def in_step():
        pairs = zip(model.parameters(), masters, strict=True)
        return all(torch.equal(p, m.bfloat16()) for p, m in pairs)

    def looking():
        seen.append(in_step())
        return closure()

    before = model[0].weight.detach().clone()
    opt.register_step_post_hook(lambda *_: after.append(in_step()))
    opt.step(looking)
    assert (seen, after) == ([True, True], [True])
    assert in_step()
    assert not torch.equal(model[0].weight.detach(), before)


@pytest.mark.parametrize("kind", ["two masters", "none before", "the parameter itself"])
def test_a_group_that_would_step_on_a_parameter_twice_is_refused(kind):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    first, second = accumext.masters([weight]), accumext.masters([weight])
    if kind == "none before":
        opt = AccumulatingOptimizer(sgd([nn.Parameter(torch.zeros(2))]))
    else:
        opt = AccumulatingOptimizer(sgd(first), masters=first)
    added = [weight] if kind == "the parameter itself" else second
    with pytest.raises(ValueError, match="add_param_group: params must hold"):
        opt.add_param_group({"params": added})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="masters must"):
        AccumulatingOptimizer(sgd([*first, *second]), masters=[*first, *second])


class Decaying(torch.optim.SGD):
    """Moves parameters without gradients, too."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(0.5)


def test_the_model_follows_a_step_without_gradients():
    model, opt, masters = with_masters(Decaying)
    opt.step()
    assert_all([*masters, *model.parameters()])
