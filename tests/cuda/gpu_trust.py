"""Takes the installed CUDA kernels as having passed the self-test, in the cache that is in use:
what is wrong with them every part of tests/gpu.sh is to show. Fails where they do not load."""

from __future__ import annotations

import accumext
from accumext.backend import _build, _cache, _self_test, _verify


def main() -> None:
    root, _ = _cache.open_cache()
    library = _build.installation() / "_C_cuda.abi3.so"
    for device in _verify._devices("cuda"):
        trial = _verify._Trial(library, _build.registered_ops("cuda"), device)
        _verify._keep(dict.fromkeys(trial.names, _self_test.OK), root / trial.key())
    assert accumext.backend() == "cuda", accumext.backend_reason()


if __name__ == "__main__":
    main()
