"""Private names of torch: those whose change no other test would notice, and those around which we
have code of our own; and that no other file reads one."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

import accumext
from accumext.tensors import torch_private as private
from accumext.tensors import torch_private_distributed as distributed

PACKAGE = Path(accumext.__file__).parent


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


def test_views_and_memory():
    weight, tensor = parameter(), torch.ones(2)
    assert private.base_of(weight.view(3)[1:]) is private.base_of(weight) is weight
    (alone,) = private.storage_users([tensor.untyped_storage()])
    view = private.negated_view(tensor)
    assert (view.is_neg(), view.data_ptr()) == (True, tensor.data_ptr())
    assert private.storage_users([view.untyped_storage()]) == [alone + 1]
    before = private.write_count(tensor)
    private.zero_all_([tensor])
    assert not tensor.any()
    assert private.write_count(tensor) > before
    with torch.inference_mode():
        unknown = torch.zeros(1)
    with pytest.raises(RuntimeError):
        private.write_count(unknown)


def test_optimizers():
    sgd = torch.optim.SGD([parameter()], lr=1.0)
    held = {name for name, value in vars(sgd).items() if name.endswith("hooks")}
    assert held == set(private.HOOK_ATTRIBUTES)
    assert private.takes_scale(torch.optim.Adam([parameter()], fused=True))
    assert not private.takes_scale(sgd)
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd)
    setattr(sgd, private.HAS_STEPPED, True)
    schedule.step()  # a warning, which is an error here, where the optimizer has not stepped


def test_nodes_and_leaves_since():
    early, late = parameter(), parameter()
    before = early.exp()
    first = private.next_node_number()
    middle = before * late
    last = middle + middle.sin()
    found = set(private.nodes_since(first, [last, middle]))
    assert found == {middle.grad_fn, last.grad_fn, last.grad_fn.next_functions[1][0]}
    assert all(private.is_since(node, first) for node in found)
    assert not private.is_since(before.grad_fn, first)
    (leaf,) = private.leaves_since(first, [last])
    assert leaf is late
    assert private.leaves_since(first, [before, late]) == []


def test_fake_tensors():
    weight, counter = parameter(), torch.zeros((), dtype=torch.int64)
    generator = torch.get_rng_state()
    with private.fake_tensors() as fake, private.Allocations(fake):
        counter.add_(1)
        weight.detach().uniform_()
        dropped = torch.nn.functional.dropout(weight) + torch.empty(10**9, 3)
    assert list(dropped.shape) == [10**9, 3]
    assert (int(counter), weight.any()) == (0, False)
    assert torch.equal(torch.get_rng_state(), generator)


def test_allocations():
    """Of each operator, until nothing holds it; sums in place, unless of views."""
    with private.fake_tensors() as fake, private.Allocations(fake) as memory:
        one, two = torch.empty(100), torch.empty(25)
        assert memory.now == memory.peak == 500
        view = one.view(10, 10).t()
        one.add_(1)
        del one
        assert memory.now == memory.peak == 500
        del view
        assert (memory.now, memory.peak) == (100, 500)
        three = two + two[:1]  # in the memory of `two`
        del two
        three.exp()
        assert memory.peak == 500
        view = torch.empty(200).view(200)
        view = view[:] + view[:]
        assert (memory.now, memory.peak) == (900, 1700)
        torch.stack([view, view])
        view.exp()
        assert memory.peak == 1700


def test_translated_from():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated

        class GRUCell(torch.jit.ScriptModule):
            pass

        scripted, own = torch.jit.script(nn.GRUCell(2, 3)), GRUCell()
    assert private.translated_from(scripted) == ("a scripted", "GRUCell")
    compiled = torch.compile(nn.Linear(2, 3), backend="eager")
    assert private.translated_from(compiled) == ("a compiled", "Linear")
    compiled = torch.compile(type("Linear", (nn.Linear,), {})(2, 3), backend="eager")
    assert [private.translated_from(x) for x in (own, compiled, nn.Linear(2, 3), len)] == [None] * 4


def test_a_factor_that_a_node_has_saved():
    factor = torch.tensor(2.0)
    product = (parameter().sum() * factor).grad_fn
    assert product.name() == "MulBackward0"
    assert private.saved_factor(product).data_ptr() == factor.data_ptr()


def test_step_is_wrapped():
    class Plain(torch.optim.SGD):
        def step(self, closure=None):
            return "stepped"

        setattr(step, private.STEP_IS_WRAPPED, True)

    before = Plain.step
    Plain([parameter()], lr=1.0)
    assert Plain.step is before


def test_kernels_can_be_called_by_their_key():
    kernels = torch.library.Library("accumext_test_keys", "FRAGMENT")
    kernels.define("which(Tensor x, *, int more=0) -> int")
    op = torch.ops.accumext_test_keys.which.default
    kernels.impl("which", lambda x, *, more=0: 1 + more, "CompositeExplicitAutograd")
    kernels.impl("which", lambda x, *, more=0: 2 + more, "CPU")
    compiled = private.compiled_kernel(op, "CPU")
    over = torch.library.Library("accumext_test_keys", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        over.impl("which", lambda x, *, more=0: 3 + more, "CPU", allow_override=True)
    x = torch.zeros(1)
    assert (op(x), compiled(x, more=10), private.call_default_kernel(op, x, more=10)) == (3, 12, 11)
    private.remove_kernels(over)
    assert op(x) == 2
    private.remove_kernels(kernels)


@pytest.fixture
def sharded():
    """A layer of bfloat16 computation that `fully_shard` splits over a group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = nn.Linear(3, 2)
    yield fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    dist.destroy_process_group()


