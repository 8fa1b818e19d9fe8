"""The Trainer of transformers, `gradient_accumulation_steps=4`, and models of several kinds."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
from _factors import (
    BATCHES,
    EPOCHS,
    INF,
    MAX_NORM,
    TOKENS,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
)
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

ROWS, LENGTH, CLASSES = 2, 8, 50  # of a micro-batch


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


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(seen: Seen, model, data, loss=None, scaler=False, kind=InOrder, **options):
    options = {"num_train_epochs": EPOCHS, "max_grad_norm": 0.0, **options}
    optimizer = optimizer_of(model)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=WINDOW,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = kind(
            model,
            arguments,
            train_dataset=data,
            compute_loss_func=loss,
            optimizers=(optimizer, schedule_of(optimizer)),
        )
        if scaler:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.train()


def of_weights(seen: Seen, model, infinite=False, loss=None, **options):
    model, data = model(), samples(unequal=False)
    if infinite:
        data[ROWS * INF]["labels"][0] = -101
    seen.watch(model)
    train(seen, model, data, loss, scaler=infinite, **options)


def of_model(seen: Seen, make, causal, unequal=False, sentences=False, masked=False, **options):
    torch.manual_seed(0)
    model, data = make().double().eval(), samples(unequal, sentences, masked)
    model.train = lambda mode=True: model  # no dropout
    gradients, counts = by_hand(model, data, causal)
    seen.watch(model, gradients)
    seen.facts["tokens"] = counts
    train(seen, model, data, **options)


def llama():
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, num_hidden_layers=1, **size))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=CLASSES, n_embd=16, n_layer=1, n_head=2))


def bert(kind):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return kind(BertConfig(vocab_size=CLASSES, num_hidden_layers=1, **size))


class OwnLoss(InOrder):
    """The override that is in many tutorials."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return loss_of(model(**inputs)["logits"])


def mean(outputs, labels, num_items_in_batch=None):
    return loss_of(outputs["logits"])


def divided(make):
    """A model that says that its loss is a mean."""
    model = make()
    model.accepts_loss_kwargs = False
    return model


def of_tokens(outputs, labels, num_items_in_batch=None):
    """A sum over the number that the Trainer gives: of all labels of the window."""
    k = outputs["logits"]
    return loss_of(k) * labels.numel() / num_items_in_batch


def first_masked(make):
    """Positions without a target are not labels, so that they are not counted."""
    return partial(of_model, make=make, causal=True, masked=True)


def runs(train, unequal=True):
    found = {"plain": train, "clip": partial(train, max_grad_norm=MAX_NORM)}
    return found | ({"unequal": partial(train, unequal=True)} if unequal else {})


without = partial(of_weights, model=NoKeywords)
with_function = partial(of_weights, model=Keywords, loss=mean)
with_method = partial(of_weights, model=Keywords, kind=OwnLoss)
tokens = partial(of_model, make=partial(bert, BertForMaskedLM), causal=False)
sentences = partial(
    of_model,
    make=partial(bert, BertForSequenceClassification),
    causal=False,
    sentences=True,
)
FLAG = "cure: `model.accepts_loss_kwargs = False`"
ALL = {
    "Trainer, a model whose `forward` takes no `**kwargs`": runs(without, unequal=False)
    | {"skipped": partial(without, infinite=True), "stopped": partial(without, max_steps=4)},
    "Trainer, LlamaForCausalLM": runs(partial(of_model, make=llama, causal=True)),
    "Trainer, GPT2LMHeadModel": runs(partial(of_model, make=gpt2, causal=True))
    | {"cure: first label of each row -100": first_masked(gpt2)},
    "Trainer, BertForMaskedLM": runs(tokens)
    | {FLAG: partial(tokens, make=partial(divided, partial(bert, BertForMaskedLM)))},
    "Trainer, BertForSequenceClassification": runs(sentences, unequal=False)
    | {
        FLAG: partial(
            sentences, make=partial(divided, partial(bert, BertForSequenceClassification))
        )
    },
    "Trainer, `compute_loss_func` that returns a mean": runs(with_function, unequal=False)
    | {"cure: a sum over `num_items_in_batch`": partial(with_function, loss=of_tokens)},
    "Trainer, own `compute_loss` that returns a mean": runs(with_method, unequal=False)
    | {FLAG: partial(with_method, model=partial(divided, Keywords))},
}

if __name__ == "__main__":
    main("transformers", ALL)
