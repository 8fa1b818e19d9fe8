"""The findings and questions, the worst first: their names, cures, and what would make them right.

Ids stay the same from release to release. A rule decides whether its result is a question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from accumext.auditing._events import Finding, Record, Window


class Kind(NamedTuple):
    name: str
    cure: str
    right_if: str = ""  # what makes a question right


# "id: name", the cure, and "right if ..." if it may be intended; without it, it is no question.
_TABLE = """\
step.nonfinite: step on inf or nan
  scaler.step(optimizer), or on_nonfinite= of AccumulatingOptimizer, which skips the window or the
  micro-batch, or raises
step.skipped: steps skipped
  find the micro-batch that has it: no loss scale helps where the loss is not finite;
  opt.last.nonfinite of AccumulatingOptimizer names parameters
  right if the loss scale still falls to its first good value
scaler.unscale_missing: unscale missing
  scaler.step(optimizer) instead of optimizer.step(); or AccumulatingOptimizer(optimizer,
  scaler=scaler) and opt.backward(loss)
accumulation.lost: micro-batches lost
  optimizer.zero_grad() after optimizer.step(), and nowhere else
accumulation.counted_again: micro-batches counted again
  optimizer.zero_grad() after every optimizer.step(); backward on each micro-batch's own loss,
  without retain_graph, and loss.detach() for the log
accumulation.another_loss: gradients of another optimizer's loss
  zero_grad() of this optimizer before its own passes, or requires_grad_(False) of its parameters
  during the other's
  right if both losses shall train these parameters
accumulation.leftover: rest of an epoch in the next window
  step on the rest when an epoch ends, divided by what it holds: opt.flush() of
  AccumulatingOptimizer; or zero_grad() there, which drops it
accumulation.partial: divisor of a full window
  divide the last window of an epoch by the micro-batches that it holds, or opt.flush() of
  AccumulatingOptimizer, which does
accumulation.varying: factor differs between windows
  divide every loss by what its window holds, micro-batches or targets: AccumulatingOptimizer
  does, with weight= for targets
  right if the loss has weights of its own
accumulation.scaled_between: gradients scaled between micro-batches
  clip once, after the window's last backward pass, or max_norm= of AccumulatingOptimizer
  right if older micro-batches shall count less
accumulation.divisor_missing: divisor missing
  divide every micro-batch's loss by their number, or AccumulatingOptimizer(optimizer, window=n),
  which divides by what a window holds
  right if the sum of the losses is meant, as of the terms of one loss
accumulation.divided_by_more: divided by more than the window
  divide once, the loss or the gradient, by what the window holds; for AccumulatingOptimizer:
  neither, and `with opt.micro_batch():` around the passes of one micro-batch, as tbptt's are
  right if the loss has this weight
accumulation.divided_by_less: divided by less than the window
  divide by what the window holds, or AccumulatingOptimizer, which does if its step is called after
  every pass
  right if the loss has this weight, or is a sum over steps that is meant
accumulation.window_of_one: accumulation without effect
  let a window hold more than one micro-batch, or do not divide
  right if the loss has this weight
accumulation.unequal_counts: micro-batches weighted equally
  sum the losses (reduction='sum') and divide by all targets of the window, or opt.backward(loss,
  weight=targets) of AccumulatingOptimizer
  right if every micro-batch shall weigh the same, however many targets it has
accumulation.unequal_weights: micro-batches weighted unequally
  give micro-batches of as many targets the same factor
  right if tasks, sources or batches have these weights
accumulation.dropped: micro-batches dropped
  optimizer.zero_grad() after optimizer.step(), and nowhere else
  right if they are dropped on purpose
accumulation.unused: micro-batches at the end in no step
  step on the rest when the loop ends: opt.flush() of AccumulatingOptimizer
  right if the rest is dropped on purpose, or the loop goes on after the audit
accumulation.sum: sum over targets
  divide by all targets of the window
  right if a step shall grow with its number of targets
scaler.mixed: scales mixed in one sum
  keep the loss scale until the window's step, or AccumulatingOptimizer, which unscales every
  micro-batch with its own
scaler.updated_inside: scaler updated inside a window
  scaler.update() once, after scaler.step(optimizer)
clip.before_unscale: clip before unscale
  scaler.unscale_(optimizer) before clip_grad_norm_, once per window, or max_norm= and scaler= of
  AccumulatingOptimizer
  right if max_norm is meant times the loss scale
clip.per_micro_batch: clip of each micro-batch
  clip once, after the window's last backward pass
  right if each micro-batch's gradient is kept by itself, as differential privacy does
clip.empty: clip of no gradients
  clip once, after the window's last backward pass, the parameters of a list, as a generator is
  empty the second time; or max_norm= of AccumulatingOptimizer, which keeps the sum elsewhere
clip.other_parameters: clip of other parameters
  clip_grad_norm_ of the parameters that the optimizer has
  right if their gradients are handed on to another model
clip.part: clip of a part
  clip_grad_norm_ of all parameters of the optimizer at once
  right if the others shall not be clipped
processes.not_reduced: parameters not reduced
  let a window's last forward and backward pass run outside of model.no_sync()
processes.reduced_each: reduced every micro-batch
  with model.no_sync(): around forward and backward of all micro-batches but the last, or
  opt.micro_batch(model) of AccumulatingOptimizer
  right if the network has time: the result is the same
