#!/usr/bin/env bash
# Expected: `with torch.autocast(...)` around a whole loop is slower or less exact at worst. A cache
# of weights that are cast once would notice that the optimizer has written them, as autograd does.
# What happens: the cache is kept until the outermost autocast ends, by the identity of the tensor,
# and nobody looks at its version. All forward passes in it use the first weights; the optimizer
# moves float32 weights by gradients of a model that stands still. Outside the loop they are new.
# Validation in an autocast of its own is therefore right, and the training loss alone is flat.
# Version: torch 2.13.0. Read in aten/src/ATen/autocast_mode.cpp: cached_cast. The documentation says
# that autocast "should wrap only the forward pass(es)", not why.
# Seen:
#   outputs in one autocast: 1.0 1.0 1.0 - weight at its end: 0.25
#   with cache_enabled=False: 1.0 0.75 0.5
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch


def losses(**options):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.ones(1, 1)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16, **options):
        for _ in range(3):
            out = model(x)
            seen.append(out.item())
            sgd.zero_grad()
            out.sum().backward()
            sgd.step()
    return seen, model.weight.item()


seen, weight = losses()
print("outputs in one autocast:", *seen, "- weight at its end:", weight)
uncached, _ = losses(cache_enabled=False)
print("with cache_enabled=False:", *uncached)
assert weight == 0.25 and uncached == [1, 0.75, 0.5], "SGD or autocast has changed"
assert seen == [1, 1, 1], "the cache sees steps now"
PYTHON
venv/bin/python finding.py
