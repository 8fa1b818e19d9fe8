"""bench/extremes.py in small: each extreme passes here, and tells where something is wrong."""

import json
from typing import Any

import pytest
from support import ROOT
from support.programs import run_script

import accumext


@pytest.fixture
def extremes(monkeypatch, only_objects_of_the_test):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import extremes

    return extremes


WRONG: dict[str, tuple[str, dict[str, Any]]] = {  # a function, and options that it must not get
    "elements": ("accumulate_", {"inv_scale": 1.0}),
    "tensors": ("accumulate_", {"inv_scale": 1.0}),
    "vocabulary": ("decode_loss", {"k1": 4, "k2": 4}),
    "steps": ("decode_loss", {"k1": 4, "k2": 4}),
    "long-run": ("AccumulatingOptimizer", {"max_norm": 0.69}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "long-run")) for name in WRONG],
)
def test_an_extreme_passes_and_a_wrong_result_is_a_difference(extremes, monkeypatch, name):
    row = extremes.examine(name, quick=True)
    assert row["difference"] is None
    assert len(row["checked"]) >= 3
    function, options = WRONG[name]
    good = getattr(accumext, function)
    monkeypatch.setattr(accumext, function, lambda *args, **kw: good(*args, **{**kw, **options}))
    assert extremes.examine(name, quick=True)["difference"] is not None


@pytest.mark.process
def test_each_runs_in_a_process_of_its_own(tmp_path):
    done = run_script("bench/extremes.py", "elements", "--quick", f"--json={tmp_path}/result.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "result.json").read_text())["extremes"]
    assert (row["name"], row["difference"]) == ("elements", None)
