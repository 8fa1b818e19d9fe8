"""Warnings of what a call sees in itself, each given once per optimizer."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from accumext.optimizer._engine import Engine
from accumext.optimizer._report import named
from accumext.optimizer._settings import OP, unlike_bare
from accumext.tensors import scalars


def warn_of_a_full_window(engine: Engine) -> None:
    """Warn that a micro-batch was added to a full window, before which a step is missing."""
    engine.warn_once(
        "full",
        f"one more micro-batch comes into a window of {engine.settings.window} that is full. Call "
        "opt.step(), not that of the wrapped optimizer, after every micro-batch, and put several "
        "backward passes that are one micro-batch into `with opt.micro_batch():`",
    )


def warn_of_passes(engine: Engine) -> None:
    """Warn before backward passes of one sequence that would each be a micro-batch. A window that
    is a sum does not divide by their number."""
    settings = engine.settings
    if engine.state.micro_batch is None and settings.reduction == "mean" and settings.window > 1:
        engine.warn_once(
            "full",  # the topic of a window that they would overfill
            "tbptt runs a backward pass every k1 steps, and each is a micro-batch of its own. Put "
            "the call inside `with opt.micro_batch():`",
        )


def warn_of_unscaled(engine: Engine) -> None:
    """Warn of a loss that did not come through `opt.backward`, which has scaled others."""
    engine.warn_once(
        "unscaled",
        "a backward pass of your own left gradients, and they are divided by the loss scale. Call "
        "opt.backward(loss) for every loss, or scaler.scale(loss).backward()",
    )


def warn_of_scaled(engine: Engine) -> None:
    """Warn of a loss that a GradScaler has scaled, whose gradients it is not asked to unscale."""
    engine.warn_once(
        "scaled",
        "the loss was scaled, and nobody unscales its gradients. Pass the scaler, "
        f"{OP}(..., scaler=scaler), and the loss itself, opt.backward(loss); or call "
        "scaler.scale(loss).backward() and scaler.step(opt)",
    )


def warn_of_skip(engine: Engine, proxy: Optimizer) -> None:
    """Warn of a skipped window, unless a loss scale above 1 may be the cause."""
    last = engine.state.last
    if last is None or "found_inf" in vars(proxy):
        return
    scale = float(last.loss_scale) if scalars.on_host(last.loss_scale) else math.inf
    if scale > 1.0:
        return
    names = named(last.nonfinite)
    where = f"the gradient of {names}" if names else f"its norm, with a loss scale of {scale:g}"
    engine.warn_once(
        "skip",
        f"a window was skipped, for inf or NaN in {where}. This is said once; opt.last.skipped and "
        "opt.last.nonfinite tell of every window, and on_nonfinite='raise' stops at the first",
    )


def warn_of_release(engine: Engine) -> None:
    """Warn of parameter hooks that use up gradients while a backward pass runs."""
    engine.warn_once(
        "nothing",  # the topic of "found no gradient", for which this is the reason
        "hooks of the parameters take gradients out of .grad in the backward pass, as an optimizer "
        "does that steps there (gradient release, LOMO): it takes a step per backward pass, and "
        "window, max_norm and scaler do nothing. Use it without the wrapper, or have it step in "
        "opt.step()",
    )


def warn_of_another_step(engine: Engine, name: str) -> None:
    """Warn of a wrapped optimizer's method that steps on `.grad` instead of the window."""
    if ignored := " and ".join(unlike_bare(engine.settings)):
        engine.warn_once(
            "another step",
            f"{name} steps at once on what is in .grad, without {ignored}. Call opt.step(), "
            f"with a closure if the optimizer takes one; or leave {ignored} out",
        )


def warn_of_a_load(engine: Engine) -> None:
    """Warn of a checkpoint that comes into an open window, unless the window is one's, too."""
    count = engine.state.micro_batches
    if count > engine.state.saved:
        engine.warn_once(
            "load",
            f"load_state_dict inside a window, whose gradients, of {count} micro-batches, are of "
            "the weights before. Call opt.discard() first, or opt.flush() to step on them",
        )
