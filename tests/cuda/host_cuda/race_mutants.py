"""Faults that the race detector has to find, of each kind that there is, each with the call of
tests/cuda/test_host_races.py that shows it; see mutants.py."""

from host_cuda.mutants import Mutant

SHARED, STATIC, DEVICE = "dynamic shared memory", "static shared memory", "device memory"


def without_barrier(
    name: str, case: str, memory: str, file: str, before: str, after: str = ""
) -> Mutant:
    """A __syncthreads() between two pieces of text left out."""
    barrier = "__syncthreads();"
    return Mutant(
        name, case, memory, file, before + barrier + after, f"{before}if (!MUTANT) {barrier}{after}"
    )


HEAD, STEPS = "decoder/persistent_head.cuh", "decoder/persistent_steps.cuh"
MEMORY = "decoder/persistent_memory.cuh"
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
        "one buffer of operands", "gru", DEVICE, MEMORY,
        "(layer * 2 + step % 2)", "(layer * 2 + (MUTANT ? 0 : step % 2))",
    ),
    # --- lists of tensors ---
    Mutant(
        "threads past the end read another thread's vector", "scale", DEVICE, "device.cuh",
        "time < times ? time : first", "time < times ? time : MUTANT ? times - 1 : first",
    ),
    # --- softmax ---
    without_barrier(
        "a row is combined before all warps are there", "softmax", STATIC, TILES,
        "[lane()] = mine;\n  ",
    ),
    without_barrier(
        "chunks are added up before all are scaled", "softmax, many chunks", DEVICE, SOFTMAX,
        "static_cast<double>(call.inverse_temperature));\n  }\n  ",
    ),
    without_barrier(
        "rows are fed back before their tokens are known", "softmax, fed back", STATIC, SOFTMAX,
        "if (feed_back.later == 0) return;\n  ",
    ),
    # --- a loss of whole distributions ---
    without_barrier(
        "words are compared before all are there", "head_objective", STATIC, OBJECTIVE,
        "shares[mine] = share;\n        ",
    ),
    # --- cells ---
    without_barrier(
        "products are passed on before all are there", "through time", SHARED, THROUGH_TIME,
        "multiply(t);\n      ",
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
