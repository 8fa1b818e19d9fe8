"""Sampling from some of the words, by sorting all of them."""

import torch
from torch import Tensor


def kept_shares(
    logits: Tensor,  # [..., V]
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The probabilities that are drawn from: of the k likeliest words, and of the fewest of these
    whose share of their sum is p; of equals the first."""
    p = (logits.double() / temperature).softmax(-1)
    p, order = p.sort(dim=-1, descending=True, stable=True)
    words = torch.arange(p.shape[-1], device=p.device)
    p = p * (words < (len(words) if top_k is None else top_k))
    if top_p is not None:
        before = (p.cumsum(-1) - p) / p.sum(-1, keepdim=True)
        p = p * ((before < top_p) | (words == 0))
    shares = torch.zeros_like(p).scatter(-1, order, p)
    return shares / shares.sum(-1, keepdim=True)


def assert_drawn(tokens: Tensor, shares: Tensor, uniforms: Tensor, tolerance: float) -> None:
    """Each token [...] is possible, and where the running sum of its shares [..., V] passes its
    uniform number [...], or as near to that as other sums come."""
    reached, mass = (x.gather(-1, tokens[..., None])[..., 0] for x in (shares.cumsum(-1), shares))
    assert (mass > 0).all()
    assert (reached > uniforms - tolerance).all()
    assert (reached - mass <= uniforms + tolerance).all()
