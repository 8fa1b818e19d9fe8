"""Large products with sums in the accumulation dtype, against the definition in float64."""

import pytest
import torch
from support.tensors import dtype_id
from torch import Tensor

import accumext

add_matmul = torch.ops.accumext.add_matmul.default

DTYPES = [  # of the sums, of the left and of the right operand
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.float16, torch.float32),
]
# Around blocks of 4, 6, 12 and 32 rows and spans of 240; panels of 16 and 32 columns; pairs and
# tiles of 32 terms, and panels of 256 and 512 of them.
ROWS = [1, 3, 4, 5, 6, 11, 12, 13, 31, 32, 33, 239, 240, 241, 500]
DEPTHS = [1, 2, 3, 31, 32, 33, 64, 255, 256, 257, 512, 513, 1100]
COLUMNS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 65]
SHAPES = (
    [(rows, 37, 33) for rows in ROWS]
    + [(13, depth, 33) for depth in DEPTHS]
    + [(13, 37, columns) for columns in COLUMNS]
    + [(2100, 40, 20), (40, 3000, 70)]  # shared out by rows, and by columns
)


def operand(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    """A matrix among NaN, which no product may read."""
    shape = (columns, rows) if layout == "columns" else (rows, columns)
    memory = torch.full((shape[0] + 2, shape[1] + 5), float("nan"), dtype=dtype)
    matrix = memory[1:-1, 3:-2]
    matrix.copy_(torch.randn(shape))
    if layout == "strided":
        spread = torch.full((rows, 2 * columns), float("nan"), dtype=dtype)
        return spread[:, ::2].copy_(matrix)
    return matrix.t() if layout == "columns" else matrix


def error_and_bound(
    sums: Tensor, left: Tensor, right: Tensor, before: Tensor
) -> tuple[float, float]:
    """The largest distance to the product of the operands as they are rounded, and what the sums'
    rounding allows: an ulp per term, of the sum of magnitudes."""
    if left.dtype != sums.dtype:
        right = right.to(left.dtype)
    exact = before.double() + left.double() @ right.double()
    size = before.double().abs() + left.double().abs() @ right.double().abs()
    ulps = left.shape[1] * torch.finfo(sums.dtype).eps
    return float(((sums - exact).abs() / size).max()), ulps


@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(map(dtype_id, dtypes)))
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_products_are_those_of_the_definition(layout, dtypes, overwrite):
    torch.manual_seed(0)
    for rows, depth, columns in SHAPES:
        left = operand(rows, depth, dtypes[1], layout)
        right = operand(depth, columns, dtypes[2], layout)
        before = torch.zeros(rows, columns, dtype=dtypes[0]) if overwrite else torch.randn(
            rows, columns, dtype=dtypes[0]
        )  # fmt: skip
        memory = torch.full((rows + 2, columns + 2), 7.0, dtype=dtypes[0])
        sums = memory[1:-1, 1:-1]
        sums.copy_(torch.full_like(before, float("nan")) if overwrite else before)
        add_matmul(sums, left, right, overwrite)
        error, bound = error_and_bound(sums, left, right, before)
        assert error <= bound, (rows, depth, columns)
        memory[1:-1, 1:-1] = 7.0
        assert torch.equal(memory, torch.full_like(memory, 7.0)), (rows, depth, columns)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_no_terms_and_no_sums(overwrite):
    sums = torch.ones(3, 4)
    add_matmul(sums, torch.empty(3, 0), torch.empty(0, 4), overwrite)
    assert torch.equal(sums, torch.full((3, 4), 0.0 if overwrite else 1.0))
    add_matmul(torch.empty(0, 4), torch.empty(0, 2), torch.ones(2, 4), overwrite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("shape", [(1000, 300, 70), (70, 3000, 130)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, shape):
    rows, depth, columns = shape
    left, right = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            sums = torch.ones(rows, columns)
            torch.ops.accumext.add_matmul(sums, left, right, False)
            found.append(sums)
    finally:
        torch.set_num_threads(threads)
    own = accumext.backend() != "reference" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    if own:  # the library's products promise nothing
        assert all(torch.equal(sums, found[0]) for sums in found)
