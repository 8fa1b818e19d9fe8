"""Every registered operator: its schema, its fake, functionalisation and tracing."""

import pytest
import torch
from support.tensors import assert_equal
from torch.library import opcheck

import accumext
from accumext.backends import _self_test
from accumext.tensors.torch_private import operator

CASES = _self_test.cases()
# It changes its arguments and returns an int as well, which torch does not make functional.
NOT_TRACED = {"decode_steps"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name not in NOT_TRACED:
        checks.append("test_aot_dispatch_dynamic")
    for case in CASES[name][::20]:
        call = case._on(torch.device("cpu"))
        done = opcheck(operator(name), (), call, test_utils=checks)
        assert set(done.values()) == {"SUCCESS"}


def test_every_operator_has_calls():
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("accumext::") for name in names if name.startswith("accumext::")}
    assert ours == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_answers_where_no_kernel_is_compiled(name):
    key = "CompositeExplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator(name).name(), key)


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
    assert_equal(got, expected)
    assert_equal(compiled, eager)
