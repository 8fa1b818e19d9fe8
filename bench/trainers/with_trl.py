"""TRL: SFTTrainer, `gradient_accumulation_steps=4`, on a small Llama."""

import torch
from _factors import Seen, main, runs
from _hub import InOrder, fit
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from with_trainer import CLASSES, by_hand, llama, samples


class Ordered(InOrder, SFTTrainer):
    pass


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
    columns = {name: [row[name].tolist() for row in data] for name in ("input_ids", "labels")}
    given = {"processing_class": tokenizer()}
    options = {"gradient_checkpointing": False, "bf16": False}
    fit(Ordered, SFTConfig, model, Dataset.from_dict(columns), max_norm, given, **options)


if __name__ == "__main__":
    main("trl", {"TRL SFTTrainer, LlamaForCausalLM": runs(train, "clip", "unequal")})
