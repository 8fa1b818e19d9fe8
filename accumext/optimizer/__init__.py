"""`AccumulatingOptimizer`: gradient accumulation as an optimizer around any optimizer."""

from accumext.optimizer._accumulating_optimizer import (
    AccumulatingOptimizer as AccumulatingOptimizer,
)
from accumext.optimizer._report import WindowReport as WindowReport
