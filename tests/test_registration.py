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


def operator(row):
    name, overload = row.split(".")
    return getattr(getattr(torch.ops.accumext, name), overload)


@pytest.mark.parametrize("row", ROWS)
def test_opcheck(row):
    make, scale = ROWS[row]
    args, kwargs = make(scale())
    assert set(opcheck(operator(row), args, kwargs).values()) == {"SUCCESS"}


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


@pytest.mark.parametrize("row", ROWS)
def test_meta_tensors_give_the_shape_of_the_result(row):
    make, scale = ROWS[row]
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to("meta"), make(scale())
    )
    result = operator(row)(*args, **kwargs)
    if result is not None:
        assert (result.shape, result.dtype, result.device.type) == ((), torch.float64, "meta")


def step(main_grads, grads, inv_scale, found_inf):
    norm = accumext.accumulate_(main_grads, grads, inv_scale=inv_scale, found_inf=found_inf)
    micro = accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=inv_scale, max_norm=1.0, found_inf=found_inf, if_finite=True
    )
    accumext.scale_(main_grads, 0.5)
    return norm, micro, accumext.total_norm(main_grads, norm_type=1.0)


@pytest.mark.parametrize("inv_scale", [0.37, torch.tensor(0.37)], ids=["float", "tensor"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_in_one_graph(backend, inv_scale):
    torch._dynamo.reset()
    eager, compiled = ([torch.zeros(40, 3), torch.ones(5)] for _ in range(2))
    grads = [torch.randn(40, 3).half(), torch.randn(5)]
    expected = step(eager, grads, inv_scale, torch.zeros(()))
    got = torch.compile(step, fullgraph=True, backend=backend)(
        compiled, grads, inv_scale, torch.zeros(())
    )
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, compiled, eager))
