"""The self-test: calls of every operator, whose results must be those of plain PyTorch.

One list for `python -m accumext doctor` and for the verification of CUDA kernels (_verify.py). The
calls are small, and take every branch of the kernels: every dtype, batches of every width and
beyond the largest of the persistent decoder window, logits that are all below zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.tensors.torch_private import call_default_kernel, operator, tree_leaves, tree_map

OK = "ok"

# Four roundings of float32, in which most tensors of a list are summed whatever the dtype of the
# result: two orders of summation, or a power on a GPU, may differ by two roundings.
_LIST_TOLERANCE = 4 * torch.finfo(torch.float32).eps
# By the dtype of a product's operands: sums in another order may round a half-precision state to
# its other neighbour, and later steps carry the difference on.
_PRODUCT_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
}
_TOKEN_TOLERANCE = 1e-4  # of a logit or a probability: sums of float32 in another order
_DTYPES = tuple(_PRODUCT_TOLERANCE)

_GATES, _STATES = (3, 4, 1, 1), (1, 2, 1, 1)  # numbers per layer, by `kind`
_STEPS, _UNITS, _WIDTH, _WORDS = 4, 70, 9, 300  # no multiples of the kernels' tile sizes
_BELOW_ZERO = -16.0  # a bias with which no logit reaches zero
_EOS, _PAD = 3, 1


class Case(NamedTuple):
    """A call of an operator."""

    name: str  # of the operator, such as scale_.scalar
    arguments: dict[str, Any]
    tolerance: float = _LIST_TOLERANCE

    def check(self, device: torch.device) -> None:
        """Raise AssertionError if kernel and plain PyTorch return or write different numbers."""
        op = operator(self.name)
        ours, theirs = self._on(device), self._on(device)
        result = op(**ours)
        if self.name in ("head_forward", "decode_steps") and ours["stats"] is not None:
            _accept_tokens(ours, theirs)
        expected = call_default_kernel(op, **theirs)
        for got, want in zip(tree_leaves((result, ours)), tree_leaves((expected, theirs))):
            if isinstance(want, Tensor):
                _require_close(got, want, self.tolerance)
            else:
                _require(got == want, f"{got} instead of {want}")

    def _on(self, device: torch.device) -> dict[str, Any]:
        """Return copies of the arguments on a device, with the same strides."""

        def copied(leaf: Any) -> Any:
            return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf

        call: dict[str, Any] = tree_map(copied, self.arguments)
        for name in ("exps", "gradients"):
            workspace = call.get(name)
            if workspace is not None and (device.type, workspace.dtype) == ("cpu", torch.float16):
                call[name] = workspace.float()  # CPUs multiply float16 slowly
        return call


@functools.cache
def cases() -> dict[str, list[Case]]:
    """Return all calls, by operator, with the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        by_operator: dict[str, list[Case]] = {}
        for case in chain(_list_cases(), _decoder_cases(), _cases_of_the_cpu()):
            by_operator.setdefault(case.name, []).append(case)
    return by_operator


def outcome(name: str, device: torch.device, before: Callable[[], object] = object) -> str:
    """Return OK, or what is wrong with an operator on a device; `before` runs before each call."""
    calls = cases().get(name, [])
    for number, case in enumerate(calls, 1):
        before()
        try:
            case.check(device)
        except Exception as error:  # a report names failures of any kind
            return f"{words(error)} (call {number} of {len(calls)})"
    return OK if calls else "there is no call of it in the self-test"


