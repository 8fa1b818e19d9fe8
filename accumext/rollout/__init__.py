"""`rollout`: the loss of any recurrence on its own output, in the memory of its states."""

from accumext.rollout._rollout import RolloutOutput as RolloutOutput
from accumext.rollout._rollout import rollout as rollout
