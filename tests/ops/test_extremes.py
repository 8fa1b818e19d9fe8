"""bench/extremes.py in small: each extreme passes here, and tells where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.programs import run_script

import accumext

NAMES = ["long-run", "elements", "tensors", "vocabulary", "steps"]


@pytest.mark.process
def test_every_extreme_is_checked(tmp_path: Path) -> None:
    done = run_script("bench/extremes.py", *NAMES, "--quick", f"--json={tmp_path}/result.json")
    assert done.returncode == 0, done.stdout + done.stderr
    extremes = json.loads((tmp_path / "result.json").read_text())["extremes"]
    assert [row["name"] for row in extremes] == NAMES
    for row in extremes:
        assert row["difference"] is None
        assert len(row["checked"]) >= 3
        assert row["seconds"] > 0.0


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("elements", "accumulate_", {"inv_scale": 1.0}),
        ("tensors", "accumulate_", {"inv_scale": 1.0}),
        ("vocabulary", "decode_loss", {"k1": 4, "k2": 4}),
        ("steps", "decode_loss", {"k1": 4, "k2": 4}),
        ("long-run", "AccumulatingOptimizer", {"max_norm": 0.69}),
    ],
)
def test_a_wrong_result_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, name: str, function: str, wrong: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import extremes

    good = getattr(accumext, function)
    monkeypatch.setattr(accumext, function, lambda *args, **kw: good(*args, **{**kw, **wrong}))
    assert extremes.examine(name, quick=True)["difference"] is not None
