"""Calls whose arguments have other names, or are missing: what their errors say."""

import inspect
import re

import pytest
import torch
from torch import nn

import accumext

E, C, H = nn.Embedding(7, 5), nn.GRUCell(5, 5), nn.Linear(5, 7)
Y, S = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 5)
MEANT = [  # a function, a name that it does not have, and the one that it has
    (accumext.decode_loss, "teacher_forcing_ratio", "teacher_forcing"),
    (accumext.decode_loss, "feed_back", "feedback"),
    (accumext.generate, "num_beams", "beams"),
    (accumext.generate, "max_new_tokens", "max_length"),
    (accumext.AccumulatingOptimizer, "max_grad_norm", "max_norm"),
    (accumext.AccumulatingOptimizer, "gradient_accumulation_steps", "window"),
    (accumext.tbptt, "loss_fn", "criterion"),
    (accumext.rollout, "loss_fn", "loss"),
    (accumext.rollout, "criterion", "loss"),
    (accumext.decode_loss, "bos", "start"),
    (accumext.decode_loss, "weight", "class_weight"),
    (accumext.chunked_loss, "weight", "weights"),
    (accumext.decode_loss, "memory", "context"),
    (accumext.decode_loss, "observations", "inputs"),
    (accumext.generate, "input_ids", "prompt"),
    (accumext.tbptt, "is_init", "resets"),
    (accumext.tbptt, "lenghts", "lengths"),
    (accumext.rollout, "memory_bugdet", "memory_budget"),
    (accumext.chunked_loss, "chunksize", "chunk_size"),
]
GIVEN_TOO_LITTLE = [  # a call, and what its error says to type
    (lambda: accumext.decode_loss(E, C, H, Y, S), "got nothing. One of 'teacher', 'greedy', 'sam"),
    (lambda: accumext.decode_loss(embedding=H, feedback="greedy"), "model.embedding, model.cell"),
    (lambda: accumext.generate(embedding=H, state=S, max_length=3), "model.embedding, model.c"),
    (lambda: accumext.tbptt(step=H, targets=Y, state=S), "Such as F.cross_entropy"),
]
GIVEN_BY_PLACE = [
    (lambda: accumext.AccumulatingOptimizer(torch.optim.SGD([S]), 4), "Did you mean window=4?"),
    (lambda: accumext.AccumulatingOptimizer(torch.optim.SGD([S]), 4, window=2), "mean max_norm=4"),
    (lambda: accumext.decode_loss(E, C, H, Y, S, "greedy"), "Did you mean feedback='greedy'?"),
    (lambda: accumext.tbptt(C, Y, S, nn.MSELoss()), "Did you mean criterion=...?"),
]
# A function, and a name that it does not have: another of ours has it, or nothing here is like it.
BELONGS = [
    (accumext.tbptt, "batch_first", "decode_loss"),
    (accumext.tbptt, "soft_temperature", "decode_loss"),
    (accumext.generate, "resets", "decode_loss"),
    (accumext.generate, "targets", "tbptt"),
    (accumext.rollout, "feedback", "tbptt"),
    (accumext.AccumulatingOptimizer, "steps", "rollout"),
    (accumext.chunked_loss, "k2", "rollout"),
]
UNLIKE = [
    (accumext.decode_loss, "dropout"),
    (accumext.decode_loss, "features"),
    (accumext.decode_loss, "z_loss_weight"),
    (accumext.generate, "min_length"),
    (accumext.generate, "opt"),
    (accumext.chunked_loss, "kwargs"),
    (accumext.AccumulatingOptimizer, "masks"),
]
CALLS = [
    *((lambda f=f, k=k: f(**{k: 3}), f"Did you mean {name}?") for f, k, name in MEANT),
    *GIVEN_TOO_LITTLE,
    *GIVEN_BY_PLACE,
]


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_what_to_type(call, text):
    with pytest.raises(TypeError, match=rf"^\w+: \w+ must .*{re.escape(text)}"):
        call()


@pytest.mark.parametrize(("function", "name", "other"), BELONGS)
def test_names_of_other_functions_are_not_taken_for_misspelt_ones(function, name, other):
    text = rf"got {name}\. It is an argument of .*\b{other}\b"
    with pytest.raises(TypeError, match=text):
        function(**{name: 3})


@pytest.mark.parametrize(("function", "name"), UNLIKE)
def test_nothing_is_guessed_of_a_name_that_is_like_none(function, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        function(**{name: 3})


def test_other_errors_are_as_they_were():
    """Of Python where nothing is like it, and of what is called, with its traceback."""
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'zzz'"):
        accumext.generate(E, C, H, zzz=1)
    with pytest.raises(TypeError, match=r"takes .* positional arguments but 8 were given"):
        accumext.tbptt(*range(8))

    def fn(_):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        accumext.chunked_loss(fn, S, chunks=1)
    with pytest.raises(TypeError, match=r"^of the user$"):
        accumext.chunked_loss(lambda *_: fn(0), S, S, S, chunks=1)


@pytest.mark.parametrize("call", [accumext.decode_loss, accumext.AccumulatingOptimizer])
def test_signatures_and_help_are_those_of_the_function(call):
    parameters = inspect.signature(call).parameters
    assert "args" not in parameters
    assert {"feedback", "window"} & set(parameters)
    assert inspect.getdoc(call)
