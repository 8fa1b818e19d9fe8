"""Loggers and recipes."""

import json
import runpy
from functools import partial

import pytest
import torch
from support import ROOT
from support import optimizer_oracle as oracle
from support.device import DeviceReads, cpu_as_device
from support.programs import output_of, run_script
from your_loops import frameworks

pytestmark = frameworks

NO_EXTRA_OF_OURS = {  # tests/tools/test_other_frameworks.py runs these where they are installed
    *("with_composer", "with_darts", "with_deepspeed", "with_fastai", "with_neuralforecast"),
    *("with_skorch", "with_speechbrain", "with_stable_baselines3", "with_timm"),
}
FOUND = sorted((ROOT / "examples" / "recipes").glob("*.py"))
RECIPES = [path for path in FOUND if path.stem not in NO_EXTRA_OF_OURS]
NEEDS = {  # by a word in the name of a recipe: what it imports beside torch
    **{name: name for name in ("accelerate", "ignite", "lightning", "tensorboard")},
    "fabric": "lightning",
    "trainer": "transformers",
}
GROUPS = {"with_ddp", "with_torchrun_elastic"}  # end the process, or a group of processes
STATS = ["total_norm", "clip_coef", "loss_scale", "weight", "micro_batches", "skipped"]
BATCHES = oracle.make_batches(6)
MAX_NORM = 0.1  # below the norm of every window
FLOAT32 = 1e-6  # TensorBoard keeps values in float32

sgd = partial(torch.optim.SGD, lr=0.1)


def test_loggers(tmp_path):
    """Dicts, JSON and TensorBoard take `stats()`, a flat dict of floats, norm before clipping"""
    model, written = oracle.make_model(), []
    opt = oracle.wrapped(model, sgd, window=2, max_norm=MAX_NORM)
    for batch in BATCHES:
        opt.backward(oracle.loss_of(model, batch))
        opt.step()
        if opt.stepped:
            written.append(json.loads(json.dumps(opt.stats())))
    assert [list(stats) for stats in written] == [STATS] * 3
    assert all(stats["total_norm"] > MAX_NORM for stats in written)
    assert [stats["micro_batches"] for stats in written] == [2.0] * 3

    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for window, stats in enumerate(written, 1):
            for name, value in stats.items():
                writer.add_scalar(f"window/{name}", value, window)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"window/{name}" for name in STATS}
    for name in STATS:
        scalars = events.Scalars(f"window/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        values = [stats[name] for stats in written]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=FLOAT32)


def test_device_reads():
    """Logging every n-th window reads the device in those windows alone, and once in each"""
    model = oracle.make_model(torch.float32)
    opt = oracle.wrapped(model, partial(sgd, fused=True), window=2, max_norm=MAX_NORM)
    with cpu_as_device(), DeviceReads() as reads:
        for window in range(1, 7):
            for batch in BATCHES[:2]:
                oracle.one_call(opt, oracle.loss_of(model, batch.float()))
            report = opt.last.total_norm, opt.last.clip_coef, opt.last.loss_scale, opt.last.weight
            assert all(value.shape == () for value in report)
            if window % 3 == 0:
                assert opt.stats()["micro_batches"] == 2.0
            assert (reads.count, reads.lists) == (0, window // 3)


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe(recipe, tmp_path, monkeypatch, capsys):
    """Each recipe for plain PyTorch or an extra runs as it is, writes no file, prints its window"""
    for word in NEEDS.keys() & set(recipe.stem.split("_")):
        pytest.importorskip(NEEDS[word])
    if recipe.stem in GROUPS:
        said = output_of(run_script(recipe, cwd=tmp_path))
    else:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(recipe), run_name="__main__")
        said = capsys.readouterr().out
    assert "'total_norm': 0." in said.replace('"', "'")
    assert list(tmp_path.iterdir()) == []


def test_a_window_above_a_bound_is_dropped():
    """The recipe that drops windows of a large norm trains as if their batches were not there"""
    recipe = ROOT / "examples" / "recipes" / "skipping_large_norms.py"
    names = runpy.run_path(str(recipe), run_name="__main__")
    torch.manual_seed(0)
    torch.randn(320, 8)  # the rows, drawn before the model is
    plain = torch.nn.Linear(8, 4).double()
    by_hand = oracle.ByHand(plain.parameters(), partial(torch.optim.AdamW, lr=0.1), max_norm=1.0)
    for window in oracle.windows_of(names["batches"], 4):
        if all(x.abs().max() < 100.0 for x, _ in window):
            for x, y in window:
                by_hand.add(torch.nn.functional.cross_entropy(plain(x.double()), y))
            by_hand.step()
    assert (names["taken"], names["dropped"]) == (4, 1)
    # Four steps of 0.1 in float32, of gradients divided by their size.
    trained = [p.double() for p in oracle.parameters_of(names["model"])]
    oracle.assert_close(trained, oracle.parameters_of(plain), 1e-4)


@pytest.mark.process
def test_a_run_that_resumes_on_other_ranks_is_the_same_run(tmp_path):
    """torchrun elastic: 2 ranks for 3 windows, then 3 ranks, end as one rank does"""
    recipe = ROOT / "examples" / "recipes" / "with_torchrun_elastic.py"
    said = []
    for folder, ranks, windows in (("whole", None, 6), ("parts", 2, 3), ("parts", 3, 6)):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        options = ["--checkpoint", tmp_path / folder, "--windows", windows]
        program = [*(torchrun if ranks else []), recipe, *options]
        said.append(output_of(run_script(*program, cwd=tmp_path)))
    assert said[1].startswith("windows 0 to 3, ")
    assert said[2].startswith("windows 3 to 6, ")
    norms = [float(text.partition("'total_norm': ")[2].partition(",")[0]) for text in said]
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)  # six steps in float32
    assert norms[1] != pytest.approx(norms[0], rel=1e-2)
