"""What a step's gradient is made of, from sketches with known factors; and the sketches."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import records
import torch
from records import BOTH, OTHER, backward, clip, passes, random_sketch, record, step, total, window
from torch import Tensor

from accumext.auditing import _sketch
from accumext.auditing._events import Record, view_of
from accumext.auditing._fit import Fit, fits
from accumext.auditing._sketch import SIZE, sketch

MANY = [1.0, -2.0, 0.5, 3.0, 0.25, 7.0, 1e-2, 1.5]  # as many as two parameters can tell apart


def fit_of(one: Record) -> Fit | None:
    """The fit of the last window; None where nothing is claimed of it."""
    view = view_of(one, 0)
    return next((fit for fit in fits(view) if fit.window is view.windows[-1]), None)


def factors_of(one: Record) -> list[float] | None:
    fit = fit_of(one)
    return None if fit is None else [part.factor for part in fit.parts]


def near(first: Tensor, by: float) -> Tensor:
    return first + by * first.norm() * random_sketch() / 4


# --- factors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 5, 8])
def test_factors_of_passes(number):
    of = passes([1.0] * number)
    fit = fit_of(record(window(of, MANY[:number])))
    assert [part.of for part in fit.parts] == of
    assert [part.factor for part in fit.parts] == pytest.approx(MANY[:number], rel=1e-9)
    assert (fit.equal, fit.earlier) == (False, 0.0)


@pytest.mark.parametrize("number", [1, 9, 100])
def test_one_factor_of_any_number_of_passes(number):
    fit = fit_of(record(window(passes([1.0] * number), 0.125)))
    assert [part.factor for part in fit.parts] == pytest.approx([0.125] * number)
    assert (fit.equal, fit.earlier) == (True, 0.0)


def test_more_passes_than_sketches_tell_apart():
    assert factors_of(record(window(passes([1.0] * 9), [*MANY, 2.0]))) is None


def test_passes_between_clears_have_one_factor():
    of = passes([1.0] * 12)
    events = [*of[:4], records.call("zero_grad"), *of[4:8], records.call("zero_grad"), *of[8:]]
    fit = fit_of(record(events, step(total(of, [0.0] * 8 + [0.5] * 4))))
    assert [part.factor for part in fit.parts] == pytest.approx([0.0] * 8 + [0.5] * 4, abs=1e-9)
    assert (fit.equal, fit.by_hand) == (True, False)
    assert fit.there == list(fit.parts[8:])


def test_passes_that_were_cleared_and_are_in_it_were_kept_by_the_loop():
    """As of the gradients of several tasks, which are projected, or summed, by hand"""
    of = passes([1.0] * 3)
    events = [of[0], records.call("zero_grad"), *of[1:]]
    for factors, by_hand in (([0.5, 1.0, 1.0], True), ([1.0] * 3, True), ([0.0, 1.0, 2.0], False)):
        one = record(events, step(total(of, factors)))
        fit = fit_of(one)
        assert factors_of(one) == pytest.approx(factors)
        assert (fit.equal, fit.by_hand) == (factors == [1.0] * 3, by_hand)
        assert not fit_of(replace(one, optimizers=records.WRAPPED)).by_hand  # which sums elsewhere


def test_a_factor_of_rounding_is_none():
    of = passes([1.0] * 3)
    fit = fit_of(record(window(of, [1.0, 1e-5, 1e-3])))
    assert fit.there == [fit.parts[0], fit.parts[2]]


@pytest.mark.parametrize(("by", "known"), [(1e-8, False), (1e-2, True)])
def test_nearly_collinear_gradients_are_not_told_apart(by, known):
    a, c = passes([1.0, 1.0])
    of = [a, backward(gradient=near(a.gradient, by)), c]
    found = factors_of(record(window(of, [1.0, 3.0, 0.5])))
    assert found == (pytest.approx([1.0, 3.0, 0.5]) if known else None)


def small(*sizes: int) -> Tensor:
    """A sketch of parameters of so many elements, each of which is its own."""
    made = torch.zeros(3, SIZE, dtype=torch.float64)
    for row, size in enumerate(sizes):
        made[row, :size] = torch.randn(size, dtype=torch.float64)
    return made


@pytest.mark.parametrize(
    ("sizes", "number"), [((1, 2), 3), ((4,), 4), ((1, 1), 2), ((8,), 8), ((1,), 1), ((2, 3), 4)]
)
def test_numbers_that_any_gradients_explain_claim_nothing(sizes, number):
    of = [backward(gradient=small(*sizes)) for _ in range(number)]
    assert factors_of(record(of, step(small(*sizes)))) is None


def test_few_numbers_that_passes_do_explain():
    of = [backward(gradient=small(8, 2)) for _ in range(3)]
    assert factors_of(record(window(of, MANY[:3]))) == pytest.approx(MANY[:3])


@pytest.mark.parametrize(
    ("half", "noise", "known"),
    [(False, 1e-4, True), (False, 3e-3, False), (True, 3e-2, True), (True, 0.3, False)],
)
def test_rounding_is_no_difference_but_more_is(half, noise, known):
    of = passes([1.0] * 4)
    used = total(of)
    apart = random_sketch()
    used += noise * used.norm() * apart / apart.norm()
    found = factors_of(record(of, step(used), half=BOTH if half else frozenset()))
    assert found == (pytest.approx([1.0] * 4, rel=noise) if known else None)


def nan(one: Tensor) -> Tensor:
    one = one.clone()
    one[0, 0] = math.nan
    return one


CLAIMLESS: dict[str, Callable[[], Record]] = {
    "another gradient": lambda: record(passes([1.0] * 4), step(random_sketch())),
    "a skipped step": lambda: record(records.skipped([backward()])),
    "several closure calls": lambda: record(window([backward()], closure_calls=2)),
    "no pass": lambda: record(step(random_sketch())),
    "no gradient": lambda: record(backward(), step(torch.zeros_like(random_sketch()))),
    "passes that cancel": lambda: record(
        (a := backward()), backward(gradient=-a.gradient), step(random_sketch())
    ),
    "nan in a pass": lambda: record(
        (a := backward()), backward(gradient=nan(a.gradient)), step(a.gradient)
    ),
    "nan in the step": lambda: record((a := backward()), step(nan(a.gradient))),
    "passes of others alone": lambda: record(records.other(), step(random_sketch())),
}


@pytest.mark.parametrize("build", CLAIMLESS.values(), ids=CLAIMLESS)
def test_nothing_is_claimed_of(build):
    assert factors_of(build()) is None


def test_what_others_have_does_not_count():
    of = [backward(gradient=random_sketch(BOTH | OTHER), order=(2, 1, 0)) for _ in range(3)]
    used = total(of, MANY[:3])
    used[list(OTHER)] = 0
    one = record(records.other(gradient=nan(random_sketch(OTHER))), of, step(used))
    assert factors_of(one) == pytest.approx(MANY[:3])


@pytest.mark.parametrize(("earlier", "factor"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.25)])
def test_what_the_step_before_left(earlier, factor):
    before, of = passes([1.0] * 2), passes([1.0] * 3)
    left = total(before)
    used = factor * (total(of) + earlier * left)
    fit = fit_of(record(before, step(left), of, step(used)))
    assert [part.factor for part in fit.parts] == pytest.approx([factor] * 3)
    assert (fit.equal, fit.earlier) == (True, pytest.approx(earlier))


@pytest.mark.parametrize("parameters", [BOTH, frozenset({0}), frozenset({1})])
def test_clips_are_undone(parameters):
    of = passes([1.0] * 3)
    used = total(of, 2.0)
    used[list(parameters)] *= 3 / 16  # the clips' 1/4 and the wrapper's; the second clip is none
    used[[n for n in (0, 1) if n not in parameters]] *= 3 / 4
    clips = [clip(4.0, 1.0, parameters=parameters), clip(0.5, 1.0, parameters=parameters)]
    fit = fit_of(record(of, clips, step(used, factor=3 / 4)))
    assert fit.equal
    assert [part.factor for part in fit.parts] == pytest.approx([2.0] * 3, rel=1e-5)


@pytest.mark.parametrize("norm", [4.0, 1e5])  # as large: of scaled gradients
def test_clips_between_passes_are_undone(norm):
    a, b, c = passes([1.0] * 3)
    used = total([a, b, c], [0.5 / norm**2, 0.5 / norm, 0.5])
    fit = fit_of(record(a, clip(norm, 1.0), b, clip(norm, 1.0), c, step(used)))
    assert fit.equal
    assert [part.factor for part in fit.parts] == pytest.approx([0.5] * 3, rel=1e-5)


def test_clips_of_what_was_not_cleared_are_undone():
    a, b = passes([1.0] * 2)
    used = total([a, b], [0.75, 1.0])  # a once more, both clipped by 1/4
    fit = fit_of(record(a, step(total([a])), b, clip(4.0, 1.0), step(used)))
    assert [part.factor for part in fit.parts] == pytest.approx([4.0], rel=1e-5)
    assert fit.earlier == pytest.approx(0.75, rel=1e-5)


def test_factors_that_rounding_would_decide_are_not_claimed():
    a, b, c = passes([1.0] * 3)
    used = total([a, b, c], [1e-5, 1.0, 3.0])
    assert factors_of(record(a, clip(1e5, 1.0), b, c, step(used))) is None


def test_what_clips_did_to_the_sum_of_a_wrapper_is_not_claimed():
    a, b = passes([1.0] * 2)
    events = a, clip(4.0, 1.0), b, step(total([a, b], [0.25, 1.0]))
    assert factors_of(record(*events)) == pytest.approx([1.0, 1.0])
    assert factors_of(record(*events, optimizers=records.WRAPPED)) is None


def test_passes_of_all_processes():
    each = [passes([1.0] * 2) for _ in range(2)]
    used = total([one for of in each for one in of], [0.5, 0.5, 0.5, 2.0])
    fit = fit_of(records.of_ranks(*(record(of, step(used)) for of in each)))
    assert [(p.rank, p.factor) for p in fit.parts] == [
        (rank, pytest.approx(f)) for rank, f in [(0, 0.5), (0, 0.5), (1, 0.5), (1, 2.0)]
    ]


# --- sketches -------------------------------------------------------------------------------------

SIZES = [0, 1, 8, 9, 1020, 1021, 1022, 2043, 5000]


def signs() -> Tensor:
    """From sketches of single elements."""
    rows = torch.eye(1021, dtype=torch.float64)
    return torch.stack([sketch(row) for row in rows])


@pytest.mark.parametrize("size", SIZES)
def test_a_sketch_is_a_sum_with_signs_at_a_stride(size):
    grad = torch.randn(size, dtype=torch.float64)
    one = sketch(grad)
    assert (one.dtype, one.shape) == (torch.float64, (SIZE,))
    if size <= SIZE:
        assert one.tolist() == grad.tolist() + [0.0] * (SIZE - size)
    else:
        right = (grad[:, None] * signs()[torch.arange(size) % 1021]).sum(0)
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)


def test_signs_are_fixed_and_fair_and_draw_nothing():
    state, made = torch.get_rng_state(), signs()
    _sketch._signs.cache_clear()
    assert made.equal(signs())
    assert torch.get_rng_state().equal(state)
    assert set(made.unique().tolist()) == {-1.0, 1.0}
    assert (made.T @ made / 1021 - torch.eye(SIZE)).abs().max() < 0.15  # independent columns


def sparse(values: Tensor) -> Tensor:
    """As an embedding's gradient: rows that come twice, and rows that are absent."""
    index = torch.tensor([[5, 0, 5]])
    return torch.sparse_coo_tensor(index, values[:3], values.shape, check_invariants=True)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "transposed": (lambda x: x.t(), lambda x: x.t().contiguous()),
    "every other": (lambda x: x[::2, 1::3], lambda x: x[::2, 1::3].contiguous()),
    "expanded": (lambda x: x[:, :1].expand_as(x), lambda x: x[:, :1].repeat(1, x.shape[1])),
    "zero-dimensional": (lambda x: x[0, 0], lambda x: x[0, :1]),
    "sparse": (sparse, lambda x: sparse(x).to_dense()),
    "compressed": (lambda x: x.relu().to_sparse_csr(), lambda x: x.relu()),
    "complex": (lambda x: torch.complex(x, 2 * x), lambda x: torch.stack([x, 2 * x], -1)),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.bfloat16().double()),
    "float16": (lambda x: x.half(), lambda x: x.half().double()),
    "float16 of which a sum overflows": (lambda x: x.half() * 0 + 6e4, lambda x: x * 0 + 60_000),
    "float32": (lambda x: x.float(), lambda x: x.float().double()),
    "negated view": (lambda x: torch._neg_view(x), lambda x: -x),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("given", "plain"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_sketch_is_of_the_elements(given, plain):
    grad = torch.randn(60, 70, dtype=torch.float64)
    kept = grad.clone()
    torch.testing.assert_close(sketch(given(grad)), sketch(plain(grad)), rtol=1e-5, atol=1e-4)
    assert grad.equal(kept)


def test_a_sketch_has_no_graph():
    assert not sketch(torch.randn(20, requires_grad=True) * 2).requires_grad


HEADS = [(10, 16), (1000, 512), (1021, 8), (5000, 16), (8, 1020)]


@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("along", [0, 1])
def test_gradients_that_sum_to_zero_are_told_apart(shape, along):
    """As those of a head before softmax do, over the classes."""
    shape = shape if along == 0 else shape[::-1]
    grads = torch.randn(3, *shape, dtype=torch.float64)
    grads -= grads.mean(1 + along, keepdim=True)
    sketches = torch.stack([sketch(grad) for grad in grads])
    singular = torch.linalg.svdvals(sketches / grads.flatten(1).norm(dim=1, keepdim=True))
    assert singular[-1] > 0.1
    assert singular[0] < 10
