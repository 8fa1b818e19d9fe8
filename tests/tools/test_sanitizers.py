"""The CPU library under AddressSanitizer, UBSan and ThreadSanitizer: tests/tools/sanitized."""

import shutil

import pytest
import sanitized
from support.once import once
from support.programs import compiler

import accumext

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(accumext.backend() == "reference", reason="has no kernels to look at"),
]


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Return a function that compiles for a sanitizer, once for all workers, into a folder."""
    if shutil.which(compiler()[0]) is None:
        pytest.skip("no C++ compiler")

    def folder(kind):
        if sanitized.runtime(kind) is None:
            pytest.skip(f"the compiler has no {sanitized.KINDS[kind][1]}")

        def build(place):
            sanitized.build(kind, place)
            clean = sanitized.run(kind, place, "fault", "none")
            unfit = "FATAL: ThreadSanitizer" in clean.stderr  # as where addresses are too random
            assert unfit or clean.returncode == 0, clean.stderr
            (place / "unfit").write_text(clean.stderr.splitlines()[0] if unfit else "")

        place = once(tmp_path_factory, f"sanitized-{kind}", build)
        if unfit := (place / "unfit").read_text():
            pytest.skip(unfit)
        return place

    return folder


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("address", "use_after_free", "AddressSanitizer: heap-use-after-free"),
        ("address", "beyond_the_buffer", "AddressSanitizer: heap-buffer-overflow"),
        ("address", "overflow", "runtime error: signed integer overflow"),
        ("thread", "race", "ThreadSanitizer: data race"),
    ],
)
def test_a_fault_is_seen(kind, fault, words, built):
    done = sanitized.run(kind, built(kind), "fault", fault)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("kind", "isa"),
    [("address", "default"), ("address", "avx2"), ("address", None), ("thread", None)],
)
def test_operators(kind, isa, built):
    """`isa`: the widest instruction set that may be used; None: AVX-512, emulated where need be.

    To name AVX-512 makes torch use it even where the processor has none.
    """
    at_most = {} if isa is None else {"ATEN_CPU_CAPABILITY": isa}
    done = sanitized.run(kind, built(kind), "operators", **at_most)
    assert done.returncode == 0, done.stdout + done.stderr
