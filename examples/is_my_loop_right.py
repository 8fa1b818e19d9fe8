"""The loop of question 1, as people have it, to be audited: nothing in it is of accumext.

`python -m accumext audit examples/is_my_loop_right.py` says what it divides by, what it clips, and
how much its graph of 200 steps keeps.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
parser.add_argument("--vocabulary", type=int, default=50_000)
parser.add_argument("--length", type=int, default=200, help="decoder steps T")
args = parser.parse_args()


class Decoder(nn.Module):
    def __init__(self, vocabulary, size):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.cell = nn.GRUCell(size, size)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, token, hidden):
        hidden = self.cell(self.embedding(token), hidden)
        return self.head(hidden), hidden


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
n, batch, size = 2, 4, 64
model = Decoder(args.vocabulary, size).to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device)

for i in range(args.steps * n):
    target = torch.randint(args.vocabulary, (args.length, batch), device=device)
    decoder_hidden = torch.randn(batch, size, device=device)
    decoder_input = torch.zeros(batch, dtype=torch.int64, device=device)
    loss = 0
    with torch.autocast(device, enabled=device == "cuda"):
        for t in range(args.length):
            output, decoder_hidden = model(decoder_input, decoder_hidden)
            loss += cross_entropy(output, target[t])
            decoder_input = output.argmax(1)
        loss = loss / (n * args.length)
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print(f"loss {loss.item() * n:.3f}")
