"""What graphs keep, in bytes: by hooks of the test itself, which see each storage once."""

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from accumext.auditing._events import Graph
from accumext.auditing._graph import Losses, SavedTensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(50, 16), nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(tokens.shape[1], 16)
        losses = []
        for token in tokens:
            state = self.cell(self.embedding(token), state)
            losses.append(cross_entropy(self.head(state), token))
        return torch.stack(losses).mean()


def of_tokens(net: Net) -> Tensor:
    return net(torch.arange(24).view(6, 4))


def tied(net: Net) -> Tensor:
    """The head's weight is used in another shape, which is no memory of its own."""
    return (net.embedding(torch.arange(5)) @ net.head.weight.view(50, 16).t()).tanh().sum()


def views(net: Net) -> Tensor:
    """One storage is saved in three shapes."""
    y = net.embedding(torch.arange(10)).tanh()
    return (y.t() ** 2).sum() + (y.view(-1) ** 3).sum() + (y[2:4] ** 2).sum()


def in_two_dtypes(net: Net) -> Tensor:
    y = net.embedding(torch.arange(10))
    return (y.double() ** 2).sum() + (y.bfloat16() ** 2).sum().double()


def sparse(net: Net) -> Tensor:
    return (embedding(torch.arange(7), net.embedding.weight, sparse=True) ** 2).sum()


GRAPHS = [of_tokens, tied, views, in_two_dtypes, sparse]


