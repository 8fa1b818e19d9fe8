"""The benchmark: its samples, what it makes of them, and that it compares equal things."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.once import once
from support.programs import run_script

import accumext

RTOL = 1e-12  # float64 in another order of operations

TARGETS = {0.9, 1.6, 3.5, 2.2, 1.0, 0.85, 3.0, 5.0}  # promised on a CPU


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the JSON that a quick run wrote, and its output."""

    def bench(folder: Path) -> None:
        result = f"--json={folder / 'result.json'}"
        done = run_script("bench/accumulate.py", "--quick", "--device=cpu", result)
        assert done.returncode == 0, done.stderr
        (folder / "printed").write_text(done.stdout)

    folder = once(tmp_path_factory, "bench-accumulate", bench)
    return json.loads((folder / "result.json").read_text()), (folder / "printed").read_text()


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _timing

    return _timing


def find(result: dict[str, Any], name: str, role: str) -> dict[str, Any]:
    (job,) = [j for j in result["jobs"] if (j["job"], j["role"]) == (name, role)]
    return job


@pytest.mark.process
def test_every_job_has_its_contenders(run: tuple[dict[str, Any], str]) -> None:
    result, _ = run
    jobs = {job["job"] for job in result["jobs"]}
    assert {"read", "update", "write", "unscale, check, norm, clip", "scale_"} < jobs
    assert {f"accumulate_ {dtype}" for dtype in ("fp32", "bf16", "fp16")} < jobs
    assert {"accumulate_ overwrite bf16", "copy_rounded_ bf16", "copy_rounded_ fp16"} < jobs
    assert {f"total_norm {dtype}" for dtype in ("fp32", "bf16", "fp16")} < jobs
    assert len([name for name in jobs if name.startswith("boundary, ")]) == 6
    for job in result["jobs"]:
        rows = job["contenders"]
        assert job["baseline"] == next(iter(rows))
        assert len(rows) >= 2
        assert {len(row["seconds"]) for row in rows.values()} == {3}
        if job["job"] not in ("read", "update", "write"):
            assert any(name.startswith("accumext") for name in rows)