def words(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _require(condition: bool, words: str) -> None:
    """Raise AssertionError if a condition is false, under python -O as well."""
    if not condition:
        raise AssertionError(words)


def _require_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compare two tensors. The import of torch.testing.assert_close would take a second."""
    _require((got.shape, got.dtype) == (want.shape, want.dtype), f"{got.dtype}{[*got.shape]}")
    error = (got.double() - want.double()).abs()
    close = error <= tolerance * (1 + want.double().abs())
    wrong = ~(close | (got == want) | (got.isnan() & want.isnan()))  # infinities differ by NaN
    count = int(wrong.sum())
    most = float(error[wrong].amax()) if count else 0.0
    _require(count == 0, f"{count} of {wrong.numel()} numbers differ, by {most:.3g} at most")


def _accept_tokens(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check the tokens of a call of the head or of steps, then give both calls these tokens.

    They have to be the largest logits, or samples, of the kernel's own hidden states. They may
    differ from plain PyTorch's if sums in another order decide between two tokens.
    """
    tokens, active, uniforms = ours["tokens"], ours.get("active"), ours["uniforms"]
    if steps := "states" in ours:
        hidden = ours["states"][-_STATES[ours["kind"]]][1:]
        if (mask := ours["dropout_masks"][2]) is not None:
            hidden = hidden * mask * ours["dropout_scales"][2]
        weight, bias = ours["head_weight"], ours["head_bias"]
    else:
        hidden, weight, bias = ours["hidden"], ours["weight"], ours["bias"]
    _require(bool(((tokens >= 0) & (tokens < len(weight))).all()), "a token is no word")
    z = hidden.to(weight.dtype).double() @ weight.double().t() + bias
    chosen = tokens[..., None]
    if uniforms is None:
        error = z.amax(-1, keepdim=True) - z.gather(-1, chosen)
    else:
        p, threshold = (z / ours["temperature"]).softmax(-1), uniforms[..., None]
        reached = p.cumsum(-1).gather(-1, chosen)
        error = torch.maximum(threshold - reached, reached - p.gather(-1, chosen) - threshold)
    error = error if active is None else error[active]
    _require(bool((error < _TOKEN_TOLERANCE).all()), "a token is not the one that the logits say")
    shared = {"targets": tokens.clone() if ours["targets"] is None else ours["targets"]}
    if steps:
        _check_feedback(ours, theirs["active"])
        shared |= {"teacher": ours["inputs"].clone(), "teacher_mask": None, "eos": -1}
    for call in (ours, theirs):
        call.update(shared, tokens=theirs["tokens"])


def _check_feedback(call: dict[str, Any], active: Tensor | None) -> None:
    """Check by which tokens steps are fed, and where rows end; update `active` from its value
    before the call to the one expected after it."""
    fed = call["tokens"][:-1]
    if call["teacher"] is not None:
        fed = torch.where(call["teacher_mask"][1:], call["teacher"][1:], fed)
    if active is not None:
        for before, after, token in zip(active, active[1:], call["tokens"]):
            after &= before & (token != call["eos"])
        _require(torch.equal(call["active"], active), "other rows have ended")
        fed = torch.where(active[1:], fed, call["pad"])
    _require(torch.equal(call["inputs"][1:], fed), "other tokens were fed")


# --- lists of tensors --------------------------------------------------------------------------


def _lists(*main_dtypes: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return main gradients of these dtypes and gradients for each, some of them transposed."""
    main_grads, grads = [], []
    for main_dtype, dtype in product(main_dtypes, _DTYPES):
        shapes = ((), (0,), (7,), (4100,), (65, 33))
        main_grads += [torch.randn(shape).to(main_dtype) for shape in shapes]
        grads += [torch.randn(shape).to(dtype) for shape in shapes]
        main_grads[-1] = torch.randn(33, 65).to(main_dtype).mT
    return main_grads, grads


def _list_cases() -> Iterator[Case]:
    """Yield calls with few tensors and with many, for which there are other CUDA kernels."""
    main_grads, grads = _lists(*_DTYPES)
    many = [*main_grads, *grads]
    wide_main_grads, wide_grads = _lists(torch.float32, torch.float64)
    broken_grads = [*grads[:-1], grads[-1] / 0]
    flag = torch.zeros(())
    lists: dict[str, Any] = {"main_grads": main_grads, "grads": grads}
    wide = {"main_grads": wide_main_grads, "grads": wide_grads, "max_norm": 1.0}
    broken = {"main_grads": main_grads, "grads": broken_grads, "found_inf": flag}
    for overload, number in (("", torch.tensor(0.37)), (".scalar", 0.37)):
        factor = {"inv_scale": number}
        yield Case(f"accumulate_{overload}", lists | factor)
        yield Case(f"accumulate_{overload}", broken | factor | {"overwrite": True})
        clip = f"unscale_check_clip_accumulate_{overload}"
        yield Case(clip, lists | factor | {"max_norm": math.inf})
        yield Case(clip, wide | factor | {"norm_type": 3.0, "found_inf": flag})
        yield Case(clip, broken | factor | {"max_norm": 1.0, "if_finite": True})
        for norm_type, tensors in product((1.0, 2.0, 3.0, math.inf, -math.inf), (grads, many)):
            norm = {"grads": tensors, "norm_type": norm_type, "found_inf": flag}
            yield Case(f"total_norm{overload}", norm | factor)
        for tensors in (main_grads, many):
            yield Case(f"scale_{overload}", {"grads": tensors, "factor": number})
    seeds = (None, torch.tensor(7 << 40 | 3))
    for seed, found_inf, count in product(seeds, (None, flag, flag + 1), (40, None)):
        copied = {"targets": main_grads[:count], "sources": grads[:count]}
        yield Case("copy_rounded_", copied | {"seed": seed, "found_inf": found_inf})
    number = torch.tensor(0.37, dtype=torch.float64)
    numbers = {"numbers": torch.zeros(3, dtype=torch.float64), "flags": torch.zeros(3)}
    rules = {"base_weight": 1.0, "max_norm": 5.0, "normalised": False, "checks_norm": True}
    for known, tensors in ((None, main_grads), (None, many), (number, main_grads)):
        window = {"main_grads": tensors, "ledger": [known, None, *[number] * 5]}
        yield Case("window_factors", numbers | window | rules)


# --- the decoder -------------------------------------------------------------------------------


def _decoder_cases() -> Iterator[Case]:
    for operand in _DTYPES:
        for batch, sampled in product((9, 33), (False, True)):
            yield _product_case("head_forward", operand, _head(operand, batch, sampled))
        yield _product_case("head_objective", operand, _objective(operand, 9))
        for size in (5, 70):  # a GPU finds 64 words at once
            yield _product_case("head_top", operand, _top(operand, 9, size))
            yield _product_case("head_sample", operand, _filtered(operand, 9, size))
        if operand.itemsize > 2:
            yield Case("beam_step", _beams(operand, 9))
        for kind in range(len(_GATES)):
            yield _product_case("rnn_backward", operand, _backward(operand, kind, 9))
        # A GPU runs half-precision windows of up to 64 rows in one kernel: tiles of 8, 16, 32, 64.
        batches = (5, 9, 17, 33, 65) if operand.itemsize == 2 else (9, 33)
        for i, batch in enumerate(batches):
            yield _product_case("rnn_backward", operand, _backward(operand, i % 4, batch))
            yield _product_case("decode_steps", operand, _greedy(operand, i % 4, 1, batch))
            yield _product_case("decode_steps", operand, _mixed(operand, (i + 1) % 4, 2, batch))
        around = _mixed(operand, 1, 2, 9)
        for place, size in ((0, _WIDTH), (2, _UNITS)):
            around["dropout_masks"][place] = torch.rand(_STEPS, 9, size) < 0.5
        yield _product_case("decode_steps", operand, around)
        known = dict.fromkeys(("exps", "stats", "rows"))
        yield _product_case("decode_steps", operand, _mixed(operand, 0, 2, 9) | known)
        yield Case("select_states", _states_of_beams(operand))
    yield Case("end_rows", _ends_of_rows(300))


def _product_case(name: str, operand: torch.dtype, arguments: dict[str, Any]) -> Case:
    return Case(name, arguments, _PRODUCT_TOLERANCE[operand])


def _sums(operand: torch.dtype) -> torch.dtype:
    return torch.promote_types(operand, torch.float32)


def _weight(operand: torch.dtype, rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) / 9).to(operand)


def _head(operand: torch.dtype, rows: int, sampled: bool) -> dict[str, Any]:
    sums = _sums(operand)
    return {
        "hidden": torch.randn(rows, _UNITS, dtype=sums),
        "weight": _weight(operand, _WORDS, _UNITS),
        "bias": torch.randn(_WORDS, dtype=sums) / 9 + _BELOW_ZERO,
        "targets": torch.randint(_WORDS, [rows]) if sampled else None,
        "uniforms": torch.rand(rows, dtype=torch.float64) if sampled else None,
        "temperature": 0.7 if sampled else 1.0,
        "exps": torch.zeros(_WORDS, rows, dtype=operand).t(),
        "logit_rows": 32,
        "tokens": torch.zeros(rows, dtype=torch.int64),
        "stats": torch.zeros(3, rows, dtype=sums),
    }


def _top(operand: torch.dtype, rows: int, size: int) -> dict[str, Any]:
    head = _head(operand, rows, sampled=False)
    shared = ("hidden", "weight", "bias", "logit_rows")
    return {name: head[name] for name in shared} | {
        "logits": torch.zeros(rows, size, dtype=head["stats"].dtype),
        "tokens": torch.zeros(rows, size, dtype=torch.int64),
        "stats": torch.zeros_like(head["stats"][:2]),
    }


def _filtered(operand: torch.dtype, rows: int, top_k: int) -> dict[str, Any]:
    head = _head(operand, rows, sampled=True)
    return {k: v for k, v in head.items() if k not in ("targets", "exps")} | {
        "top_k": top_k, "top_p": 0.8,
    }  # fmt: skip


def _beams(dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Return a step of three hypotheses per row, some of which end."""
    shape, words = (3, rows), (3 * rows, 4)
    scores, score = torch.rand(2, *shape, dtype=torch.float64).sort(1, descending=True).values
    numbers, log_probs = torch.randint(3, (3, *shape)), torch.rand(shape, dtype=dtype)
    return {
        "logits": torch.rand(words, dtype=dtype).sort(1, descending=True).values,
        "found": torch.rand(3 * rows, 9).argsort(1)[:, :4].contiguous(),
        "stats": torch.rand(3 * rows, 2, dtype=dtype) + 1, "limits": torch.randint(2, 9, [rows]),
        "step": 1, "length_penalty": 1.0, "eos": 0,
        "scores": (scores - 1).masked_fill(torch.rand(rows) < 0.2, -torch.inf),
        "kept": [score - 1, numbers, log_probs],
        "going": [*torch.zeros_like(numbers[:2]), torch.zeros_like(log_probs)],
    }  # fmt: skip


def _states_of_beams(dtype: torch.dtype) -> dict[str, Any]:
    state = torch.randn(2, 27, 5).to(dtype)
    return {
        "state": state, "parents": torch.randint(3, (3, 9)),
        "of_kept": torch.randint(3, (3, 3, 9)), "step": 1, "batch_dim": 1,
        "next_state": torch.zeros_like(state), "best": torch.zeros_like(state[:, :9]),
    }  # fmt: skip


def _ends_of_rows(rows: int) -> dict[str, Any]:
    return {
        "tokens": torch.randint(4, [rows]), "active": torch.rand(rows) < 0.8,
        "limits": torch.randint(4, [rows]), "step": 1, "eos": 2, "pad": _PAD,
        "next_active": torch.zeros(rows, dtype=torch.bool),
        "inputs": torch.zeros(rows, dtype=torch.int64),
    }  # fmt: skip


def _objective(operand: torch.dtype, rows: int) -> dict[str, Any]:
    """Return the objective of a teacher with its own head and word probabilities, some twice."""
    head, sums = _head(operand, rows, sampled=True), _sums(operand)
    shared = ("hidden", "weight", "bias", "targets", "temperature", "logit_rows", "tokens")
    return {name: head[name] for name in shared} | {
        "share": torch.rand(rows, dtype=sums), "z_loss": 0.1, "entropy_weight": 0.2,
        "soft_scale": 0.5, "probabilities": torch.rand(rows, _WORDS, dtype=sums) / _WORDS,
        "indices": torch.randint(_WORDS, (rows, _WORDS)),
        "teacher_hidden": torch.randn(rows, _WIDTH, dtype=sums),
        "teacher_weight": _weight(operand, _WORDS, _WIDTH), "teacher_bias": None,
        "gradients": torch.zeros(_WORDS, rows, dtype=operand).t(),
        "stats": torch.zeros(5, rows, dtype=sums),
    }  # fmt: skip


def _greedy(operand: torch.dtype, kind: int, layers: int, batch: int) -> dict[str, Any]:
    """Return steps that are fed their own tokens, which are also the targets."""
    sums, gates = _sums(operand), _GATES[kind] * _UNITS
    cell = []
    for layer in range(layers):
        cell += [_weight(operand, gates, _UNITS if layer else _WIDTH)]
        cell += [_weight(operand, gates, _UNITS), *torch.randn(2, gates, dtype=sums)]
    states = [
        torch.randn(_STEPS + 1, batch, _UNITS, dtype=sums) for _ in range(layers * _STATES[kind])
    ]
    head = _head(operand, _STEPS * batch, sampled=False)
    absent = ("teacher", "teacher_mask", "active")
    return dict.fromkeys(absent) | {
        "table": torch.randn(_WORDS, _WIDTH, dtype=sums),
        "cell": cell, "states": states, "kind": kind,
        "dropout_masks": [None] * 3, "dropout_scales": [1.0] * 3,
        "inputs": torch.randint(_WORDS, (_STEPS, batch)), "eos": -1, "pad": _PAD,
        "uniforms": None, "temperature": 1.0,
        "head_weight": head["weight"], "head_bias": head["bias"], "targets": None,
        "tokens": torch.zeros(_STEPS, batch, dtype=torch.int64),
        "exps": head["exps"], "stats": head["stats"],
        "rows": torch.zeros(_STEPS * batch, dtype=torch.int64),
        "logit_rows": 32, "begin": 0, "end": _STEPS,
    }  # fmt: skip


def _mixed(operand: torch.dtype, kind: int, layers: int, batch: int) -> dict[str, Any]:
    """Return steps that are fed samples and a teacher's tokens, with dropout; some rows end."""
    shape, call = (_STEPS, batch), _greedy(operand, kind, layers, batch)
    call["head_bias"][_EOS] += 4  # so that the end token is drawn
    return call | {
        "dropout_masks": [None, torch.rand(_STEPS, layers - 1, batch, _UNITS) < 0.5, None],
        "dropout_scales": [2.0] * 3,
        "teacher": torch.randint(_WORDS, shape), "teacher_mask": torch.rand(shape) < 0.5,
        "active": torch.arange(_STEPS)[:, None] < torch.randint(1, _STEPS + 1, [batch]),
        "eos": _EOS, "uniforms": torch.rand(shape, dtype=torch.float64), "temperature": 0.7,
        "targets": torch.randint(_WORDS, shape),
    }  # fmt: skip


def _backward(operand: torch.dtype, kind: int, batch: int) -> dict[str, Any]:
    sums, gates = _sums(operand), _GATES[kind] * _UNITS

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=sums)

    lstm = _STATES[kind] == 2
    return {
        "kind": kind,
        "d_out": draw(_STEPS, batch, _UNITS),
        "pre": draw(_STEPS, batch, 4 * _UNITS) if _GATES[kind] > 1 else None,
        "h": draw(_STEPS + 1, batch, _UNITS),
        "c": draw(_STEPS + 1, batch, _UNITS) if lstm else None,
        "active": torch.rand(_STEPS, batch) < 0.8,
        "gate": torch.rand(_STEPS, batch, dtype=sums),
        "limit": torch.tensor(0.5, dtype=sums),
        "weight": _weight(operand, _UNITS, gates),
        "dh": draw(batch, _UNITS),
        "dc": draw(batch, _UNITS) if lstm else None,
        "d_x": torch.zeros(_STEPS, batch, gates, dtype=sums),
        "d_h": torch.zeros(_STEPS, batch, gates, dtype=sums) if _GATES[kind] == 3 else None,
    }


def _cases_of_the_cpu() -> Iterator[Case]:
    """Yield calls of operators that have compiled kernels for the CPU alone."""
    for operand in _DTYPES:
        sums = _sums(operand)
        right = torch.randn(65, 33, dtype=sums)
        for left, overwrite in product(
            (_weight(operand, 9, 65), _weight(sums, 9, 65)), (False, True)
        ):
            matmul = {
                "sums": torch.randn(9, 33, dtype=sums),
                "left": left,
                "right": right,
                "overwrite": overwrite,
            }
            yield _product_case("add_matmul", operand, matmul)
        rows = {
            "sums": torch.randn(9, 33, dtype=sums), "to": torch.randint(9, [40]),
            "factor": torch.randn(40, dtype=sums), "rows": _weight(operand, 9, 33),
            "source": torch.randint(9, [40]),
        }  # fmt: skip
        yield _product_case("add_rows", operand, rows)
    yield Case("large_pages", {"memory": torch.empty(1 << 20)})
