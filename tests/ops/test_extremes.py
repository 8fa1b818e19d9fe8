"""bench/extremes.py in small: each extreme passes here, and tells where something is wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ROOT
from support.programs import run_script

import accumext

NAMES = ["long-run", "elements", "tensors", "vocabulary", "steps"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a quick run of all extremes."""
    path = tmp_path_factory.mktemp("extremes") / "result.json"
    done = run_script("bench/extremes.py", *NAMES, "--quick", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _long_run
    import extremes

    return SimpleNamespace(extremes=extremes, long_run=_long_run)


@pytest.mark.process
def test_every_extreme_is_checked(report: dict[str, Any]) -> None:
    assert [row["name"] for row in report["extremes"]] == NAMES
    for row in report["extremes"]:
        assert row["difference"] is None
        assert len(row["checked"]) >= 3
        assert row["seconds"] > 0.0


def test_a_wrong_sum_is_a_difference(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = accumext.accumulate_

    def unscaled(*args: Any, **options: Any) -> torch.Tensor:
        return good(*args, **options | {"inv_scale": 1.0})

    monkeypatch.setattr(accumext, "accumulate_", unscaled)
    for name in ("elements", "tensors"):
        assert modules.extremes.examine(name, quick=True)["difference"] is not None


def test_a_wrong_gradient_is_a_difference(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = accumext.decode_loss

    def truncated(*args: Any, **options: Any) -> accumext.DecodeOutput:
        return good(*args, **options | {"k1": 4, "k2": 4})

    monkeypatch.setattr(accumext, "decode_loss", truncated)
    for name in ("vocabulary", "steps"):
        difference = modules.extremes.examine(name, quick=True)["difference"]
        assert "the gradient is off by" in difference


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MAX_NORM", 0.69, "parameters are off"),
        ("GROWTH_INTERVAL", 9, "the loss scale differs"),
    ],
)
def test_training_by_hand_tells_other_settings(
    modules: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: float,
    words: str,
) -> None:
    good = modules.long_run.ByHand

    class Other(good):
        def window(self, window: Any) -> float | None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(modules.long_run, name, value)
                return super().window(window)

    monkeypatch.setattr(modules.long_run, "ByHand", Other)
    with pytest.raises(AssertionError, match=words):
        modules.long_run.train(torch.float64, 200)


def test_a_window_that_is_skipped_wrongly_is_a_difference(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = modules.long_run.micro_batches

    def hidden(count: int) -> list[Any]:
        drawn = good(count)
        at = next(i for i, micro_batch in enumerate(drawn) if micro_batch.overflows)
        drawn[at] = drawn[at]._replace(overflows=False)
        return drawn

    monkeypatch.setattr(modules.long_run, "micro_batches", hidden)
    with pytest.raises(AssertionError, match="is skipped wrongly"):
        modules.long_run.train(torch.float64, 200)
