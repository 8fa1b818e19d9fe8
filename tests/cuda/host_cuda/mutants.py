"""Faults that tests put into a copy of csrc: all of them at once, each behind a condition, so that
the copy is compiled once. host_cuda.loaded switches on the one of a number."""

import shutil
from pathlib import Path
from typing import NamedTuple

from accumext.backends import _build


class Mutant(NamedTuple):
    """A change to the text of a source."""

    name: str
    shown_by: str  # the call of checks/races.py, or pytest's -k for checks/tables.py, that finds it
    words: str  # what is said of it then
    file: str  # in csrc/cuda
    old: str  # what is found there exactly once
    new: str  # what stands in its place, with MUTANT for the condition


def write_sources(folder: Path) -> None:
    """A copy of csrc with all mutants; ValueError if the text of one is not there once."""
    shutil.copytree(_build.csrc(), folder)
    for number, mutant in enumerate(ALL):
        path = folder / "cuda" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} has not once {mutant.old!r}")
        condition = f"host_cuda::mutant({number})"
        path.write_text(text.replace(mutant.old, mutant.new.replace("MUTANT", condition)))


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
RADIX, BEST, BEAMS = (f"decoder/{name}.cuh" for name in ("radix_select", "best_words", "beam_step"))
SOFTMAX, THROUGH_TIME = "decoder/softmax_stats.cuh", "decoder/rnn_through_time.cuh"

# Races, of each kind that there is.
RACES = (
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
        "rows are fed back before their tokens are known", "one row", STATIC, SOFTMAX,
        "if (feed_back.later == 0) return;\n  ",
    ),
    # --- best words, samples of them, and beams ---
    without_barrier(
        "digits are added up before all are counted", "best words", STATIC, RADIX,
        "amount(word));\n    });\n    ",
    ),
    without_barrier(
        "words are sorted before all are there", "best words", STATIC, BEST,
        "any[atomicAdd(&found, 1u)] = word;\n  });\n  ", "\n  if (threadIdx.x < found)",
    ),
    without_barrier(
        "a drawn word is passed on before it is known", "sample of shares", STATIC,
        "decoder/sample_shares.cuh", "drawn = column;\n  }\n  ",
    ),
    without_barrier(
        "hypotheses are sorted before all are there", "beams", DEVICE, BEAMS,
        "Word<double>* sorted, int64_t count) {\n  ",
    ),
    without_barrier(
        "kept hypotheses are overwritten before all are read", "beams", DEVICE, BEAMS,
        "log_prob = call.log_prob(c, b);\n      }\n    }\n    ",
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
        "two blocks look up a row", "step by step", DEVICE, "decoder/look_up.cuh",
        "lookup.copy(blockIdx.x, tokens", "lookup.copy(MUTANT ? 0 : blockIdx.x, tokens",
    ),
)  # fmt: skip

CACHE = "upload_cache.cu"
REPLAY = "a_replay and first_seen and copy_rounded and uploaded"
RELAXED = "const RelaxedCapture relaxed;"
UNLESS = "std::optional<RelaxedCapture> relaxed;\n  if (!MUTANT) relaxed.emplace();"

# Faults of how tables travel, of what they hold, and of enqueue.h.
TABLES = (
    Mutant(
        "allocates in the capture", REPLAY, "cudaErrorStreamCaptureUnsupported", CACHE,
        f"{RELAXED}\n  void* memory", f"{UNLESS}\n  void* memory",
    ),
    Mutant(
        "waits in the capture", REPLAY, "heap-use-after-free", CACHE,
        f"{RELAXED}\n  cudaStream_t", f"{UNLESS}\n  cudaStream_t",
    ),
    Mutant(
        "captures the upload", REPLAY, "an operator of torch has lost its memory", CACHE,
        "if (captured) {", "if (captured && !MUTANT) {",
    ),
    Mutant(
        "a table for graphs and calls", "the_table_of_a_graph and seen_before",
        "heap-use-after-free", CACHE,
        "captured, id, size", "captured && !MUTANT, MUTANT ? 0 : id, size",
    ),
    Mutant(
        "a table for all streams", "test_streams_have and True", "AssertionError", CACHE,
        "id = captured", "id = MUTANT || captured",
    ),
    Mutant(
        "leaves an error behind", "no_memory and copy_rounded",
        "nobody has asked for cudaErrorMemoryAllocation", CACHE,
        "cudaGetLastError();", "if (!MUTANT) cudaGetLastError();",
    ),
    Mutant(
        "launches on the default stream", "a_replay and first_seen and scale_ and small",
        "on another stream than torch's current one", "enqueue.h",
        "config.stream = stream_;", "config.stream = MUTANT ? nullptr : stream_;",
    ),
    Mutant(
        "a small table among large arguments", "how_a_table_travels", "AssertionError", "launch.h",
        "<= kSmallTable", "<= (MUTANT ? 0 : kSmallTable)",
    ),
    Mutant(
        "large arguments for an old driver", "how_a_table_travels", "cudaErrorNotSupported",
        "launch.h", "queue_.has_large_arguments()", "(MUTANT || queue_.has_large_arguments())",
    ),
    Mutant(
        "dimensions begin an entry too early", "in_order and copy_rounded and large",
        "AddressSanitizer", "tensor_list.h",
        "bytes() + tensors * sizeof", "bytes() + (tensors - MUTANT) * sizeof",
    ),
    Mutant(
        "a gradient is read in vectors wherever it begins", "in_order and accumulate and small",
        "misaligned address", "tensor_list.h",
        "misalignment(k, first) == 0;", "MUTANT || misalignment(k, first) == 0;",
    ),
    Mutant(
        "one element for a vector that is not aligned", "in_order and accumulate and small",
        "AssertionError", "device.cuh",
        "vector.set(n, data[n])", "vector.set(n, data[MUTANT ? 0 : n])",
    ),
)  # fmt: skip

ALL = (*RACES, *TABLES)