def kept_by_definition(net: nn.Module, make: Callable[[], Tensor]) -> int:
    """Bytes of the storages of what is saved, but for parameters, each once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that addresses are unique
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = make()
    del loss
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def counting(net: nn.Module | None = None) -> SavedTensors:
    saved = SavedTensors()
    saved.know([] if net is None else list(net.parameters()))
    return saved


def held(saved: SavedTensors, classes: int = 0) -> tuple[int, int]:
    """Bytes of all tensors, and of those with an element for every class."""
    graph = graph_of(saved, classes)
    return graph.bytes, graph.class_bytes


def graph_of(saved: SavedTensors, classes: int = 0) -> Graph:
    """Of a pass that begins now, with a loss of so many classes."""
    return saved.graph(SimpleNamespace(classes=classes, number=1, separate=False))


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("run", [True, False], ids=["backward", "dropped"])
def test_bytes_while_a_graph_is_there(make, run):
    net = Net()
    saved = counting(net)
    gc.disable()  # graphs go by themselves
    try:
        for _ in range(3):
            with saved.watch():
                loss = make(net)
            assert held(saved)[0] == kept_by_definition(net, lambda: make(net)) > 0
            if run:
                loss.backward()
            else:
                del loss
            assert held(saved)[0] == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("saves", [torch.tanh, lambda x: x.log_softmax(-1)])
def test_a_graph_that_saves_its_outputs_is_freed(saves):
    """Without a backward pass, as of an evaluation: hooks must not keep what they have seen."""
    x = torch.randn(10, 5, requires_grad=True)
    with counting().watch():
        y = saves(x * 2)
    freed = weakref.ref(y)
    del y
    gc.collect()
    assert freed() is None


def test_bytes_per_class():
    saved = counting()
    with saved.watch():
        x = torch.randn(6, 30, requires_grad=True)
        first = (x.t() ** 2).sum()
        assert held(saved, classes=6) == (720, 720)
        second, third = (x**3).sum(), (x[:, :4].contiguous() ** 2).sum()
    assert held(saved, classes=4) == (720 + 96, 96)
    for loss in (first, second, third):
        loss.backward()
    assert [held(saved, classes) for classes in (30, 6, 4)] == [(0, 0)] * 3


def test_one_memory_with_storages_of_two_sizes():
    saved, memory, factor = counting(), bytearray(4000), torch.ones((), requires_grad=True)
    with saved.watch():
        whole, part = (torch.frombuffer(memory, dtype=torch.float32, count=n) for n in (1000, 10))
        first, second = (whole * factor).sum(), (part * factor).sum()
    assert held(saved)[0] == 4000
    first.backward()
    assert 0 < held(saved)[0] <= 4000
    second.backward()
    assert held(saved)[0] == 0


def test_freed_memory_is_no_parameter():
    """What lies where a parameter was, before it got other memory."""
    net, memory = nn.Linear(64, 64), bytearray(64 * 64 * 4)
    net.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
    saved = counting(net)
    net.weight.data = torch.zeros(1, 1)
    saved.know(list(net.parameters()))  # as before each pass
    with saved.watch():
        loss = (
            torch.ones((), requires_grad=True) * torch.frombuffer(memory, dtype=torch.int8)
        ).sum()
    assert held(saved)[0] == len(memory)
    loss.backward()


def test_nothing_is_counted_when_nothing_is_watched():
    saved, net = counting(), Net()
    with saved.watch():
        saved.watching = False
        loss = of_tokens(net)
    assert held(saved) == (0, 0)
    loss.backward()
    saved.watching = True
    loss = of_tokens(net)
    assert held(saved) == (0, 0)


def test_writes_to_saved_tensors_are_still_errors():
    x = torch.ones(3, requires_grad=True)
    with counting().watch():
        y = (x * 2).exp()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; exp"):
        y.sum().backward()


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_calls_of_a_layer(steps, cast):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    head = nn.Linear(6, 9)
    saved = counting(nn.ModuleList([head, net]))
    for _ in range(2):
        with saved.watch(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            state = torch.randn(3, 6, requires_grad=True)
            for _ in range(steps):
                state = net(state)
            loss = head(state).float().sum()
        graph = graph_of(saved)
        assert graph.calls == steps
        if steps > 1 and not cast:
            assert graph.bytes_per_call == 3 * 6 * 4  # the state of a step
        loss.backward()
        assert graph_of(saved).calls == 0


def test_a_graph_has_the_losses_of_its_pass():
    saved, net = counting(), Net()
    with saved.watch():
        loss = of_tokens(net) + of_tokens(net)
        graph = saved.graph(Losses(loss.grad_fn))
    assert graph.bytes > graph.class_bytes > 0
    losses = Losses(loss.grad_fn)
    assert (graph.losses, graph.separate) == (losses.number, losses.separate) == (12, False)
    assert losses.classes == 50


# --- graphs that hold those of the passes before --------------------------------------------------


def of_states(net: nn.RNNCell, is_handed_on: Callable[[int], bool]) -> Iterator[Tensor]:
    """Losses of states, each of which is handed on or detached."""
    state = torch.zeros(1, 3)
    for i in range(5):
        state = net(torch.full((1, 2), float(i)), state if is_handed_on(i) else state.detach())
        yield (state**2).sum()


def of_one_graph(net: nn.RNNCell) -> Iterator[Tensor]:
    """As a prompt that is encoded once."""
    shared = net(torch.randn(2, 2)).tanh()
    yield from ((shared * torch.randn(2, 3)).sum() for _ in range(4))


def all_forward_passes_first(net: nn.RNNCell) -> Iterator[Tensor]:
    """Graphs that were not yet used are those of one pass."""
    yield from [(net(torch.randn(2, 2)) ** 2).sum() for _ in range(4)]


HELD: dict[str, tuple[Callable[[nn.RNNCell], Iterator[Tensor]], list[int]]] = {
    # The state itself, which the pass before has saved, too.
    "detached": (lambda net: of_states(net, lambda i: False), [0, 1, 1, 1, 1]),
    "handed on": (lambda net: of_states(net, lambda i: True), [0, 1, 2, 3, 4]),
    "handed on, but every third": (lambda net: of_states(net, lambda i: i % 3), [0, 1, 2, 1, 2]),
    "of one graph": (of_one_graph, [0, 1, 1, 1]),
    "all forward passes first": (all_forward_passes_first, [0, 1, 1, 1]),
}


@pytest.mark.parametrize(("losses", "right"), HELD.values(), ids=HELD)
def test_passes_whose_graphs_are_still_there(losses, right):
    net = nn.RNNCell(2, 3)
    saved, found = counting(net), []
    with saved.watch():
        for loss in losses(net):
            found.append(graph_of(saved).held)
            loss.backward(retain_graph=True)
    assert found == right
    del loss
    assert graph_of(saved).held == 0
