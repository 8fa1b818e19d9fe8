"""host_cuda/ptx, by which nvcc's kernels run on the host, sees faults of theirs. What instructions
do is tested with the kernels that have them."""

import os
import shutil
import subprocess

import host_cuda
import pytest
from host_cuda import ptx
from host_cuda.ptx.translate import translate

pytestmark = pytest.mark.build  # compiles what has been translated

# A warp whose lanes add up their numbers, those of even lanes doubled; unless %r1
# is the number of a fault.
MODULE = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 probe_param_0)
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %d<9>;
    .shared .align 4 .b8 few[8];
    ld.param.u64 %d0, [probe_param_0];
    mov.u32 %r0, %tid.x;
    ld.global.u32 %r1, [%d0];
    bar.sync 0;
    BODY
    and.b32 %r3, %r0, 1;
    setp.eq.s32 %p1, %r3, 1;
    mov.u32 %r2, %r0;
    @%p1 bra $odd;
    shl.b32 %r2, %r2, 1;
    $odd:
    shfl.sync.bfly.b32 %r4|%p2, %r2, 1, 31, -1;
    add.s32 %r2, %r2, %r4;
    setp.eq.s32 %p3, %r0, 0;
    @%p3 st.global.u32 [%d0], %r2;
    ret;
}
"""
FAULTS = {
    "st.global.u32 [%d0+2], %r0;": "a misaligned access",
    "mov.u64 %d1, few; ld.shared.u32 %r2, [%d1+6];": "an access beside shared memory",
    "st.global.u64 [%d0+8], %r0;": "an access beside memory",
    "shfl.sync.down.b32 %r2|%p1, %r0, 1, 15, -1;": "a shuffle of a part of a warp",
    "vote.sync.all.pred %p1, 1, 3;": "a warp operation of some lanes only",
    "setp.eq.s32 %p1, %r0, 0; @%p1 bar.sync 0;": "threads wait for one another at different places",
    "trap;": "a trap",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The number of a fault, or another one -> what the kernel leaves."""
    folder = tmp_path_factory.mktemp("probe")
    module = folder / "module.o"
    faults = (
        f"setp.ne.s32 %p0, %r1, {i}; @%p0 bra $past{i}; {body} $past{i}:"
        for i, body in enumerate(FAULTS)
    )
    ptx.compile_translated(translate(MODULE.replace("BODY", "\n".join(faults))), module)
    probe = host_cuda.build_program("ptx/probe", folder, module)
    return lambda number: int(host_cuda.execute(probe, str(number)))


def test_threads_meet_and_branch(run):
    assert run(len(FAULTS)) == 0 * 2 + 1


@pytest.mark.parametrize("body", FAULTS, ids=FAULTS.values())
def test_a_fault_ends_the_process(run, body):
    with pytest.raises(RuntimeError, match=FAULTS[body]):
        run(list(FAULTS).index(body))


def test_an_instruction_that_is_not_known_is_an_error(tmp_path, capfd):
    code = translate(MODULE.replace("BODY", "fns.b32 %r2, %r0, 0, 1;"))
    with pytest.raises(subprocess.CalledProcessError):
        ptx.compile_translated(code, tmp_path / "module.o")
    assert "fns" in capfd.readouterr().err


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.skipif(ptx.COMPILED in os.environ, reason="PTX for one architecture alone is compiled")
@pytest.mark.parametrize("source", ptx.SOURCES)
def test_every_architecture_has_the_same_kernels(source, pytestconfig):
    """So that what the tests say of one of them holds for the other; nightly. Modules may
    differ in names of variables that no kernel uses."""
    cache = pytestconfig.cache.mkdir("ptx")
    old, new = (translate(ptx.assembly(source, arch, cache)) for arch in ("sm_80", "sm_90"))
    assert "const Kernel" in old
    assert old == new
