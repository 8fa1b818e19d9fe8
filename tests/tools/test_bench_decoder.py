"""The decoder's benchmark: its contenders are right, its samples real, its figures follow."""

import math
import re
import warnings
from types import SimpleNamespace

import _decoder_report as report
import _decoders as decoders
import _decoding as decoding
import _facts as facts
import _timing as timing
import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from support.programs import run_bench

RTOL = 1e-12  # float64 in another order of operations
LOSS = 1e-6  # float32 losses of a few dozen tokens, relative
EXACT = 1e-5  # float32 gradients beside float64, relative
ROUNDED = 0.03  # bfloat16 products, each off by up to 2^-8 relative
TIES = 0.1  # share of tokens whose rivals bfloat16 does not tell apart, at most
TRUNCATED = 0.05  # at least; what the gradient lacks that flows through time is far more

PLAIN, PER_TOKEN = "plain autograd", "backward per token (truncated)"
OURS, OURS_BF16, PRODUCTS = "accumext", "accumext, bf16", "the head's products in torch"
TORCH = {"F.linear_cross_entropy", "F.linear_cross_entropy, chunk by hand"}


@pytest.mark.process
def test_every_way_computes_what_it_says(tmp_path):
    """On the tokens that it was fed, greedy ones; but for the way that truncates"""
    result, _ = run_bench("decoder", tmp_path, "--device=cpu", "--quick", "--shape=9,4,211,16")
    rows = {row["contender"]: row for row in result["rows"]}
    torch_has = TORCH if hasattr(F, "linear_cross_entropy") else set()
    ways = {PLAIN, PER_TOKEN, "checkpointed head", OURS, OURS_BF16, PRODUCTS} | torch_has
    assert set(rows) == ways
    assert result["figures"] == []
    assert rows[PLAIN]["times_faster"] == rows[OURS]["accumext_times_faster"] == [1.0] * 3
    peaks = {}
    for name, row in rows.items():
        assert "left_out" not in row
        assert row["runs"] >= 3
        assert 0 < row["seconds"][0] <= row["seconds"][1] <= row["seconds"][2]
        if name == PRODUCTS:
            assert "gradient_distance" not in row
            continue
        half, peaks[name] = name == OURS_BF16, row["peak_bytes"]
        assert row["loss"] == pytest.approx(row["exact_loss"], rel=ROUNDED if half else LOSS)
        assert row["exact_loss"] == pytest.approx(math.log(211), rel=0.1)
        assert row["not_greedy"] <= (TIES * 9 * 4 if half else 0)
        low, high = (
            (TRUNCATED, 1) if name == PER_TOKEN else (EXACT, ROUNDED) if half else (0, EXACT)
        )
        for kind in ("gradient_distance", "recurrent_distance"):
            assert low < row[kind] < high
    assert peaks[PLAIN] > max(4 * 9 * 4 * 211, peaks[OURS])  # its probabilities
    assert min(peaks.values()) > 0


@pytest.mark.process
def test_a_chosen_shape_in_bfloat16(tmp_path):
    options = "--cell=lstm", "--dtype=bfloat16", f"--way={PLAIN}", f"--way={OURS}", "--threads=1"
    result, _ = run_bench("decoder", tmp_path, "--device=cpu", "--shape=9,4,211,16", *options)
    assert {row["case"] for row in result["rows"]} == {"lstm, bfloat16, T=9 B=4 V=211 H=16"}
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == [PLAIN, OURS, PRODUCTS]
    for name in (PLAIN, OURS):
        assert EXACT < rows[name]["gradient_distance"] < ROUNDED
    assert result["machine"]["threads"] == 1


def test_figures_follow_from_the_samples():
    """Ratios of shared repetitions, and peaks; of cases that a figure is about"""
    seconds = {
        PLAIN: [6.0, None, 4.0, None],
        OURS: [2.0, 1.0, 1.0, None],
        "c": [None, 1.0, None, 1.0],
    }

    def result(role, steps, ours):
        case = decoding.Case(decoders.Shape(steps, 2, 31, 8, role), "gru", torch.float32)
        checked = {
            name: decoding.Checked(peak, 1.0, 1.0, synchronisations=3)
            for name, peak in ((PLAIN, 900), (OURS, ours))
        }
        left_out = {"d": "does not fit"}
        return decoding.Result(case, checked, seconds, left_out, {n: [None] * 4 for n in seconds})

    short, long = result("small", 2, 300), result("long", 6, 812)
    assert short.ratio(OURS, PLAIN) == pytest.approx((3.25, 3.5, 3.75))  # 3 and 4
    assert short.ratio("c", PLAIN) is short.ratio("d", PLAIN) is None
    assert short.spread(OURS) == pytest.approx((1.0, 1.0, 1.5))
    for figure, measured, more in (
        (report.Faster("small", OURS, PLAIN, 3.0), 3.5, {"quartiles": [3.25, 3.75]}),
        (report.Smaller("small", 10.0), 3.0, {}),
        (report.Waits("small"), 3, {}),
        (report.Growth("small", "long"), 2.0, {}),  # 512 bytes over 4 states [2, 8]
    ):
        (row,) = figure.rows([short, long])
        assert row["measured"] == measured
        assert row.items() >= more.items()
        assert figure._replace(role="other").rows([short, long]) == []
    rows = {row["contender"]: row for row in report.contender_rows(short)}
    assert list(rows) == [PLAIN, OURS, "c", "d"]
    assert (rows[OURS]["runs"], rows[OURS]["seconds"]) == (3, [1.0, 1.0, 1.5])
    assert rows[OURS]["times_faster"] == rows[PLAIN]["accumext_times_faster"] == [3.25, 3.5, 3.75]
    assert not {"times_faster", "host_seconds", "left_out"} & rows["c"].keys()
    assert (rows["d"]["steps"], rows["d"]["left_out"]) == (2, "does not fit")
    assert "3.50 [3.25, 3.75]" in report.table(short)


