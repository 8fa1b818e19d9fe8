"""apex.amp: scaled losses, and gradients unscaled at the last batch of n."""

import torch
from apex import amp
from torch.nn.functional import cross_entropy


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % n == 0
        loss = cross_entropy(model(x), y)
        loss = loss / n
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            optimizer.zero_grad()
