"""Embedding, cell and head whose call does more than their formula: they are called, and all that
comes out is the plain loop's, which calls them, too."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, make_decoder
from support.decoding import (
    BATCH,
    EXACT,
    GROUPS,
    VOCABULARY,
    check,
    options,
    parts_of,
    raises,
    run,
    targets_with_holes,
)
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import accumext
from accumext.decoder._module_calls import formula_weights
from accumext.decoder._rnn_weights import rnn_weights_of
from accumext.tensors import torch_private as private

Part = Callable[[nn.Module], Any]


def with_class(**members: Any) -> Part:
    """The module's class becomes a subclass with these members."""

    def change(module: nn.Module) -> None:
        module.__class__ = type(f"Own{type(module).__name__}", (type(module),), members)

    return change


def replace_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args: 3 * forward(*args)


def thrice_called(self: nn.Module, *args: Any) -> Tensor:
    return 3 * nn.Module.__call__(self, *args)


def thrice_forward(self: Any, *args: Any) -> Tensor:
    return 3 * type(self).__mro__[1].forward(self, *args)


def prune_half(module: nn.Module) -> None:
    name = next(iter(dict(module.named_parameters())))
    prune.l1_unstructured(module, name, amount=0.5)


class Shifted(Tensor):
    """A weight that counts more than its numbers, as a quantised one does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func in (nn.functional.linear, nn.functional.embedding, torch.gru_cell):
            return 2 * found.as_subclass(Tensor)
        return found


def shift_weight(module: nn.Module) -> None:
    name = next(iter(dict(module.named_parameters())))
    setattr(module, name, nn.Parameter(getattr(module, name).detach().as_subclass(Shifted)))


def of_module(name: str, hook: Callable[..., Any]) -> Part:
    return lambda module: getattr(module, name)(hook)


def of_all_modules(name: str, hook: Callable[..., Any]) -> Part:
    return lambda module: getattr(of_all, name)(hook)


def scale_gradients(gradients: Any) -> Any:
    return tuple(g if g is None else 0.1 * g for g in gradients)


def scale_inputs(_: Any, of_inputs: Any, __: Any) -> Any:
    return scale_gradients(of_inputs)


WAYS: dict[str, tuple[Part, str]] = {  # what is done to a module, and the words for it
    "forward replaced": (replace_forward, "with a forward that was replaced"),
    "own forward": (with_class(forward=thrice_forward), "with a forward of its own"),
    "own __call__": (with_class(__call__=thrice_called), "with a __call__ of its own"),
    "forward hook": (
        of_module("register_forward_hook", lambda m, a, y: 3 * y),
        "with forward hooks",
    ),
    "pre-hook": (
        of_module("register_forward_pre_hook", lambda m, a: (a[0] * 2 % 13, *a[1:])),
        "with forward hooks",
    ),
    "backward hook": (
        of_module("register_full_backward_hook", scale_inputs),
        "with backward hooks",
    ),
    "backward pre-hook": (
        of_module("register_full_backward_pre_hook", lambda m, o: scale_gradients(o)),
        "with backward hooks",
    ),
    "hook of all": (
        of_all_modules("register_module_forward_hook", lambda m, a, y: 3 * y),
        "hooks of all modules",
    ),
    "pre-hook of all": (
        of_all_modules("register_module_forward_pre_hook", lambda m, a: (a[0] * 2 % 13, *a[1:])),
        "hooks of all modules",
    ),
    "backward hook of all": (
        of_all_modules("register_module_full_backward_hook", scale_inputs),
        "hooks of all modules",
    ),
    "pruned": (prune_half, "with forward hooks"),
    "weights of a class": (shift_weight, "with weights of class"),
}  # fmt: skip
CALLS = [
    ["teacher", "label_smoothing", "class_weight", "z_loss"],
    ["greedy", "lengths", "token_weight", "none"],
    ["sample", "eos", "entropy_weight", "a row"],
    ["scheduled", "resets", "k1, k2", "sum"],
    ["mask", "embedding_dropout", "output_dropout", "ignore_index"],
    ["own samples", "k2 = 3", "num_items"],
    *(["greedy", kind, "few rows", "batch_first"] for kind in GROUPS["soft"]),
]  # fmt: skip


@contextmanager
def changed(way: Part, module: nn.Module) -> Iterator[None]:
    handle = way(module)
    try:
        yield
    finally:
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()


def leaves_of(decoder: Decoder) -> list[Tensor]:
    modules = (decoder.embedding, decoder.cell, decoder.head)
    found = {id(p): p for module in modules for p in module.parameters()}
    return [*found.values(), *parts_of(decoder.state)]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # tokens have no gradient
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["embedding", "cell", "head"])
def test_a_module_that_does_more_is_called(part, way):
    decoder = make_decoder("gru_cell")
    module, (change, words) = getattr(decoder, part), WAYS[way]
    name = "weight_ih" if part == "cell" else "weight"
    assert formula_weights(module, name)[0] is getattr(module, name)
    with changed(change, module):
        decoder.leaves = leaves_of(decoder)
        assert words in str(formula_weights(module, name))
        for names in CALLS[:2]:
            check(decoder, targets_with_holes(), options(names), twice=True)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
@pytest.mark.parametrize("parts", [("embedding",), ("head",), ("embedding", "head")], ids=" ".join)
@pytest.mark.parametrize("tied", [False, True])
def test_every_option_where_embedding_or_head_is_called(tied, parts, kind, call):
    decoder = make_decoder(kind, tied=tied, padding_idx=4)
    targets = targets_with_holes(hole=2 if "ignore_index" in call else -100)
    for part in parts:
        getattr(decoder, part).register_forward_hook(lambda m, a, y: y / 2)
    arguments = options(call)
    check(decoder, None if "steps" in arguments else targets, arguments, upstream=-0.3)


def test_parametrized_weights_are_read():
    """By the kernels: weight_norm keeps no buffer."""
    decoder = make_decoder("lstm")
    nn.utils.parametrizations.weight_norm(decoder.cell, "weight_hh_l0")
    nn.utils.parametrizations.weight_norm(decoder.head)
    assert rnn_weights_of(decoder.cell, torch.float64) is not None
    decoder.leaves = leaves_of(decoder)
    check(decoder, targets_with_holes(), {"feedback": "greedy"})


def test_a_cell_with_projections_is_called():
    decoder = make_decoder("lstm")
    decoder.cell = nn.LSTM(5, 8, proj_size=5, dtype=torch.float64)
    decoder.state = torch.randn(1, 3, 5).double(), torch.randn(1, 3, 8).double()

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = decoder.cell(x[None], state)
        return output[0], state

    decoder.step, decoder.leaves = step, [*decoder.cell.parameters()]
    check(decoder, targets_with_holes(), {"feedback": "greedy"})


class Adapter(nn.Module):
    """A layer around another, as peft's are."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer, self.padding_idx = base_layer, 4
        self.down = nn.Parameter(torch.randn_like(base_layer.weight[:, :2]))
        self.up = nn.Parameter(torch.randn_like(base_layer.weight[:2]))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.base_layer(x) + x @ self.up.t() @ self.down.t()
        return self.base_layer(x) + self.down[x] @ self.up