processes.unequal_counts: ranks weighted equally
  divide by the targets of all ranks: sum the losses, all-reduce the counts; or opt.backward(loss,
  weight=targets) of AccumulatingOptimizer
  right if every rank shall weigh the same, however many targets it has
schedule.per_micro_batch: scheduler steps per micro-batch
  scheduler.step() after optimizer.step() alone; with AccumulatingOptimizer: if opt.stepped:
  scheduler.step()
  right if its length is counted in micro-batches
schedule.before_first_step: scheduler before the first step
  scheduler.step() after optimizer.step()
  right if it takes up an earlier run, or counts epochs from one
schedule.on_skipped: scheduler steps on skipped steps
  ask whether the scale has fallen before scheduler.step(), or opt.last.skipped of
  AccumulatingOptimizer
  right if it counts batches, not steps
average.per_micro_batch: average moves per micro-batch
  update the average after optimizer.step() alone; with AccumulatingOptimizer: if opt.stepped:
  update
average.on_skipped: average moves on skipped steps
  ask whether the scale has fallen before the update, or opt.last.skipped of AccumulatingOptimizer
  right if it counts batches, not steps
parameters.twice: parameters in two groups
  give every parameter to one group of one optimizer
  right if they take turns
parameters.no_optimizer: parameters in no optimizer
  make the optimizer after the last of the model's parameters, or requires_grad_(False)
  right if they shall not be trained (requires_grad_(False) saves their gradients), or the loop
  reads their gradients itself
parameters.no_gradient: parameters without gradient
  use them in the loss, or leave them out of the optimizer
  right if they are used later, in other windows, or frozen on purpose
memory.growing: graphs that grow from pass to pass
  accumext.decode_loss, with all of the gradient in one pass; or leave out retain_graph, and detach
  what one pass hands to the next, such as a recurrent state, as accumext.tbptt does
  right if gradients shall flow through all of them
memory.retained: many passes through one graph
  accumext.chunked_loss if a head runs in slices: the rest then runs backward once; by hand, run the
  slices on features.detach().requires_grad_(), and features.backward() once with its .grad
  right if what the passes share is cheap
memory.losses_summed: several losses in one graph
  backward() on each of them by itself, divided by their number
  right if the memory is there, or they are terms of one loss
memory.graph: one graph over many steps
  right if the memory is there
memory.logits: logits of a whole batch
  accumext.chunked_loss, which runs head and loss slice by slice, with the same gradient; or smaller
  micro-batches and AccumulatingOptimizer
  right if the memory is there
precision.sum: sum in half precision
  sum in float32: AccumulatingOptimizer does, and accumext.masters keeps the sum unrounded for the
  step
  right if the memory is worth the bits
truncation.distance: truncated gradient
  accumext.decode_loss: the exact gradient, in memory that does not grow with the logits; or a
  longer k2
  right if so near is near enough
truncation.detached: state detached between passes
  accumext.decode_loss, whose gradient is exact, and which keeps no logits; or accumext.tbptt(k1=1),
  which is this loop: the audit then measures how far its gradient is from the exact one
  right if so short a memory is meant
determinism.differs: runs differ
  seed every generator and the loader's workers; torch.use_deterministic_algorithms(True) names
  operations that are not deterministic
modules.batchnorm_eval: batch norm in eval
  model.train() after every validation
  right if its statistics are frozen on purpose
optimizer.decay: norms and biases decay
  a group of their own with weight_decay=0
  right if the recipe that you follow decays them, too
"""


def _read(table: str) -> Iterator[tuple[str, Kind]]:
    for entry in re.split(r"\n(?=\S)", table):
        head, *rest = entry.splitlines()
        id, _, name = head.partition(": ")
        cure, _, right_if = " ".join(map(str.strip, rest)).partition("right if ")
        yield id, Kind(name, cure.strip(), right_if)


KINDS = dict(_read(_TABLE.rstrip()))


def finding(
    id: str, value: float, where: str, evidence: str, asks: bool = True, cure: str = ""
) -> Finding:
    """Return a result of a rule: a question, if it `asks` and the table says when it is right."""
    name, usual_cure, right_if = KINDS[id]
    cure = cure or usual_cure
    if asks and right_if:
        cure = f"right if {right_if}; else {cure}"
    return Finding(name, evidence, cure, value, where, id)


def is_question(one: Finding) -> bool:
    return one.cure.startswith("right if ")


Found: TypeAlias = Iterator[Finding]


def some(names: Iterable[str], most: int = 3) -> str:
    """Return a few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def named(record: Record, numbers: Iterable[int]) -> str:
    """Return the names of a few parameters."""
    return some(record.names[n] for n in sorted(numbers))


def numbered(windows: Iterable[Window]) -> str:
    numbers = [str(window.index + 1) for window in windows]
    return f"window{'s' * (len(numbers) > 1)} {some(numbers, 6)}"


def several(n: int, noun: str, none: str = "0") -> str:
    plural = noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{n or none} {noun if n == 1 else plural}"


def mib(number: float) -> str:
    """Return a number of bytes as text."""
    power = min(int(math.log(max(number, 1.0), 1024)), 4)
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
