"""The private names of torch that accumext uses, each with the reason.

A release of torch may change any of them, so no other file reads them, but those that
torch_private_distributed.py and the auditor's own have. If no other test would notice a change of
one, tests/tensors/test_torch_private.py tests it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch._compile import _disable_dynamo
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState as OptState
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

_F = TypeVar("_F", bound=Callable[..., Any])

# Why `tree_*` are imported: recurrent states nest tensors in tuples, lists and dicts, for which
# torch has no public functions (`torch.utils.pytree` does not exist in every supported release).

# A range in a profile. `torch.profiler.record_function` takes 10 us, this one a tenth of that.
record_function = _RecordFunctionFast

# `torch.no_grad` as a function: the context manager takes as long as an operation on ten tensors.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


# Tells whether a tensor is a view; torch's documentation uses this private method, too.
is_view: Callable[[Tensor], bool] = Tensor._is_view


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def not_compiled(function: _F) -> _F:
    """Do as `torch.compiler.disable`, which would import the compiler, for seconds, at once."""
    return cast(_F, _disable_dynamo(function))


def not_traced(*functions: Callable[..., Any]) -> None:
    """Keep torch.compile from tracing Python functions, at no cost per call. Hooks would be traced
    if a compiled function runs in pieces, as one that calls `nn.GRU` does."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:  # else nothing is compiled
        for function in functions:
            compiler.skip_code(function.__code__)


# --- tensors --------------------------------------------------------------------------------------

# The counter of in-place writes, with which autograd refuses a saved tensor that has changed. The
# decoder needs it because it reads parameters again in its backward pass without saving them; the
# wrapper, to see that a gradient was written. Inference tensors have none: RuntimeError.
write_count: Callable[[Any], int] = attrgetter("_version")

# Writable values of a sparse tensor, coalesced or not; `values()` requires a coalesced one.
sparse_values: Callable[[Tensor], Tensor] = methodcaller("_values")
sparse_indices: Callable[[Tensor], Tensor] = methodcaller("_indices")

# The part of a DTensor on this process, in the same memory. `to_local()` returns a view that
# autograd records, and waits for collectives that have begun.
local_part: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")

negated_view: Callable[[Tensor], Tensor] = torch._neg_view  # a view of the same memory
zero_all_: Callable[[list[Tensor]], None] = torch._foreach_zero_  # one launch for a list

# Raises an error on the device of a tensor that is false; the host does not wait for it.
assert_on_device: Callable[[Tensor, str], None] = torch._assert_async

# Hooks that have to see the gradient of a parameter, before and after it is accumulated.
gradient_hooks: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


@contextmanager
def unhooked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks that see gradients of these tensors, until the context ends."""
    all_hooks = [hooks for hooks, _ in map(gradient_hooks, tensors) if hooks]
    copies = [hooks.copy() for hooks in all_hooks]
    try:
        for hooks in all_hooks:
            hooks.clear()
        yield
    finally:
        for hooks, copy in zip(all_hooks, copies):
            hooks.update(copy)


def storage_users(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return the number of tensors that use each storage."""
    return list(map(torch._C._storage_Use_Count, map(attrgetter("_cdata"), storages)))


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors of the same memory share, or without data would share."""
    key: int = tensor.untyped_storage()._cdata
    return key


def backward_runs() -> bool:
    """Tell whether this is called by a backward pass."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


def saved_tensors_are_hooked() -> bool:
    """Tell whether hooks take the tensors that autograd saves, such as torch.utils.checkpoint's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# Whether the backward pass that runs now retains its graph.
retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# The number of a node of the graph: later nodes of a thread have greater numbers, and nodes that
# add to a leaf's `.grad` the greatest.
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")


def next_node_number() -> int:
    """Return a number that is not greater than those of nodes that autograd makes from here on."""
    node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    return 0 if node is None else node_number(node)


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf to whose `.grad` a node adds; None for other nodes."""
    leaf: Tensor | None = node.variable if type(node).__name__ == "AccumulateGrad" else None
    return leaf


def is_since(node: Any, first: int) -> bool:
    """Tell whether a node was made since `next_node_number` gave `first`, and adds to no leaf."""
    return node_number(node) >= first and leaf_of(node) is None


