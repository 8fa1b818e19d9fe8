"""The embedding's gradient: sparse, padded, of frequent words."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import EXACT, VOCABULARY, targets_with_holes
from torch import nn

import accumext


def test_sparse_embedding_gradients() -> None:
    decoder = make_decoder("gru_cell")
    targets = targets_with_holes()
    call = (decoder.cell, decoder.head, targets, decoder.state.detach())
    dense = accumext.decode_loss(decoder.embedding, *call, feedback="greedy")
    dense.loss.backward()
    sparse = nn.Embedding(
        VOCABULARY, 5, sparse=True, _weight=decoder.embedding.weight.detach().clone()
    )
    accumext.decode_loss(sparse, *call, feedback="greedy").loss.backward()
    assert sparse.weight.grad.is_sparse
    torch.testing.assert_close(sparse.weight.grad.to_dense(), decoder.embedding.weight.grad)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("periods", [(None, None), (2, 2), (1, 3)], ids=str)
def test_sparse_embeddings(
    padding_idx: int | None, tied: bool, periods: tuple[int | None, int | None]
) -> None:
    grads = []
    for sparse in (False, True):
        torch.manual_seed(0)
        decoder = make_decoder("lstm_cell", padding_idx=padding_idx, tied=tied)
        decoder.embedding.sparse = sparse
        targets = torch.randint(13, (7, 3))
        k1, k2 = periods
        accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback="greedy", k1=k1, k2=k2,
        ).loss.backward()  # fmt: skip
        grad = decoder.embedding.weight.grad
        assert grad.is_sparse == (sparse and not tied)
        grads.append(grad.to_dense())
    assert relative_distance([grads[1]], [grads[0]]) < EXACT
