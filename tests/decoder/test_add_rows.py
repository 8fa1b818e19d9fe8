"""add_rows: rows of one matrix, times factors, to rows of another."""

import pytest
import torch
from support.tensors import dtype_id

import accumext

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def expected(sums, to, factor, rows, source):
    """Return the sums, one row after the other, in the dtype of the sums."""
    sums = sums.clone()
    count = len(to if to is not None else source if source is not None else sums)
    for i in range(count):
        row = rows[i if source is None else source[i]].to(sums.dtype)
        sums[i if to is None else to[i]] += row if factor is None else row * factor[i]
    return sums


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 70])
@pytest.mark.parametrize("named", ["to", "source", "both", "none"])
@pytest.mark.parametrize("with_factor", [False, True], ids=["plain", "factor"])
def test_rows_are_added_one_after_the_other(dtype, columns, named, with_factor):
    # 20,000 rows make pieces of 16 columns. Products with thirds are rounded, and so are their
    # sums, in each order otherwise.
    count = 20_000 if columns == 70 else 50
    to = torch.randint(40, (count,)) if named in ("to", "both") else None
    source = torch.randint(30, (count,)) if named in ("source", "both") else None
    accumulation = torch.promote_types(dtype, torch.float32)
    sums = torch.ones(count if to is None else 40, columns + 3, dtype=accumulation)[:, :columns]
    rows = (torch.randint(-8, 9, (count if source is None else 30, columns + 2)) / 8).to(dtype)
    factor = torch.arange(count).remainder(7).to(accumulation) / 3 if with_factor else None
    found = sums.clone(memory_format=torch.preserve_format)
    operands = (to, factor, rows[:, :columns], source)
    torch.ops.accumext.add_rows(found, *operands)
    own = accumext.backend() != "reference"  # torch's index_add_ promises no order
    truth = expected(sums, *operands)
    if own:
        assert torch.equal(found, truth)
    else:
        # 500 sums of up to 1,000, each rounded by 6e-8 of it
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-4)


def test_no_rows_and_no_columns():
    sums = torch.ones(3, 4)
    none = torch.empty(0, dtype=torch.int64)
    torch.ops.accumext.add_rows(sums, none, torch.empty(0), torch.empty(0, 4), None)
    torch.ops.accumext.add_rows(sums, none, None, torch.ones(2, 4), none)
    torch.ops.accumext.add_rows(torch.empty(3, 0), None, None, torch.empty(3, 0), None)
    assert torch.equal(sums, torch.ones(3, 4))
