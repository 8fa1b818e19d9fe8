"""First checks of a GPU: every operator, decode_loss beside plain autograd, and the rest.

    python tests/cuda/gpu_checks.py operators|decoder|beyond|masters [--device D] [--json FILE]
        [--quick] [--here WORDS]

`operators`: those that the CUDA library registers, against the reference on the CPU.
`decoder`: decode_loss in every mode and precision, against plain autograd (gpu_decoder.py).
`beyond`: its other options, generate and rollout, against the CPU in float64 (gpu_decoder.py).
`masters`: float32 masters on the GPU and on the host, against the CPU (gpu_masters.py). Needs torch
alone. Every row is printed and written as soon as it is there; exit status 1 if one is wrong.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_decoder
import gpu_masters
import torch
from gpu_rows import Checks, Facts, collect, examine
from support.decoder_calls import (
    KINDS,
    Call,
    backward_call,
    beam_call,
    end_rows_call,
    head_call,
    objective_call,
    sample_call,
    select_call,
    steps_call,
    top_call,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accumext.backends import _build
from accumext.decoder import _operators
from accumext.generation import _beam_step, _output_layer, _stepper
from accumext.ops import reference
from accumext.tensors.torch_private import operator as lookup

PATIENCE = {"cuda": 20.0, "cpu": 60.0}  # s, that a row may take

# Sums of some thousand float32 in two orders, powers, and what is clipped by such norms.
RTOL = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.int64: 0.0,
    torch.bool: 0.0,
}
# Of the decoder, where in several steps a number may be rounded to its other neighbour.
DECODER_RTOL = {False: 1e-4, True: 2.0**-6}  # whether weights are bfloat16


# --- operators ------------------------------------------------------------------------------------


class Operator(NamedTuple):
    arguments: Callable[[], tuple[list[Any], dict[str, Any]]]  # on the CPU
    reference: Callable[..., Any]
    written: slice  # of the positional arguments, those that hold results
    rtol: dict[torch.dtype, float] = RTOL


def gradients(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Lists of mixed dtypes and shapes around the edges of chunks, some transposed, and some slices
    that end where their memory ends."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    main_grads, grads = [], []
    for main, grad in itertools.product(dtypes, dtypes):
        for shape in ((), (0,), (9,), (33, 130), (4097,)):
            main_grads.append(torch.randn(shape).to(main))
            grads.append(torch.randn(shape).to(grad))
        grads[-2] = grads[-2].t().contiguous().t()
        for size in (1, 300, 9000):
            main_grads.append(torch.randn(size + 1).to(main)[1:])
            grads.append(torch.randn(size + 3).to(grad)[3:])
    return [main_grads, grads], options


def factor() -> Tensor:
    return torch.tensor(0.37)


def flag() -> Tensor:
    return torch.zeros(())


def broken(value: float) -> Operator:
    """A clipped micro-batch with an element that is not finite, which is to be left out."""

    def arguments() -> tuple[list[Any], dict[str, Any]]:
        lists, options = gradients(inv_scale=factor(), found_inf=flag(), **CLIP)
        lists[1][-1][8191] = value
        return lists, options

    return Operator(arguments, reference.unscale_check_clip_accumulate_, MAIN_GRADS)


def one_list(*more: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    (_, grads), _ = gradients()
    return [grads, *more], options


def closing() -> tuple[list[Any], dict[str, Any]]:
    """A window's factors from its main gradients, with a clip and a loss scale."""
    (main_grads, _), _ = gradients()
    number = torch.tensor(0.37, dtype=torch.float64)
    ledger = [None, None, number, number, number, number * 0, number]
    numbers = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    return [*numbers, main_grads, ledger, 1.0, 5.0, False, True], {}


