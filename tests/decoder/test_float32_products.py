"""Who multiplies in float32: torch's setting of the precision of products is torch's products'."""

from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder
from support.decoding import options, run, targets_with_holes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import accumext

PRODUCTS = {"mm", "addmm", "mv", "addmv", "dot", "vdot", "bmm", "baddbmm", "addbmm", "linear"}
CALLS = [["teacher"], ["greedy", "label_smoothing"], ["sample", "z_loss", "entropy_weight"]]


class Products(TorchDispatchMode):
    """The operands of the products of torch that run in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.removesuffix("_") in PRODUCTS:
            self.operands += [a for a in args if isinstance(a, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(accumext.backend() == "reference", reason="whose products are torch's")
@pytest.mark.parametrize("kind", ["gru", "lstm_cell", "function"])
def test_no_product_of_a_compiled_call_is_torchs(kind):
    decoder = make_decoder("gru_cell" if kind == "function" else kind, dtype=torch.float32)
    cell = (lambda x, state: (x + state, state)) if kind == "function" else decoder.cell
    state = None if kind == "function" else decoder.state
    with Products() as products:
        for names in CALLS:
            for class_weight in (None, torch.linspace(0, 2, 13)):
                call = {**options(names), "class_weight": class_weight}
                run(decoder, cell, targets=targets_with_holes(), **call).loss.backward()
        if kind != "function":
            for search in ("greedy", "sample", "beam"):
                parts = (decoder.embedding, cell, decoder.head, state)
                accumext.generate(*parts, max_length=3, search=search)
    assert not products.operands


@pytest.mark.parametrize("kind", ["gru", "lstm_cell", "rnn"])
def test_sums_over_rows_are_no_products(kind):
    """With either backend: the gradient of a bias would lose what a product with ones loses."""
    decoder = make_decoder(kind, dtype=torch.float32)
    with Products() as products:
        run(decoder, feedback="greedy").loss.backward()
    assert not any(t.numel() > 1 and bool((t == 1).all()) for t in products.operands)
