"""spaCy: `accumulate_gradient = 4` of `spacy train`, which splits each batch.

thinc steps itself and its losses are sums over documents, so gradients are compared as a whole.
"""

import copy

import numpy
import spacy
from _factors import WINDOW, Seen, main
from spacy.tokens import Doc
from spacy.training import Example
from spacy.training.loop import train_while_improving


def examples(nlp, count):
    """Documents of 1, 2, 3, ... words, of two classes."""
    found = []
    for k in range(count):
        doc = Doc(nlp.vocab, words=[f"word{n}" for n in range(k, 2 * k + 1)])
        labels = {"even": float(k % 2 == 0), "odd": float(k % 2)}
        found.append(Example.from_dict(doc, {"cats": labels}))
    return found


def step(nlp, batch, parts):
    """What `spacy train` does for one batch: the sizes of its parts, and the step's gradient."""
    nlp, sizes, gradients = copy.deepcopy(nlp), [], []
    pipe, update = nlp.get_pipe("textcat"), nlp.update

    def updated(part, **options):
        sizes.append(len(part))
        return update(part, **options)

    def finish(optimizer):
        for node in pipe.model.walk():
            gradients.extend(node.get_grad(n).ravel() for n in node.param_names if node.has_grad(n))

    nlp.update, pipe.finish_update = updated, finish
    training = train_while_improving(
        nlp,
        nlp.create_optimizer(),
        iter([(0, batch)]),
        lambda: (0.0, {}),
        dropout=0.0,
        eval_frequency=10,
        accumulate_gradient=parts,
        patience=0,
        max_steps=1,
        exclude=[],
        annotating_components=[],
        before_update=None,
    )
    list(training)
    return sizes, numpy.concatenate(gradients)


def train(seen: Seen):
    numpy.random.seed(0)
    nlp = spacy.blank("en")
    nlp.add_pipe("textcat")
    data = examples(nlp, 8)
    nlp.initialize(lambda: data)
    notes = []
    for count in (8, 7, 3):
        sizes, gradient = step(nlp, data[:count], WINDOW)
        _, whole = step(nlp, data[:count], 1)
        distance = numpy.linalg.norm(gradient - whole) / numpy.linalg.norm(whole)
        parts = ", ".join(map(str, sizes))
        off = f"{distance:.0e}" if distance else "0"
        notes.append(f"a batch of {count} documents in parts of {parts}: gradient off by {off}")
    _, twice = step(nlp, data + data, 1)
    _, once = step(nlp, data, 1)
    ratio = numpy.linalg.norm(twice) / numpy.linalg.norm(once)
    notes.append(f"each document twice: {ratio:.3g} times the gradient")
    seen.facts["notes"] = notes


if __name__ == "__main__":
    main("spacy", {"spaCy textcat, accumulate_gradient=4": {"plain": train}})
