"""The auditor where others run it: a fixture of pytest, callbacks of trainers."""

import runpy

import pytest
from support import ROOT
from support.programs import run_script
from your_loops import frameworks

pytestmark = frameworks

CONFTEST = 'pytest_plugins = ["accumext.auditing.pytest_plugin"]\n'
TESTS = """
import torch

def train(audited, divisor):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audited(model, optimizer):
        for i in range(10):
            (model(torch.randn(4, 3)).square().mean() / divisor).backward()
            if i % 4 == 3 or i == 9:
                optimizer.step()
                optimizer.zero_grad()

def test_partial(audited):
    train(audited, 4)
"""


@pytest.mark.process
def test_a_fixture_checks_when_the_test_ends(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_loop.py").write_text(TESTS)
    said = []
    for ignored in ("", "audit_ignore =\n    accumulation.partial  # of the last window\n"):
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ignored}")
        done = run_script("-m", "pytest", "-qp", "no:cacheprovider", "test_loop.py", cwd=tmp_path)
        said.append((done.returncode, done.stdout))
    assert said[0][0] == 1
    assert "accumulation.partial" in said[0][1]
    assert "1 passed, 1 error" in said[0][1]  # at its end, not in its loop
    assert said[1][0] == 0, said[1][1]


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("with_lightning", "lightning", "accumulation.partial"),
        ("with_trainer", "transformers", "accumulation.divisor_missing"),
    ],
)
def test_callbacks_print_what_is_wrong(name, package, said, tmp_path, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "auditing" / f"{name}.py"), run_name="__main__")
    assert f"  {said}\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