def _reached(first: int, roots: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of a graph made since `first`, and those of leaves they use, each once."""
    waiting, seen = [t.grad_fn for t in roots], {None}
    while waiting:
        node: Any = waiting.pop()
        if node not in seen and node_number(node) >= first:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def nodes_since(first: int, roots: Iterable[Tensor]) -> Iterator[Any]:
    """Return the nodes of a graph for which `is_since` is true, each once."""
    return (node for node in _reached(first, roots) if leaf_of(node) is None)


def leaves_since(first: int, roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that the nodes made since `first` use, each once."""
    leaves = map(leaf_of, _reached(first, roots))
    return [leaf for leaf in leaves if leaf is not None]


def shape_into(node: Any) -> torch.Size:
    """Return the shape of the first operand of a node, whose own node computed it."""
    shape: torch.Size = node.next_functions[0][0]._input_metadata[node.next_functions[0][1]].shape
    return shape


def saved_factor(node: Any) -> object:
    """Return the second operand that a multiplication's node has saved; None if it has not."""
    return getattr(node, "_saved_other", None)


# --- optimizers -----------------------------------------------------------------------------------

# `torch.amp.GradScaler`: the scale on its device, None before the first loss (the public
# `get_scale` waits for the device); and its state of every optimizer, by id, until `update`.
scale_tensor: Callable[[GradScaler], Tensor | None] = methodcaller("_get_scale_async")
optimizer_states: Callable[[GradScaler], dict[int, dict[str, Any]]] = attrgetter(
    "_per_optimizer_states"
)

# Attributes that hold the hooks of an optimizer: a wrapper uses those of the wrapped optimizer.
HOOK_ATTRIBUTES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# The attribute that holds the hooks after a step, by id, in the order in which they run. A class
# that never calls `Optimizer.__init__`, such as PostLocalSGDOptimizer, lacks it and runs no hooks.
STEP_POST_HOOKS = "_optimizer_step_post_hooks"

# The attribute by which an optimizer says that its step unscales with `grad_scale` and skips at
# `found_inf`: GradScaler then always calls the step, without unscaling.
TAKES_SCALE = "_step_supports_amp_scaling"

# An attribute of an optimizer by which a learning-rate scheduler sees that it has stepped.
HAS_STEPPED = "_opt_called"

# An attribute of `step`: without it, `Optimizer.__init__` of a subclass wraps `step` with hooks.
STEP_IS_WRAPPED = "hooked"


def takes_scale(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer's step unscales with `grad_scale` and skips at `found_inf`."""
    return bool(getattr(optimizer, TAKES_SCALE, False))


# --- operators ------------------------------------------------------------------------------------

# The C++ callable of an operator overload, without the Python call around it, in which a signal
# could raise an exception.
call_of_operator: Callable[[Any], Callable[..., Any]] = attrgetter("_op")
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
_KEYS = torch._C.DispatchKey.__members__
remove_kernels: Callable[[torch.library.Library], None] = methodcaller("_destroy")


def call_default_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as if no kernel were registered for the device."""
    return op._op_dk(_KEYS["CompositeExplicitAutograd"], *args, **kwargs)


def compiled_kernel(op: Any, key: str) -> Callable[..., Any]:
    """Return the kernel that an operator has for a dispatch key, which stays callable if another
    one is registered over it later."""
    kernel, keys = torch.library.get_kernel(op, key), torch._C.DispatchKeySet(_KEYS[key])
    return functools.partial(kernel.call_boxed, keys)


def operator(name: str) -> Any:
    """Return the operator of a name that a library registers, such as `scale_.scalar`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.accumext, packet), overload or "default")


# --- modules --------------------------------------------------------------------------------------

# Hooks of a module. If the decoder computes its forward from the weights, it cannot call them.
forward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)
backward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)

# Hooks of all modules, as registered by `torch.nn.modules.module.register_module_forward_hook`.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)

# Prefixes of the Python modules of hooks that need not run if the decoder computes from weights: it
# gathers them itself, as hooks of `fully_shard` and accumext do, and FlopCounterMode's only watch.
_WATCHING = ("torch.distributed.fsdp.", "accumext.", "torch.utils.module_tracker")


