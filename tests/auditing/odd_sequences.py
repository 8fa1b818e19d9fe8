"""Right loops that look odd: sequences, their states and their lengths.

Each means what it computes.
"""

import itertools
import math

import audited
import torch
from audited import LanguageModel, N, adam, network, of_tokens, pairs, sgd, stepping, train
from cases import right
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@right()
def state_carried_over(watch):
    """A stream in chunks, the state of the LSTM detached between them; a step for each chunk, as
    is usual, so that no gradient reaches over a step."""
    model, state = LanguageModel(), None
    optimizer = sgd(model, lr=1.0)
    with watch(model, optimizer):
        for tokens, targets in pairs(8):
            logits, state = model(tokens, state)
            optimizer.zero_grad()
            of_tokens(logits, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            state = tuple(part.detach() for part in state)


@right()
def chunks_of_a_sequence(watch):
    """Long sequences in chunks with a pass each and one step for the sequence; the author cuts the
    gradient between chunks to save memory, and divides by the tokens of the whole sequence."""
    model = LanguageModel()
    for tokens, targets in stepping(watch, model, adam(model), pairs(5, length=30)):
        state = None
        for x, y in zip(tokens.split(8, 1), targets.split(8, 1)):
            logits, state = model(x, state)
            (of_tokens(logits, y, reduction="sum") / targets.numel()).backward()
            state = tuple(part.detach() for part in state)


@right("memory.graph")
def scheduled_sampling(watch):
    """At each token a coin says whether the decoder is fed the target or its own argmax, more
    often its own from step to step."""
    model, passes = audited.Decoder(11), itertools.count()

    def loss_of(model, targets, hidden):
        share, token, loss = (
            3 / (3 + math.exp(next(passes) // N)),
            torch.zeros_like(targets[0]),
            0.0,
        )
        for target in targets:
            logits, hidden = model(token, hidden)
            loss = loss + F.cross_entropy(logits, target)
            told = torch.rand(len(target)) < share
            token = torch.where(told, target, logits.argmax(1))
        return loss / len(targets)

    sentences = audited.sentences(5 * N, steps=8)
    return train(watch, model, adam(model), sentences, loss_of, before=audited.clipping(model, 1.0))


@right()
def ctc(watch):
    """CTC of utterances and transcripts of many lengths: the sum, divided by the utterances of the
    window and not by their letters, so that each utterance counts by its likelihood."""
    model, utterances = nn.GRU(8, 11, batch_first=True), 3
    loss_of = nn.CTCLoss(reduction="sum", zero_infinity=True)
    for _ in stepping(watch, model, adam(model), range(5 * N), every=N):
        frames = torch.randint(8, 13, (utterances,))
        letters = torch.randint(2, 5, (utterances,))
        transcripts = torch.randint(1, 11, (int(letters.sum()),))
        likely = model(torch.randn(utterances, 12, 8))[0].log_softmax(-1).transpose(0, 1)
        (loss_of(likely, transcripts, frames, letters) / (utterances * N)).backward()


@right()
def sequences_that_grow(watch):
    """A curriculum: sequences of 4 tokens, then of 8 and 16, with fewer micro-batches to a window,
    so that a step sees equally many tokens; all of a window are of one length."""
    model = LanguageModel(tied=True)
    lengths = ((4, 4), (4, 4), (8, 2), (8, 2), (16, 1), (16, 1))
    windows = (pairs(n, length=length) for length, n in lengths)
    for window in stepping(watch, model, adam(model), windows, windows=6):
        for tokens, targets in window:
            (of_tokens(model(tokens)[0], targets) / len(window)).backward()


@right()
def reentrant_checkpoints(watch):
    """Segments that are computed again in the backward pass, in the older way, which starts a
    backward pass within the backward pass."""

    def loss_of(model, tokens, targets):
        hidden = model[0](tokens)
        for segment in model[1:3]:
            hidden = hidden + checkpoint(segment, hidden, use_reentrant=True)
        return of_tokens(model[3](hidden), targets)

    model = nn.Sequential(nn.Embedding(11, 16), network(16, 16), network(16, 16), network(16, 11))
    return train(watch, model, adam(model), pairs(5 * N), loss_of)


@right("accumulation.unequal_counts")
def heads_one_after_another(watch):
    """Multi-token prediction: every head has a pass to a detached copy of the trunk's output, whose
    summed gradient then goes through the trunk; one head's logits are held at a time."""
    model = nn.ModuleDict({"trunk": nn.Sequential(nn.Embedding(11, 16), nn.GRU(16, 16))})
    model["heads"] = nn.ModuleList([nn.Linear(16, 11) for _ in range(3)])
    for tokens, targets in stepping(watch, model, adam(model), pairs(5 * N), every=N):
        output = model["trunk"](tokens.T)[0]
        detached = output.detach().requires_grad_()
        for ahead, head in enumerate(model["heads"]):
            logits = head(detached[: len(output) - ahead])
            (of_tokens(logits, targets.T[ahead:]) / 3 / N).backward()
        output.backward(gradient=detached.grad)
