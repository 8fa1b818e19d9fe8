"""The decoder's benchmark: its contenders are right, its samples real, its figures follow."""

from __future__ import annotations

import json
import re
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import ROOT
from support.decode_oracle import relative_distance
from support.once import once
from support.programs import run_script

RTOL = 1e-12  # float64 in another order of operations
LOSS = 1e-6  # float32 losses of a few dozen tokens, relative
EXACT = 1e-5  # float32 gradients beside float64, relative
ROUNDED = 0.03  # bfloat16 products, each off by up to 2^-8 relative
TIES = 0.1  # share of tokens whose rivals bfloat16 does not tell apart, at most
TRUNCATED = 0.05  # at least; what the gradient lacks that flows through time is far more

PLAIN, PER_TOKEN = "plain autograd", "backward per token (truncated)"
OURS, OURS_BF16, PRODUCTS = "accumext", "accumext, bf16", "the head's products in torch"
TORCH = {"F.linear_cross_entropy", "F.linear_cross_entropy, chunk by hand"}
MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported()

FASTER_BF16 = [("wide", OURS_BF16, PRODUCTS, 1 / 0.4), ("wide", OURS_BF16, OURS, 2.0)]
FASTER = [  # promised on a CPU, in float32
    ("small", OURS, PER_TOKEN, 8.0),
    ("small", OURS, PLAIN, 10.0),
    ("wide", OURS, PER_TOKEN, 5.0),
    ("wide", OURS, PLAIN, 5.0),
    ("wide", OURS, PRODUCTS, 1 / 0.75),
    *(FASTER_BF16 if MULTIPLIES_BF16 else []),
    ("many rows", OURS, PER_TOKEN, 4.0),
    ("many rows", OURS, PLAIN, 5.5),
]
MEMORY = [("long", 10.0), ("shorter", None)]

Run = tuple[dict[str, Any], str]


def bench(folder: Path, *arguments: str) -> Run:
    """Return the JSON that a run on a CPU wrote, and its output."""
    path = folder / "result.json"
    done = run_script("bench/decoder.py", "--device=cpu", f"--json={path}", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def quick(folder: Path) -> None:
        _, printed = bench(folder, "--quick")
        (folder / "printed").write_text(printed)

    folder = once(tmp_path_factory, "bench-decoder", quick)
    return json.loads((folder / "result.json").read_text()), (folder / "printed").read_text()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The benchmark's own modules."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _decoder_report
    import _decoders
    import _decoding
    import _facts
    import _timing

    return SimpleNamespace(
        report=_decoder_report, decoders=_decoders, decoding=_decoding, facts=_facts, timing=_timing
    )


def contenders() -> set[str]:
    here = {PLAIN, PER_TOKEN, "checkpointed head", OURS}
    if hasattr(F, "linear_cross_entropy"):
        here |= TORCH
    return here | {OURS_BF16}


def timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in result["cases"] if PRODUCTS in case["contenders"]]


def find(result: dict[str, Any], role: str) -> dict[str, Any]:
    (case,) = [case for case in result["cases"] if case["role"] == role]
    return case


@pytest.mark.process
def test_every_case_has_its_contenders(run: Run) -> None:
    result, _ = run
    assert [case["role"] for case in timed(result)] == ["small", "wide", "many rows"]
    for case in result["cases"]:
        memory = {PLAIN, OURS} if case["role"] == "long" else {OURS}
        names = contenders() | {PRODUCTS} if case in timed(result) else memory
        assert set(case["contenders"]) == names
        assert case["left_out"] == {}
        assert case["baseline"] == PLAIN


@pytest.mark.process
def test_losses_are_those_of_the_tokens_fed(run: Run) -> None:
    result, _ = run
    for case in timed(result):
        for name, row in case["contenders"].items():
            if name != PRODUCTS:
                rel = ROUNDED if name == OURS_BF16 else LOSS
                assert row["loss"] == pytest.approx(row["exact_loss"], rel=rel)
                assert row["exact_loss"] == pytest.approx(np.log(case["vocabulary"]), rel=0.1)


@pytest.mark.process
def test_tokens_are_greedy(run: Run) -> None:
    result, _ = run
    for case in timed(result):
        for name, row in case["contenders"].items():
            if name != PRODUCTS:
                ties = TIES * case["steps"] * case["batch"] if name == OURS_BF16 else 0
                assert row["not_greedy"] <= ties


@pytest.mark.process
def test_gradients_are_exact_but_for_the_truncated_one(run: Run) -> None:
    result, _ = run
    for case in timed(result):
        for name, row in case["contenders"].items():
            if name == PRODUCTS:
                assert "gradient_distance" not in row
                continue
            for kind in ("gradient_distance", "recurrent_distance"):
                if name == PER_TOKEN:
                    assert TRUNCATED < row[kind] < 1
                elif name == OURS_BF16:
                    assert EXACT < row[kind] < ROUNDED
                else:
                    assert 0 < row[kind] < EXACT


