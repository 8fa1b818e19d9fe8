"""host_cuda/ptx, by which nvcc's kernels run on the host: the effects of instructions, as the PTX
ISA defines them, and the faults that it is to see. The PTX compiled here is written by hand."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess

import host_cuda
import pytest
from host_cuda import ptx
from host_cuda.ptx.translate import translate

pytestmark = pytest.mark.build  # compiles what has been translated


def f32(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def f64(x: float) -> int:
    return int.from_bytes(struct.pack("<d", x), "little")


NAN, INF = f32(float("nan")), f32(float("inf"))
# Instruction, destination `%r` of 32 bits, `%d` of 64, `%h` of 16 or `%p` -> its bits.
INSTRUCTIONS = {
    "add.s32 %r, 0x7fffffff, 1": 1 << 31,
    "sub.s64 %d, 3, 5": 2**64 - 2,
    "mul.lo.s32 %r, -3, 5": 2**32 - 15,
    "mul.wide.s32 %d, -2, 3": 2**64 - 6,
    "mul.wide.u32 %d, 0xffffffff, 2": 2**33 - 2,
    "mad.lo.s32 %r, -2, 3, 7": 1,
    "div.s32 %r, -7, 2": 2**32 - 3,
    "rem.u32 %r, 7, 4": 3,
    "shl.b32 %r, 3, 31": 1 << 31,
    "shl.b32 %r, 1, 32": 0,
    "shr.s32 %r, -20, 3": 2**32 - 3,
    "shr.s32 %r, -1, 99": 2**32 - 1,
    "shr.u32 %r, 0x80000000, 31": 1,
    "and.b32 %r, 12, 10": 8,
    "not.b16 %h, 1": 0xFFFE,
    "bfi.b32 %r, 5, 0xffffffff, 8, 4": 0xFFFFF5FF,
    "popc.b32 %r, 0xf0f": 8,
    "neg.s64 %d, 1": 2**64 - 1,
    "min.s32 %r, -1, 1": 2**32 - 1,
    "min.u32 %r, -1, 1": 1,
    f"add.rn.f32 %r, 0f{f32(1.0):08x}, 0f{f32(2.0**-24):08x}": f32(1.0),
    f"fma.rn.f32 %r, 0f{f32(3.0):08x}, 0f{f32(5.0):08x}, 0f{f32(2.0):08x}": f32(17.0),
    f"fma.rm.f32 %r, 0f{f32(1.0):08x}, 0f{f32(1.0):08x}, 0f{f32(2.0**-24 * 1.5):08x}": f32(1.0),
    f"neg.f64 %d, 0d{f64(0.0):016x}": f64(-0.0),
    f"abs.f32 %r, 0f{f32(-2.0):08x}": f32(2.0),
    f"copysign.f32 %r, 0f{f32(-1.0):08x}, 0f{f32(2.0):08x}": f32(-2.0),
    f"max.f32 %r, 0f{NAN:08x}, 0f{f32(1.0):08x}": f32(1.0),
    f"ex2.approx.ftz.f32 %r, 0f{f32(3.0):08x}": f32(8.0),
    f"ex2.approx.ftz.f32 %r, 0f{f32(-140.0):08x}": 0,
    f"rcp.approx.ftz.f32 %r, 0f{f32(1e-40):08x}": INF,
    f"cvt.rni.f32.f32 %r, 0f{f32(2.5):08x}": f32(2.0),
    f"cvt.rmi.f32.f32 %r, 0f{f32(-2.5):08x}": f32(-3.0),
    f"cvt.rzi.s32.f32 %r, 0f{f32(-2.9):08x}": 2**32 - 2,
    f"cvt.rzi.s32.f32 %r, 0f{f32(3e9):08x}": 2**31 - 1,
    f"cvt.rzi.s32.f32 %r, 0f{NAN:08x}": 0,
    f"cvt.sat.f32.f32 %r, 0f{NAN:08x}": 0,
    f"cvt.f64.f32 %d, 0f{f32(1.5):08x}": f64(1.5),
    f"cvt.rn.bf16.f32 %h, 0f{f32(1 + 2.0**-8):08x}": 0x3F80,
    f"cvt.rn.f16.f32 %h, 0f{f32(1.5):08x}": 0x3E00,
    "cvt.s64.s32 %d, -1": 2**64 - 1,
    "cvt.u64.u32 %d, -1": 2**32 - 1,
    f"setp.eq.f32 %p, 0f{NAN:08x}, 0f{NAN:08x}": 0,
    f"setp.ne.f32 %p, 0f{NAN:08x}, 0f{NAN:08x}": 0,
    f"setp.neu.f32 %p, 0f{NAN:08x}, 0f{NAN:08x}": 1,
    f"setp.gtu.f32 %p, 0f{f32(1.0):08x}, 0f{NAN:08x}": 1,
    f"setp.num.f32 %p, 0f{f32(1.0):08x}, 0f{INF:08x}": 1,
    "setp.lt.s32 %p, -1, 1": 1,
    "setp.lt.u32 %p, -1, 1": 0,
    "selp.b32 %r, 3, 4, 0": 4,
    "mov.b64 %d, {7, 1}": 2**32 + 7,
    "mov.b32 {_, %h}, 0x50006": 5,
}
WIDTHS = {"r": "u32", "d": "u64", "h": "u16", "p": "u32"}

MODULE = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 probe_param_0)
{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<9>;
    .reg .b64 %d<9>;
    BODY
    ret;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return host_cuda.build("ptx/probe", tmp_path_factory.mktemp("probe"))


@pytest.fixture
def run(driver, tmp_path):
    """Statements of `probe`, in which %d0 is where its numbers are -> the numbers."""

    def result(body: str) -> list[int]:
        first = "ld.param.u64 %d0, [probe_param_0];\nmov.u32 %r0, %tid.x;\n"
        code = translate(MODULE.replace("BODY", first + body))
        ptx.compile_translated(code, tmp_path / "module.o")
        executable = tmp_path / "probe"
        host_cuda.link(driver.with_suffix(".o"), tmp_path / "module.o", executable=executable)
        return [int(line) for line in host_cuda.execute(executable).split()]

    return result


def test_instructions(run):
    assert len(INSTRUCTIONS) <= 64
    body = []
    for index, instruction in enumerate(INSTRUCTIONS):
        kind = next(kind for kind in WIDTHS if f"%{kind}" in instruction)
        body.append(instruction.replace(f"%{kind}", f"%{kind}1") + ";")
        if kind == "p":
            body.append("selp.u32 %r1, 1, 0, %p1;")
        register = "%r1" if kind == "p" else f"%{kind}1"
        body.append(f"st.global.{WIDTHS[kind]} [%d0+{8 * index}], {register};")
    found = dict(zip(INSTRUCTIONS, run("\n".join(body))))
    assert found == INSTRUCTIONS


def test_threads_meet_and_branch(run):
    """A sum over the lanes in shared memory, of which those of even lanes are doubled."""
    numbers = run("""
        .shared .align 4 .b8 lanes[128];
        mul.wide.u32 %d1, %r0, 4;
        mov.u64 %d2, lanes;
        add.s64 %d2, %d2, %d1;
        st.shared.u32 [%d2], %r0;
        bar.sync 0;
        and.b32 %r1, %r0, 1;
        setp.eq.s32 %p1, %r1, 1;
        ld.shared.u32 %r2, [%d2];
        @%p1 bra $odd;
        shl.b32 %r2, %r2, 1;
        $odd:
        shfl.sync.bfly.b32 %r3|%p2, %r2, 1, 31, -1;
        add.s32 %r2, %r2, %r3;
        add.s64 %d3, %d0, %d1;
        add.s64 %d3, %d3, %d1;
        st.global.u64 [%d3], %r2;
    """)
    assert numbers[:32] == [3 * (lane & ~1) + 1 for lane in range(32)]


FAULTS = {
    "st.global.u32 [%d0+2], %r0;": "a misaligned access",
    ".shared .align 4 .b8 few[8]; mov.u64 %d1, few; ld.shared.u32 %r1, [%d1+8];": (
        "an access beside shared memory"
    ),
    "st.global.u64 [%d0+512], %r0;": "heap-buffer-overflow",
    "shfl.sync.down.b32 %r1|%p1, %r0, 1, 15, -1;": "a shuffle of a part of a warp",
    "vote.sync.all.pred %p1, 1, 3;": "a warp operation of some lanes only",
    "setp.eq.s32 %p1, %r0, 0; @%p1 bar.sync 0;": "where others wait",
    "trap;": "a trap",
}


@pytest.mark.parametrize("body", FAULTS, ids=FAULTS.values())
def test_a_fault_ends_the_process(run, body):
    with pytest.raises(RuntimeError, match=FAULTS[body]):
        run(body)


@pytest.mark.skipif(ptx.COMPILED not in os.environ, reason="nvcc has compiled no PTX before")
@pytest.mark.parametrize("source", sorted(itertools.chain.from_iterable(ptx.SOURCES.values())))
def test_every_architecture_has_the_same_kernels(source, pytestconfig):
    """So that what the tests say of one of them holds for the other."""
    cache = pytestconfig.cache.mkdir("ptx")
    code = ptx.translated(source, "sm_80", cache)
    assert "Kernel" in code
    assert code == ptx.translated(source, "sm_90", cache)


def test_an_instruction_that_is_not_known_is_an_error(run, capfd):
    with pytest.raises(subprocess.CalledProcessError):
        run("fns.b32 %r1, %r0, 0, 1;")
    assert "fns" in capfd.readouterr().err
