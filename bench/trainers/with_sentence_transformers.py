"""sentence-transformers: SentenceTransformerTrainer, `gradient_accumulation_steps=4`."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
from _factors import (
    BATCHES,
    EPOCHS,
    MAX_NORM,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
)
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import InputModule

ROWS = 2  # of a micro-batch


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
    model = SentenceTransformer(modules=[Numbers()], device="cpu")
    seen.watch(model)
    optimizer = optimizer_of(model)
    texts = [str(k) for k in range(BATCHES) for _ in range(ROWS)]
    data = Dataset.from_dict({"text": texts, "label": [0.0] * len(texts)})
    with TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=WINDOW,
            max_grad_norm=max_norm,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        InOrder(
            model,
            arguments,
            train_dataset=data,
            loss=Loss(model),
            optimizers=(optimizer, schedule_of(optimizer)),
        ).train()


RUNS = {
    "plain": train,
    "clip": partial(train, max_norm=MAX_NORM),
    "stopped": partial(train, max_steps=4),
}

if __name__ == "__main__":
    main("sentence-transformers", {"sentence-transformers": RUNS})
