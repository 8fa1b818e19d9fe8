"""Is my loop right? An observer of any training loop, which says what it does wrongly."""

from accumext.audit._audit import Audit, audit
from accumext.audit._events import Finding

__all__ = ["Audit", "Finding", "audit"]
