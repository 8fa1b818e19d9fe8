"""peak_memory: what a measurement itself takes of the machine's memory."""

import pytest
from support.programs import output_of, run_python

PROGRAM = """
import resource
import torch
from accumext._peak_memory import peak_memory

def resident():  # at most so far, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

embedding, head = torch.nn.Embedding(50_000, 128), torch.nn.Linear(128, 50_000)
cell, tokens = torch.nn.GRUCell(128, 128), torch.arange(16)

def passes():
    for _ in range(20):
        logits = head(cell(embedding(tokens)))
        torch.nn.functional.cross_entropy(logits, tokens).backward()

passes()
before = resident()
peak_memory(passes)
print(resident() - before)
"""


@pytest.mark.process
def test_a_measurement_leaves_no_holes_in_the_heap():
    """Pairs of gradients of 26 MB, in a heap with the profile in it, would take 1 GB."""
    assert int(output_of(run_python("-c", PROGRAM))) < 200e6
