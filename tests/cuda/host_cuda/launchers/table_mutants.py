"""Faults of upload_cache.cu and enqueue.h that tables.py has to find, by pytest's -k."""

from host_cuda.mutants import Mutant

CACHE = "upload_cache.cu"
REPLAY = "a_replay and first_seen and copy_rounded"
RELAXED = "const RelaxedCapture relaxed;"
UNLESS = "std::optional<RelaxedCapture> relaxed;\n  if (!MUTANT) relaxed.emplace();"

MUTANTS = (
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
        "launches on the default stream", "a_replay and call[scale_-first_seen]",
        "on another stream than torch's current one", "enqueue.h",
        "config.stream = stream_;", "config.stream = MUTANT ? nullptr : stream_;",
    ),
)  # fmt: skip
