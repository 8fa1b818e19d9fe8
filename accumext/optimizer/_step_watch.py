"""Whether a step of the wrapped optimizer has changed parameters before it failed."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from accumext.master_weights import Rounding
from accumext.tensors.kinds import versions
from accumext.tensors.torch_private import STEP_POST_HOOKS, write_count


class StepWatch:
    """Tells, after an exception, whether an optimizer has written parameters.

    Versions of tensors tell, except after torch's fused kernels and writes through `.data`, which
    do not raise them. So a post-hook, the first of all, notes that the step itself has ended. If an
    optimizer runs no hooks, only versions tell.
    """

    def __init__(self, parameters: list[Tensor], rounding: Rounding | None = None) -> None:
        self._parameters = parameters
        try:
            self._before: list[int | None] = list(map(write_count, parameters))
        except RuntimeError:  # an inference tensor among them
            self._before = versions(parameters)
        self.rounding = rounding  # of masters into parameters, before post-hooks read the model
        self._ended = False

    def has_moved(self) -> bool:
        """Tell whether any parameter may have changed."""
        return self._ended or versions(self._parameters) != self._before

    def write(self) -> None:
        """Round masters that have been stepped on into the parameters."""
        if self.rounding is not None:
            self.rounding.write()

    def begin(self, optimizer: Optimizer) -> None:
        """Register the post-hook that notes the end of the step, before all others."""
        hooks = getattr(optimizer, STEP_POST_HOOKS, None)
        if hooks is not None:
            hooks[id(self)] = self._end
            hooks.move_to_end(id(self), last=False)

    def end(self, optimizer: Optimizer) -> None:
        """Remove the hook."""
        hooks = getattr(optimizer, STEP_POST_HOOKS, None)
        if hooks is not None:
            hooks.pop(id(self), None)

    def _end(self, *args: object) -> None:
        self._ended = True
        if self.rounding is not None:
            self.rounding.write()
