"""The benchmarks of gradients and of the audit: equal things are compared, figures follow."""

from types import SimpleNamespace
from typing import Any

import _timing as timing
import numpy as np
import pytest
import torch
from _limits import Memory
from _report import COPY, LIMIT, MICROSECONDS, Figure, contender_rows, evaluate
from support.programs import run_bench

import accumext

RTOL = 1e-12  # float64 in another order of operations
WRITTEN = 1e-6  # by the digits of a result


@pytest.mark.process
def test_gradients(tmp_path):
    """All jobs with small tensors: every contender, its times, and what is said of them"""
    result, printed = run_bench("accumulate", tmp_path, "--quick", "--device=cpu", "--shape=1e4/20")
    assert result["failed"] == {}
    jobs: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        jobs.setdefault(row["job"], {})[row["contender"]] = row
    names = {name.split(", ")[0].split()[0] for name in jobs}
    assert {"read", "accumulate_", "total_norm", "copy_rounded_", "boundary", "window"} < names
    for name, rows in jobs.items():
        assert f"\n{name}: " in printed
        assert len(rows) >= 2
        assert next(iter(rows.values()))["time_over_first"] == [1.0] * 3
        assert name in ("read", "update", "write") or any(n.startswith("accumext") for n in rows)
        for row in rows.values():
            assert row["runs"] == 3
            assert 0 < row["seconds"][0] <= row["seconds"][1] <= row["seconds"][2]
        if name.startswith("window of "):
            check_window(name, rows)
    for name, fact in result["machine"].items():
        assert f"\n{name}: {fact}\n" in printed
    promised = [row for row in result["figures"] if "quartiles" not in row]
    assert [row["measured"] for row in promised] == [True] * 3
    for row in promised:
        assert f"\n{row['figure']} | yes | yes\n" in printed


def check_window(name: str, rows: dict[str, Any]) -> None:
    """Check the loops of a window, and the memory of gradients that each takes."""
    half = "bf16" in name
    loops = {"by hand", "accumext, backward", "accumext, usual loop"}
    assert loops | ({"accumext, in backward"} if half else set()) == set(rows) - {"Accelerate"}
    by_hand, ours = (rows[n]["sets_of_gradients"] for n in ("by hand", "accumext, backward"))
    assert by_hand >= 1.0
    # A window of one leaves its gradients in `.grad`, beside the next forward pass; and the
    # operators in plain PyTorch take memory of their own.
    compiled = accumext.backend() != "reference"
    if compiled and not half and not name.startswith("window of 1,"):
        assert ours == pytest.approx(by_hand, abs=0.06)


@pytest.mark.process
def test_audit(tmp_path):
    result, printed = run_bench("audit", tmp_path, "--quick")
    assert list(result["cases"]) == ["transformer, 64 tokens", "perceptron, 8 rows"]
    for name, case in result["cases"].items():
        assert f"\n{name} " in printed
        assert case["ratio"] > 0 < case["seconds"]
        assert 0 <= case["sets"] < 0.1


def test_contenders_that_differ_are_not_timed():
    def job(value):
        def contender(value):
            return timing.Contender(
                lambda: value, timing.Traffic(4, 0), lambda v: [torch.tensor(v)]
            )

        contenders = {"one": contender(1.0), "other": contender(value)}
        return timing.Job("job", timing.Shape(1, 1), contenders)

    timing.check(job(1.0 + 1e-6))
    with pytest.raises(AssertionError, match=r"job: other is off by 1\.0e-03"):
        timing.check(job(1.001))
    with pytest.raises(AssertionError, match="off by nan"):
        timing.check(job(float("nan")))


@pytest.mark.parametrize(
    ("again", "calls", "seconds"),
    [
        (
            False,
            "-a-b-c" + "-a-b-c" + "-b-c-a" + "-c-a-b",
            {"a": [0, 5, 7], "b": [1, 3, 8], "c": [2, 4, 6]},
        ),
        (  # as of windows: the second run in a row
            True,
            "-a-b-c" + "-a-a-b-b-c-c" + "-b-b-c-c-a-a" + "-c-c-a-a-b-b",
            {"a": [1, 11, 15], "b": [3, 7, 17], "c": [5, 9, 13]},
        ),
    ],
)
def test_repetitions_are_complete_and_rotate(again, calls, seconds):
    made: list[str] = []

    def contender(name):
        run = lambda: made.append(name)  # noqa: E731
        return timing.Contender(run, timing.Traffic(0, 8), None, lambda: float(ord(name)))

    contenders = {name: contender(name) for name in "abc"}
    job = timing.Job("job", timing.Shape(1, 1), contenders, lambda: made.append("-"), again)
    clock = iter(range(100))

    def seconds_of(run):
        run()
        return timing.Taken(float(next(clock)), 0.5)

    result = timing.measure(job, seconds_of, timing.Patience(seconds=0.0, least=3))
    assert "".join(made) == calls
    assert result.seconds == seconds
    assert result.host_seconds == {name: [0.5] * 3 for name in "abc"}
    assert result.memory == {name: ord(name) for name in "abc"}


