#!/usr/bin/env bash
# Expected: `number / tensor` is the IEEE quotient, as `tensor / tensor` and `torch.div` are; the
# number is an operand like any other, and n / n is 1.
# What happens: torch multiplies the tensor's reciprocal by the number. That rounds twice, so 49 / 49
# is below 1 in float64 and its integer part is 0; and where the reciprocal overflows, a quotient
# that is an ordinary number is inf. A clip's `max_norm / norm` is such a division.
# Version: torch 2.13.0. Read in torch/_tensor.py: Tensor.__rdiv__, which is __rtruediv__.
# Seen:
#   49 / tensor(49.): 0.9999999999999999 of which int() is 0
#   tensor(49.) / tensor(49.): 1.0
#   float32, n from 1 to 1000: n / n is not 1 for 135 numbers: 41 47 55 61 82 ...
#   0.01 / float16 1e-5: inf
#   the same, both tensors: 999.0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch

one = torch.tensor(49.0, dtype=torch.float64)
print("49 / tensor(49.):", repr((49 / one).item()), "of which int() is", int(49 / one))
print("tensor(49.) / tensor(49.):", repr((one / one).item()))
numbers = range(1, 1001)
wrong = [n for n in numbers if (n / torch.tensor(float(n))).item() != 1]
print("float32, n from 1 to 1000: n / n is not 1 for", len(wrong), "numbers:", *wrong[:5], "...")
small = torch.tensor(1e-5, dtype=torch.float16)
print("0.01 / float16 1e-5:", (0.01 / small).item())
print("the same, both tensors:", (torch.tensor(0.01, dtype=torch.float16) / small).item())

assert (49 / one).item() == 1 - 2**-53, "49 / 49 is 1 now"
assert int(49 / one) == 0 and (one / one).item() == 1, "tensor / tensor has changed"
assert len(wrong) > 50, "numbers are divided in one rounding now"
assert (0.01 / small).item() == float("inf"), "the reciprocal no longer overflows"
assert 998 < (torch.tensor(0.01, dtype=torch.float16) / small).item() < 1000
PYTHON
venv/bin/python finding.py
