"""`AccumulatingOptimizer`: gradient accumulation as an optimizer around any optimizer."""

from accumext.optimizer._accumulating_optimizer import (
    AccumulatingOptimizer as AccumulatingOptimizer,
)
from accumext.optimizer._masters import masters as masters
from accumext.optimizer._sharded_window import window_memory as window_memory
from accumext.optimizer._window_report import WindowReport as WindowReport
