"""Two wrappers over one graph, against `autograd.grad` of each loss for each optimizer.

A backward pass of one counts there alone, also where it reaches the other's parameters and nobody
calls `zero_grad`; `accumulate` of the other takes what it made there, in its own units.
"""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
import torch
from support import optimizer_oracle as oracle
from support.budget import combinations
from support.optimizer_oracle import INF, OP, ByHand, assert_close, sgd
from torch import nn
from torch.distributed.fsdp import fully_shard

import accumext
from accumext import AccumulatingOptimizer

COUNT = 8
ONES = [1.0] * COUNT
WEIGHTS = [2.0, 3.0, 1.0, 4.0, torch.tensor(4.0), 1.0, torch.tensor(0.0), 2.0]
EACH_WEIGHT = {"ones": ONES, "weights": WEIGHTS}
WINDOWS = [(1, 1), (4, 4), (1, 4), (4, 1)]

NO_GRADIENT = (
    f"{OP}.step: .grad must hold a gradient of this optimizer's own backward pass, got only that "
    "of another AccumulatingOptimizer's backward. Call accumulate() after that backward if it "
    "counts here, too, as one loss of two optimizers does, or zero_grad() if not"
)


class Sides:
    """Two networks, and a loss of each; both losses reach the second network."""

    def __init__(self, dtype=torch.float64):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
            second = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
            self.batches = torch.randn(COUNT, 4, 3, dtype=torch.float64).to(dtype)
        self.nets = first, second

    def through_both(self, number):
        first, second = self.nets
        return second(first(self.batches[number])).square().mean()

    def of_the_second(self, number):
        first, second = self.nets
        made = first(self.batches[number]).detach()
        return (second(self.batches[number]) - second(made)).square().mean()

    def held(self):
        """The parameters of each optimizer."""
        return [list(net.parameters()) for net in self.nets]

    def parameters(self):
        return [p.detach() for net in self.nets for p in net.parameters()]


class Overlapping(Sides):
    """The first optimizer holds both networks, as that of an encoder and a head, or of InfoGAN."""

    def held(self):
        first, second = super().held()
        return [first + second, second]


def wrappers(sides, windows, scaled="none", make=sgd, **options):
    """A wrapper for each network; which of them has a scaler, and whether it is the same one."""
    one, another = (oracle.growing_scaler(growth_interval=n) for n in (1, 2))
    scalers = {
        "none": (None, None),
        "each": (one, another),
        "shared": (one, one),
        "first": (one, None),
        "second": (None, one),
    }[scaled]
    return [
        AccumulatingOptimizer(make(held), window=window, scaler=scaler, **options)
        for held, window, scaler in zip(sides.held(), windows, scalers)
    ]


def train_by_hand(order, losses, windows, weights, make=sgd, kind=Sides):
    """What each network becomes that steps on its own loss: a word is what is done, and for
    which."""
    sides = kind()
    hands = [ByHand(held, make) for held in sides.held()]
    for number, weight in enumerate(weights):
        for what, i in order:
            if what == "backward":
                hands[i].add(getattr(sides, losses[i])(number), weight)
            elif (number + 1) % windows[i] == 0:
                hands[i].step()
    return sides.parameters()


# A loss for each optimizer: a GAN, an actor and its critic


def in_parts(opt, loss, weight):
    with opt.micro_batch():
        for share in (0.5, 0.25, 0.25):
            opt.backward(share * loss, weight, retain_graph=True)


B1, B2, S1, S2 = ("backward", 0), ("backward", 1), ("step", 0), ("step", 1)
ORDERS = {
    "first-first": (B1, S1, B2, S2),
    "second-first": (B2, S2, B1, S1),
    "steps-behind": (B1, B2, S1, S2),
    "steps-crossed": (B2, B1, S2, S1),
}
PASSES = {"one-pass": AccumulatingOptimizer.backward, "parts": in_parts}
OPTIONS = (
    PASSES,
    WINDOWS,
    EACH_WEIGHT,
    ["none", "each", "shared", "first", "second"],
    ["skip_window", "skip_micro_batch"],
)
NAMES = ("order", "passes", "windows", "weights", "scaled", "policy")


