"""Whether a call of one of torch's modules does more than the formula of its class, as with hooks.
The kernels compute the formula from the weights; a module that does more is called."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accumext.tensors.torch_private import (
    GLOBAL_HOOKS,
    backward_hooks,
    changes_functions,
    forward_hooks,
    is_fake,
    number_of_function_modes,
    only_watching,
    own_children,
)

_CELLS = (nn.GRUCell, nn.LSTMCell, nn.RNNCell, nn.GRU, nn.LSTM, nn.RNN)
_CALL, _FORWARDS = nn.Module.__call__, {k.forward for k in (nn.Embedding, nn.Linear, *_CELLS)}
_PLAIN = (nn.Parameter, Tensor)


def changes_when_read(module: nn.Module) -> bool:
    """Tell whether reading a weight changes its next value, as a parametrization with buffers does
    in training: `parametrizations.spectral_norm` takes a step of its power iteration."""
    several = own_children(module).get("parametrizations")
    if several is None:
        return False
    return any(p.training and next(p.buffers(), None) is not None for p in several.children())


def formula_weights(module: nn.Module, *names: str) -> list[Any] | str:
    """Return the weights of these names (None for those that the module lacks) if a call computes
    just the formula of the class from them. If it does more, return a text that says what.
    Parametrizations without buffers and an in-place `module.compile()` leave the formula alone."""
    kind = type(module)
    if kind.__call__ is not _CALL:
        return f"{kind.__name__} with a __call__ of its own"
    if kind.forward not in _FORWARDS:
        return f"{kind.__name__} with a forward of its own"
    if "forward" in vars(module):
        return f"{kind.__name__} with a forward that was replaced"
    forward, backward = forward_hooks(module), backward_hooks(module)
    if any(forward) and not only_watching(forward):
        return f"{kind.__name__} with forward hooks"
    if any(backward):
        return f"{kind.__name__} with backward hooks"
    if any(GLOBAL_HOOKS) and not only_watching(GLOBAL_HOOKS):
        return "hooks of all modules"
    if number_of_function_modes() > 0 and changes_functions():
        return "a TorchFunctionMode around it"
    if "parametrizations" in own_children(module) and changes_when_read(module):
        return f"{kind.__name__} with weights that change when they are read"
    weights = []
    for name in names:
        weight: Any = getattr(module, name, None)
        if not (weight is None or weight.__class__ in _PLAIN or is_fake(weight)):
            return f"{kind.__name__} with weights of class {type(weight).__name__}"
        weights.append(weight)
    return weights
