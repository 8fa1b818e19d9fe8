"""The benchmark of the auditor: both models, a ratio of times, and next to no memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import run_script


@pytest.mark.process
def test_quick(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    done = run_script("bench/audit.py", "--quick", f"--json={path}")
    assert done.returncode == 0, done.stderr
    cases = json.loads(path.read_text())["cases"]
    assert list(cases) == ["transformer, 64 tokens", "perceptron, 8 rows"]
    for name, case in cases.items():
        assert f"\n{name} " in done.stdout
        assert case["ratio"] > 0 < case["seconds"]
        assert 0 <= case["sets"] < 0.1
