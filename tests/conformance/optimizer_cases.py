"""Every optimizer that torch.optim exports, how it can be asked to work, and a model for each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from support.optimizer_oracle import make_model
from torch import Tensor, nn

# By class, settings under which all of its own arithmetic takes part.
SETTINGS = {
    "Adadelta": {"lr": 1.0, "weight_decay": 0.01},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "Adam": {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01},
    "Adamax": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "ASGD": {"lr": 0.1, "t0": 2.0},
    "LBFGS": {"lr": 0.5, "max_iter": 4},
    "Muon": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "SparseAdam": {"lr": 0.05},
}
CLASSES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
)
WITHOUT_CLOSURE = [name for name in CLASSES if name != "LBFGS"]

# Variants that torch computes with tensors: how to ask for each, and who refuses it on a CPU.
VARIANTS = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "tensor-lr": {},
}
NO_TENSOR_LR = ("LBFGS", "Muon")


def accepts(name: str, option: str) -> bool:
    """Tell whether the class has an option of that name."""
    return option in inspect.signature(getattr(torch.optim, name)).parameters


def cases(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every class in every variant that it has."""
    pairs = [(name, variant) for name in names for variant in VARIANTS]
    return [
        (name, variant)
        for name, variant in pairs
        if all(accepts(name, option) for option in VARIANTS[variant])
        and not (variant == "tensor-lr" and name in NO_TENSOR_LR)
    ]


def make_optimizer(name: str, parameters: Iterator[Tensor], variant: str = "default", **options):
    settings = SETTINGS[name] | VARIANTS[variant] | options
    if variant == "tensor-lr":
        settings["lr"] = torch.tensor(settings["lr"], dtype=torch.float64)
    return getattr(torch.optim, name)(parameters, **settings)


def model_for(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model that this optimizer can train: of matrices for Muon, sparse for SparseAdam."""
    if name not in ("Muon", "SparseAdam"):
        return make_model(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if name == "SparseAdam":
            return nn.Embedding(7, 3, sparse=True, dtype=dtype)
        return nn.Sequential(nn.Linear(3, 4, False), nn.Tanh(), nn.Linear(4, 2, False)).to(dtype)


def batches_for(name: str, sizes: Sequence[int], dtype: torch.dtype = torch.float64):
    """Inputs of so many rows each: vectors, or the tokens of an embedding."""
    generator = torch.Generator().manual_seed(2)
    if name == "SparseAdam":
        return [torch.randint(7, (size,), generator=generator) for size in sizes]
    return [
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    ]
