"""DeepSpeed: the engine takes the wrapper, and steps after every micro-batch."""

import os

import deepspeed
import torch
from torch.nn.functional import cross_entropy

import accumext

alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ |= {name: value for name, value in alone.items() if name not in os.environ}

torch.manual_seed(0)
rows = torch.randn(160, 8)
model = torch.nn.Linear(8, 4)

sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
opt = accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)
config = {
    "train_micro_batch_size_per_gpu": 16,  # gradient_accumulation_steps stays 1
    "gradient_clipping": 0.0,  # of each micro-batch; the default is 1.0
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
micro_batches = rows.split(16)
for _ in range(3):
    for i, x in enumerate(micro_batches):
        if i % 4 == 0:  # a shorter last window; without ZeRO, opt.flush() behind the loop
            opt.window = min(4, len(micro_batches) - i)
        loss = cross_entropy(engine(x), x[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()

print(f"last window: {opt.stats()}")
