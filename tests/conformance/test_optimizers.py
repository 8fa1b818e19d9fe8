"""Optimizers.

Every class that torch.optim exports, beside itself without the wrapper; half-precision parameters
beside it on float32 masters, which it steps on while the model keeps half precision.
"""

import inspect
from functools import partial

import pytest
import torch
from ranks import across
from shares import inside, own_share, train, whole
from support import optimizer_oracle as oracle
from support.masters import adamw, rounded, with_masters
from support.optimizer_oracle import adam, assert_close, loss_of, make_model, parameters_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = oracle.make_batches(9)
HALF = torch.bfloat16
WINDOW, COUNT = 2, 6  # micro-batches of a rank

# By class, settings under which all of its own arithmetic takes part.
SETTINGS = {
    "Adadelta": {"lr": 1.0, "weight_decay": 0.01},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "Adam": {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01},
    "Adamax": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "ASGD": {"lr": 0.1, "t0": 2.0},
    "LBFGS": {"lr": 0.5, "max_iter": 4},
    "Muon": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "SparseAdam": {"lr": 0.05},
}
CLASSES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
)
# Variants that torch computes with tensors: how to ask for each, and who refuses it on a CPU.
VARIANTS = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "tensor-lr": {},
}
NO_TENSOR_LR = ("LBFGS", "Muon")


def accepts(name, option):
    """Tell whether the class has an option of that name."""
    return option in inspect.signature(getattr(torch.optim, name)).parameters


CASES = [
    (name, variant)
    for name in CLASSES
    for variant, options in VARIANTS.items()
    if name != "LBFGS" and all(accepts(name, option) for option in options)
    if not (variant == "tensor-lr" and name in NO_TENSOR_LR)
]
every_optimizer = pytest.mark.parametrize(("name", "variant"), CASES)


def make_optimizer(name, parameters, variant="default", **options):
    settings = SETTINGS[name] | VARIANTS[variant] | options
    if variant == "tensor-lr":
        settings["lr"] = torch.tensor(settings["lr"], dtype=torch.float64)
    return getattr(torch.optim, name)(parameters, **settings)