@pytest.mark.parametrize(NAMES, combinations(ORDERS, *OPTIONS), ids=str)
def test_a_backward_pass_counts_in_its_own_optimizer_alone(
    order, passes, windows, weights, scaled, policy
):
    """Nothing is frozen, and nobody calls `zero_grad`."""
    sides, losses = Sides(), ("through_both", "of_the_second")
    order, backward, weights = ORDERS[order], PASSES[passes], EACH_WEIGHT[weights]
    opts = wrappers(sides, windows, scaled, on_nonfinite=policy)
    for number, weight in enumerate(weights):
        for what, i in order:
            if what == "backward":
                backward(opts[i], getattr(sides, losses[i])(number), weight)
            else:
                opts[i].step()
    assert_close(sides.parameters(), train_by_hand(order, losses, windows, weights))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("late", [False, True], ids=["before-the-other", "behind-it"])
def test_a_backward_pass_of_the_users_own_is_kept_apart_from_the_others(window, late):
    """Whether it comes before or after, what lies in `.grad` is of that pass alone."""
    sides, losses = Sides(), ("through_both", "of_the_second")
    opts = wrappers(sides, (window, window))
    for number in range(COUNT):
        if late:
            opts[0].backward(sides.through_both(number))
        sides.of_the_second(number).backward()
        seen = [p.grad.clone() for p in sides.nets[1].parameters()]
        if not late:
            opts[0].zero_grad()
            opts[0].backward(sides.through_both(number))
        oracle.assert_equal([p.grad for p in sides.nets[1].parameters()], seen)
        opts[0].step()
        opts[1].step()
        opts[1].zero_grad()
    order = ORDERS["steps-behind"]
    assert_close(sides.parameters(), train_by_hand(order, losses, (window, window), ONES))


def test_a_pass_that_fails_leaves_the_gradients_of_the_other():
    sides = Sides()
    opts = wrappers(sides, (1, 1))
    opts[1].backward(sides.of_the_second(0))
    held = [p.grad for p in sides.nets[1].parameters()]
    values = [grad.clone() for grad in held]

    def fail(grad):
        raise ArithmeticError

    made = sides.nets[0](sides.batches[0])
    made.register_hook(fail)  # behind the second network
    with pytest.raises(ArithmeticError):
        opts[0].backward(sides.nets[1](made).mean())
    assert all(p.grad is grad for p, grad in zip(sides.nets[1].parameters(), held))
    oracle.assert_equal(held, values)
    opts[1].step()
    assert opts[1].stepped


def test_frozen_parameters_and_wrappers_that_are_gone():
    """A frozen network gets no gradient; one without a wrapper gets it in `.grad`, as in torch."""
    sides = Sides()
    opts = wrappers(sides, (1, 1))
    sides.nets[1].requires_grad_(False)
    opts[0].backward(sides.through_both(0))
    opts[0].step()
    sides.nets[1].requires_grad_(True)
    assert all(p.grad is None for p in sides.nets[1].parameters())
    opts[1].step()  # nothing to ask about
    del opts[1]
    gc.collect()
    opts[0].backward(sides.through_both(0))
    assert all(p.grad is not None for p in sides.nets[1].parameters())
    opts[0].step()


# Parameters that both hold

TWO_HOLD = f"{OP}.%s: .grad must hold a gradient of this {OP}'s own backward pass, got %s"
EACH = ". Call backward of each optimizer that holds the parameters, with retain_graph=True"