@pytest.mark.process
def test_derived_numbers_follow_from_the_samples(run: Run) -> None:
    result, _ = run
    for case in timed(result):
        plain = samples(case, PLAIN)
        for name, row in case["contenders"].items():
            seconds = samples(case, name)
            assert len(seconds) == len(plain)
            assert np.isfinite(seconds[:3]).all()
            assert np.nanmin(seconds) > 0
            expected = np.nanpercentile(seconds, (25, 50, 75))
            assert list(row["spread"].values()) == pytest.approx(expected, rel=RTOL)
            rate = case["steps"] * case["batch"] / expected[1]
            assert row["tokens_per_second"] == pytest.approx(rate, rel=RTOL)
            ratios = np.nanpercentile(plain / seconds, (25, 50, 75))
            assert list(row["times_faster"].values()) == pytest.approx(ratios, rel=RTOL)


def samples(case: dict[str, Any], name: str) -> np.ndarray:
    """Seconds by repetition, NaN where the contender took no turn."""
    return np.array(case["contenders"][name]["seconds"], dtype=np.float64)


@pytest.mark.process
def test_figures_follow_from_the_samples(run: Run) -> None:
    result, printed = run
    faster, rest = result["figures"][: len(FASTER)], result["figures"][len(FASTER) :]
    known = "role", "contender", "against", "target"
    assert [tuple(figure[key] for key in known) for figure in faster] == FASTER
    assert [(figure["role"], figure["target"]) for figure in rest] == MEMORY
    for figure in faster:
        case = find(result, figure["role"])
        ratios = samples(case, figure["against"]) / samples(case, figure["contender"])
        q1, median, q3 = np.nanpercentile(ratios, (25, 50, 75))
        assert figure["measured"] == pytest.approx(median, rel=RTOL)
        assert figure["quartiles"] == pytest.approx([q1, q3], rel=RTOL)
        line = f"{figure['figure']} | {figure['target']:g} | {median:.2f} [{q1:.2f}, {q3:.2f}]"
        assert f"\n{line}\n" in printed

    smaller, growth = rest
    peaks = {
        (case["role"], name): row["peak_bytes"]
        for case in result["cases"]
        for name, row in case["contenders"].items()
        if name != PRODUCTS
    }
    assert smaller["measured"] == peaks["long", PLAIN] / peaks["long", OURS]
    longer, shorter = find(result, "longer"), find(result, "shorter")
    steps = longer["steps"] - shorter["steps"]
    grown = peaks["longer", OURS] - peaks["shorter", OURS]
    assert growth["measured"] == grown / (4 * steps * longer["batch"] * longer["size"])
    for figure, target in ((smaller, "10"), (growth, "-")):
        assert f"\n{figure['figure']} | {target} | {figure['measured']:g}\n" in printed


@pytest.mark.process
def test_plain_autograd_holds_its_probabilities(run: Run) -> None:
    result, _ = run
    for case in timed(result):
        probabilities = 4 * case["steps"] * case["batch"] * case["vocabulary"]
        peaks = {name: row.get("peak_bytes") for name, row in case["contenders"].items()}
        assert peaks.pop(PRODUCTS) is None
        assert min(peaks.values()) > 0
        # torch's bfloat16 products may repack operands, which outweighs decoders as small as these
        peaks.pop(OURS_BF16, None)
        assert peaks[PLAIN] == max(peaks.values()) > probabilities


@pytest.mark.process
def test_the_machine_is_named(run: Run) -> None:
    result, printed = run
    assert result["machine"]["torch"] == torch.__version__
    assert {"cpu", "threads", "backend", "Liger", "CCE", "bfloat16"} < set(result["machine"])
    for name, fact in result["machine"].items():
        assert f"\n{name}: {fact}\n" in printed