def product(dtype: torch.dtype, overwrite: bool) -> Operator:
    """add_matmul of whole numbers, whose sums in float32 are exact."""

    def whole(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape).float()

    def add(sums: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
        sums.mul_(not overwrite).add_(left.float() @ right)

    right = whole(72, 24)
    right[0, 0] = 8.0  # by the largest magnitude a product of float16 is scaled
    arguments = [whole(40, 24), whole(40, 72).to(dtype), right, overwrite]
    return Operator(lambda: (arguments, {}), add, MAIN_GRADS)


def norm(p: float) -> Operator:
    def arguments() -> tuple[list[Any], dict[str, Any]]:
        return one_list(norm_type=p, inv_scale=factor(), found_inf=flag())

    return Operator(arguments, reference.total_norm, NOTHING)


CLIP = {"max_norm": 5.0, "if_finite": True}
MAIN_GRADS, NOTHING = slice(1), slice(0)


MODULES = (_operators, _output_layer, _beam_step, _stepper)  # with plain PyTorch


def of_the_decoder(call: Call) -> Operator:
    name = f"{call.op}_reference"
    kernel = next(getattr(m, name) for m in MODULES if hasattr(m, name))
    rtol = DECODER_RTOL[any(t.dtype == torch.bfloat16 for t in call.tensors)]
    tolerances = {dtype: rtol if allowed else 0.0 for dtype, allowed in RTOL.items()}
    written = slice(call.first_written, None)
    return Operator(lambda: (call.arguments, {}), kernel, written, tolerances)


def decoder_calls() -> Iterator[tuple[str, Call]]:
    """Vocabularies around chunks, batches of every band of rows, each kind of cell."""
    for words, rows in (*itertools.product((1, 9, 4100, 9000), (1, 3, 9)), (50257, 32)):
        shape = {"rows": rows, "words": words}
        for sampled in (False, True):
            name = f"head_forward V={words} B={rows} {'sampled' if sampled else 'greedy'}"
            yield name, head_call(**shape, sampled=sampled, temperature=0.5 if rows == 3 else 1.0)
        for soft in ("tokens", "all words") if rows > 3 else ():
            call = objective_call(**shape, soft=soft, narrow=rows == 32)
            yield f"head_objective V={words} B={rows} {soft}", call
    for kind, narrow in itertools.product(KINDS, (False, True)):
        told = f"{kind} {'narrow' if narrow else 'wide'}"
        for batch in (5, 17, 33):
            yield f"rnn_backward {told} B={batch}", backward_call(kind, narrow=narrow, batch=batch)
        for layers, head in itertools.product((1, 3), (False, True)):
            name = f"decode_steps {told} L={layers} {'predicted' if head else 'known'}"
            yield name, steps_call(kind, layers=layers, head=head, narrow=narrow)
        call = steps_call(kind, layers=2, around=True, narrow=narrow)
        yield f"decode_steps {told} L=2 dropout around", call
    for batch, sampled in itertools.product((9, 17, 33), (False, True)):
        name = f"decode_steps all logits below 0 B={batch} {'sampled' if sampled else 'greedy'}"
        yield name, steps_call("gru", narrow=True, batch=batch, sampled=sampled, bias=-50.0)
    for words, rows in ((9, 3), (4100, 9), (50257, 2)):  # plain PyTorch takes seconds for more
        shape = {"rows": rows, "words": words, "narrow": rows == 2, "logit_rows": 32}
        for size in (1, 9, 70)[: 3 if words > 70 else 2]:
            yield f"head_top V={words} B={rows} k={size}", top_call(**shape, size=size)
        for top_k, top_p in ((7, 0.8), (50, 1.0), (300, 0.5), (10**6, 0.9)):
            name = f"head_sample V={words} B={rows} k={top_k} p={top_p}"
            yield name, sample_call(**shape, top_k=top_k, top_p=top_p)
    for beams, words, rows in ((1, 9, 3), (4, 50257, 16), (20, 40, 5)):
        call = beam_call(rows=rows, beams=beams, words=words)
        yield f"beam_step K={beams} V={words} B={rows}", call


OPERATORS: dict[str, Operator] = {
    "accumulate_": Operator(
        lambda: gradients(inv_scale=factor(), found_inf=flag()), reference.accumulate_, MAIN_GRADS
    ),
    "accumulate_.scalar": Operator(
        lambda: gradients(inv_scale=0.37), reference.accumulate_, MAIN_GRADS
    ),
    "unscale_check_clip_accumulate_": broken(1.0),
    "unscale_check_clip_accumulate_.scalar": Operator(
        lambda: gradients(inv_scale=0.37, **CLIP),
        reference.unscale_check_clip_accumulate_,
        MAIN_GRADS,
    ),
    "window_factors": Operator(closing, reference.window_factors, slice(2)),
    "total_norm": norm(3.0),
    "total_norm.scalar": Operator(lambda: one_list(inv_scale=0.37), reference.total_norm, NOTHING),
    "scale_": Operator(lambda: one_list(factor()), reference.scale_, MAIN_GRADS),
    "scale_.scalar": Operator(lambda: one_list(0.37), reference.scale_, MAIN_GRADS),
    "copy_rounded_": Operator(
        lambda: gradients(seed=torch.tensor(7 << 40 | 3), found_inf=flag()),
        reference.copy_rounded_,
        MAIN_GRADS,
    ),
    "head_forward": of_the_decoder(head_call()),
    "head_objective": of_the_decoder(objective_call()),
    "head_top": of_the_decoder(top_call()),
    "head_sample": of_the_decoder(sample_call()),
    "beam_step": of_the_decoder(beam_call()),
    "select_states": of_the_decoder(select_call()),
    "end_rows": of_the_decoder(end_rows_call()),
    "decode_steps": of_the_decoder(steps_call("lstm", layers=2)),
    "rnn_backward": of_the_decoder(backward_call("lstm")),
}
# On a GPU these are torch's: products of half precision with sums in float32, which its oldest
# version must have as well.
PRODUCTS = {
    f"add_matmul {dtype} {way}": product(dtype, way == "overwrite")
    for dtype in (torch.bfloat16, torch.float16)
    for way in ("add", "overwrite")
}


BROKEN = {f"unscale_check_clip_accumulate_ {v}": broken(v) for v in (float("inf"), float("nan"))}
NORMS = {f"total_norm p={p}": norm(p) for p in (1.0, 2.0, float("inf"), -float("inf"))}


def check_operator(name: str, operator: Operator, device: torch.device) -> Facts:
    arguments, options = operator.arguments()
    there = tree_map(lambda leaf: copy_of(leaf, device), (arguments, options))
    op = lookup(name.split()[0])
    got = [op(*there[0], **there[1]), there[0][operator.written], there[1].get("found_inf")]
    want = [
        operator.reference(*arguments, **options),
        arguments[operator.written],
        options.get("found_inf"),
    ]
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
    for mine, theirs in tensors:
        rtol = operator.rtol[theirs.dtype]
        torch.testing.assert_close(mine.cpu(), theirs, rtol=rtol, atol=rtol, equal_nan=True)
    return {"tensors compared": len(tensors)}


def copy_of(leaf: Any, device: torch.device) -> Any:
    """Of a tensor, in memory that begins and ends where its own does."""
    if not isinstance(leaf, Tensor):
        return leaf
    memory = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage()).to(device, copy=True)
    return memory.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())


def operators(device: torch.device, quick: bool) -> Checks:
    rows = {name: OPERATORS[name] for name in _build.registered_ops("cuda")}
    rows |= {name: of_the_decoder(call) for name, call in decoder_calls()}
    for name, operator in (rows | NORMS | BROKEN | PRODUCTS).items():
        yield name, lambda row=(name, operator): check_operator(*row, device)


PARTS = {
    "operators": operators,
    "decoder": gpu_decoder.checks,
    "beyond": gpu_decoder.checks_beside,
    "masters": gpu_masters.checks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=tuple(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--here", metavar="WORDS", help="rows of such names, in this process")
    args = parser.parse_args()
    if args.here is not None:
        checks = PARTS[args.what](torch.device(args.device), args.quick)
        rows = [examine(*row) for row in checks if re.search(args.here, row[0])]
        print(*rows, sep="\n")
        return 0 if all(row["passed"] for row in rows) and rows else 1
    passed = collect(PARTS[args.what], args.device, args.quick, args.json, PATIENCE[args.device])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