@pytest.mark.parametrize(
    ("order", "clears", *NAMES[2:]), combinations(ORDERS, [False, True], *OPTIONS[1:]), ids=str
)
def test_parameters_that_both_hold_step_on_the_losses_of_each(
    order, clears, windows, weights, scaled, policy
):
    """Nothing of a backward pass enters the window of the other, nor of a step that has used it."""
    sides, losses = Overlapping(), ("through_both", "of_the_second")
    slow = partial(sgd, lr=0.02)  # two optimizers of a parameter diverge sooner
    order, weights = ORDERS[order], EACH_WEIGHT[weights]
    opts = wrappers(sides, windows, scaled, slow, on_nonfinite=policy)
    for number, weight in enumerate(weights):
        for what, i in order:
            if what == "backward":
                if clears:
                    opts[i].zero_grad()
                opts[i].backward(getattr(sides, losses[i])(number), weight)
            else:
                opts[i].step()
    by_hand = train_by_hand(order, losses, windows, weights, slow, kind=Overlapping)
    assert_close(sides.parameters(), by_hand)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("gone", [False, True])
def test_a_wrapper_begins_without_what_another_has_used(gone, window):
    """A second phase of training: `.grad` holds what the last step of the first was given."""
    parameter, first = oracle.wrapped_zeros()
    first.backward(parameter * 2.0)
    first.step()
    assert parameter.grad.item() == 2.0
    if gone:
        del first
    second = AccumulatingOptimizer(sgd([parameter]), window=window)
    for _ in range(window):
        second.backward(parameter * 3.0)
        second.step()
    assert parameter.item() == -5.0


def test_a_gradient_that_an_ended_wrapper_has_used_is_a_new_one_of_another_parameter():
    parameter, first = oracle.wrapped_zeros()
    parameter.grad = grad = torch.ones(())
    first.backward(parameter * 2.0)  # added in place
    first.step()
    other, second = oracle.wrapped_zeros()
    del first
    other.grad = grad
    second.step()
    assert other.item() == -3.0


def test_a_pass_of_ones_own_beside_that_of_another_holder():
    """Nobody can tell for whom it is."""
    sides = Overlapping()
    opts = wrappers(sides, (1, 1))
    opts[1].backward(sides.of_the_second(0))
    sides.through_both(0).backward()
    held = [p.grad.clone() for p in sides.held()[0]]
    text = TWO_HOLD % ("step", "also one of a backward pass of your own") + EACH
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        opts[0].step()
    oracle.assert_equal([p.grad for p in sides.held()[0]], held)
    opts[1].step()
    assert opts[1].stepped


@pytest.mark.parametrize("stepped", [False, True])
def test_a_step_on_nothing_but_what_another_holder_made(stepped):
    sides = Overlapping()
    opts = wrappers(sides, (1, 1))
    opts[0].backward(sides.through_both(0))
    if stepped:
        opts[0].step()
    text = TWO_HOLD % ("step", "only that of another one that holds the parameters, too") + EACH
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        opts[1].step()
    opts[0].discard()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("windows", [(1, 1), (4, 4), (4, 1)])
def test_what_another_holder_took_cannot_be_accumulated(windows, first):
    """The second network's gradients are in sums of that one, as those of a pass of one's own are
    that it has taken. What the error says to type is right."""
    sides = Overlapping()
    opts = wrappers(sides, windows)
    opts[first].backward(sides.through_both(0))
    text = f"{OP}.accumulate: .grad must hold new gradients, got"
    with pytest.raises(RuntimeError, match=f"{oracle.says(text)}.*{EACH}"):
        opts[1 - first].accumulate()
    for opt in opts:
        opt.discard()
    for number, weight in enumerate(WEIGHTS):
        loss = sides.through_both(number)
        opts[first].backward(loss, weight, retain_graph=True)
        opts[1 - first].backward(loss, weight)
        for opt in opts:
            opt.step()
    losses = ("through_both",) * 2
    by_hand = train_by_hand([B1, B2, S1, S2], losses, windows, WEIGHTS, kind=Overlapping)
    assert_close(sides.parameters(), by_hand)


# One loss of two optimizers: Muon and AdamW

TAKEN = {
    "before-the-steps": ("take", S1, S2),
    "other-step-first": ("take", S2, S1),
    "behind-its-step": (S1, "take", S2),
}


