"""Is my loop right? An observer of any training loop, which says what it does wrongly."""

from accumext.auditing._audit import Audit, audit
from accumext.auditing._events import Finding

__all__ = ["Audit", "Finding", "audit"]
