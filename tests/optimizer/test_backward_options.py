"""`retain_graph`, `create_graph` and `inputs` of `backward`: what torch's own gives."""

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP, assert_close, loss_of, make_batches, make_model, wrapped
from support.tensors import dtype_id
from torch import nn
from torch.autograd.graph import get_gradient_edge

import accumext

BATCHES = make_batches(3)
REFERENCE_CYCLE = "ignore:Using backward.. with create_graph=True:UserWarning"  # torch's own


def decoder_loss(kind):
    """Modules, and a function that makes a loss of `decode_loss`."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        modules = nn.ModuleList([nn.Embedding(7, 4), nn.GRUCell(4, 4), nn.Linear(4, 7)]).double()
        targets = torch.randint(7, (5, 3))
    embedding, gru, head = modules
    cell = gru if kind == "cell" else lambda x, h: (gru(x, h),) * 2
    state = torch.zeros(3, 4, dtype=torch.float64)
    return (
        modules,
        lambda: (
            accumext.decode_loss(embedding, cell, head, targets, state, feedback="teacher").loss
        ),
    )


@pytest.mark.parametrize("kind", ["cell", "callable"])
@pytest.mark.parametrize("chosen", ["0.weight", "1.weight_hh", "2.weight", "2.bias"])
def test_inputs_of_an_operator_that_adds_to_the_sums(chosen, kind):
    """In the second pass of a window `decode_loss` adds to the sums itself."""
    modules, loss = decoder_loss(kind)
    parameters = dict(modules.named_parameters())
    grads = dict(zip(parameters, torch.autograd.grad(loss(), list(parameters.values()))))
    opt = wrapped(modules, window=4)
    opt.backward(loss())
    opt.backward(loss(), inputs=parameters[chosen])
    for name, parameter in parameters.items():
        expected = grads[name] * (2.0 if name == chosen else 1.0)
        torch.testing.assert_close(opt.main_grad(parameter), expected, rtol=1e-12, atol=1e-15)
    opt.discard()


OPTIONS = {
    "plain": {},
    "looks-first": {"on_nonfinite": "raise"},
    "in-backward": {"accumulate_in_backward": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("window", [1, 4])
def test_inputs_alone_get_a_gradient(window, options, dtype):
    """Also a tensor that the optimizer does not hold; the others' sums stay."""
    first, second, left_out = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3))
    foreign = torch.ones(2, dtype=dtype, requires_grad=True)
    opt = accumext.AccumulatingOptimizer(
        oracle.sgd([first, second, left_out]), window=window, **options
    )
    for count in range(window):
        loss = (first * 2.0 + second * foreign * 3.0 + left_out).sum()
        chosen = [first, get_gradient_edge(second), foreign]
        opt.backward(loss, inputs=iter(chosen) if count % 2 else chosen)
    assert opt.main_grad(first).tolist() == [2.0 * window] * 2
    assert opt.main_grad(second).tolist() == [3.0 * window] * 2
    assert opt.main_grad(left_out) is None
    assert foreign.grad.tolist() == [3.0 * window] * 2
    opt.step()
    assert left_out.tolist() == [1.0] * 2
    assert first.tolist() == [-1.0] * 2


@pytest.mark.parametrize("inside", [False, True], ids=["two-micro-batches", "one-micro-batch"])
@pytest.mark.parametrize("policy", ["skip_window", "raise"])
def test_two_losses_of_one_graph(policy, inside):
    model, by_hand = make_model(), make_model()
    opt = wrapped(model, window=1 if inside else 2, on_nonfinite=policy)
    losses = [part(model(BATCHES[0])) for part in (torch.mean, lambda out: out.square().mean())]
    if inside:
        with opt.micro_batch():
            opt.backward(losses[0] / 2, retain_graph=True)
            opt.backward(losses[1] / 2)
    else:
        opt.backward(losses[0], retain_graph=True)
        opt.backward(losses[1])
    opt.step()
    out = by_hand(BATCHES[0])
    ((out.mean() + out.square().mean()) / 2).backward()
    oracle.sgd(by_hand.parameters()).step()
    assert_close(oracle.parameters_of(model), oracle.parameters_of(by_hand))