@pytest.mark.parametrize(NAMES, combinations(TAKEN, *OPTIONS), ids=str)
def test_accumulate_takes_what_the_others_pass_made(
    order, passes, windows, weights, scaled, policy
):
    """Without the other's loss scale, and with the weight that the loss had."""
    sides = Sides()
    order, backward, weights = TAKEN[order], PASSES[passes], EACH_WEIGHT[weights]
    opts = wrappers(sides, windows, scaled, on_nonfinite=policy)
    for number, weight in enumerate(weights):
        backward(opts[0], sides.through_both(number), weight)
        for action in order:
            opts[1].accumulate() if action == "take" else opts[action[1]].step()
    losses, steps = ("through_both",) * 2, [action for action in order if action != "take"]
    assert_close(sides.parameters(), train_by_hand([B1, B2, *steps], losses, windows, weights))


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0), 0.0, torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("other", [2.0, torch.tensor(2.0)], ids=str)
def test_a_weight_of_its_own_and_the_report(other, weight):
    sides = Sides()
    opts = wrappers(sides, (2, 2), "first", reduction="sum")
    opts[0].backward(sides.through_both(0), 8.0)
    opts[1].accumulate()
    opts[0].backward(sides.through_both(1), other)
    opts[1].accumulate(weight)
    parameters = list(sides.nets[1].parameters())
    grads = [torch.autograd.grad(sides.through_both(i), parameters) for i in (0, 1)]
    for p, one, two in zip(parameters, *grads):
        expected = 8.0 * one + float(weight) * two
        torch.testing.assert_close(opts[1].main_grad(p), expected, rtol=1e-12, atol=1e-12)
    for opt in opts:
        opt.step()
    assert float(opts[1].last.weight) == 8.0 + float(weight)
    assert opts[1].last.loss_scale == 1024.0


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("in_backward", [False, True])
def test_half_precision_and_masters(window, in_backward):
    """The sums are float32, and what differs is where a gradient of bfloat16 is scaled."""
    sides, expected = Sides(torch.bfloat16), Sides(torch.bfloat16)
    scaler, opts, hands = oracle.growing_scaler(), [], []
    for net, plain in zip(sides.nets, expected.nets):
        masters = accumext.masters(net.parameters())
        options = {"window": window, "scaler": scaler, "accumulate_in_backward": in_backward}
        opts.append(AccumulatingOptimizer(sgd(masters, lr=0.5), masters=masters, **options))
        hands.append(ByHand(plain.parameters(), lambda ps: sgd(ps, lr=0.5), wide=torch.float32))
    for number in range(COUNT):
        opts[0].backward(sides.through_both(number))
        opts[1].accumulate()
        for hand, opt in zip(hands, opts):
            hand.add(expected.through_both(number))
            opt.step()
        if (number + 1) % window == 0:
            for hand in hands:
                hand.step()
    assert_close(sides.parameters(), expected.parameters(), 2.0**-7)


def test_an_inf_skips_both_and_one_scaler_is_updated_by_both():
    sides = Sides()
    opts = wrappers(sides, (1, 1), "shared")
    before = [p.clone() for p in sides.parameters()]
    opts[0].backward(sides.through_both(0) * INF)
    opts[1].accumulate()
    for opt in opts:
        opt.step()
    assert [opt.last.skipped for opt in opts] == [1.0, 1.0]
    assert opts[0].scaler.get_scale() == 1024.0 / 4.0
    oracle.assert_equal(sides.parameters(), before)


# What it cannot know


@pytest.mark.parametrize("loop", ["step", "closure"])
@pytest.mark.parametrize("window", [1, 4])
def test_a_step_on_the_others_pass_alone_asks_what_is_meant(window, loop):
    sides = Sides()
    opts = wrappers(sides, (window, window))

    def step():
        if loop == "step":
            opts[0].backward(sides.through_both(0))
            opts[1].step()
        else:
            opts[1].step(lambda: opts[0].backward(sides.through_both(0)))

    with pytest.raises(RuntimeError) as error:
        step()
    assert str(error.value) == NO_GRADIENT
    grads = torch.autograd.grad(sides.through_both(0), list(sides.nets[1].parameters()))
    opts[1].accumulate()  # nothing was lost
    oracle.assert_equal([opts[1].main_grad(p) for p in sides.nets[1].parameters()], grads)
    for opt in opts:
        opt.discard()


