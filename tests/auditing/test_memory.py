"""What an audit holds: nothing of the size of gradients; of half-precision ones a float32 sum."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import accumext
from accumext._peak_memory import peak_memory

ROWS, WIDTH = 200_000, 64  # of an embedding that is nearly all of the model


def peak(dtype: torch.dtype, audited: bool) -> int:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def window():
        with accumext.audit(model, optimizer) if audited else nullcontext():
            for _ in range(3):
                (model(torch.randint(ROWS, (8,))).square().mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    return peak_memory(window)


# Beyond those of the bare loop; a hundredth for sketches, and parts that are converted at once.
@pytest.mark.parametrize(("dtype", "sets"), [(torch.float32, 0.0), (torch.bfloat16, 2.0)])
def test_sets_of_gradients(dtype, sets):
    size = (ROWS + 8) * WIDTH * dtype.itemsize
    parts = 2**20 * 4 * 3
    more = peak(dtype, audited=True) - peak(dtype, audited=False)
    assert more <= sets * size + parts + 0.01 * size
