"""sentence-transformers: SentenceTransformerTrainer, `gradient_accumulation_steps=4`."""

from functools import partial

import torch
from _factors import Seen, Weights, loss_of, main, numbers, runs
from _hub import fit
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import InputModule


class Numbers(InputModule):
    """A text is the number of its micro-batch, and its embedding that weight."""

    def __init__(self):
        super().__init__()
        self.model = Weights()

    def preprocess(self, inputs, prompt=None, **kwargs):
        return {"input_ids": torch.tensor([int(text) for text in inputs])}

    def forward(self, features, **kwargs):
        return features | {"sentence_embedding": self.model(features["input_ids"])[:, None]}

    def save(self, *args, **kwargs):
        pass


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features, labels):
        return loss_of(self.model(next(iter(features)))["sentence_embedding"])


class InOrder(SentenceTransformerTrainer):
    def get_batch_sampler(self, dataset, batch_size, drop_last, **kwargs):
        order = torch.utils.data.SequentialSampler(dataset)
        return torch.utils.data.BatchSampler(order, batch_size, drop_last)


def train(seen: Seen, max_norm=0.0, **options):
    model = seen.watch(SentenceTransformer(modules=[Numbers()], device="cpu"))
    texts = [str(k) for k in numbers()]
    data = Dataset.from_dict({"text": texts, "label": [0.0] * len(texts)})
    arguments, given = SentenceTransformerTrainingArguments, {"loss": Loss(model)}
    fit(InOrder, arguments, model, data, max_norm, given, **options)


if __name__ == "__main__":
    found = runs(train, "clip") | {"stopped": partial(train, max_steps=4)}
    main("sentence-transformers", {"sentence-transformers": found})