@pytest.mark.parametrize("clear", ["zero_grad", "discard", "flush"])
@pytest.mark.parametrize("window", [1, 4])
def test_what_the_other_made_can_be_dropped(window, clear):
    sides = Sides()
    opts = wrappers(sides, (window, window))
    opts[0].backward(sides.through_both(0))
    before = [p.clone() for p in sides.nets[1].parameters()]
    getattr(opts[1], clear)()
    opts[1].step()
    oracle.assert_equal(list(sides.nets[1].parameters()), before)
    opts[0].discard()


def test_passes_of_several_micro_batches_are_not_taken_as_one():
    sides = Sides()
    opts = wrappers(sides, (4, 4))
    for number in range(2):
        opts[0].backward(sides.through_both(number), weight=1.0 + number)
    with pytest.raises(RuntimeError) as error:
        opts[1].accumulate()
    assert str(error.value) == (
        f"{OP}.accumulate: .grad must hold new gradients, got those of another "
        "AccumulatingOptimizer's backward calls, more than one. Call accumulate() after each of "
        "them, or zero_grad() before one that counts"
    )
    opts[1].zero_grad()
    opts[0].backward(sides.through_both(2))
    opts[1].accumulate()
    for opt in opts:
        opt.discard()


@pytest.mark.usefixtures("alone")
def test_sharded_parameters():
    """Each loss counts in its optimizer; what one pass made for both has weights of other ranks."""
    sides, losses, order = Sides(), ("through_both", "of_the_second"), ORDERS["steps-behind"]
    for net in sides.nets:
        fully_shard(net, reshard_after_forward=True)  # else it may compute with what was stepped on
    opts = wrappers(sides, (4, 1))
    for number, weight in enumerate(WEIGHTS):
        for i in (0, 1):
            opts[i].backward(getattr(sides, losses[i])(number), weight)
        for opt in opts:
            opt.step()
    held = [p for opt in opts for p in opt.param_groups[0]["params"]]
    whole = [p.detach().full_tensor() for p in held]
    assert_close(whole, train_by_hand(order, losses, (4, 1), WEIGHTS))
    opts[0].backward(sides.through_both(0))
    with pytest.raises(RuntimeError) as error:
        opts[1].accumulate()
    assert str(error.value) == (
        f"{OP}.accumulate: .grad must hold new gradients, got those of another "
        "AccumulatingOptimizer's backward. Run loss.backward() for both, and accumulate(weight) of "
        "each"
    )
    opts[0].discard()


def test_a_micro_batch_that_fails_takes_its_parts_back():
    sides = Sides()
    opts = wrappers(sides, (4, 4))

    def fails():
        with opts[0].micro_batch():
            opts[0].backward(sides.through_both(0))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    opts[0].backward(sides.through_both(1))
    opts[1].accumulate()
    grads = torch.autograd.grad(sides.through_both(1), list(sides.nets[1].parameters()))
    oracle.assert_equal([opts[1].main_grad(p) for p in sides.nets[1].parameters()], grads)
    for opt in opts:
        opt.discard()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_come_without(copied):
    sides = Sides()
    opts = wrappers(sides, (1, 1))
    opts[0].backward(sides.through_both(0))
    copied(opts[1]).step()
    with pytest.raises(RuntimeError, match="accumulate"):
        opts[1].step()
    opts[0].discard()


# One scaler


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("accumulates", [False, True])
def test_one_scaled_pass_for_two_wrappers_with_that_scaler(accumulates, windows):
    """The step of the first updates the scale under the gradients of the second."""
    sides = Sides()
    opts = wrappers(sides, windows, "shared")
    for number in range(COUNT):
        opts[0].scaler.scale(sides.through_both(number)).backward()
        if accumulates:
            opts[0].accumulate()
            opts[1].accumulate()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    order, losses = (B1, B2, S1, S2), ("through_both",) * 2
    assert_close(sides.parameters(), train_by_hand(order, losses, windows, ONES))


