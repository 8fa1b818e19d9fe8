"""Every registered operator: its schema, its fake, functionalisation and tracing."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import accumext


def tensors(requires_grad=False):
    shapes, dtypes = [(33, 7), (), (0,), (65537,)], [torch.float32, torch.float16, torch.float64]
    return [
        torch.ones(shape, dtype=dtypes[i % 3], requires_grad=requires_grad)
        for i, shape in enumerate(shapes)
    ]


# One row per overload: a function that makes its arguments.
GRADIENT_OPS = {
    "accumulate_": lambda scale: (
        (tensors(), tensors()),
        {"inv_scale": scale, "found_inf": torch.zeros(())},
    ),
    "unscale_check_clip_accumulate_": lambda scale: (
        (tensors(), tensors()),
        {"inv_scale": scale, "max_norm": 1.0, "found_inf": torch.zeros(()), "if_finite": True},
    ),
    "total_norm": lambda scale: ((tensors(),), {"inv_scale": scale, "found_inf": torch.zeros(())}),
    "scale_": lambda scale: ((tensors(), scale), {}),
}
ROWS = {
    f"{name}.{overload}": (make, scale)
    for name, make in GRADIENT_OPS.items()
    for overload, scale in (("default", lambda: torch.tensor(0.5)), ("scalar", lambda: 0.5))
}


def head_arguments(first):
    words, rows = 11, 4
    targets, uniforms = torch.arange(rows), torch.rand(rows, dtype=torch.float64)
    exps = torch.zeros(words, rows + 2)[:, 1:-1].t()
    return [*first, targets, uniforms, 0.5, exps], [torch.zeros(rows).long(), torch.zeros(3, rows)]


def head_forward():
    given, written = head_arguments([torch.randn(4, 5), torch.randn(11, 5), torch.randn(11)])
    return (*given, 3, *written), {}


def head_objective():
    rows, words = 4, 11
    teacher = torch.randn(rows, 3), torch.randn(words, 3), torch.randn(words)
    written = torch.zeros(rows, dtype=torch.int64), torch.zeros(5, rows)
    return (
        torch.randn(rows, 5), torch.randn(words, 5), torch.randn(words), torch.arange(rows),
        torch.rand(rows), 0.1, 0.2, 0.3, 2.0, torch.rand(rows, 2), torch.ones(rows, 2).long(),
        *teacher, torch.zeros(words, rows + 2)[:, 1:-1].t(), 3, *written,
    ), {}  # fmt: skip


def head_top():
    head = torch.randn(4, 5), torch.randn(11, 5), torch.randn(11)
    written = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(2, 4)
    return (*head, 3, *written), {}


def head_sample():
    head = torch.randn(4, 5), torch.randn(11, 5), torch.randn(11)
    uniforms = torch.rand(4, dtype=torch.float64)
    written = torch.zeros(4, dtype=torch.int64), torch.zeros(3, 4)
    return (*head, uniforms, 0.5, 7, 0.5, 3, *written), {}


def add_matmul():
    return (torch.randn(4, 5), torch.randn(4, 3), torch.randn(3, 5), False), {}


def large_pages():
    return (torch.empty(4),), {}


def decode_steps():
    steps, batch, units, words = 3, 2, 4, 7
    cell = [torch.randn(16, units), torch.randn(16, units), torch.randn(16), torch.empty(0)] * 2
    tokens = torch.zeros(4, steps, batch, dtype=torch.int64).unbind()
    masks = torch.ones(3, steps, batch, dtype=torch.bool).unbind()
    exps = torch.zeros(words, steps * batch).t()
    return (
        torch.randn(words, units), cell, [torch.randn(steps + 1, batch, units) for _ in range(4)],
        1, torch.ones(steps, 1, batch, units, dtype=torch.bool), 1.0,
        torch.ones(steps, batch, units, dtype=torch.bool), 1.0, None, 1.0, tokens[0].clone(),
        tokens[1], masks[0], masks[1].clone(), 3, 0,
        torch.rand(steps, batch, dtype=torch.float64), 1.0,
        torch.randn(words, units), torch.randn(words), tokens[2], tokens[3].clone(), exps,
        torch.zeros(3, steps * batch), torch.zeros(steps * batch, dtype=torch.int64), 32, 0, steps,
    ), {}  # fmt: skip


LIVE = [True, False]


def rnn_backward():
    steps, batch, units = 3, 2, 4
    live = torch.tensor([LIVE] * steps)
    h, c = (torch.randn(steps + 1, batch, units) for _ in range(2))
    return (
        1, torch.randn(steps, batch, units), torch.randn(steps, batch, 16), h, c, live,
        torch.ones(steps, batch), torch.tensor(0.5), torch.randn(units, 16),
        torch.randn(batch, units), torch.randn(batch, units), torch.zeros(steps, batch, 16), None,
    ), {}  # fmt: skip


def window_factors():
    number = torch.ones((), dtype=torch.float64)
    options = dict.fromkeys(("device_unit", "weight", "scale", "overflow", "found_inf"), number)
    return (torch.zeros(3, dtype=torch.float64), torch.zeros(3), tensors(), None), {
        **options, "unit": 1.0, "max_norm": 0.5, "normalised": False, "checks_norm": True,
        "finite": number,
    }  # fmt: skip


def copy_rounded_():
    targets = [tensor.half() for tensor in tensors()]
    return (targets, tensors()), {"seed": torch.tensor(1), "found_inf": torch.zeros(())}


DECODER_OPS = (
    head_forward, head_objective, head_top, head_sample, add_matmul, large_pages, decode_steps,
    rnn_backward,
)  # fmt: skip
ROWS |= {
    f"{op.__name__}.default": (lambda _, op=op: op(), lambda: None)
    for op in (*DECODER_OPS, window_factors, copy_rounded_)
}
# Changes its arguments and returns an int as well, which torch does not make functional.
NOT_TRACED = {"decode_steps.default"}


def operator(row):
    name, overload = row.split(".")
    return getattr(getattr(torch.ops.accumext, name), overload)


@pytest.mark.parametrize("row", ROWS)
def test_opcheck(row):
    make, scale = ROWS[row]
    args, kwargs = make(scale())
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if row not in NOT_TRACED:
        checks.append("test_aot_dispatch_dynamic")
    done = opcheck(operator(row), args, kwargs, test_utils=checks)
    assert set(done.values()) == {"SUCCESS"}


def test_every_operator_has_a_row():
    names = [
        n.removeprefix("accumext::")
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("accumext::")
    ]
    assert {n if "." in n else f"{n}.default" for n in names} == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_reference_answers_where_no_kernel_is_compiled(row):
    name = operator(row).name()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")


def step(main_grads, grads, inv_scale, found_inf):
    norm = accumext.accumulate_(main_grads, grads, inv_scale=inv_scale, found_inf=found_inf)
    micro = accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=inv_scale, max_norm=1.0, found_inf=found_inf, if_finite=True
    )
    accumext.scale_(main_grads, 0.5)
    halves = [main_grad.bfloat16() * 0 for main_grad in main_grads]
    accumext.copy_rounded_(halves, main_grads, seed=torch.tensor(1), found_inf=found_inf)
    return norm, micro, accumext.total_norm(main_grads, norm_type=1.0), *halves


@pytest.mark.parametrize("inv_scale", [0.37, torch.tensor(0.37)], ids=["float", "tensor"])
def test_compile_in_one_graph(inv_scale):
    torch._dynamo.reset()
    eager, compiled = ([torch.zeros(40, 3), torch.ones(5)] for _ in range(2))
    grads = [torch.randn(40, 3).half(), torch.randn(5)]
    expected = step(eager, grads, inv_scale, torch.zeros(()))
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(
        compiled, grads, inv_scale, torch.zeros(())
    )
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, compiled, eager))
