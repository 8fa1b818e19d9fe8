"""Checkpoints, copies and resuming."""

import copy
import pickle
from functools import partial

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import adam, assert_close, assert_equal, make_model, parameters_of
from test_optimizers import CLASSES, batches_for, make_optimizer, model_for
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 3
BATCHES = oracle.make_batches(12)
wrapped = partial(oracle.wrapped, make=adam, window=WINDOW)


IS_TOLD = pytest.mark.filterwarnings("ignore:.*load_state_dict inside a window:UserWarning")


def run_bare(opt, model, batches, window=WINDOW):
    """Train a bare optimizer on the joined batches of each window."""
    for some in oracle.windows_of(batches, window):
        opt.step(oracle.closure_of(opt, model, torch.cat(some)))


@pytest.mark.parametrize("first", ["bare", "wrapped"])
@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_move_both_ways(name, first):
    """`state_dict` moves between the bare and the wrapped optimizer, both ways, bit for bit"""
    batches = batches_for(name, [4] * 9, torch.float32)

    def build(wrap):
        model = model_for(name, torch.float32)
        bare = make_optimizer(name, model.parameters())
        return model, AccumulatingOptimizer(bare) if wrap else bare

    expected, uninterrupted = build(wrap=False)
    run_bare(uninterrupted, expected, batches, 1)

    wrap = first == "wrapped"
    model, opt = build(wrap)
    for start in range(0, 9, 3):
        if start:
            wrap = not wrap
            states = oracle.through_a_file([model.state_dict(), opt.state_dict()])
            model, opt = build(wrap)
            model.load_state_dict(states[0])
            opt.load_state_dict(states[1])
        run_bare(opt, model, batches[start : start + 3], 1)
    assert_equal(parameters_of(model), parameters_of(expected))
    assert set(opt.state_dict()) == {"state", "param_groups"}


@IS_TOLD
def test_loading_leaves_the_open_window_alone():
    """`load_state_dict` inside a window changes the optimizer's state and leaves the window"""
    model = make_model()
    opt = wrapped(model)
    oracle.run(opt, model, BATCHES[:3])
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    oracle.run(opt, model, BATCHES[3:6])
    model.load_state_dict(saved[0])
    oracle.run(opt, model, BATCHES[6:7])
    opt.load_state_dict(saved[1])
    oracle.run(opt, model, BATCHES[7:9])
    assert opt.stepped
    batches = [*BATCHES[:3], *BATCHES[6:9]]
    assert_close(parameters_of(model), oracle.train_by_hand(adam, batches, WINDOW))


KINDS = {
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    **{kind: oracle.OPTIMIZERS[kind] for kind in ("adam", "sgd-momentum", "sgd", "adamw-fused")},
}


@IS_TOLD
@pytest.mark.parametrize("position", [0, 1, 4], ids=["fresh", "mid-window", "later-mid-window"])
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoint_leaves_no_trace(kind, position):
    """`torch.distributed.checkpoint` get and set, fresh or inside a window, leave no trace"""

    def get_and_set(model, opt):
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            state = get_optimizer_state_dict(model, opt, options=options)
            set_optimizer_state_dict(model, opt, state, options=options)

    reference, model = make_model(), make_model()
    bare = KINDS[kind](reference.parameters())
    opt = AccumulatingOptimizer(KINDS[kind](model.parameters()), window=WINDOW)
    before = position // WINDOW * WINDOW  # of the bare optimizer, which has no windows
    run_bare(bare, reference, BATCHES[:before])
    get_and_set(reference, bare)  # its own priming counts as a step in the state of Adam
    run_bare(bare, reference, BATCHES[before:])

    oracle.run(opt, model, BATCHES[:position])
    here, report = opt.stepped, opt.last
    parameters = [p.clone() for p in parameters_of(model)]
    get_and_set(model, opt)
    assert opt.stepped == here
    assert opt.last is report
    assert_equal(parameters_of(model), parameters)
    oracle.run(opt, model, BATCHES[position:])
    assert opt.last.micro_batches == WINDOW
    assert_close(parameters_of(model), parameters_of(reference))
    torch.testing.assert_close(opt.state_dict()["state"], bare.state_dict()["state"])