def test_one_scaler_that_has_not_scaled_yet_and_a_holder_of_what_another_used():
    shared, own = oracle.scalar(2.0), oracle.scalar(3.0)
    scaler = torch.amp.GradScaler("cpu")
    first = AccumulatingOptimizer(sgd([shared], lr=1.0))
    holder = AccumulatingOptimizer(sgd([shared], lr=1.0), scaler=scaler)
    second = AccumulatingOptimizer(sgd([own], lr=1.0), scaler=scaler)
    first.backward(shared * own)
    second.accumulate()
    for opt in (first, second):
        opt.step()
    assert (shared.item(), own.item()) == (-1.0, 1.0)
    holder.backward(shared * 2.0)
    holder.step()
    assert shared.item() == -3.0


@pytest.mark.parametrize("window", [1, 2])
def test_a_pass_of_its_own_joins_one_from_before_the_update(window):
    parameters = [oracle.scalar() for _ in range(2)]
    scaler = oracle.growing_scaler(growth_interval=1)
    opts = [AccumulatingOptimizer(sgd([p]), window=1, scaler=scaler) for p in parameters]
    opts[1].window = window
    scaler.scale(parameters[0] + parameters[1]).backward()
    opts[0].step()
    opts[1].backward(parameters[1] * 2.0)
    assert opts[1].main_grad(parameters[1]).item() == 3.0
    opts[1].discard()


# Threads


def test_a_pass_in_another_thread_keeps_its_gradients():
    """Wrappers that were made here, and are used in a thread each: one pass while another runs."""
    (one, first), (two, second) = (oracle.wrapped_zeros() for _ in range(2))
    begun, done = Event(), Event()

    def wait(grad):
        begun.set()
        assert done.wait(10)

    def passes():
        assert begun.wait(10)
        (two * 3.0).backward()
        done.set()

    loss = one * 2.0
    loss.register_hook(wait)
    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(first.backward, loss), threads.submit(passes)]:
            call.result()
    second.step()
    assert two.item() == -3.0
    first.discard()


@pytest.mark.parametrize("window", [1, 4])
def test_wrappers_that_another_thread_trains(window):
    """One after the other, from the start or from the middle on."""
    sides, losses, order = Sides(), ("through_both", "of_the_second"), ORDERS["steps-behind"]
    opts = wrappers(sides, (window, window))

    def train(numbers):
        for number in numbers:
            for i in (0, 1):
                opts[i].backward(getattr(sides, losses[i])(number))
            for opt in opts:
                opt.step()

    for numbers in (range(4), range(4, COUNT)):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(train, numbers).result()
    assert_close(sides.parameters(), train_by_hand(order, losses, (window, window), ONES))


def in_a_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@pytest.mark.parametrize("window", [1, 2])
def test_a_wrapper_in_use_in_another_thread_is_not_told(window):
    """It has a step behind it, or an open window: its parameters get what autograd makes."""
    (p, opt), (q, other) = oracle.wrapped_zeros(), oracle.wrapped_zeros(window)

    def use():
        other.backward(q * 1)
        other.step()

    in_a_thread(use)
    q.grad = None
    opt.backward(p + q)
    assert q.grad is not None


def test_wrappers_that_come_from_another_thread_are_told():
    """One that was made there, and all of those that were used there together."""
    p, opt = oracle.wrapped_zeros()
    q, made_there = in_a_thread(oracle.wrapped_zeros)
    opt.backward(p + q)
    opt.step()
    assert q.grad is None
    made_there.zero_grad()

    def use():
        for loss, wrapper in ((p, opt), (q, made_there)):
            wrapper.backward(loss * 1)
            wrapper.step()

    in_a_thread(use)
    q.grad = None
    opt.backward(p + q)
    assert q.grad is None
