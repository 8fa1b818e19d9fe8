"""Question 2: backward for every token, or once for all of them: two settings of one call.

The accepted answer divides each token's loss by the target length, calls backward per token and
detaches; the other keeps the history, calls backward once, and may run out of memory. Here both
are `tbptt`, with the same module, and the running loss is collected on the device.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumext


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.cell = nn.GRUCell(size, size)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.embedding(token), hidden)
        return self.head(hidden), hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each setting")
    args = parser.parse_args()
    vocabulary, size, length, batch, n = 2000, 64, 30, 8, 4

    for name, k1 in (("per token (k1=k2=1)", 1), (f"once (k1=k2=T={length})", length)):
        torch.manual_seed(0)
        model = Decoder(vocabulary, size)
        scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        opt = accumext.AccumulatingOptimizer(
            torch.optim.Adam(model.parameters(), lr=3e-3), window=n, max_norm=2.0, scaler=scaler
        )
        running = torch.zeros(())  # stays on the device: nothing waits for it until it is printed
        for _ in range(args.steps):
            for _ in range(n):
                start = torch.randint(vocabulary // 2, (1, batch))
                targets = (start + torch.arange(length)[:, None]) % vocabulary  # counts upwards
                with opt.micro_batch():
                    # mean over the steps: each token's loss divided by the target length;
                    # the division by n is the optimizer's
                    running += accumext.tbptt(
                        model,
                        targets,
                        torch.zeros(batch, size),
                        criterion=F.cross_entropy,
                        feedback="scheduled",
                        teacher_forcing=0.5,
                        k1=k1,
                        backward=opt.backward,
                    ).loss
                opt.step()
        print(f"{name}: mean loss {running / (args.steps * n):.3f}, last {opt.stats()}")


if __name__ == "__main__":
    main()
