"""The modules of a decoder as its operators take them: the embedding, the cell, the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from accumext._checks import FLOAT_DTYPES, dtype_name, fail_type, fail_value, message, type_name
from accumext._torch_private import (
    forward_hooks,
    is_fake,
    only_sharding,
    sharded_state,
    translated_from,
)
from accumext.recurrence import Cell, Dtypes, EmbeddingTable, cell_of, dtypes_of, parts_of
from accumext.sharding import is_shard


class DecoderModules(NamedTuple):
    """What a step of a decoder is made of."""

    table: EmbeddingTable
    cell: Cell
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None  # [V]
    dtypes: Dtypes


def modules_of(op: str, call: Mapping[str, Any]) -> DecoderModules:
    """The arguments embedding, cell, head and batch_dim of a call."""
    table, (weight, bias) = embedding_table(op, call["embedding"]), head_of(op, call["head"])
    if "without_data" not in call:  # of decode_memory
        _check_computable(op, "embedding", table.weight)
        _check_computable(op, "head", weight)
    of_cell = list(call["cell"].parameters()) if isinstance(call["cell"], nn.Module) else []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _check_whole(op, {"embedding": [table.weight], "cell": of_cell, "head": [weight, bias]})
    same_device(op, "embedding", [table.weight], weight.device)
    same_device(op, "cell", of_cell, weight.device)
    others = {parameter.dtype for parameter in of_cell} - {table.weight.dtype}
    cell = cell_of(op, call["cell"], call["batch_dim"])
    width = table.weight.shape[1]
    if cell.input_size is not None and cell.input_size != width:
        fail_value(op, "embedding", f"have the cell's input size, {cell.input_size}", width)
    if others and cell.input_size is not None and not weight.is_meta:
        _check_casts(op, table.weight, others)
    if cell.output_size is not None and cell.output_size != weight.shape[1]:
        contract = f"take the cell's output, {cell.output_size} wide"
        fail_value(op, "head", contract, list(weight.shape))
    return DecoderModules(table, cell, weight, bias, dtypes_of(weight))


def _check_casts(op: str, embedding: Tensor, others: set[torch.dtype]) -> None:
    """Raise for one of torch's cells that is of other dtypes than its input, without autocast."""
    if not torch.is_autocast_enabled(embedding.device.type):
        dtype, got = dtype_name(embedding.dtype), ", ".join(sorted(map(dtype_name, others)))
        advice = f"Pass cell.to(torch.{dtype}), or call it under torch.autocast"
        fail_type(op, "cell", f"have the embedding's dtype, {dtype}", got, advice)


def _check_computable(op: str, name: str, weight: Tensor) -> None:
    """Raise for a weight without numbers, and for one whose changes autograd does not know."""
    if weight.is_meta or (type(weight) not in (Tensor, nn.Parameter) and is_fake(weight)):
        got = "a meta tensor" if weight.is_meta else "a fake tensor"
        advice = "accumext.decode_memory takes such tensors, for the memory of a call"
        fail_type(op, name, "hold numbers", got, advice)
    if weight.is_inference() and not torch.is_inference_mode_enabled():
        contract = "not be made in torch.inference_mode where it is to be used outside"
        advice = "Make the module outside, or copy.deepcopy(module) there"
        raise RuntimeError(message(op, name, contract, "an inference tensor", advice))


def embedding_table(op: str, embedding: Any) -> EmbeddingTable:
    """The embedding argument: an `nn.Embedding` or a [V, E] tensor."""
    if isinstance(embedding, nn.Embedding):
        _check_forward(op, "embedding", embedding, nn.Embedding, "the weight")
        if embedding.scale_grad_by_freq:
            fail_value(op, "embedding", "not scale gradients by frequency", "scale_grad_by_freq")
        padding, limit = embedding.padding_idx, embedding.max_norm
        if limit is not None and sharded_state(embedding) is not None:
            contract = "have no max_norm where it is sharded, for what lookups write would be lost"
            fail_value(op, "embedding", contract, limit)
        token = 0 if padding is None else padding
        options = (token, padding, limit, embedding.norm_type, embedding.sparse)
        return EmbeddingTable(embedding.weight, *options)
    if not isinstance(embedding, Tensor) or embedding.dtype not in FLOAT_DTYPES:
        contract = "be an nn.Embedding or a floating-point tensor [V, E]"
        _fail_module(op, "embedding", contract, embedding)
    if embedding.dim() != 2:
        fail_value(op, "embedding", "have shape [V, E]", list(embedding.shape))
    return EmbeddingTable(embedding)


