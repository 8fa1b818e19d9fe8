"""Faults that the race detector has to find, each with the call of tests/cuda/test_host_races.py
that shows it; see mutants.py."""

from __future__ import annotations

from typing import NamedTuple

SHARED, STATIC, DEVICE = "dynamic shared memory", "static shared memory", "device memory"


class Mutant(NamedTuple):
    name: str
    case: str
    memory: str  # in which the race is
    file: str
    old: str
    new: str


def without_barrier(
    name: str, case: str, memory: str, file: str, before: str, after: str = ""
) -> Mutant:
    """A __syncthreads() between two pieces of text left out."""
    barrier = "__syncthreads();"
    return Mutant(
        name, case, memory, file, before + barrier + after, f"{before}if (!MUTANT) {barrier}{after}"
    )


HEAD, STEPS = "decoder/persistent_head.cuh", "decoder/persistent_steps.cuh"
MEMORY, RESULTS = "decoder/persistent_memory.cuh", "decoder/persistent_results.cuh"
BARRIER, TILES = "decoder/grid_barrier.cuh", "decoder/row_tiles.cuh"
OBJECTIVE = "decoder/objective.cuh"
SOFTMAX, THROUGH_TIME = "decoder/softmax_stats.cuh", "decoder/rnn_through_time.cuh"

