"""The modules of benchmarks, and of the table of what works, can be imported."""

import sys

from support import ROOT

sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "bench/trainers", "tests/conformance")]
