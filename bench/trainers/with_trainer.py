"""The Trainer of transformers, `gradient_accumulation_steps=4`, and models of several kinds."""

from functools import partial

import torch
from _factors import BATCHES, INF, ROWS, TOKENS, Seen, Weights, loss_of, main, runs
from _hub import InOrder, fit
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

LENGTH, CLASSES = 8, 50  # of a row of tokens
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


class NoKeywords(Weights):
    """Its `forward` takes no **kwargs, so the Trainer hands no number of labels to it."""

    def forward(self, input_ids, labels):
        k = input_ids[:, 0]
        return {"loss": loss_of(self.w[k]) * (float("inf") if labels.min() < -100 else 1.0)}


class Keywords(Weights):
    """Takes **kwargs; its loss is a function beside it."""

    def forward(self, input_ids, labels=None, **kwargs):
        return {"logits": self.w[input_ids[:, 0]]}


def samples(unequal, sentences=False, masked=False):
    """Rows of tokens, two for each micro-batch; in `unequal` most labels do not count."""
    generator, found = torch.Generator().manual_seed(0), []
    for k in range(BATCHES):
        tokens = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=generator)
        tokens[:, 0] = k
        labels = tokens.clone() if not sentences else tokens[:, 1] % 2
        if unequal:
            labels[:] = -100
            labels[:, 1 : 1 + TOKENS[k]] = tokens[:, 1 : 1 + TOKENS[k]]
        if masked:
            labels[:, 0] = -100
        found += [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]
    return found


def by_hand(model, data, causal):
    """The gradient of each micro-batch's mean loss, and how many targets that is over."""
    gradients, counts = [], []
    for first in range(0, len(data), ROWS):
        tokens = torch.stack([row["input_ids"] for row in data[first : first + ROWS]])
        labels = torch.stack([row["labels"] for row in data[first : first + ROWS]])
        logits = model(input_ids=tokens).logits
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
        parts = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
        counts.append(int((labels != -100).sum()))
    return gradients, counts


class Ordered(InOrder, Trainer):
    pass


class Scaled(Ordered):
    """With the scaler of mixed precision."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


class OwnLoss(Ordered):
    """The override that is in many tutorials."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return loss_of(model(**inputs)["logits"])


def train(model, data, loss=None, trainer=Ordered, **options):
    given = {"compute_loss_func": loss}
    pinned = {"dataloader_pin_memory": False}
    fit(trainer, TrainingArguments, model, data, given=given, **pinned, **options)


def of_weights(seen: Seen, make, infinite=False, **options):
    model, data = seen.watch(make()), samples(unequal=False)
    if infinite:
        data[ROWS * INF]["labels"][0] = -101
        options["trainer"] = Scaled
    train(model, data, **options)


def of_model(seen: Seen, make, causal, unequal=False, sentences=False, masked=False, **options):
    torch.manual_seed(0)
    model, data = make().double().eval(), samples(unequal, sentences, masked)
    model.train = lambda mode=True: model  # no dropout
    gradients, counts = by_hand(model, data, causal)
    seen.watch(model, gradients)
    seen.facts["tokens"] = counts
    train(model, data, **options)


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, num_hidden_layers=1, **SIZE))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=CLASSES, n_embd=16, n_layer=1, n_head=2))


def bert(kind):
    return kind(BertConfig(vocab_size=CLASSES, num_hidden_layers=1, **SIZE))


def mean(outputs, labels, num_items_in_batch=None):
    return loss_of(outputs["logits"])


def of_tokens(outputs, labels, num_items_in_batch=None):
    """A sum over the number that the Trainer gives: of all labels of the window."""
    k = outputs["logits"]
    return loss_of(k) * labels.numel() / num_items_in_batch


def divided(once):
    """The run with a model that says that its loss is a mean."""

    def make():
        model = once.keywords["make"]()
        model.accepts_loss_kwargs = False
        return model

    return {"cure: `model.accepts_loss_kwargs = False`": partial(once, make=make)}


causal = partial(of_model, causal=True)
masked = partial(of_model, make=partial(bert, BertForMaskedLM), causal=False)
sentences = partial(
    of_model, make=partial(bert, BertForSequenceClassification), causal=False, sentences=True
)
without = partial(of_weights, make=NoKeywords)
with_function = partial(of_weights, make=Keywords, loss=mean)
with_method = partial(of_weights, make=Keywords, trainer=OwnLoss)
ALL = {
    "Trainer, a model whose `forward` takes no `**kwargs`": runs(without, "clip", "skipped")
    | {"stopped": partial(without, max_steps=4)},
    "Trainer, LlamaForCausalLM": runs(causal, "clip", "unequal", make=llama),
    "Trainer, GPT2LMHeadModel": runs(causal, "clip", "unequal", make=gpt2)
    # Positions without a target are not labels, so that they are not counted.
    | {"cure: first label of each row -100": partial(causal, make=gpt2, masked=True)},
    "Trainer, BertForMaskedLM": runs(masked, "clip", "unequal") | divided(masked),
    "Trainer, BertForSequenceClassification": runs(sentences, "clip") | divided(sentences),
    "Trainer, `compute_loss_func` that returns a mean": runs(with_function, "clip")
    | {"cure: a sum over `num_items_in_batch`": partial(with_function, loss=of_tokens)},
    "Trainer, own `compute_loss` that returns a mean": runs(with_method, "clip")
    | divided(with_method),
}

if __name__ == "__main__":
    main("transformers", ALL)
