"""Loops over the steps of any model, in memory that does not grow with them: `tbptt`, `rollout` and
`chunked_loss`."""

from accumext.loops._chunked_loss import chunked_loss as chunked_loss
from accumext.loops._rollout import RolloutOutput as RolloutOutput
from accumext.loops._rollout import rollout as rollout
from accumext.loops._tbptt import TBPTTResult as TBPTTResult
from accumext.loops._tbptt import tbptt as tbptt