@pytest.mark.process
def test_windows_have_the_loops_and_their_memory(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    jobs = [job for job in result["jobs"] if job["job"].startswith("window of ")]
    kinds = {job["job"].split(", ")[1] for job in jobs}
    assert kinds == {"SGD", "AdamW foreach", "AdamW fused"}
    assert {job["role"] for job in jobs} == {"", "transformer"}
    assert any("scaler" in job["job"] for job in jobs)
    loops = {"by hand", "accumext, backward", "accumext, usual loop"}
    for job in jobs:
        rows = job["contenders"]
        half = "bf16" in job["job"]
        assert loops | ({"accumext, in backward"} if half else set()) == set(rows) - {"Accelerate"}
        assert ("Accelerate" in rows) == (result["machine"]["Accelerate"] == "installed")
        sets = {name: row["sets_of_gradients"] for name, row in rows.items()}
        assert sets["by hand"] >= 1.0
        # A window of one leaves its gradients in `.grad`, beside the next forward pass; and the
        # operators in plain PyTorch take memory of their own.
        compiled = accumext.backend() != "reference"
        if compiled and not half and not job["job"].startswith("window of 1,"):
            assert sets["accumext, backward"] == pytest.approx(sets["by hand"], abs=0.06)
        by_hand = np.array(rows["by hand"]["seconds"])
        for name, row in rows.items():
            over = np.percentile(np.array(row["seconds"]) / by_hand, (50, 25, 75))
            median, q1, q3 = (f"{value:.2f}" for value in over)
            line = rf"  {name} .* {sets[name]:.2f}  {median} \[{q1}, {q3}\]\n"
            assert name == "by hand" or re.search(line, printed)


@pytest.mark.process
def test_derived_numbers_follow_from_the_samples(run: tuple[dict[str, Any], str]) -> None:
    result, _ = run
    for job in result["jobs"]:
        baseline = np.array(job["contenders"][job["baseline"]]["seconds"])
        for row in job["contenders"].values():
            seconds = np.array(row["seconds"])
            read, update = row["read_bytes_per_element"], row["update_bytes_per_element"]
            copied = row["copy_read_bytes_per_element"] + row["copy_written_bytes_per_element"]
            median = np.median(seconds)
            rate = job["elements"] * (read + update + copied) / median
            assert (seconds > 0).all()
            assert row["median_seconds"] == pytest.approx(median, rel=RTOL)
            assert row["times_faster"] == pytest.approx(np.median(baseline / seconds), rel=RTOL)
            assert row["bytes_per_second"] == pytest.approx(rate, rel=RTOL)


@pytest.mark.process
def test_shares_are_of_the_limit_in_the_same_repetition(run: tuple[dict[str, Any], str]) -> None:
    result, _ = run
    for job in result["jobs"]:
        if job["role"] != "large":  # the data may lie in a cache
            assert job["limits"] == []
            assert {row["share_of_limit"] for row in job["contenders"].values()} == {None}
            continue
        reading, updating, writing = (
            np.array([limit[kind] for limit in job["limits"]])
            for kind in ("read", "update", "write")
        )
        for row in job["contenders"].values():
            read, update = row["read_bytes_per_element"], row["update_bytes_per_element"]
            least = job["elements"] * (read / reading + update / updating)
            copied = row["copy_read_bytes_per_element"], row["copy_written_bytes_per_element"]
            either = np.maximum(copied[0] / reading, copied[1] / writing)
            least += job["elements"] * np.maximum(either, sum(copied) / updating)
            share = np.median(least / np.array(row["seconds"]))
            assert row["share_of_limit"] == pytest.approx(share, rel=RTOL)


@pytest.mark.process
def test_the_yardstick_is_the_fastest_of_the_plain_loops(run: tuple[dict[str, Any], str]) -> None:
    result, _ = run
    fastest = []
    for name in ("read", "update"):
        rows = find(result, name, "")["contenders"]
        fastest.append(min(rows, key=lambda who: rows[who]["median_seconds"]))
    assert result["machine"]["limit"].startswith(" and ".join(fastest))


@pytest.mark.process
def test_figures_are_ratios_within_repetitions(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    figures = [figure for figure in result["figures"] if "quartiles" in figure]
    assert {figure["target"] for figure in figures} == TARGETS | {None}
    for figure in figures:
        rows = find(result, figure["job"], figure["role"])["contenders"]
        if figure["against"] == "the limit":
            assert figure["measured"] == rows[figure["contender"]]["share_of_limit"]
            continue
        sides = figure["against"], figure["contender"]
        theirs, mine = (np.array(rows[side]["seconds"]) for side in sides)
        q1, median, q3 = np.percentile(theirs / mine, (25, 50, 75))
        assert figure["measured"] == pytest.approx(median, rel=RTOL)
        assert figure["quartiles"] == pytest.approx([q1, q3], rel=RTOL)
        target = "-" if figure["target"] is None else f"{figure['target']:g}"
        line = f"{figure['figure']} | {target} | {median:.2f} [{q1:.2f}, {q3:.2f}] | "
        assert line in printed


@pytest.mark.process
def test_promises_without_a_ratio(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    rows = [figure for figure in result["figures"] if "quartiles" not in figure]
    assert [row["measured"] for row in rows] == [True] * 3
    for row in rows:
        assert f"\n{row['figure']} | yes | yes\n" in printed


@pytest.mark.process
def test_the_machine_is_named(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    assert result["machine"]["torch"] == torch.__version__
    assert {"cpu", "threads", "backend", "apex", "TransformerEngine"} < set(result["machine"])
    for name, fact in result["machine"].items():
        assert f"\n{name}: {fact}\n" in printed


def test_contenders_that_differ_are_not_timed(timing: ModuleType) -> None:
    def contender(value: float) -> Any:
        return timing.Contender(
            lambda: torch.tensor([value]), timing.Traffic(4, 0), lambda got: [got]
        )

    def job(value: float) -> Any:
        contenders = {"one": contender(1.0), "other": contender(value)}
        return timing.Job("job", timing.Shape(1, 1), contenders)

    timing.check(job(1.0 + 1e-6))
    with pytest.raises(AssertionError, match=r"job: other is off by 1\.0e-03"):
        timing.check(job(1.001))
    with pytest.raises(AssertionError, match="off by nan"):
        timing.check(job(float("nan")))


def test_repetitions_are_complete_and_rotate(timing: ModuleType) -> None:
    calls: list[str] = []

    def contender(name: str) -> Any:
        return timing.Contender(lambda: calls.append(name), timing.Traffic(0, 8), None)

    job = timing.Job(
        "job", timing.Shape(1, 1), {n: contender(n) for n in "abc"}, lambda: calls.append("-")
    )
    clock = iter(range(100))

    def seconds_of(run: Any) -> Any:
        run()
        return timing.Taken(float(next(clock)), 0.5)

    result = timing.measure(job, seconds_of, timing.Patience(seconds=0.0, least=3))
    assert "".join(calls) == "-a-b-c" + "-a-b-c" + "-b-c-a" + "-c-a-b"
    assert result.seconds == {"a": [0.0, 5.0, 7.0], "b": [1.0, 3.0, 8.0], "c": [2.0, 4.0, 6.0]}
    assert result.host_seconds == {name: [0.5] * 3 for name in "abc"}


def test_of_windows_the_second_in_a_row_is_timed(timing: ModuleType) -> None:
    def contender(sets: float) -> Any:
        return timing.Contender(lambda: None, timing.Traffic(0, 0), None, lambda: sets)

    contenders = {"a": contender(1.0), "b": contender(2.5)}
    job = timing.Job("job", timing.Shape(1, 1), contenders, again=True)
    clock = iter(range(100))
    patience = timing.Patience(seconds=0.0, least=2)
    result = timing.measure(job, lambda run: timing.Taken(float(next(clock))), patience)
    assert result.seconds == {"a": [1.0, 7.0], "b": [3.0, 5.0]}
    assert result.sets == {"a": 1.0, "b": 2.5}


class FakeGpu:
    """Seconds of a host and of a GPU whose kernels are started one after the other."""

    RATE = 2e9  # cycles per second

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def put(self, host: float, device: float) -> None:
        """The host puts a kernel into the queue."""
        self.host += host
        self.device = max(self.device, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def install(self, timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.device, gpu.host)

            def query(self) -> bool:
                return self.at <= gpu.host

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * (other.at - self.at)

        cuda = SimpleNamespace(
            Event=Event,
            synchronize=self.synchronize,
            _sleep=lambda cycles: self.put(0.0, cycles / self.RATE),
        )
        monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.host))
        monkeypatch.setattr(timing.torch, "cuda", cuda)


def test_a_gpu_is_timed_without_its_host(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    gpu.install(timing, monkeypatch)
    clock = timing.DeviceClock(torch.device("cpu"), ahead=True)
    buffer, read = clock._buffer.clone(), []
    sums = torch.sum
    monkeypatch.setattr(torch, "sum", lambda *args, **how: read.append(args) or sums(*args, **how))

    def call(host: float, device: float, waits: bool = False) -> Any:
        def run() -> None:
            for _ in range(10):
                gpu.put(host / 10, device / 10)
            if waits:
                gpu.synchronize()

        return run

    short, long, waiting = call(1e-3, 1e-4), call(8e-3, 1e-4), call(1e-3, 1e-4, waits=True)
    assert clock(short) == pytest.approx((1e-4, 1e-3))
    assert clock(long)[1] is None
    for _ in range(3):
        found = clock(long)
    assert found == pytest.approx((1e-4, 8e-3))
    for _ in range(9):
        assert clock(waiting)[1] is None
    before = gpu.host
    clock(waiting)
    assert gpu.host - before < 1.1 * clock._LONGEST
    assert len(read) == 15  # before every call
    assert torch.equal(clock._buffer, buffer)  # nothing is written

    together = timing.DeviceClock(torch.device("cpu"), ahead=False)
    assert together(long) == pytest.approx((8e-3 + 1e-5, 8e-3))  # both


def test_a_gpus_figures_are_of_a_copy_and_of_its_time(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accumulate
    from _report import COPY, MICROSECONDS, as_json, evaluate, table

    figures = accumulate.figures(torch.device("cuda"))
    shapes = {shape.role: shape for shape in accumulate.GPU_SHAPES if shape.role}
    assert (shapes["medium"].elements, shapes["medium"].tensors) == (5 * 10**7, 100)
    assert shapes["many"].sizes() == [1000] * 2000
    names = {"total_norm fp32", "unscale, check, norm, clip", *accumulate.HALVES}
    for against, role in ((COPY, "medium"), (COPY, "large"), (MICROSECONDS, "many")):
        found = {f.job for f in figures if (f.against, f.role) == (against, role)}
        assert found == names

    def result(role: str) -> Any:
        limits = [timing.Limits(4e12, 4.2e12, 4e12)] * 3
        both = "torch foreach", "accumext"
        traffic = dict.fromkeys(both, timing.Traffic(4, 0))
        taken = {name: [60e-6, 62.5e-6, 70e-6] for name in both}
        host = {name: [1e-3, None, 2e-3] for name in both}
        return timing.Result("total_norm fp32", shapes[role], traffic, taken, limits, host)

    rows = evaluate(figures, [result("medium"), result("many")])
    measured = {(row["role"], row["against"]): row["measured"] for row in rows}
    assert measured["medium", COPY] == pytest.approx(4 * 5e7 / 62.5e-6 / 4e12)
    assert measured["many", MICROSECONDS] == pytest.approx(62.5)
    row = as_json(result("medium"))["contenders"]["accumext"]
    assert row["share_of_copy"] == pytest.approx(0.8)
    assert row["median_host_seconds"] == pytest.approx(1.5e-3)
    assert " 80% " in table(result("medium"))


def test_shapes_hold_all_elements(timing: ModuleType) -> None:
    sizes = timing.Shape(1003, 10).sizes()
    assert sum(sizes) == 1003
    assert set(sizes) == {100, 101}
    assert str(timing.Shape(10**8, 2000)) == "100M in 2,000"
