"""Wrong loops, whose mistake the audit names and measures; right ones, of which it says nothing.

Of either not one bit changes.
"""

import importlib
import linecache
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import odd_turns
import pytest
import right_loops
import torch
from audited import Looping, N, Watch, network, run, sgd, train, unwatched
from by_definition import Plain
from cases import RIGHT, WRONG
from torch import Tensor

import accumext
from accumext.auditing._events import view_of

pytestmark = [  # what is said of some of these loops without an audit
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. the loss was divided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*so the micro-batch counts it twice:UserWarning"),
    pytest.mark.filterwarnings("ignore:.parameters. is an empty generator:UserWarning"),
]


def end_of(loop: Looping, watch: Watch) -> tuple[Any, list[Tensor]]:
    """What looked on; then parameters, buffers, gradients, the optimizer's state, generators."""
    random.seed(0)
    torch.manual_seed(0)
    result, model, optimizer = run(loop, watch)
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return result, [*tensors, torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def both(loop: Looping) -> tuple[Plain, accumext.Audit]:
    """A loop by itself, and the same with an audit: equal bit by bit, NaN as well."""
    (plain, expected), (audit, found) = end_of(loop, Plain), end_of(loop, accumext.audit)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (t.detach().to_dense().contiguous().view(-1) for t in (a, b))
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return plain, audit


def ids(found: Iterable[accumext.Finding]) -> set[str]:
    """Without the decay of biases, of which most loops are asked."""
    return {one.id for one in found} - {"optimizer.decay"}


HERE = Path(__file__).parent
for kind in ("right", "odd", "wrong"):
    for path in sorted(HERE.glob(f"{kind}_*.py")):  # each lists its loops
        importlib.import_module(path.stem)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.loop.__name__)
def test_the_audit_names_a_mistake(case):
    """Its id, its size to 1 %, its line, and nothing else; a question where the table says so"""
    plain, audit = both(case.loop)
    right = case.size(plain) if callable(case.size) else case.size
    assert right > 0
    assert ids([*audit.findings, *audit.questions]) == {case.id, *case.also}, str(audit)
    (found,) = [f for f in (audit.questions if case.asks else audit.findings) if f.id == case.id]
    assert found.value == pytest.approx(right, rel=0.01)
    assert case.told in found.evidence
    assert found.cure.startswith("right if ") == case.asks
    file, line = re.fullmatch(r"(\w+\.py):(\d+)", found.where).groups()
    assert case.at in linecache.getline(str(HERE / file), int(line))


def told(what: str) -> pytest.MarkDecorator:
    """Every right loop whose audit is told that."""
    cases = [case for case in RIGHT if what in case.told]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.loop.__name__)


@told("optimizer")
def test_a_right_loop(case):
    """No finding, and no new question; as many windows as there are steps, or were asked for"""
    plain, audit = both(case.loop)
    assert plain.steps
    assert audit.findings == (), str(audit)
    assert ids(audit.questions) == case.asked, str(audit)
    steps = max(len(plain.steps), plain.scaler_steps)  # also those that were skipped
    assert len(audit.to_json()["windows"]) == min(steps, plain.windows)


@pytest.mark.slow  # every loop once more
@told("optimizer")
def test_a_right_loop_all_of_whose_optimizers_are_followed(case):
    audit, _ = end_of(case.loop, lambda model, optimizer, **options: accumext.audit(**options))
    assert audit.findings == (), str(audit)


@told("model")
def test_a_right_loop_of_which_only_the_model_is_named(case):
    """Nothing more is asked: of optimizers that have not stepped yet, or of another's schedule"""
    audit, _ = end_of(case.loop, lambda model, _, **options: accumext.audit(model, **options))
    assert audit.findings == (), str(audit)
    assert ids(audit.questions) == case.asked, str(audit)


def test_an_optimizer_that_has_not_stepped_yet():
    """Its parameters have gradients, and the audit ends before it: that is told, and not asked"""
    audit = odd_turns.five_steps_of_the_critic(
        lambda model, _: accumext.audit(model), detaches=False
    )
    assert ids([*audit.findings, *audit.questions]) == set(), str(audit)
    assert re.search(r"not judged .*SGD has not stepped", " ".join(str(audit).split()))


def test_a_step_of_a_right_loop_is_skipped():
    """Or nothing would be said of skipped steps"""
    plain, audit = both(right_loops.amp_with_an_overflow)
    assert (plain.scaler_steps, len(plain.steps)) == (6, 5)
    assert [window.step.skipped for window in view_of(audit.record, 0).windows] == [True] + 3 * [
        False
    ]


MAKERS = {
    "torch": sgd,
    "wrapper": lambda model: accumext.AccumulatingOptimizer(sgd(model)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_named(name):
    """`audit()` follows every optimizer that steps inside the block"""
    for divisor, windows, asked in ((N, 4, []), (1, 2, [("accumulation.divisor_missing", N)])):
        with accumext.audit(windows=windows) as audit:
            model = network()
            train(unwatched, model, MAKERS[name](model), divisor=divisor)
        assert audit.findings == (), str(audit)
        assert [(f.id, f.value) for f in audit.questions] == [
            (id, pytest.approx(value)) for id, value in asked
        ]
        assert len(audit.to_json()["windows"]) == windows


def test_the_same_run_twice():
    """`against` an equal run: nothing differs, bit by bit"""
    first = None
    for _ in range(2):
        model = network()
        first = train(accumext.audit, model, sgd(model), against=first)
        assert first.findings == (), str(first)