def test_a_way_that_is_wrong_is_seen():
    """Each gradient is compared on the tokens that its own way fed."""
    shape = decoders.Shape(6, 3, 31, 8)
    decoder = decoders.Decoder(shape, "gru", torch.device("cpu"))
    truth = decoding.Truth(decoder, shape)

    def off_by(factor):
        def way(decoder):
            inputs = torch.arange(18).reshape(6, 3)
            loss, gradients, _ = decoders.exact(decoder, inputs)
            for parameter, gradient in zip(decoder.parameters(), gradients):
                parameter.grad = gradient * factor
            return decoders.Outcome(loss, inputs)

        return way

    for factor, expected in ((1.0, 0.0), (1.01, 0.01), (-1.0, 2.0)):
        checked = decoding.check(decoder, off_by(factor), truth, torch.device("cpu"))
        assert checked.gradient_distance == pytest.approx(expected, abs=EXACT)
        assert checked.recurrent_distance == pytest.approx(expected, abs=EXACT)
        assert checked.loss == pytest.approx(checked.exact_loss, rel=LOSS)
        assert checked.not_greedy > 7  # of the 15 that were made up


def test_plain_autograd_is_the_truth_in_its_own_precision():
    """Spares large shapes a run; where the truth is in float64, nothing is taken over."""
    small, large = decoders.Shape(6, 3, 31, 8), decoders.Shape(1, 1, decoding.IN_DOUBLE + 1, 1)
    decoder = decoders.Decoder(small, "gru", torch.device("cpu"))
    outcome = decoders.plain(decoder)
    gradients = decoders.exact(decoder, outcome.inputs).gradients
    for shape, same in ((small, False), (large, True)):
        truth = decoding.Truth(decoder, shape)
        truth.learn(decoder, outcome)
        found = truth(outcome.inputs)
        assert (found.gradients[0] is decoder.gradients()[0]) == same
        assert relative_distance(found.gradients, gradients) < EXACT
        assert torch.equal(found.greedy[:5], outcome.inputs[1:])
        other = truth(outcome.inputs.flip(0))
        assert relative_distance(other.gradients, gradients) > TRUNCATED


def test_turns_rotate_and_end_with_the_seconds():
    """In a turn a way runs twice; the first run, here a hundred times as long, is not timed."""
    calls: list[str] = []
    costs = {"a": 4.0, "b": 1.0, "c": 2.0}

    def seconds_of(run):
        cost = costs[run()]
        return timing.Taken(cost if calls[-4:-2] == calls[-2:] else 100 * cost, 0.5)

    def way(name):
        return lambda: calls.append(name) or name

    patience = decoding.Patience(seconds=4.0, least=2, most=9, longest=100.0)
    bench = decoding.Bench(torch.device("cpu"), seconds_of, patience)
    decoder = SimpleNamespace(forget=lambda: calls.append("-"))
    seconds, host = bench._time(decoder, {name: way(name) for name in "abc"})
    # a is over after the two that everyone has, c with them, too; b goes on for four seconds
    assert "".join(calls) == "-a-a-b-b-c-c" + "-b-b-c-c-a-a" + "-b-b" + "-b-b"
    assert seconds == {"a": [4.0, 4.0, None, None], "b": [1.0] * 4, "c": [2.0, 2.0, None, None]}
    assert host == {"a": [0.5, 0.5, None, None], "b": [0.5] * 4, "c": [0.5, 0.5, None, None]}


@pytest.mark.slow
def test_what_takes_too_long_or_does_not_fit_is_left_out(monkeypatch):
    ticks = iter(range(0, 10**6, 10))  # seconds; every run takes ten
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    small, large = (decoders.Shape(steps, 2, 31, 8) for steps in (2, 40))

    def seconds_of(run):
        run()
        return timing.Taken(1.0)

    def measure(shape, **how):
        return bench.measure(decoding.Case(shape, "gru", torch.float32, (PLAIN, OURS), **how))

    def new_bench(longest):
        patience = decoding.Patience(seconds=0.0, least=2, most=2, longest=longest)
        return decoding.Bench(torch.device("cpu"), seconds_of, patience)

    bench = new_bench(15.0)
    result = measure(small)
    assert result.left_out == {}
    assert set(result.seconds) == {PLAIN, OURS, PRODUCTS}
    monkeypatch.setattr(decoding, "free_bytes", lambda device: 4 * large.logits)
    result = measure(large)
    assert result.left_out == {PLAIN: "does not fit", OURS: "would take 20 s a run or more"}
    assert set(result.seconds) == {PRODUCTS}
    assert re.search(f"  {OURS} +left out: would take 20 s", report.table(result))
    result = measure(small, without=(OURS,))
    assert set(result.seconds) == {PLAIN, PRODUCTS}
    result = measure(large, timed=False)
    assert set(result.checked) == {OURS}
    assert result.checked[OURS].gradient_distance is None

    bench = new_bench(5.0)
    result = measure(small)
    assert result.left_out == dict.fromkeys((PLAIN, OURS), "takes 10 s a run")
    assert set(result.checked) == {PLAIN, OURS}
    assert set(result.seconds) == {PRODUCTS}


def test_waits_for_a_gpu_are_counted(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call(waits):
        def run():
            for _ in range(waits):
                if modes[-1] == "error":
                    raise RuntimeError("called a synchronizing CUDA operation")
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

        return run

    assert [facts.synchronisations(call(n)) for n in (0, 1, 3)] == [0, 1, 3]
    assert modes[-1] == "default"
