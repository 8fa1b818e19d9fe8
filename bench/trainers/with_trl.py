"""TRL: SFTTrainer, `gradient_accumulation_steps=4`, on a small Llama."""

from functools import partial
from tempfile import TemporaryDirectory

import torch
from _factors import EPOCHS, MAX_NORM, WINDOW, Seen, main, optimizer_of, schedule_of
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from with_trainer import CLASSES, ROWS, by_hand, llama, samples


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def tokenizer():
    words = {"<pad>": 0, **{str(k): k for k in range(1, CLASSES)}}
    object_ = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=object_, pad_token="<pad>", eos_token="<pad>", unk_token="<pad>"
    )


def train(seen: Seen, unequal=False, max_norm=0.0):
    torch.manual_seed(0)
    model, data = llama().double().eval(), samples(unequal)
    gradients, seen.facts["tokens"] = by_hand(model, data, causal=True)
    seen.watch(model, gradients)
    optimizer = optimizer_of(model)
    columns = {name: [row[name].tolist() for row in data] for name in ("input_ids", "labels")}
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=WINDOW,
            max_grad_norm=max_norm,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        InOrder(
            model,
            arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
            optimizers=(optimizer, schedule_of(optimizer)),
        ).train()


RUNS = {
    "plain": train,
    "clip": partial(train, max_norm=MAX_NORM),
    "unequal": partial(train, unequal=True),
}

if __name__ == "__main__":
    main("trl", {"TRL SFTTrainer, LlamaForCausalLM": RUNS})
