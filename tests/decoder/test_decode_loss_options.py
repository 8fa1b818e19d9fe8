"""Every option of decode_loss together with every other, in float64 against plain autograd."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import CELLS, Decoder, decode, make_decoder, relative_distance
from support.decoding import (
    EXACT,
    FEEDBACKS,
    GROUPS,
    OPTIONS,
    check,
    options,
    parts_of,
    run,
    wrapped,
)

PARTS = ("embedding", "cell", "head", "state")
MODELS = {
    "layers": st.integers(1, 3),
    # E, H: around row blocks of 12, 48 units of a thread.
    "sizes": st.sampled_from([(5, 5), (3, 7), (13, 4), (1, 1), (16, 12), (17, 13), (5, 49)]),
    "tied": st.booleans(),
    "biases": st.tuples(st.booleans(), st.booleans()),
    "padding_idx": st.sampled_from([None, 4, 0]),
    "dropout": st.sampled_from([0.0, 0.0, 0.5]),
}
CALLS = {
    "steps": st.integers(1, 14),
    "batch": st.sampled_from([1, 2, 3, 4, 8, 9, 16, 17]),  # around panels of 8 columns
    "words": st.sampled_from([9, 13, 481]),  # around spans of 480 rows of the head's weight
    "called": st.booleans(),
    "hole": st.sampled_from(["none", "some", "all"]),
    "frozen": st.frozensets(st.sampled_from(PARTS), max_size=3),
    "upstream": st.sampled_from([1.0, 65536.0, -0.3]),
    "twice": st.booleans(),
    "seed": st.integers(0, 2**20),
}
SOME = sorted(OPTIONS.keys() - {"nobody"})  # in which nothing would be left to compare
NAMES = st.tuples(
    st.sampled_from(sorted(FEEDBACKS)),
    *(st.sampled_from([None] * len(group) + sorted(group)) for group in GROUPS.values()),
    st.sets(st.sampled_from(SOME), max_size=6),
)


def frozen_but(decoder: Decoder, frozen: frozenset[str]) -> Decoder:
    """The decoder, its leaves only those that want a gradient."""
    for part in {"embedding", "cell", "head"} & frozen:
        getattr(decoder, part).requires_grad_(False)
    if "state" in frozen:
        for part in parts_of(decoder.state):
            part.requires_grad_(False)
    decoder.leaves = [leaf for leaf in decoder.leaves if leaf.requires_grad]
    return decoder


@pytest.mark.parametrize("kind", CELLS)
def test_everything_at_once(kind):
    @settings(max_examples=examples(30), deadline=None)
    @given(names=NAMES, model=st.fixed_dictionaries(MODELS), call=st.fixed_dictionaries(CALLS))
    def compare(names: tuple[Any, ...], model: dict[str, Any], call: dict[str, Any]) -> None:
        torch.manual_seed(call["seed"])
        steps, batch, words = call["steps"], call["batch"], call["words"]
        *one_of_each, some = names
        arguments = options([*filter(None, one_of_each), *sorted(some)], steps, batch, words)
        inputs, units = model["sizes"]
        decoder = make_decoder(
            kind, words, units, batch, tied=model["tied"], bias=model["biases"][0], inputs=inputs,
            cell_bias=model["biases"][1], padding_idx=model["padding_idx"], layers=model["layers"],
            dropout=0.0 if "k2" in arguments else model["dropout"],
        )  # fmt: skip
        targets = torch.randint(words, (steps, batch))
        if call["hole"] != "none":
            hole = torch.rand(steps, batch) < (0.3 if call["hole"] == "some" else 1.0)
            targets[hole] = arguments.get("ignore_index", -100)
        check(
            frozen_but(decoder, call["frozen"]), None if "steps" in arguments else targets,
            arguments, wrapped(decoder) if call["called"] else None, call["upstream"],
            call["twice"],
        )  # fmt: skip

    compare()


@pytest.mark.parametrize("periods", [None, (2, 2), (2, 5)], ids=str)
def test_one_leaf_at_a_time(periods):
    """torch.autograd.grad for a part of the leaves, from the same retained graph; and of the last
    state alone."""
    for kind, tied in (("lstm", False), ("gru_cell", True)):
        decoder = make_decoder(kind, tied=tied)
        targets = torch.randint(13, (6, 3))
        k1, k2 = periods or (None, None)
        out = run(decoder, targets=targets, feedback="greedy", label_smoothing=0.1, k1=k1, k2=k2)
        states: list[Any] = []
        losses, divisor, _ = decode(
            decoder, targets, out.inputs, label_smoothing=0.1, windows=periods, states=states
        )
        total = losses.sum() / divisor
        expected = torch.autograd.grad(total, decoder.leaves, retain_graph=True)
        for leaf, gradient in zip(decoder.leaves, expected, strict=True):
            (mine,) = torch.autograd.grad(out.loss, [leaf], retain_graph=True)
            assert relative_distance([mine], [gradient]) < 10 * EXACT
        if periods is None:
            mine, its = (
                sum(s.square().sum() for s in parts_of(x)) for x in (out.state, states[-1])
            )
            assert relative_distance(decoder.gradients(mine), decoder.gradients(its)) < EXACT
