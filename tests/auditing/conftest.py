"""The loops and processes of tests/conformance, which are run here under an audit."""

import sys

from support import ROOT

sys.path.append(str(ROOT / "tests" / "conformance"))
from your_loops import forget_accelerate as forget_accelerate