def model_for(name, dtype=torch.float64):
    """Make a model that this optimizer can train: matrices for Muon, sparse for SparseAdam."""
    if name not in ("Muon", "SparseAdam"):
        return make_model(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if name == "SparseAdam":
            return nn.Embedding(7, 3, sparse=True, dtype=dtype)
        return nn.Sequential(nn.Linear(3, 4, False), nn.Tanh(), nn.Linear(4, 2, False)).to(dtype)


def batches_for(name, sizes, dtype=torch.float64):
    """Make inputs of so many rows each: vectors, or the tokens of an embedding."""
    generator = torch.Generator().manual_seed(2)
    if name == "SparseAdam":
        return [torch.randint(7, (size,), generator=generator) for size in sizes]
    return [
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    ]


def bare(optimizer):
    return optimizer


def test_it_is_an_optimizer_and_owns_nothing_of_one():
    """`isinstance(opt, Optimizer)`, with the wrapped one's groups, state and defaults"""
    model = make_model()
    opt = oracle.wrapped(model, adam, window=3)
    oracle.one_call(opt, loss_of(model, BATCHES[0]))
    for _ in range(2):  # the second time after a load, which rebinds them
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.param_groups is opt.optimizer.param_groups
        assert opt.state is opt.optimizer.state
        assert opt.defaults is opt.optimizer.defaults
        opt.discard()
        opt.load_state_dict(state_dict=opt.state_dict())
    assert "window=3" in repr(opt)
    assert "Adam" in repr(opt)


@every_optimizer
def test_a_window_of_one_is_the_bare_optimizer(name, variant):
    """`window=1` is every class of `torch.optim` bit for bit, in every loop, hooks too"""
    batches, calls = batches_for(name, [5, 4, 5], torch.float32), []

    def train(wrap, backward):
        model, facts = model_for(name, torch.float32), []
        opt = wrap(make_optimizer(name, model.parameters(), variant))
        opt.register_step_pre_hook(lambda *_: facts.append("pre"))
        opt.register_step_post_hook(lambda *_: facts.append("post"))
        for batch in batches:
            backward(opt, loss_of(model, batch))
        facts += [opt.step(oracle.closure_of(opt, model, batches[1])).item() for _ in range(2)]
        opt.zero_grad()
        opt.step()  # without a gradient
        for batch in batches[1:]:
            loss_of(model, batch).backward()
            opt.step()
            opt.step()  # on the same ones
        if name != "SparseAdam":  # which does not take a dense zero
            opt.zero_grad(set_to_none=False)
            opt.step()
        calls.append(facts)
        return parameters_of(model)

    expected = train(bare, oracle.own_backward)
    assert not torch.equal(expected[0], parameters_of(model_for(name, torch.float32))[0])
    for loop in (oracle.one_call, oracle.own_backward):
        oracle.assert_equal(train(AccumulatingOptimizer, loop), expected)
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize("loop", [oracle.one_call, oracle.accumulated])
@every_optimizer
def test_a_window_is_one_large_batch(name, variant, loop):
    """`window=3` is one large batch for every class: unequal weights, a partial last window"""
    sizes = [2, 3, 5, 4, 1, 3, 6, 2]
    batches = batches_for(name, sizes)
    reference, model = model_for(name), model_for(name)
    plain = make_optimizer(name, reference.parameters(), variant)
    for some in oracle.windows_of(batches, 3):
        oracle.own_backward(plain, loss_of(reference, torch.cat(some)))

    opt = AccumulatingOptimizer(make_optimizer(name, model.parameters(), variant), window=3)
    for batch, size in zip(batches, sizes):
        loop(opt, loss_of(model, batch), weight=size)
    opt.flush()
    assert opt.last.micro_batches == 2
    assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("name", [name for name in CLASSES if accepts(name, "differentiable")])
def test_gradients_flow_through_a_differentiable_step(name):
    """`differentiable=True`: gradients flow through the step of a window of one"""

    def meta_gradients(wrap):
        start = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        grad = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        parameter = start.clone()
        opt = wrap(make_optimizer(name, [parameter], differentiable=True))
        parameter.grad = 1.5 * grad
        opt.step()
        meta = torch.autograd.grad(parameter.square().sum(), [start, grad])
        return [parameter.detach(), *meta]

    expected = meta_gradients(bare)
    assert expected[1].any()
    oracle.assert_equal(meta_gradients(AccumulatingOptimizer), expected)


@pytest.mark.parametrize("names", ["own", "raw"])
@pytest.mark.parametrize("window", [1, 3])
def test_the_closure_runs_once_per_step(window, names):
    """A closure runs once in every `step`, with gradients enabled, whatever the window"""
    model = make_model()
    opt = oracle.wrapped(model, adam, window=window)
    calls = []
    for batch in BATCHES:

        def closure(batch=batch):
            opt.zero_grad()
            loss = loss_of(model, batch)
            (opt.backward if names == "own" else torch.Tensor.backward)(loss)
            calls.append(loss.item())
            return loss

        with torch.no_grad():
            assert opt.step(closure).item() == calls[-1]
    assert len(calls) == len(BATCHES)
    assert_close(parameters_of(model), oracle.train_by_hand(adam, BATCHES, window))


def test_lbfgs():
    """LBFGS calls its closure as often as it likes; a window, a clip or a scaler is refused"""
    assert {name for name in CLASSES if name not in dict(CASES)} == {"LBFGS"}
    results = []
    for wrap in (bare, AccumulatingOptimizer):
        model, losses = make_model(), []
        opt = wrap(make_optimizer("LBFGS", model.parameters()))
        closure = oracle.closure_of(opt, model, BATCHES[0], losses)
        values = [opt.step(closure).item() for _ in range(3)]
        results.append((parameters_of(model), [losses, values]))
    (expected, seen), (actual, ours) = results
    oracle.assert_equal(actual, expected)
    assert ours == seen
    assert len(seen[0]) > 3
    assert opt.stepped
    assert opt.stats()["skipped"] == 0.0
    for name, value in {"window": 2, "max_norm": 1.0, "scaler": oracle.growing_scaler()}.items():
        text = rf"^AccumulatingOptimizer: {name} must be \w+ for LBFGS, which needs a closure, got"
        with pytest.raises(ValueError, match=text):
            AccumulatingOptimizer(opt.optimizer, **{name: value})


@pytest.mark.parametrize(
    ("loop", "dtype"), [(oracle.one_call, HALF), (oracle.own_backward, torch.float16)]
)
@every_optimizer
def test_masters_are_the_optimizer_in_float32(name, variant, loop, dtype):
    """Every class of `torch.optim` on masters: bit for bit itself in float32, `fused` too"""
    batches = batches_for(name, [5] * 4, torch.float32)
    make = partial(make_optimizer, name, variant=variant)
    reference = model_for(name, dtype)
    by_hand = oracle.ByHand(reference.parameters(), make, wide=torch.float32)
    model, opt, masters = with_masters(make, model=model_for(name, dtype))
    for batch in batches:
        batch = batch if name == "SparseAdam" else batch.to(dtype)
        by_hand.add(loss_of(reference, batch))
        by_hand.step()
        loop(opt, loss_of(model, batch))
    oracle.assert_equal([m.detach() for m in masters], by_hand.stepped_on)
    oracle.assert_equal(parameters_of(model), parameters_of(reference))
    assert not torch.equal(parameters_of(model)[0], parameters_of(model_for(name, dtype))[0])


@across(2, cases={"to_nearest": {"stochastic": False}, "stochastically": {"stochastic": True}})
def test_masters_of_replicas(rank, world, stochastic):
    """Masters under DistributedDataParallel: windows are summed in float32, rounded alike"""
    # Stochastic rounding gives all ranks the same parameters, whatever their seeds.
    torch.manual_seed(rank)
    model, opt, masters = with_masters(stochastic=stochastic, window=WINDOW)
    replica = DistributedDataParallel(model)
    train(opt, replica, own_share(rank, world, COUNT, HALF, weighted=False), inside)
    parameters, masters = parameters_of(model), [m.detach() for m in masters]
    if stochastic:
        pairs = zip(parameters, rounded(masters), strict=True)
        assert not all(torch.equal(*pair) for pair in pairs)
        return parameters, masters
    batches = oracle.make_batches(2 * COUNT, HALF)
    numbers = {"dtype": HALF, "wide": torch.float32}
    oracle.assert_equal(masters, oracle.train_by_hand(adamw, batches, 2 * WINDOW, **numbers))
    oracle.assert_equal(parameters, rounded(masters))
    return parameters, masters


def sharded():
    model = make_model(HALF)
    fully_shard(model[0])
    return fully_shard(model)


@across(2)
def test_masters_of_shards(rank, world):
    """Masters of `fully_shard` parameters are shards, also in checkpoints; bit for bit by hand"""
    reference = sharded()
    model, opt, masters = with_masters(model=sharded(), window=WINDOW)
    assert all(isinstance(m, DTensor) and m.dtype == torch.float32 for m in masters)
    share = own_share(rank, world, COUNT, HALF, weighted=False)
    train(opt, model, share)

    pairs = [(p, p.detach().float().requires_grad_()) for p in reference.parameters()]
    adam = adamw([wide for _, wide in pairs])
    for number, (batch, _) in enumerate(share, 1):
        loss_of(reference, batch).backward()
        for parameter, wide in pairs:
            mean = parameter.grad.float() / WINDOW
            wide.grad = mean if wide.grad is None else wide.grad + mean
        reference.zero_grad()
        if number % WINDOW == 0:
            adam.step()
            adam.zero_grad()
            with torch.no_grad():
                for parameter, wide in pairs:
                    parameter.copy_(wide)
    saved = opt.state_dict()["masters"]["parameters"]
    assert all(isinstance(saved[i], DTensor) for i in range(len(masters)))
    parameters = whole(parameters_of(model))
    masters, expected = (whole(some) for some in (masters, [wide for _, wide in pairs]))
    oracle.assert_equal(masters, expected)
    oracle.assert_equal(parameters, rounded(masters))
    return parameters


# The compiler's own imports use what torch has deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "window", "max_norm", "scheduled", "scaled"),
    [
        ("plain", 1, None, "before", False),
        ("plain", 3, 1e-3, "before", True),
        ("capturable", 3, 1e-3, "after", False),  # on a CPU only compiled
        ("fused", 3, 1e-3, "before", False),  # whose kernel torch does not compile
    ],
)
def test_a_compiled_step(kind, window, max_norm, scheduled, scaled):
    """`torch.compile` of `opt.step`, scheduler made before or after: no recompilation per step"""
    compilations = torch._dynamo.utils.counters["frames"]
    batches = oracle.windows_of(oracle.make_batches(8 * window), window)
    options = {} if kind == "plain" else {kind: True}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None

    def train(wrap, run_window):
        torch._dynamo.reset()
        model, graphs, counts = make_model(), [], []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        opt = wrap(make_optimizer("Adam", model.parameters(), "tensor-lr", **options))
        if scheduled == "before":
            scheduler = lr_scheduler.ExponentialLR(opt, 0.9)
            step = torch.compile(opt.step, backend=backend)
        else:  # it replaces `step`, so what is compiled has to look that up
            step = torch.compile(lambda: opt.step(), backend=backend)
        for number, some in enumerate(batches):
            run_window(opt, model, some, step)
            if scheduled == "after" and number == 0:
                scheduler = lr_scheduler.ExponentialLR(opt, 0.9)
            else:
                scheduler.step()
            counts.append(compilations["total"])
        assert kind == "fused" or any("addcdiv" in code for code in graphs)
        return parameters_of(model), counts

    def joined(opt, model, some, step):
        opt.zero_grad()
        loss_of(model, torch.cat(some)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        step()

    def micro_batches(opt, model, some, step):
        for batch in some:
            loss = loss_of(model, batch)
            (scaler.scale(loss) if scaled else loss).backward()
            step()
            opt.zero_grad()

    expected, _ = train(bare, joined)
    actual, counts = train(
        partial(AccumulatingOptimizer, window=window, max_norm=max_norm, scaler=scaler),
        micro_batches,
    )
    assert_close(actual, expected)
    assert counts[-1] == counts[3] > 0