def by_states(model, opt):
    """Load the state of a run, as a file holds it, into new objects."""
    parts = [part for part in (model, opt, opt.scaler) if part is not None]
    states = [part.state_dict() for part in parts]
    *states, window = oracle.through_a_file([*states, opt.accumulation_state_dict()])
    twin_model, scaler = make_model(model[0].weight.dtype), torch.amp.GradScaler("cpu")
    options = {"window": opt.window, "max_norm": opt.max_norm, "on_nonfinite": opt.on_nonfinite}
    twin = wrapped(twin_model, scaler=opt.scaler and scaler, **options)
    for part, state in zip((twin_model, twin, scaler), states):
        part.load_state_dict(state)
    twin.load_accumulation_state_dict(window)
    return twin_model, twin


MOVES = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": partial(oracle.through_a_file, weights_only=False),
    "states": lambda pair: by_states(*pair),
}
POLICIES = [("skip_window", None), ("skip_window", 3), ("skip_micro_batch", 3), ("raise", None)]


@pytest.mark.parametrize("middle", [3, 4, 5])
@pytest.mark.parametrize(("on_nonfinite", "bad"), POLICIES)
@pytest.mark.parametrize(
    ("dtype", "scaled"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_run_that_is_moved_goes_on_bit_for_bit(move, dtype, scaled, on_nonfinite, bad, middle):
    """Copied, pickled or saved inside a window, also with an inf: the run goes on bit for bit"""
    batches, weights = oracle.make_batches(9, dtype), [1.0, 1.0, 3.0] * 3
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
    model = make_model(dtype)
    opt = wrapped(model, on_nonfinite=on_nonfinite, max_norm=0.05, scaler=scaler)
    lr_scheduler.LambdaLR(opt, lambda step: 1.0)  # patches opt.step, which must not travel

    def go(model, opt, start, stop):
        reports = []
        for i in range(start, stop):
            opt.backward(
                oracle.loss_of(model, batches[i]) * (oracle.INF if i == bad else 1.0), weights[i]
            )
            opt.step()
            reports += [str(opt.stats())] if opt.stepped else []  # NaN is equal to NaN in words
        return reports

    go(model, opt, 0, middle)
    twin_model, twin = move((model, opt))
    assert "step" not in vars(twin)
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    reports = go(model, opt, middle, 9)
    assert len(reports) == 2
    assert go(twin_model, twin, middle, 9) == reports
    assert_equal(parameters_of(twin_model), parameters_of(model))
    if dtype == torch.float64 and bad is None:
        expected = oracle.train_by_hand(adam, batches, WINDOW, weights=weights, max_norm=0.05)
        assert_close(parameters_of(model), expected)


def test_an_open_window_that_version_0_1_saved_is_loaded():
    """An open window that version 0.1.0 has saved is loaded"""
    model = make_model()
    opt = wrapped(model)
    oracle.run(opt, model, BATCHES[:1])
    saved = opt.accumulation_state_dict()
    del saved["through_backward"]
    twin = wrapped(model)
    twin.load_accumulation_state_dict(saved)
    for parameter in model.parameters():
        assert torch.equal(twin.main_grad(parameter), opt.main_grad(parameter))
    twin.discard()
    opt.discard()


@pytest.mark.parametrize("through", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize("middle", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", MOVES)
def test_a_decoder_that_is_moved_goes_on_bit_for_bit(move, dtype, middle, through):
    """`decode_loss` in a run that is copied, pickled or saved inside a window: bit for bit, too"""
    # It adds the head's gradient to the window's sum, or returns it, which rounds otherwise.

    def made():
        torch.manual_seed(0)
        parts = [torch.nn.Embedding(40, 16), torch.nn.GRUCell(16, 16), torch.nn.Linear(16, 40)]
        model = torch.nn.ModuleList(parts).to(dtype)
        return model, wrapped(model, max_norm=0.5)

    def by_states(model, opt):
        twin_model, twin = made()
        states = [model.state_dict(), opt.state_dict(), opt.accumulation_state_dict()]
        parameters, state, window = oracle.through_a_file(states)
        twin_model.load_state_dict(parameters)
        twin.load_state_dict(state)
        twin.load_accumulation_state_dict(window)
        return twin_model, twin

    def go(model, opt, start, stop):
        for i in range(start, stop):
            generator = torch.Generator().manual_seed(i)
            targets = torch.randint(40, (6, 3), generator=generator)
            state = torch.randn(3, 16, generator=generator).to(dtype)
            loss = accumext.decode_loss(*model, targets, state, feedback="greedy").loss
            opt.backward(loss) if through == "opt.backward" else loss.backward()
            opt.step()

    model, opt = made()
    go(model, opt, 0, middle)
    twin_model, twin = by_states(model, opt) if move == "states" else MOVES[move]((model, opt))
    go(model, opt, middle, 9)
    go(twin_model, twin, middle, 9)
    assert_equal(parameters_of(twin_model), parameters_of(model))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_copies_between_backward_and_step(move, scaled):
    """Copies between `backward` and `step`, with `window=1`, keep the gradient"""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    opt = wrapped(model, window=1, scaler=scaler)
    opt.backward(oracle.loss_of(model, BATCHES[0]))
    twin_model, twin = move((model, opt))
    for some, its in ((twin, twin_model), (opt, model)):
        some.step()
        oracle.run(some, its, BATCHES[1:3])
        assert_close(parameters_of(its), oracle.train_by_hand(adam, BATCHES[:3], 1))


def finish_elsewhere(model, opt, batches, queue):
    oracle.run(opt, model, batches)
    queue.put(([p.tolist() for p in model.parameters()], opt.stats()))


@pytest.mark.process
def test_a_spawned_process_goes_on():
    """`multiprocessing` with spawn: model and optimizer go to another process inside a window"""
    model = make_model()
    opt = wrapped(model)
    oracle.run(opt, model, BATCHES[:5])
    twin_model, twin = copy.deepcopy((model, opt))  # what is sent lies in shared memory afterwards
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (twin_model, twin, BATCHES[5:], queue)
    process = context.Process(target=finish_elsewhere, args=arguments)
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    oracle.run(opt, model, BATCHES[5:])
    assert queue.get() == ([p.tolist() for p in model.parameters()], opt.stats())


def test_a_cloned_class_shares_the_window():
    """A subclass made at run time around a copied `__dict__`, as in Lightning, shares a window"""

    class Strategy:
        def step(self, closure=None):
            return self._optimizer.step(closure)

    model = make_model()
    opt = wrapped(model)
    clone = Strategy()
    clone.__dict__ = {k: v for k, v in vars(opt).items() if k != "step"}
    clone.__class__ = type("StrategyOptimizer", (Strategy, type(opt)), {})
    clone._optimizer = opt
    assert isinstance(clone, torch.optim.Optimizer)
    clone.backward(oracle.loss_of(model, BATCHES[0]))
    opt.backward(oracle.loss_of(model, BATCHES[1]))
    clone.step()
    assert not opt.stepped
    assert not clone.stepped
    opt.backward(oracle.loss_of(model, BATCHES[2]))
    clone.step()
    assert opt.stepped
    assert clone.stepped
    assert clone.last is opt.last
    assert_close(parameters_of(model), oracle.train_by_hand(adam, BATCHES[:3], 3))


def test_a_saved_window_is_a_copy():
    """A saved window can be loaded again after the run has gone on"""
    model = make_model()
    opt = wrapped(model)
    oracle.run(opt, model, BATCHES[:1])
    saved = opt.accumulation_state_dict()
    before = copy.deepcopy(saved["main_grads"])
    oracle.run(opt, model, BATCHES[1:2])
    opt.load_accumulation_state_dict(saved)
    oracle.run(opt, model, BATCHES[1:3])
    assert_equal(list(saved["main_grads"].values()), list(before.values()))
    assert_close(parameters_of(model), oracle.train_by_hand(adam, BATCHES[:3], 3))