def only_watching(hooks: Iterable[dict[int, Any]]) -> bool:
    """Tell whether a call computes the same without these hooks."""
    modules = [str(getattr(hook, "__module__", "")) for some in hooks for hook in some.values()]
    return all(name.startswith(_WATCHING) for name in modules)


# The global variables in which `parametrize.cached()` keeps parametrized weights.
PARAMETRIZED = vars(parametrize), ["_cache", "_cache_enabled"]

number_of_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> list[Any]:
    """Return the active TorchFunctionModes, the outermost first, without those of accumext. The
    default device is such a mode."""
    stack = _get_current_function_mode_stack()
    return [mode for mode in stack if not type(mode).__module__.startswith("accumext.")]


def changes_functions() -> bool:
    """Tell whether a TorchFunctionMode is active that may change what functions return. A default
    device does not count."""
    return any(not isinstance(mode, DeviceContext) for mode in function_modes())


@contextmanager
def under_function_modes(modes: list[Any]) -> Iterator[None]:
    """Activate these modes, and no others, and `__torch_function__` of tensor subclasses. A
    backward pass begins without both."""
    now = [_pop_mode() for _ in range(number_of_function_modes())]
    for mode in modes:
        _push_mode(mode)
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for _ in range(number_of_function_modes()):
            _pop_mode()
        for mode in reversed(now):
            _push_mode(mode)


# The dicts in which a module keeps its own buffers and children, by name.
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def translated_from(module: Any) -> tuple[str, str] | None:
    """Return how a module of torch's own was translated, by torch.compile or torch.jit, and its
    original class, since the result is of another class. None for any other object."""
    if isinstance(module, torch.jit.ScriptModule):
        names = module._c._type().qualified_name().split(".")  # "__torch__.torch.nn.modules...."
        return ("a scripted", names[-1]) if names[1:4] == ["torch", "nn", "modules"] else None
    inner = getattr(module, "_orig_mod", None) if isinstance(module, nn.Module) else None
    if inner is None or not type(inner).__module__.startswith("torch.nn."):
        return None
    return "a compiled", type(inner).__name__


# --- tensors without data -------------------------------------------------------------------------


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of FakeTensorMode, whose class takes a while to import."""
    return hasattr(tensor, "fake_mode")


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which, inside `Allocations`, operators compute only shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a while to import

    return FakeTensorMode(allow_non_fake_inputs=True)


class Allocations(TorchDispatchMode):
    """Counts bytes of tensors that operators make inside `fake_tensors`.

    A storage counts from the operator that makes it until nothing holds it. Autograd adds two
    gradients in the memory of one, unless both are views, but not gradients without data: so such a
    sum does not count in addition to its parts. Nor does a stack, which may be unused.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._fake = fake
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "prim":  # such as the question for a device
            return func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.now)
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is a number's tensor
            # FakeTensorMode converts a tensor with data only if other arguments have none.
            args, kwargs = tree_map(self._without_data, (args, kwargs))
        results = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return results
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        parts = [part for part in args if isinstance(part, Tensor)]
        in_place = func is torch.ops.aten.add.Tensor and not all(part._is_view() for part in parts)
        if not in_place and func is not torch.ops.aten.stack.default:
            self.peak = max(self.peak, self.now)
        return results

    def _without_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or self._fake.is_our_fake(leaf):
            return leaf
        return self._fake.from_tensor(leaf)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size


# --- cuDNN ----------------------------------------------------------------------------------------

_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t


def flatten_for_cudnn(weights: list[Tensor], kind: str, layers: int, units: int) -> None:
    """Move the weights, per layer weight_ih, weight_hh and maybe biases, into one chunk of memory,
    as cuDNN reads them. `nn.GRU` and others do so when they are moved to a GPU."""
    per_layer, mode = len(weights) // layers, _CUDNN_MODES[kind]
    inputs, none = weights[0].shape[1], 0  # no projections
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(
            weights, per_layer, inputs, mode, units, none, layers, False, False
        )


# --- processors -----------------------------------------------------------------------------------


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Tell whether the CPU has AVX512-BF16, and ATEN_CPU_CAPABILITY allows it. The public
    `torch.backends.cpu` tells of AVX-512, but not of this extension."""
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and torch.cpu._is_avx512_bf16_supported()