@pytest.mark.process
@pytest.mark.parametrize("cell", ["lstm", "rnn"])
def test_a_chosen_shape_in_bfloat16_is_drawn(cell: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = tmp_path / "decoder.png"
    result, printed = bench(
        tmp_path, "--shape=9,4,211,16", f"--cell={cell}", "--dtype=bfloat16", f"--plot={drawing}"
    )
    (case,) = result["cases"]
    assert case["case"] == f"{cell}, bfloat16, T=9 B=4 V=211 H=16"
    assert set(case["contenders"]) == contenders() - {OURS_BF16} | {PRODUCTS}
    for name, row in case["contenders"].items():
        if name not in (PRODUCTS, PER_TOKEN):
            assert EXACT < row["gradient_distance"] < ROUNDED
    assert result["figures"] == []
    assert "figure | target" not in printed
    header = drawing.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", header[16:])
    assert width > 1000
    assert height > 300


@pytest.mark.process
def test_ways_that_are_asked_for_run_alone(tmp_path: Path) -> None:
    result, _ = bench(tmp_path, "--quick", "--shape=9,4,211,16", f"--way={OURS}", "--threads=1")
    (case,) = result["cases"]
    assert list(case["contenders"]) == [OURS, PRODUCTS]
    assert result["machine"]["threads"] == 1


def test_a_way_that_is_wrong_is_seen(modules: SimpleNamespace) -> None:
    """Each gradient is compared on the tokens that its own way fed."""
    decoders, decoding = modules.decoders, modules.decoding
    shape = decoders.Shape(6, 3, 31, 8)
    decoder = decoders.Decoder(shape, "gru", torch.device("cpu"))
    truth = decoding.Truth(decoder, shape)

    def off_by(factor: float) -> Any:
        def way(decoder: Any) -> Any:
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


def test_plain_autograd_is_the_truth_in_its_own_precision(modules: SimpleNamespace) -> None:
    """Spares large shapes a run; where the truth is in float64, nothing is taken over."""
    decoders, decoding = modules.decoders, modules.decoding
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
        assert torch.equal(found.greedy, outcome.inputs[1:])
        other = truth(outcome.inputs.flip(0))
        assert relative_distance(other.gradients, gradients) > TRUNCATED


def test_distance_is_over_all_tensors(modules: SimpleNamespace) -> None:
    got = [torch.randn(4, 3), torch.randn(5)]
    expected = [tensor.double() + torch.randn_like(tensor) for tensor in got]
    found = modules.decoding.distance(got, expected)
    assert found == pytest.approx(relative_distance(got, expected), rel=RTOL)


def test_turns_rotate_and_end_with_the_seconds(modules: SimpleNamespace) -> None:
    """In a turn a way runs twice; the first run, here a hundred times as long, is not timed."""
    calls: list[str] = []
    costs = {"a": 4.0, "b": 1.0, "c": 2.0}

    def seconds_of(run: Any) -> Any:
        cost = costs[run()]
        return modules.timing.Taken(cost if calls[-4:-2] == calls[-2:] else 100 * cost, 0.5)

    def way(name: str) -> Any:
        return lambda: calls.append(name) or name

    patience = modules.decoding.Patience(seconds=4.0, least=2, most=9, longest=100.0)
    bench = modules.decoding.Bench(torch.device("cpu"), seconds_of, patience)
    decoder = SimpleNamespace(forget=lambda: calls.append("-"))
    seconds, host = bench._time(decoder, {name: way(name) for name in "abc"})
    # a is over after the two that everyone has, c with them, too; b goes on for four seconds
    assert "".join(calls) == "-a-a-b-b-c-c" + "-b-b-c-c-a-a" + "-b-b" + "-b-b"
    assert seconds == {"a": [4.0, 4.0, None, None], "b": [1.0] * 4, "c": [2.0, 2.0, None, None]}
    assert host == {"a": [0.5, 0.5, None, None], "b": [0.5] * 4, "c": [0.5, 0.5, None, None]}


def test_ratios_are_of_shared_repetitions(modules: SimpleNamespace) -> None:
    seconds = {"a": [6.0, None, 4.0, None], "b": [2.0, 1.0, 1.0, None], "c": [None, 1.0, None, 1.0]}
    result = modules.decoding.Result(None, {}, seconds, {}, {})
    assert result.ratio("b", "a") == pytest.approx((3.25, 3.5, 3.75))  # 3 and 4
    assert result.ratio("c", "a") is None
    assert result.ratio("d", "a") is None
    assert result.spread("b") == pytest.approx((1.0, 1.0, 1.5))


def test_what_takes_too_long_or_does_not_fit_is_left_out(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders, decoding = modules.decoders, modules.decoding
    ticks = iter(range(0, 10**6, 10))  # seconds; every run takes ten
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    small, large = (decoders.Shape(steps, 2, 31, 8) for steps in (2, 40))

    def seconds_of(run: Any) -> Any:
        run()
        return modules.timing.Taken(1.0)

    def measure(shape: Any, **how: Any) -> Any:
        return bench.measure(decoding.Case(shape, "gru", torch.float32, (PLAIN, OURS), **how))

    def new_bench(longest: float) -> Any:
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
    assert re.search(f"  {OURS} +left out: would take 20 s", modules.report.table(result))
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


def test_waits_for_a_gpu_are_counted(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call(waits: int) -> Any:
        def run() -> None:
            for _ in range(waits):
                if modes[-1] == "error":
                    raise RuntimeError("called a synchronizing CUDA operation")
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

        return run

    assert [modules.facts.synchronisations(call(n)) for n in (0, 1, 3)] == [0, 1, 3]
    assert modes[-1] == "default"
    checked = modules.decoding.Checked(1, 1.0, 1.0, synchronisations=3)
    case = modules.decoding.Case(modules.decoders.Shape(1, 1, 2, 1, "large"), "gru", torch.float32)
    result = modules.decoding.Result(case, {OURS: checked}, {}, {}, {})
    (row,) = modules.report.Waits("large").rows([result])
    assert (row["target"], row["measured"]) == (0, 3)