class Curvature(torch.optim.SGD):
    """Steps along the gradient over the diagonal of the Hessian, as AdaHessian does, which it finds
    by differentiating the gradients that it is given."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters]
        ones = [torch.ones_like(grad) for grad in grads]
        rows = torch.autograd.grad(grads, parameters, ones, retain_graph=True)
        with torch.no_grad():
            for p, row in zip(parameters, rows):
                p -= 0.05 * p.grad / (row.abs() + 1.0)


@pytest.mark.filterwarnings(REFERENCE_CYCLE)
def test_a_second_order_optimizer_reads_the_graph_of_the_gradients():
    model, by_hand = make_model(), make_model()
    opt, bare = wrapped(model, lambda ps: Curvature(ps)), Curvature(by_hand.parameters())
    for batch in BATCHES:
        opt.backward(loss_of(model, batch), create_graph=True)
        opt.step()
        bare.zero_grad()
        loss_of(by_hand, batch).backward(create_graph=True)
        bare.step()
    oracle.assert_equal(oracle.parameters_of(model), oracle.parameters_of(by_hand))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("weight", [0.0, 3.0, torch.tensor(3.0)], ids=str)
@pytest.mark.filterwarnings(REFERENCE_CYCLE)
def test_create_graph_with_other_settings(weight, policy, clip):
    """The values are those of gradients without a graph."""
    models, scaler = (make_model(), make_model()), oracle.growing_scaler()
    for model, create_graph in zip(models, (True, False)):
        opt = wrapped(model, max_norm=clip, on_nonfinite=policy, scaler=scaler)
        for batch in BATCHES:
            opt.backward(loss_of(model, batch), weight, create_graph=create_graph)
            opt.step()
    assert_close(*map(oracle.parameters_of, models))


CREATE_GRAPH = (
    "create_graph must be False unless gradients stay in `.grad`, with window=1 and one backward "
    "pass, got True. For a loss of gradients: torch.autograd.grad(loss, inputs, create_graph=True)"
)
REFUSED = {
    "bool": ({"create_graph": 1}, TypeError, "create_graph must be a bool, got int"),
    "or-none": ({"retain_graph": 1}, TypeError, "retain_graph must be a bool or None, got int"),
    "empty": (
        {"inputs": []}, ValueError,
        "inputs must hold a tensor, got none. Pass None for all of the graph",
    ),
    "no-tensor": ({"inputs": [3]}, TypeError, "inputs[0] must be a tensor, got int"),
    "frozen": (
        {"inputs": torch.ones(2)}, ValueError,
        "inputs[0] must be a tensor that requires a gradient, got one with requires_grad=False",
    ),
    "window": ({"create_graph": True}, ValueError, CREATE_GRAPH),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_the_window(options, error, text):
    parameter, opt = oracle.wrapped_zeros(3, shape=2)
    opt.backward(parameter.sum())
    with pytest.raises(error) as raised:
        opt.backward(parameter.sum(), **options)
    assert str(raised.value) == f"{OP}.backward: {text}"
    assert opt.main_grad(parameter).tolist() == [1.0, 1.0]
    opt.discard()


def test_create_graph_is_refused_where_window_1_has_no_gradient_in_grad():
    parameter, opt = oracle.wrapped_zeros(shape=2)
    with opt.micro_batch(), pytest.raises(ValueError, match="create_graph must be False"):
        opt.backward(parameter.sum(), create_graph=True)
    opt.backward(parameter.sum())
    with pytest.raises(ValueError, match="create_graph must be False"):
        opt.backward(parameter.sum(), create_graph=True)  # a second one before the step
    opt.discard()
