"""A window whose gradient is too large is dropped, not clipped: one bad batch in a long run.

`main_grad` is the sum of the window before its last step, so its norm is known while the window can
still be dropped. That costs a copy of the gradient and a read of the device in every window.
"""

import torch
from torch.nn.functional import cross_entropy

import accumext

torch.manual_seed(0)
rows = torch.randn(320, 8)
rows[100] *= 1e4  # a bad one
batches = list(zip(rows.split(16), rows[:, :4].argmax(1).split(16)))

WINDOW, BOUND = 4, 10.0
model = torch.nn.Linear(8, 4)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=WINDOW, max_norm=1.0
)


def norm_of_window(weight: float) -> float:
    """Return the norm of the mean over all rows of the open window."""
    sums = [opt.main_grad(p) for p in model.parameters()]
    found = [main for main in sums if main is not None]
    return accumext.total_norm(found, inv_scale=1.0 / weight).item()


weight, taken, dropped = 0, 0, 0
for number, (x, y) in enumerate(batches, 1):
    opt.backward(cross_entropy(model(x), y), weight=len(y))
    weight += len(y)
    if number % WINDOW == 0:  # the window is full, and the next step would close it
        if not norm_of_window(weight) <= BOUND:  # NaN, too
            opt.discard()
            dropped += 1
        weight = 0
    opt.step()  # does nothing where the window is empty
    taken += opt.stepped

print(f"{taken} windows taken, {dropped} dropped, the last: {opt.stats()}")