def _check_forward(
    op: str, name: str, module: nn.Module, kind: type[nn.Module], instead: str
) -> None:
    """Raise for a module whose forward does more than its weight says: it is not called here."""
    hooks = forward_hooks(module)
    hooked = any(hooks) and not only_sharding(hooks)
    if type(module).forward is not kind.forward or hooked:
        contract = f"compute as a plain nn.{kind.__name__}, for its forward is not called"
        got = "forward hooks" if hooked else f"{type(module).__name__} with a forward of its own"
        fail_type(op, name, contract, got, f"Pass {instead} to mean just that")


def _check_whole(op: str, parameters: Mapping[str, Iterable[Any]]) -> None:
    """Raise for arguments with parameters of which this process has a shard only."""
    for name, given in parameters.items():
        if any(is_shard(parameter) for parameter in given):
            inside = "Call this inside the forward of the fully_shard module that it is a part of"
            advice = f"{inside}, or apply fully_shard to it as well"
            fail_type(op, name, "have whole weights", "shards (DTensor)", advice)


def _fail_module(op: str, name: str, contract: str, given: Any) -> NoReturn:
    """Raise for an embedding or head that is none, and say which part of it may be one."""
    translated = translated_from(given)
    if translated is not None:
        itself = "Pass the module itself, of which only the weights are read"
        fail_type(op, name, contract, " ".join(translated), itself)
    fail_type(op, name, contract, type_name(given), _instead(op, name, given))


def _instead(op: str, name: str, given: Any) -> str | None:
    """What to pass in place of an embedding or head that is none."""
    whole = parts_of(given)
    if name == "head" and isinstance(given, (nn.Embedding, Tensor)):
        word = "embedding.weight" if isinstance(given, nn.Embedding) else "weight"
        return f"Pass ({word}, None)"
    if isinstance(given, nn.AdaptiveLogSoftmaxWithLoss):
        return "Its logits are no one matrix product: use tbptt, or chunked_loss"
    if isinstance(given, nn.Sequential):
        kind = nn.Linear if name == "head" else nn.Embedding
        at = [i for i, layer in enumerate(given) if isinstance(layer, kind)]
        rates = [layer.p for layer in given if isinstance(layer, nn.Dropout)]
        first_or_last = len(given) - 1 if name == "head" else 0
        if at == [first_or_last] and len(rates) == len(given) - 1:
            option = "output_dropout" if name == "head" else "embedding_dropout"
            dropout = f" and {option}={rates[0]}" if rates and op == "decode_loss" else ""
            return f"Pass {name}[{at[0]}]{dropout}"
        if name == "head" and at and at[-1] == first_or_last:
            before = "let the cell apply the layers before it to its output"
            return f"Pass head[-1], and {before}; or use tbptt"
        if name == "head" and isinstance(given[-1], (nn.LogSoftmax, nn.Softmax)):
            return "The loss is that of logits: leave the softmax out"
    if whole is None and name == "head" and isinstance(given, nn.Module):
        return "Pass its last nn.Linear, and let the cell do what comes before; or use tbptt"
    if whole is None and not isinstance(given, nn.Module) and callable(given):
        return "Pass the module itself; what else is computed belongs into the cell, or use tbptt"
    return whole


def head_of(op: str, head: Any) -> tuple[Tensor, Tensor | None]:
    """The head argument: weight [V, H] and bias [V] of an `nn.Linear`, or a pair of them."""
    if isinstance(head, nn.Linear):
        _check_forward(op, "head", head, nn.Linear, "(weight, bias)")
        weight, bias = head.weight, head.bias
    elif isinstance(head, (tuple, list)) and len(head) == 2:
        weight, bias = head
    else:
        _fail_module(op, "head", "be an nn.Linear or a pair (weight, bias)", head)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES:
        fail_type(op, "head weight", "be a floating-point tensor [V, H]", type_name(weight))
    if weight.dim() != 2 or weight.shape[0] == 0:
        fail_value(op, "head weight", "have shape [V, H] with V >= 1", list(weight.shape))
    if bias is not None:
        dtypes, contract = FLOAT_DTYPES, "be a floating-point tensor [V] or None"
        check_vector(op, "head bias", bias, dtypes, contract, weight.shape[0], weight.device)
    return weight, bias


def check_vector(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], contract: str, size: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Raise if a tensor has not this dtype, size or device."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        fail_type(op, name, contract, type_name(value))
    if list(value.shape) != [size]:
        fail_value(op, name, f"have shape {[size]}", list(value.shape))
    same_device(op, name, [value], device)


def same_device(op: str, name: str, given: Sequence[Tensor], device: torch.device) -> None:
    """Raise if one of the tensors is not where the head is."""
    for tensor in given:
        if tensor.device != device:
            fail_value(op, name, f"be on the head's device, {device}", tensor.device)