def test_the_parameters_of_a_sharded_module(sharded):
    sharded.set_requires_gradient_sync(False)
    sharded.set_reshard_after_backward(False)
    shards = list(sharded.parameters())
    sharded(torch.ones(1, 3)).sum().backward()
    found = list(distributed.sharded_parameters(sharded))
    assert [p.shard for p in found] == shards
    assert [p.gathered for p in found] == list(sharded.parameters())
    assert {p.dtype for p in found} == {torch.bfloat16}
    assert [p.grad_dtype for p in found] == [p.gathered.grad.dtype for p in found]
    assert [p.elements for p in found] == [6, 2]


def test_sharding(sharded):
    """A forward pass of ours, in which the module is called and its weight read."""
    assert distributed.sharded_state(nn.Linear(1, 1)) is None
    assert sharded in distributed.sharded_modules()
    assert any(private.forward_hooks(sharded))
    assert private.only_watching(private.forward_hooks(sharded))
    hook = sharded.register_forward_hook(lambda *_: None)
    assert not private.only_watching(private.forward_hooks(sharded))
    hook.remove()
    state = distributed.sharded_state(sharded)
    assert distributed.is_root(sharded) is None
    assert distributed.sharding_phase(state) == distributed.IDLE_PHASE
    root = torch.zeros((), requires_grad=True)
    behind = distributed.begin_sharded_forward(state, sharded, root)
    assert distributed.is_root(sharded)
    assert distributed.sharding_phase(state) == distributed.FORWARD_PHASE
    assert not hasattr(sharded.weight, "device_mesh")
    distributed.set_sharding_phase(state, distributed.REPLAY_PHASE)
    casts = hasattr(state, "_cast_forward_inputs")  # not in torch 2.10, where a forward runs again
    loss = sharded(torch.ones(1, 3, dtype=None if casts else torch.bfloat16)).sum() + behind
    distributed.set_sharding_phase(state, distributed.FORWARD_PHASE)
    distributed.end_sharded_forward(state, sharded, [loss])
    sharded.reshard()
    seen = []
    behind.register_hook(lambda _: seen.append((sharded.weight, sharded.weight.grad.sum().item())))
    loss.backward()
    assert not hasattr(seen[0][0], "device_mesh")
    assert seen[0][1] == 6.0
    assert sharded.weight.grad.to_local().tolist() == [[1.0] * 3] * 2
    assert distributed.sharding_phase(state) == distributed.IDLE_PHASE


class SomeMode(TorchFunctionMode):
    pass


def test_function_modes():
    """The default device is one; they can be exchanged, and are as they were afterwards."""
    with torch.device("meta"), SomeMode() as mode:
        outer, inner = private.function_modes()
        assert inner is mode
        assert private.changes_functions()
        with private.under_function_modes([outer]):
            assert private.function_modes() == [outer]
            assert not private.changes_functions()
            assert torch.empty(()).is_meta
        assert private.function_modes() == [outer, inner]
    assert private.number_of_function_modes() == 0


def test_what_parametrize_caches():
    layer = weight_norm(nn.Linear(2, 2))
    variables, names = private.PARAMETRIZED
    with parametrize.cached():
        weight = layer.weight
        cache, enabled = (variables[name] for name in names)
        assert enabled == 1
        assert any(value is weight for value in cache.values())
    assert [variables[name] for name in names] == [{}, 0]


def test_every_name_has_a_reader():
    names, read = set(), {"ShardedParameter"}  # which is returned
    for module in (private, distributed):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            names |= {getattr(node, "name", "_")}
            names |= {alias.asname or "_" for alias in getattr(node, "names", ())}
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                parts = (part for part in ast.walk(node) if isinstance(part, ast.Name))
                names |= {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = str(getattr(node, "module", ""))
            if module.startswith("accumext.tensors.torch_private"):
                read |= {alias.name for alias in node.names}
    assert {name for name in names if not name.startswith("_")} == read


def test_no_other_file_reads_a_private_name():
    """An attribute of torch's classes, or a private module."""
    torch_names = set()
    for cls in (torch.Tensor, nn.Parameter, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler):
        torch_names |= {name for name in dir(cls) if name.startswith("_") and name[1] != "_"}
    torch_names |= {name for name in vars(nn.Linear(1, 1)) if name.startswith("_")}
    torch_names |= {name for name in vars(torch.amp.GradScaler("cpu")) if name.startswith("_")}
    found = []
    for path in PACKAGE.rglob("*.py"):
        if "torch_private" in path.stem:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in torch_names:
                owner = getattr(node.value, "id", None)
                found += [(path.name, node.lineno, node.attr)] * (owner not in ("self", "draft"))
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("torch") and "._" in module:
                found.append((path.name, node.lineno, module))
    assert not found
