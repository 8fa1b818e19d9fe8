#!/usr/bin/env bash
# Expected: `torch.set_default_device("cuda")` holds for the process, and `with torch.device(...)` or
# any TorchFunctionMode for all that runs inside it, backward included.
# What happens: `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` are torch
# functions themselves, so the mode is popped while they run: the backward method of an
# autograd.Function and hooks make their tensors on the CPU, and torch.utils.checkpoint with
# use_reentrant=True, which runs the forward code again, makes them on another device than before.
# Here the default device is "meta", so that no GPU is needed. Issues of PyTorch describe it.
# Version: torch 2.13.0. Read in torch/autograd/__init__.py (backward, grad), torch/_tensor.py
# (Tensor.backward), and torch/utils/checkpoint.py, which restores the device with use_reentrant=False.
# Seen:
#   new tensors, forward and backward, twice: meta cpu meta cpu
#   torch.arange in a checkpoint, use_reentrant=False: meta meta
#   torch.arange in a checkpoint, use_reentrant=True: meta cpu
#   a TorchFunctionMode sees: zeros __get__ clone backward
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

devices = []


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        devices.append(torch.zeros(1).device.type)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        devices.append(torch.zeros(1).device.type)
        return grad


class Calls(TorchFunctionMode):
    def __init__(self):
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


x = torch.ones(1, requires_grad=True)
one = torch.ones(1)
torch.set_default_device("meta")
Identity.apply(x).backward(one)
torch.autograd.grad(Identity.apply(x), x, one)
print("new tensors, forward and backward, twice:", *devices)
twice = list(devices)


def ramp(y):
    devices.append(torch.arange(3).device.type)
    return (y * y).sum()


again = {}
for reentrant in (False, True):
    devices.clear()
    y = torch.ones(3, device="cpu", requires_grad=True)
    checkpoint(ramp, y, use_reentrant=reentrant).backward(torch.ones((), device="cpu"))
    again[reentrant] = list(devices)
    print(f"torch.arange in a checkpoint, use_reentrant={reentrant}:", *devices)
torch.set_default_device("cpu")
with Calls() as calls:
    Identity.apply(x).backward(one)
print("a TorchFunctionMode sees:", *calls.names)

assert twice == ["meta", "cpu"] * 2, "the default device holds in the backward pass now"
assert again == {False: ["meta", "meta"], True: ["meta", "cpu"]}, "checkpoints have changed"
assert calls.names.count("zeros") == 1, "a mode sees the backward pass now"
PYTHON
venv/bin/python finding.py
