"""The optimizers that bench/optimizers.py runs, of torch and of the packages that
bench/optimizers.txt pins, and the model that they train."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = {  # by module: those that are made of parameters, and perhaps a learning rate
    "torch.optim": "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop "
    "SGD",
    "timm.optim": "AdaBelief AdafactorBigVision AdamP Adan Adopt LaProp Lamb Lars Lion MADGRAD "
    "Mars NAdamW NvNovoGrad RMSpropTF SGDP",
    "pytorch_optimizer": "ADOPT AdEMAMix AdaBelief AdaBound Amos CAME DiffGrad FTRL Fromage "
    "GaLore GrokFastAdamW Kate Kron LaProp Lamb Lion MADGRAD MARS Nero PID Prodigy QHAdam Ranger "
    "SCION SM3 SOAP ScheduleFreeAdamW Shampoo StableAdamW Tiger Yogi",
    "torch_optimizer": "AccSGD AdaBelief AdaBound AdaMod AdamP AggMo DiffGrad Lamb NovoGrad QHAdam "
    "Ranger SGDP SGDW SWATS Shampoo Yogi",
    "bitsandbytes.optim": "Adagrad8bit Adam8bit AdamW AdamW8bit AdEMAMix8bit Lion8bit RMSprop8bit",
    "optimi": "Adam AdamW Adan Lion RAdam Ranger SGD",
    "heavyball": "AdamW HeavySOAP LaProp Muon NAdam SFAdamW SOAP",
    "dadaptation": "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD",
    "schedulefree": "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
    "torchao.optim": "AdamW4bit AdamW8bit AdamWFp8",
    "lion_pytorch": "Lion",
    "prodigyopt": "Prodigy",
    "came_pytorch": "CAME",
    "adabelief_pytorch": "AdaBelief",
    "adabound": "AdaBound",
    "adamp": "AdamP SGDP",
    "adan_pytorch": "Adan",
}
SIZE, ROWS = 64, 8  # 64 x 64 elements are enough for states of 8 bits

Named = list[tuple[str, nn.Parameter]]


class Kind(NamedTuple):
    """An optimizer, and what its loop has to do for it."""

    name: str
    package: str  # of the package index
    make: Callable[[Named], torch.optim.Optimizer]
    closure: bool = False  # its step needs one
    graph: bool = False  # it differentiates gradients
    matrices: bool = False  # it takes parameters of two dimensions alone


def plain(cls: Any, named: Named) -> torch.optim.Optimizer:
    """Make an optimizer with its own defaults, and a rate if it needs one."""
    try:
        return cls([p for _, p in named])
    except (TypeError, ValueError):
        return cls([p for _, p in named], lr=1e-2)


def with_options(cls: Any, named: Named, **options: Any) -> torch.optim.Optimizer:
    return cls([p for _, p in named], **options)


def around(cls: Any, named: Named, **options: Any) -> torch.optim.Optimizer:
    return cls(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9), **options)


def low_rank(cls: Any, named: Named, **options: Any) -> torch.optim.Optimizer:
    """Make one of GaLore or APOLLO, whose group of matrices says how these are projected."""
    matrices, vectors = ([p for _, p in named if p.dim() == dim] for dim in (2, 1))
    options |= {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    return cls([{"params": matrices, **options}, {"params": vectors}], lr=1e-2)


def prepared(cls: Any, named: Named) -> torch.optim.Optimizer:
    accelerate = importlib.import_module("accelerate")
    return around(accelerate.Accelerator(cpu=True).prepare, named)


def without_processes(cls: Any, named: Named) -> torch.optim.Optimizer:
    class Averager:
        step = 0

        def average_parameters(self, params: object) -> None:
            self.step += 1

    return around(cls, named, averager=Averager())


APOLLO = {"proj": "random", "scale_type": "channel"}
SHARP = partial(with_options, base_optimizer=torch.optim.SGD, lr=0.1)
FUSED, MATRICES = partial(with_options, fused=True), {"matrices": True}
CLOSURE, GRAPH = {"closure": True}, {"graph": True}
SPECIAL: list[tuple[str, str, Any, dict[str, bool]]] = [
    *(("torch.optim", name, FUSED, {}) for name in ("AdamW", "SGD")),
    ("torch.optim", "Muon", plain, MATRICES),
    ("torch.distributed.optim", "PostLocalSGDOptimizer", without_processes, {}),
    ("transformers.optimization", "Adafactor", plain, {}),  # its rate is None
    ("accelerate.optimizer", "AcceleratedOptimizer", prepared, {}),
    *((m, "Lookahead", partial(around, k=2), {}) for m in ("torch_optimizer", "pytorch_optimizer")),
    ("adam_mini", "Adam_mini", lambda cls, named: cls(named, dim=SIZE, n_heads=4), {}),
    ("muon", "SingleDeviceMuon", plain, MATRICES),
    ("galore_torch", "GaLoreAdamW", low_rank, {}),
    ("apollo_torch", "APOLLOAdamW", partial(low_rank, **APOLLO), {}),
    *(("pytorch_optimizer", name, SHARP, CLOSURE) for name in ("SAM", "FriendlySAM")),
    *(("pytorch_optimizer", name, plain, GRAPH) for name in ("AdaHessian", "SophiaH")),
    *((module, "Adahessian", plain, GRAPH) for module in ("timm.optim", "torch_optimizer")),
]


def not_compiled(function: Any = None, **options: Any) -> Any:
    """Stand in for torch.compile, which some packages call for every step, and which takes
    minutes."""
    return not_compiled if function is None else function


def kinds() -> Iterator[Kind]:
    """Yield all kinds, by package."""
    torch.compile = not_compiled
    packages = metadata.packages_distributions()
    rows = [(m, n, plain, dict[str, bool]()) for m, names in CLASSES.items() for n in names.split()]
    for module, name, make, needs in sorted([*rows, *SPECIAL], key=lambda row: row[:2]):
        cls = getattr(importlib.import_module(module), name)
        label = f"{name}(fused=True)" if make is FUSED else name
        package = packages[module.partition(".")[0]][0].replace("_", "-")
        yield Kind(label, package, partial(make, cls), **needs)


def made(kind: Kind, masters: bool) -> nn.Module:
    """Make the same model at every call; for bitsandbytes with a weight that is not contiguous."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        bias = not kind.matrices
        first, last = (nn.Linear(SIZE, SIZE, bias) for _ in range(2))
    if kind.package == "bitsandbytes":
        first.weight.data = first.weight.data.t().contiguous().t()
    return nn.Sequential(first, nn.Tanh(), last).to(torch.bfloat16 if masters else torch.float32)


def optimizer_of(kind: Kind, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = kind.make(list(params.items()))
    getattr(optimizer, "train", lambda: None)()  # of schedule-free ones
    return optimizer


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.to(model[0].weight.dtype)).float().square().mean()


def evaluated(kind: Kind, model: nn.Module, batch: Tensor, scaler: Any = None) -> Tensor:
    loss = loss_of(model, batch)
    (loss if scaler is None else scaler.scale(loss)).backward(create_graph=kind.graph)
    return loss


def batches(count: int) -> list[Tensor]:
    """Return so many batches; all random numbers after them follow from the same seed."""
    torch.manual_seed(0)
    np.random.seed(0)
    return [torch.randn(ROWS, SIZE) for _ in range(count)]
