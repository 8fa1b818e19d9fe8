"""More wrong loops: of decoders, of half precision, and with parameters that are not trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from wrong_loops import (
    STEPS,
    VOCABULARY,
    Decoder,
    N,
    Watch,
    network,
    of_rows,
    rows,
    sentences,
    sgd,
)

import accumext

MANY = 32  # micro-batches of a window in half precision
K1 = 5  # steps between two backward passes


def decoded(model: nn.Module, targets: Tensor, hidden: Tensor) -> Tensor:
    """The mean loss of a decoder that is fed its own argmax."""
    token, loss = torch.zeros_like(targets[0]), torch.zeros(())
    for target in targets:
        logits, hidden = model(token, hidden)
        loss = loss + cross_entropy(logits, target)
        token = logits.argmax(1)
    return loss / len(targets)


def greedy_decoder_in_one_graph(watch: Watch = accumext.audit, validate: bool = False) -> Any:
    """A decoder fed its own argmax, whose losses are summed: the logits of all steps are kept."""
    model = Decoder(VOCABULARY)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for sentence in sentences(2, STEPS, VOCABULARY):
            if validate:
                decoded(model, *sentence).item()
            decoded(model, *sentence).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def greedy_decoder_with_validation(watch: Watch = accumext.audit) -> Any:
    """The same, after a validation that makes a graph as well, which is gone before the pass."""
    return greedy_decoder_in_one_graph(watch, validate=True)


def backward_at_every_token(watch: Watch = accumext.audit) -> Any:
    """Backward at every token, and the state detached: no gradient flows through time."""
    model = Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for targets, hidden in sentences(1):
            accumext.tbptt(model, targets, hidden, criterion=cross_entropy, k1=1)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def measured_truncation(watch: Watch = accumext.audit) -> Any:
    """A backward pass at the end of a sentence; what cutting it every five steps would cost."""
    model = Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for targets, hidden in sentences(1):
            audit.measure_truncation(model, targets, hidden, criterion=cross_entropy, k1=K1)
            steps = len(targets)
            accumext.tbptt(model, targets, hidden, criterion=cross_entropy, k1=steps)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def sum_of_many_in_bfloat16(watch: Watch = accumext.audit) -> Any:
    """Parameters, and so gradients, in bfloat16, and a window of 32 micro-batches."""
    model = network().bfloat16()
    optimizer = sgd(model)
    with watch(model, optimizer, windows=1) as audit:
        for x, y in rows(MANY):
            (of_rows(model, x.bfloat16(), y) / MANY).backward()
        optimizer.step()
        optimizer.zero_grad()
    return audit


class TwoHeads(nn.Module):
    """A trunk with a head that is trained, and one for later."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.later = network(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def head_that_nothing_uses(watch: Watch = accumext.audit) -> Any:
    """A head that no loss uses is in the optimizer."""
    model = TwoHeads()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for x, y in rows(4):
            of_rows(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def trunk_under_no_grad(watch: Watch = accumext.audit) -> Any:
    """The trunk is to be trained, and its `no_grad` of an experiment has stayed."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            with torch.no_grad():
                features = model[1](model[0](x))
            (cross_entropy(model[2](features), y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def head_in_two_optimizers(watch: Watch = accumext.audit) -> Any:
    """An optimizer of its own for the head, which the other one has as well."""
    model = network()
    optimizer, of_head = sgd(model), sgd(model[2], lr=0.01)
    with watch(model, optimizer) as audit:
        for x, y in rows(4):
            of_rows(model, x, y).backward()
            optimizer.step()
            of_head.step()
            optimizer.zero_grad()
    return audit


def layer_added_after_the_optimizer(watch: Watch = accumext.audit) -> Any:
    """A layer that is added to the model when its optimizer has been made."""
    model = network()
    optimizer = sgd(model)
    model.append(nn.Linear(8, 8))
    with watch(model, optimizer) as audit:
        for x, y in rows(4):
            of_rows(model, x, y).backward()
            optimizer.step()
            model.zero_grad()
    return audit


def head_replaced_after_the_optimizer(watch: Watch = accumext.audit) -> Any:
    """Fine-tuning: a new head for new classes, and the optimizer has the old one."""
    model = network()
    optimizer = sgd(model)
    model[2] = nn.Linear(64, 8)
    with watch(model, optimizer) as audit:
        for x, y in rows(4):
            of_rows(model, x, y).backward()
            optimizer.step()
            model.zero_grad()
    return audit


def noise_from_a_generator_that_goes_on(watch: Watch = accumext.audit) -> Any:
    """Augmented inputs, and nobody seeds the generator before the second run."""
    generator = torch.Generator().manual_seed(3)
    first = None
    for _ in range(2):
        model = network()
        optimizer = sgd(model)
        with watch(model, optimizer, against=first) as audit:
            for x, y in rows(4):
                noisy = x + 0.01 * torch.randn(x.shape, generator=generator)
                of_rows(model, noisy, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        first = audit
    return first