MUTANTS = (
    # --- the persistent kernel: barriers of a block ---
    without_barrier(
        "the call is read before it is there", "gru", STATIC, MEMORY,
        "PersistentMemory(call, plan, scratch);\n    ",
    ),
    without_barrier(
        "a pass is advanced before its products are there", "gru", SHARED, STEPS,
        "Operand::kX, step);\n        ", "\n        advance_pass(",
    ),
    without_barrier(
        "the next pass is multiplied while one is advanced", "passes", SHARED, STEPS,
        "advance_pass(layer, pass, step);\n        ",
    ),
    without_barrier(
        "hidden states are multiplied before all are there", "gru", SHARED, HEAD,
        "wait_for_group<0>();\n    ",
    ),
    without_barrier(
        "statistics overwrite hidden states that are still multiplied", "gru", SHARED, HEAD,
        "// [width, warps]\n    ",
    ),
    without_barrier(
        "statistics are combined before all are there", "gru", SHARED, HEAD,
        "warp_index()] = all;\n    }\n    ",
    ),
    without_barrier(
        "a step begins before every row knows its input", "gru", SHARED, STEPS,
        "feed_back(step, threadIdx.x);\n      ",
    ),
    without_barrier(
        "tempered sums overwrite statistics that are still combined", "sample", SHARED, RESULTS,
        "in_shared<double>(plan_.hidden);\n    ",
    ),
    without_barrier(
        "tempered sums are added up before all are there", "sample", SHARED, RESULTS,
        "sums[threadIdx.x] = sum;\n    ",
    ),
    # --- asynchronous copies ---
    Mutant(
        "a group of copies too few is awaited", "two stages", SHARED, HEAD,
        "wait_for_group<kMinStages - 1>();",
        "MUTANT ? wait_for_group<kMinStages>() : wait_for_group<kMinStages - 1>();",
    ),
    Mutant(
        "copies of hidden states are not awaited", "gru", SHARED, HEAD,
        "    wait_for_group<0>();", "    if (!MUTANT) wait_for_group<0>();",
    ),
    # --- blocks that meet ---
    without_barrier(
        "a block arrives before its threads", "gru", DEVICE, BARRIER,
        "", "\n    if (threadIdx.x != 0) return;",
    ),
    Mutant(
        "a block arrives without a fence", "gru", DEVICE, "decoder/instructions.cuh",
        "  __threadfence();", "  if (!MUTANT) __threadfence();",
    ),
    Mutant(
        "the last block to arrive is not awaited", "gru", DEVICE, BARRIER,
        "*expected_ += blocks_;", "*expected_ += blocks_ - (MUTANT && *expected_ == 0);",
    ),
    Mutant(
        "samples are read before all blocks have drawn", "sample, taught", DEVICE, STEPS,
        "        sample(step);\n        barrier_.arrive();\n        barrier_.wait();",
        "        sample(step);\n        if (!MUTANT) {\n          barrier_.arrive();\n"
        "          barrier_.wait();\n        }",
    ),
    Mutant(
        "keys are cleared a step early", "gru", DEVICE, STEPS,
        "      advance(step);\n      clear_keys(step + 1);",
        "      if (MUTANT) clear_keys(step + 1);\n      advance(step);\n"
        "      if (!MUTANT) clear_keys(step + 1);",
    ),
    Mutant(
        "one buffer of operands", "gru", DEVICE, MEMORY,
        "(layer * 2 + step % 2)", "(layer * 2 + (MUTANT ? 0 : step % 2))",
    ),
    Mutant(
        "one buffer of shares", "gru", DEVICE, MEMORY,
        "(step % 2 * plan.blocks + block)", "((MUTANT ? 0 : step % 2) * plan.blocks + block)",
    ),
    Mutant(
        "one buffer of keys", "gru", DEVICE, MEMORY,
        "plan.keys) + step % 2 * plan.width", "plan.keys) + (MUTANT ? 0 : step % 2) * plan.width",
    ),
    Mutant(
        "every block keeps account of every row", "gru", DEVICE, MEMORY,
        "return b % plan.blocks == blockIdx.x;", "return MUTANT || b % plan.blocks == blockIdx.x;",
    ),
    # --- lists of tensors ---
    without_barrier(
        "a chunk's partials are combined before all are there", "norm", STATIC, "reduce.cuh",
        "if (partials == nullptr) continue;\n    ",
    ),
    without_barrier(
        "partials of the next chunks overwrite these", "many tensors", STATIC, "reduce.cuh",
        "partials[first + threadIdx.x] = all;\n    }\n    ",
    ),
    without_barrier(
        "a norm is formed before all partials are there", "norm", STATIC, "norm.cuh",
        "of_warp[threadIdx.x / kWarpSize] = mine;\n  ",
    ),
    Mutant(
        "threads past the end read another thread's vector", "scale", DEVICE, "device.cuh",
        "time < times ? time : first", "time < times ? time : MUTANT ? times - 1 : first",
    ),
    Mutant(
        "two blocks scale a chunk", "scale", DEVICE, "scale.cuh",
        "share(table, blockIdx.x + int64_t{1});",
        "share(table, blockIdx.x + int64_t{1}) + (MUTANT && blockIdx.x == 0);",
    ),
    Mutant(
        "two blocks copy a chunk", "copy_rounded", DEVICE, "copy_rounded.cuh",
        "share(table, blockIdx.x + int64_t{1});",
        "share(table, blockIdx.x + int64_t{1}) + (MUTANT && blockIdx.x == 0);",
    ),
    Mutant(
        "two blocks reduce a chunk", "norm", DEVICE, "reduce.cuh",
        "share(table, blockIdx.x + int64_t{1});",
        "share(table, blockIdx.x + int64_t{1}) + (MUTANT && blockIdx.x == 0);",
    ),
    # --- softmax ---
    without_barrier(
        "a row is combined before all warps are there", "softmax", STATIC, TILES,
        "[lane()] = mine;\n  ",
    ),
    without_barrier(
        "a prefix is formed before all warps are there", "softmax", STATIC, TILES,
        "lane() >= height ? other : 0.0;\n  ",
    ),
    without_barrier(
        "the next prefix overwrites this one", "softmax, sampled", STATIC, TILES,
        "of_warp[warp][place.in_tile];\n  }\n  ",
    ),
    without_barrier(
        "chunks are added up before all are scaled", "softmax, many chunks", DEVICE, SOFTMAX,
        "static_cast<double>(call.inverse_temperature));\n  }\n  ",
    ),
    without_barrier(
        "rows are fed back before their tokens are known", "softmax, fed back", STATIC, SOFTMAX,
        "if (feed_back.later == 0) return;\n  ",
    ),
    Mutant(
        "two blocks take a chunk of a row", "softmax", DEVICE, SOFTMAX,
        "int64_t chunk = place.slot;", "int64_t chunk = MUTANT ? 0 : place.slot;",
    ),
    Mutant(
        "two blocks finish a row", "softmax", DEVICE, SOFTMAX,
        "if (place.slot == 0) return", "if (MUTANT || place.slot == 0) return",
    ),
    Mutant(
        "two blocks write exponentials", "softmax", DEVICE, SOFTMAX,
        "peak.value, place.slot - 1,", "peak.value, MUTANT ? 0 : place.slot - 1,",
    ),
    # --- a loss of whole distributions ---
    without_barrier(
        "words are compared before all are there", "head_objective", STATIC, OBJECTIVE,
        "shares[mine] = share;\n        ",
    ),
    without_barrier(
        "the next words overwrite these", "head_objective", STATIC, OBJECTIVE, "if (repeats) ",
    ),
    Mutant(
        "every thread of a word adds it up", "head_objective", DEVICE, OBJECTIVE,
        "is_first && words[i] != word", "is_first && (MUTANT || words[i] != word)",
    ),
    Mutant(
        "words that repeat are taken for ascending ones", "head_objective", DEVICE, OBJECTIVE,
        "sums.descents == 0.0", "MUTANT || sums.descents == 0.0",
    ),
    Mutant(
        "every block of a row has all of its words", "head_objective", DEVICE, OBJECTIVE,
        "first = slot * kBlockSize;", "first = MUTANT ? 0 : slot * kBlockSize;",
    ),
    Mutant(
        "two blocks differentiate a chunk", "head_objective", DEVICE, OBJECTIVE,
        "#pragma unroll 1\n    for (int64_t chunk = place.slot;",
        "#pragma unroll 1\n    for (int64_t chunk = MUTANT ? 0 : place.slot;",
    ),
    # --- cells ---
    Mutant(
        "two blocks take a unit", "rnn_advance", DEVICE, "decoder/rnn_units.cuh",
        "blockIdx.x % blocks * kBlockSize", "blockIdx.x % blocks * (kBlockSize - MUTANT)",
    ),
    without_barrier(
        "products are passed on before all are there", "through time", SHARED, THROUGH_TIME,
        "multiply(t);\n      ",
    ),
    Mutant(
        "a step is multiplied before all blocks have written it", "through time", DEVICE,
        THROUGH_TIME, "      barrier_.wait();", "      if (!MUTANT) barrier_.wait();",
    ),
    Mutant(
        "one buffer of gradients", "through time", DEVICE, THROUGH_TIME,
        "t % 2 * plan_.operand_size", "(MUTANT ? 0 : t % 2) * plan_.operand_size",
    ),
    Mutant(
        "two blocks own a unit", "through time", DEVICE, THROUGH_TIME,
        "plan.members * int64_t{plan.units()}", "plan.members * int64_t{plan.units() - MUTANT}",
    ),
    Mutant(
        "bands share their gradients", "through time, batch of 64", DEVICE, THROUGH_TIME,
        "band() * 2 * plan.operand_size", "(MUTANT ? 0 : band()) * 2 * plan.operand_size",
    ),
    Mutant(
        "two blocks look up a row", "look_up", DEVICE, "decoder/look_up.cuh",
        "lookup.copy(blockIdx.x, tokens", "lookup.copy(MUTANT ? 0 : blockIdx.x, tokens",
    ),
)  # fmt: skip
