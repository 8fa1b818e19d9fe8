"""The effects of exceptions: the parameters and the window are as before the call or as after it,
but where a backward pass had added to the window: then it is dropped, and the exception says so."""

from contextlib import nullcontext, suppress

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP
from support.tensors import dtype_id

from accumext.optimizer import _collecting

BATCHES = oracle.make_batches(5)
DROPPED = "the open window was dropped: it had been added to"


class Once:
    """A hook that raises once, after some calls."""

    def __init__(self, error=torch.OutOfMemoryError, calls=0):
        self.left, self.error = calls, error("once")

    def __call__(self, *args):
        self.left -= 1
        if self.left == -1:
            raise self.error


def micro_batch(opt, losses, raises_after=None, caught=False):
    """Of several passes if there are several losses; the user's own code may raise inside."""
    if len(losses) == 1:
        opt.backward(losses[0])
        return
    with opt.micro_batch():
        for number, loss in enumerate(losses):
            if number == raises_after:
                raise ZeroDivisionError
            with suppress(torch.OutOfMemoryError) if caught else nullcontext():
                opt.backward(loss)


FAULTS = {  # passes, the one whose hook raises, and before which one the user's code does
    "one pass": (1, 0, None),
    "the first part": (2, 0, None),
    "the second part": (2, 1, None),
    "the first part, caught": (2, 0, None),  # which takes the others with it
    "the second part, caught": (3, 1, None),
    "between the parts": (2, None, 1),
    "before the first part": (2, None, 0),
    "beside the user's": (1, 1, None),  # on a gradient in `.grad`, which belongs to the micro-batch
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    ("policy", "in_backward"),
    [("skip_window", False), ("skip_window", True), ("skip_micro_batch", False), ("raise", False)],
)
def test_a_backward_pass_that_fails(dtype, policy, in_backward, held, fault, monkeypatch):
    """Drops what was added to, says so once, and leaves what is kept apart."""
    monkeypatch.setattr(_collecting, "BUNDLE_BYTES", oracle.ONE_BY_ONE)
    passes, failing, raises_after = FAULTS[fault]
    caught = fault.endswith("caught")
    model, batches = oracle.make_model(dtype), [batch.to(dtype) for batch in BATCHES]
    parameters = list(model.parameters())
    options = {"on_nonfinite": policy, "accumulate_in_backward": in_backward}
    opt = oracle.wrapped(model, window=held + 1, **options)
    for batch in batches[:held]:
        opt.backward(oracle.loss_of(model, batch))
    before = oracle.state_of(opt, parameters)
    if failing is not None:
        parameters[0].register_hook(Once(calls=failing))
    if fault == "beside the user's":
        oracle.loss_of(model, batches[3]).backward()
    losses = [oracle.loss_of(model, batches[3]) for _ in range(passes)]
    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
        micro_batch(opt, losses, raises_after, caught)
    drops = policy == "skip_window" and held > 0 and fault != "before the first part"
    if held:
        assert oracle.said_by(raised.value).count(DROPPED) == drops
    if caught:
        assert "and the micro-batch is dropped" in oracle.said_by(raised.value)
    assert all(p.grad is None for p in parameters)
    assert not oracle.hooks_of(model)
    if not drops:
        assert oracle.state_of(opt, parameters) == before
    kept = [] if drops else BATCHES[:held]
    rest = BATCHES[held : 2 * held + 1] if drops else BATCHES[held : held + 1]
    for batch in rest:
        opt.backward(oracle.loss_of(model, batch.to(dtype)))
    opt.step()
    assert opt.stepped
    expected = oracle.train_by_hand(
        oracle.sgd, [b.to(dtype) for b in [*kept, *rest]], held + 1, dtype=dtype
    )
    # In half precision one more rounding may decide how a parameter is rounded.
    rounding = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    oracle.assert_close(oracle.parameters_of(model), expected, rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_model_that_is_converted_inside_a_window(dtype, passes):
    """The window is dropped, and the next one is of the converted model."""
    model, batch = oracle.make_model(torch.float32), oracle.make_batches(1, dtype)[0]
    opt = oracle.wrapped(model, window=2)
    opt.backward(oracle.loss_of(model, batch.float()))
    model.to(dtype)
    text = (
        f"{OP}.backward: a parameter must keep its dtype, shape and device inside a window, got "
        f"{dtype_id(dtype)} [4, 3] on cpu, with a sum of float32 [4, 3] on cpu. Convert or move "
        "the model between windows, after opt.flush() or opt.discard()"
    )
    with pytest.raises(RuntimeError, match=oracle.says(text)) as raised:
        micro_batch(opt, [oracle.loss_of(model, batch) for _ in range(passes)])
    assert DROPPED in oracle.said_by(raised.value)
    assert all(p.grad is None for p in model.parameters())
    oracle.run(opt, model, [batch, batch])
    assert opt.stepped


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("passes", [0, 1])
def test_a_model_that_is_converted_before_a_pass_of_ones_own_or_a_flush(dtype, passes):
    model, plain = (oracle.make_model(torch.float32) for _ in range(2))
    batch = oracle.make_batches(1, torch.float32)[0]
    opt = oracle.wrapped(model, window=3, reduction="sum")
    opt.backward(oracle.loss_of(model, batch))
    oracle.loss_of(plain, batch).backward()
    for each in (model, plain):
        each.to(dtype)  # with the gradients in `.grad`, which are those of `plain` alone
        for _ in range(passes):
            oracle.loss_of(each, batch.to(dtype)).backward()
    opt.flush()
    oracle.sgd(plain.parameters()).step()
    rounding = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    oracle.assert_close(oracle.parameters_of(model), oracle.parameters_of(plain), 2 * rounding)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="Python has no notes")
def test_the_exception_says_so_beside_a_note_of_the_users():
    parameter, opt = oracle.wrapped_zeros(2)
    opt.backward(parameter * 1)
    error = torch.OutOfMemoryError("once")
    error.add_note("in step 5")
    parameter.register_hook(Once(lambda text: error))
    with pytest.raises(torch.OutOfMemoryError):
        opt.backward(parameter * 1)
    assert error.__notes__ == ["in step 5", f"{OP}.backward: {DROPPED}"]
