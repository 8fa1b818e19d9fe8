"""What follows from a record: one finding or question with its value, and nothing from neighbours.

Records are made by hand, so that nothing here depends on how a loop is observed. Values are those
of the definition: how many micro-batches, which ratio, which distance.
"""

import re

import pytest
from mistakes import FINDINGS, QUESTIONS
from neighbours import NEIGHBOURS
from records import said

from accumext.auditing import _accumulation, _rules
from accumext.auditing._events import view_of
from accumext.auditing._judge import judge
from accumext.auditing._words import KINDS

CASES = [*((case, False) for case in FINDINGS), *((case, True) for case in QUESTIONS)]
RULES = {
    **{rule.__name__: lambda one, rule=rule: rule(view_of(one, 0))
       for rule in (*_accumulation.RULES, *_rules.OF_A_VIEW)},
    **{rule.__name__: rule for rule in _rules.OF_A_RECORD},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "asks"), CASES, ids=[f"{c[0]}-{c[1]:g}{'?' * asks}" for c, asks in CASES]
)
def test_a_mistake_is_all_that_is_said(case, asks):
    """Its id, its line, its value; and a question where it may be meant"""
    id, value, where, build = case
    judgement = judge(build())
    found = judgement.questions if asks else judgement.findings
    assert [(one.id, one.where) for one in found] == [(id, where)]
    assert (judgement.findings if asks else judgement.questions) == ()
    assert found[0].value == pytest.approx(value, rel=1e-4)
    assert found[0].name == KINDS[id].name
    begin = f"right if {KINDS[id].right_if}; else " if asks else ""
    if id != "memory.graph":  # whose cure depends on what the graph keeps
        begin += KINDS[id].cure
        assert found[0].cure == begin
    assert found[0].cure.startswith(begin)
    assert len(found[0].cure) > len(begin) - len(KINDS[id].cure)


@pytest.mark.parametrize(
    "build",
    [build for of_id in NEIGHBOURS.values() for build in of_id.values()],
    ids=[f"{id}-{words}" for id, of_id in NEIGHBOURS.items() for words in of_id],
)
def test_a_neighbour_of_a_mistake_is_none(build):
    assert said(build()) == ()


# --- the table ------------------------------------------------------------------------------------


def test_every_id_has_cases_and_neighbours():
    assert {case[0] for case, _ in CASES} == set(NEIGHBOURS)
    assert set(NEIGHBOURS) == set(KINDS)


def test_what_asks_is_right_if():
    """And what never asks has no such words"""
    assert {case[0] for case in QUESTIONS} == {id for id, kind in KINDS.items() if kind.right_if}


def test_ids_are_words_and_kinds_have_names_and_cures():
    assert [id for id in KINDS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", id)] == []
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert [id for id, kind in KINDS.items() if not kind.cure] == ["memory.graph"]
    words = " / ".join(word for kind in KINDS.values() for word in kind if word)
    assert not re.search(r"  |\n|right if| /  / ", words)
    assert all(word == word.strip() for kind in KINDS.values() for word in kind)


def test_every_rule_has_a_case():
    silent = [
        name for name, rule in RULES.items()
        if not any(list(rule(case[-1]())) for case, _ in CASES)
    ]  # fmt: skip
    assert silent == []
