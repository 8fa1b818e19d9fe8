"""A source tree of the package with one tiny kernel, to see in a process of its own who answers.

The kernel fills tensors with 42, so that a result tells which kernel answered; it compiles in
seconds.
"""

import hashlib
import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import accumext
from support import forks
from support.forks import Forked

PROBE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

void Fill(std::vector<torch::stable::Tensor> tensors, double factor) {
  for (torch::stable::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) *static_cast<float*>(tensor.data_ptr()) = 42;
  }
}

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) { m.impl("scale_.scalar", TORCH_BOX(&Fill)); }
"""
CALL = """
import torch, accumext
tensor = torch.tensor([2.0])
accumext.scale_([tensor], 0.5)
"""
SHOW = CALL + "print(tensor.item(), accumext.backend(), accumext.backend_reason(), sep='|')"
NATIVE, REFERENCE = "42.0", "1.0"
COMPILER: dict[str, str] = {}  # variables, where all tests of a session share a compiler
SHARED = 'exec "$COMPILE_ONCE" "$@"'  # that one, at the end of a script in its place


class Tree:
    """A source tree of the package that nothing was installed from."""

    def __init__(self, folder: Path) -> None:
        ignore = shutil.ignore_patterns("*.so", "_build_info.json", "_csrc")
        shutil.copytree(Path(accumext.__file__).parent, folder / "accumext", ignore=ignore)
        (folder / "csrc" / "cpu").mkdir(parents=True)
        self.folder = folder
        self.source = folder / "csrc" / "cpu" / "probe.cpp"
        self.source.write_text(PROBE)
        self.cache = folder / "extensions"
        self.installed = folder / "accumext" / "backends" / "_C_cpu.abi3.so"

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of a program in this tree."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCUMEXT_")}
        clean |= {"PYTHONPATH": str(self.folder), "TORCH_EXTENSIONS_DIR": str(self.cache)}
        return clean | COMPILER | variables

    def start(self, code: str, **variables: str) -> Forked:
        """Run Python in this tree."""
        return Forked("-c", code, cwd=self.folder, env=self.environment(**variables))

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = self.environment(**variables)
        return forks.run("-c", code, cwd=self.folder, env=env, timeout=100)

    def show(self, **variables: str) -> tuple[str, str, str]:
        """Return the result of one call, the backend and the reason."""
        done = self.run(SHOW, **variables)
        assert done.returncode == 0, done.stderr
        result, backend, reason = done.stdout.strip().split("|")
        return result, backend, reason

    def doctor(self, **variables: str) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the report of `python -m accumext doctor --json`."""
        code = "from accumext.__main__ import main; raise SystemExit(main(['doctor', '--json']))"
        done = self.run(code, **variables)
        return done.returncode, json.loads(done.stdout)

    def built(self) -> Path:
        """Return the folder of the library compiled on first use."""
        (library,) = self.cache.glob("accumext*/*/_C_cpu.so")
        return library.parent

    def install(self, library: Path | None = None) -> None:
        """Put a library, by default that of these sources, where an installation would."""
        if library is None:
            if not self.cache.exists():
                self.show()
            library = self.built() / "_C_cpu.so"
        shutil.copy(library, self.installed)
        path = self.folder / "accumext" / "backends" / "_build.py"  # by path, as in setup.py
        key = runpy.run_path(str(path))["sources_key"]()
        record: dict[str, Any] = {"sources": key, "torch": "2.13.0", "compiled": ["cpu"]}
        digest = hashlib.sha256(self.installed.read_bytes()).hexdigest()
        record |= {"missing": {}, "sha256": {self.installed.name: digest}}
        (self.folder / "accumext" / "backends" / "_build_info.json").write_text(json.dumps(record))
        shutil.rmtree(self.cache, ignore_errors=True)