def test_figures_follow_from_the_samples():
    """Ratios and shares within a repetition, by the bytes that have to move"""
    bytes_of = {"torch": (4, 0, 0, 0), "ours": (2, 8, 0, 0), "copies": (0, 0, 2, 8)}
    speeds = np.array(
        [[4e12, 5e12, 3e12, 2e12], [3e12, 6e12, 2e12, 4e12], [5e12, 4e12, 3e12, 3e12]]
    )
    read, update, copy, write = speeds.T
    elements, seconds = 5 * 10**7, np.array([[9.0, 12, 15], [6, 2, 5], [8, 7, 5]]) * 1e-5
    taken = dict(zip(bytes_of, seconds, strict=True))
    shape = timing.Shape(elements, 100, "large")
    result = timing.Result(
        "job",
        shape,
        {name: timing.Traffic(*traffic) for name, traffic in bytes_of.items()},
        {name: list(times) for name, times in taken.items()},
        [timing.Limits(*row) for row in speeds],
        {name: [1e-3, None, 2e-3] for name in bytes_of},
    )

    def least(name):
        r, u, cr, cw = bytes_of[name]
        copies = np.maximum(np.maximum(cr / read, cw / write), (cr + cw) / update)
        return elements * (r / read + u / update + copies)

    size = elements * 10
    right = {
        "torch": (taken["torch"] / taken["ours"], np.median(least("torch") / least("ours"))),
        LIMIT: (least("ours") / taken["ours"], 1.0),
        COPY: (size / taken["ours"] / copy, 1.0),
        MICROSECONDS: (taken["ours"] * 1e6, None),
    }
    figures = [Figure("job", "large", "ours", against, 3.0) for against in right]
    rows = evaluate([*figures, Figure("job", "tiny", "ours", "torch", 1.0)], [result])
    assert [row["against"] for row in rows] == list(right)
    for row, (values, allowed) in zip(rows, right.values(), strict=True):
        q1, median, q3 = np.percentile(values, (25, 50, 75))
        assert row["measured"] == pytest.approx(median, rel=RTOL)
        assert row["quartiles"] == pytest.approx([q1, q3], rel=RTOL)
        assert row["allowed"] == (allowed and pytest.approx(allowed, rel=RTOL))
    share = np.median(least("copies") / taken["copies"])
    (row,) = (row for row in contender_rows(result) if row["contender"] == "copies")
    assert row["bytes_per_element"] == "c2>8"
    assert row["share_of_limit"][1] == pytest.approx(share, rel=WRITTEN)
    assert row["share_of_copy"][1] == pytest.approx(
        np.median(size / taken["copies"] / copy), rel=WRITTEN
    )
    assert row["host_seconds"] == pytest.approx([1.25e-3, 1.5e-3, 1.75e-3])
    assert row["seconds"] == pytest.approx([6e-5, 7e-5, 7.5e-5])
    faster = taken["torch"] / taken["copies"]
    for name, values in (("times_faster", faster), ("time_over_first", 1 / faster)):
        assert row[name] == pytest.approx(np.percentile(values, (25, 50, 75)), rel=WRITTEN)
    assert "sets_of_gradients" not in row


def test_the_limit_is_the_fastest_of_the_plain_loops():
    """A yardstick takes the contender that read or wrote the most in the least time"""
    memory = Memory(torch.device("cpu"))
    results = []
    for job in memory.jobs():
        names = list(job.contenders)
        taken = {name: [2.0, 2.0] for name in names} | {names[-1]: [1.0, 1.0]}
        traffic = {name: contender.traffic for name, contender in job.contenders.items()}
        results.append(timing.Result(job.name, job.shape, traffic, taken, [], {}))
    yardstick = memory.yardstick(*results)
    reader, updater, writer = (list(result.seconds)[-1] for result in results)
    assert (yardstick.reader, yardstick.updater, yardstick.writer) == (reader, updater, writer)


class FakeGpu:
    """Seconds of a host and of a GPU whose kernels are started one after the other."""

    RATE = 2e9  # cycles per second

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def put(self, host: float, device: float) -> None:
        """Put a kernel into the queue, from the host."""
        self.host += host
        self.device = max(self.device, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = max(gpu.device, gpu.host)

            def query(self):
                return self.at <= gpu.host

            def synchronize(self):
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        cuda = SimpleNamespace(
            Event=Event,
            synchronize=self.synchronize,
            _sleep=lambda cycles: self.put(0.0, cycles / self.RATE),
        )
        monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.host))
        monkeypatch.setattr(timing.torch, "cuda", cuda)


def test_a_gpu_is_timed_without_its_host(monkeypatch):
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    clock = timing.DeviceClock(torch.device("cpu"), ahead=True)
    buffer, read, sums = clock._buffer.clone(), [], torch.sum
    monkeypatch.setattr(torch, "sum", lambda *args, **how: read.append(args) or sums(*args, **how))

    def call(host, device, waits=False):
        def run():
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


def test_shapes_hold_all_elements():
    sizes = timing.Shape(1003, 10).sizes()
    assert sum(sizes) == 1003
    assert set(sizes) == {100, 101}