class Quantised(nn.Module):
    """A layer of its own that has the sizes of one of torch's."""

    def __init__(self, layer: Any, *sizes: str) -> None:
        super().__init__()
        self.register_buffer("numbers", (layer.weight.detach() * 64).to(torch.int8))
        self.scale, self.padding_idx = nn.Parameter(torch.tensor(1 / 64).double()), 4
        vars(self).update(zip(sizes, layer.weight.shape, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.numbers * self.scale
        return x @ weight.t() if x.is_floating_point() else weight[x]


@pytest.mark.parametrize("kind", ["adapter", "quantised"])
def test_layers_that_are_none_of_torchs_are_called(kind):
    decoder, targets = make_decoder("gru", padding_idx=4), targets_with_holes()
    if kind == "adapter":
        decoder.embedding, decoder.head = Adapter(decoder.embedding), Adapter(decoder.head)
    else:
        decoder.embedding = Quantised(decoder.embedding, "num_embeddings", "embedding_dim")
        decoder.head = Quantised(decoder.head, "out_features", "in_features")
    decoder.leaves = leaves_of(decoder)
    for names in (["greedy", "lengths"], ["teacher", "label_smoothing", "k1, k2"]):
        check(decoder, targets, options(names))


@pytest.mark.parametrize("part", ["embedding", "head"])
@pytest.mark.parametrize("search", ["greedy", "sample", "top_k", "beam"])
def test_generate_calls_it_too(search, part):
    decoder = make_decoder("gru")
    call: dict[str, Any] = {"search": search, "max_length": 9, "eos": 2}
    if search == "top_k":
        call |= {"search": "sample", "top_k": 4, "top_p": 0.9}
    parts = (decoder.embedding, decoder.cell, decoder.head, decoder.state)

    def say() -> Any:
        return accumext.generate(*parts, **call, generator=torch.Generator().manual_seed(3))

    plain = say()
    getattr(decoder, part).register_forward_hook(lambda m, a, y: y * 1)  # the same numbers
    found = say()
    assert torch.equal(found.tokens, plain.tokens)
    torch.testing.assert_close(found.scores, plain.scores, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=EXACT, atol=EXACT)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile asks it
@pytest.mark.parametrize("cell", [None, lambda x, h: (h + x.mean(), h)], ids=["gru", "function"])
def test_a_call_that_is_compiled_with_what_is_around_it(cell):
    """One module after another, with hooks that torch.compile takes for granted to be the same."""
    torch.compiler.reset()

    @partial(torch.compile, backend="eager")
    def compiled(decoder: Decoder) -> Tensor:
        return 2 * run(decoder, cell or decoder.cell, feedback="greedy").loss

    for factor in (1, 2, 3):
        decoder = make_decoder("gru_cell")
        if factor > 1:
            decoder.head.register_forward_hook(lambda m, given, y, factor=factor: factor * y)
        loss = 2 * run(decoder, cell or decoder.cell, feedback="greedy").loss
        torch.testing.assert_close(compiled(decoder), loss, rtol=EXACT, atol=EXACT)


def test_modes_of_functions_that_change_nothing_cost_nothing():
    """The default device, and what `chunked_loss` watches its function by."""
    decoder, seen = make_decoder("gru_cell"), []

    def loss(x: Tensor) -> Tensor:
        seen.append(formula_weights(decoder.head))
        return x.sum()

    with torch.device("cpu"):
        accumext.chunked_loss(loss, torch.ones(2, 3), chunks=1)
    assert seen == [[]]


def test_hooks_that_only_watch_cost_nothing():
    """FLOPs of modules are counted by hooks of all modules; `fully_shard`'s gather weights."""
    head = nn.Linear(2, 3, bias=False)
    gather: Any = lambda *_: None  # noqa: E731
    gather.__module__ = "torch.distributed.fsdp.of_a_test"
    head.register_forward_hook(gather)
    with FlopCounterMode(display=False):
        assert any(private.GLOBAL_HOOKS)
        assert formula_weights(head, "bias") == [None]


def test_a_head_runs_once_a_step_and_once_more_where_its_step_does():
    """What a hook keeps is put back, but for an iterator."""
    decoder, seen, calls = make_decoder("gru_cell"), [], itertools.count()

    def hook(module: nn.Module, given: tuple[Tensor], logits: Tensor) -> None:
        next(calls)
        seen.append(list(given[0].shape))

    decoder.head.register_forward_hook(hook)
    loss = run(decoder, feedback="greedy").loss
    assert seen == [[BATCH, 5]] * 6
    loss.backward()
    assert next(calls) == 6  # the graph of a few small steps is kept
    run(decoder, feedback="greedy", memory_budget=VOCABULARY * 8).loss.backward()
    assert next(calls) == 7 + 12
    assert seen == [[BATCH, 5]] * 12


def test_parameters_of_a_called_head_must_not_change_before_the_backward_pass():
    decoder = make_decoder("gru_cell")
    replace_forward(decoder.head)
    loss = run(decoder).loss
    with torch.no_grad():
        decoder.head.bias.add_(1)
    with raises(RuntimeError, "parameters must be those of the forward pass"):
        loss.backward()


def test_parameters_of_a_called_head_that_were_replaced_are_an_error():
    decoder = make_decoder("gru_cell")
    replace_forward(decoder.head)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = decoder.head

        def forward(self) -> Tensor:
            return run(decoder).loss

    other = {"head.bias": torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True)}
    loss = torch.func.functional_call(Whole(), other, ())
    with raises(RuntimeError, "parameters must be those of the forward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda y: y[:, 1:], ValueError, "return logits of shape [3, 13], got [3, 12]"),
        (tuple, TypeError, "return a tensor of logits, got tuple"),
    ],
)
def test_a_called_head_has_to_return_logits(change, kind, text):
    decoder = make_decoder("gru_cell")
    decoder.head.register_forward_hook(lambda m, a, y: change(y))
    with raises(kind, f"head must {text}"):
        run(decoder)


def test_what_is_no_layer_yet_is_refused():
    decoder = make_decoder("gru_cell")
    decoder.head = nn.LazyLinear(VOCABULARY)
    with raises(
        TypeError, "head must be an nn.Linear or a pair (weight, bias), got LazyLinear. Call"
    ):
        run(decoder)


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_the_memory_of_a_call_is_not_predicted(part):
    decoder = make_decoder("gru_cell")
    replace_forward(getattr(decoder, part))
    text = f"{part} must be computed from its weight, for the memory of a call of it is not known"
    with raises(TypeError, text):
        accumext.decode_memory(
            decoder.embedding, decoder.cell, decoder.head, (4, 3), feedback="greedy"
        )
