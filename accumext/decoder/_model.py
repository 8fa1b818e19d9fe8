"""The modules of a decoder as its operators take them: the embedding, the cell, the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from accumext.decoder._embedding import EmbeddingTable
from accumext.decoder._module_calls import changes_when_read, formula_weights
from accumext.decoder._precision import Dtypes, dtypes_of
from accumext.decoder._rnn_weights import RnnWeights, rnn_weights_of
from accumext.distributed import is_shard
from accumext.recurrence import Cell, cell_of, context_of, parameter_tensors, parts_of
from accumext.recurrence.peft import base_layer
from accumext.tensors.checks import (
    FLOAT_DTYPES,
    check_vector,
    dtype_name,
    fail_type,
    fail_value,
    message,
    number,
    same_device,
    type_name,
)
from accumext.tensors.torch_private import is_fake, translated_from
from accumext.tensors.torch_private_distributed import sharded_state

OP = "decode_loss"

# The arguments of `decode_loss` by name, as the user gave them. Its signature is the only list of
# them. Each function that takes them checks the arguments that it reads.
Arguments: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """The modules of a decoder as its operators take them, and the tensors that the cell reads."""

    table: EmbeddingTable
    cell: Cell
    rnn: RnnWeights | None  # None: the cell is called, and autograd differentiates it
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None  # [V]
    called_head: nn.Module | None  # does more than its formula; head_weight then only has a shape
    device: torch.device
    tied: bool  # the head shares the embedding's weight
    dtypes: Dtypes
    context: tuple[Tensor, ...]
    draws: bool  # a step may draw random numbers, so that a replay restores the generators
    embedding_dropout: float  # of the cell's input; 0 in the cell's eval mode
    output_dropout: float  # of the head's input; 0 in the cell's eval mode

    def parameters(self) -> list[Tensor]:
        """Return the parameters that a call reads; for a callable those of its module, if any."""
        weights = [self.table.weight, self.head_weight, *parameter_tensors(self.cell)]
        weights += [*parameters_of(self.table.module), *parameters_of(self.called_head)]
        return weights if self.head_bias is None else [*weights, self.head_bias]


def model_from(op: str, args: Arguments, has_data: bool = True) -> Model:
    """Check the modules, the context and the dropout of a call, and return them."""
    cell, feedback, context = args["cell"], args["feedback"], args["context"]
    table = embedding_table(op, args["embedding"])
    weight, bias, called_head = head_weights(op, args["head"])
    device = weight.device
    if has_data:
        _check_computable(op, {table.argument: table.weight, "head": weight})
    of_cell = list(cell.parameters()) if isinstance(cell, nn.Module) else []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        of_embedding = [table.weight, *parameters_of(table.module)]
        of_head = [weight, bias, *parameters_of(called_head)]
        _check_whole(op, {table.argument: of_embedding, "cell": of_cell, "head": of_head})
    if table.weight.device != device:
        same_device(op, table.argument, [table.weight], device)
    for parameter in of_cell:
        if parameter.device != device:
            same_device(op, "cell", of_cell, device)
    dropouts: tuple[float, ...] = (0.0, 0.0)
    if args["embedding_dropout"] != 0 or args["output_dropout"] != 0:
        dropouts = _dropout(op, args)
    read = cell_of(op, cell, args["batch_dim"])
    rows, words = table.weight.shape[0], weight.shape[0]
    feeds_back = not isinstance(feedback, str) or feedback != "teacher"
    if rows < words and feeds_back:
        contract = f"have a row for each of the {words} words that can be fed back"
        fail_value(op, "embedding", contract, f"{rows} rows")
    # The operators look rows up without renormalising them to `max_norm`.
    by_operators = table.max_norm is None or not feeds_back
    rnn = None
    if by_operators and table.module is called_head is None:
        rnn = rnn_weights_of(read.module, table.weight.dtype, weight.dtype)
    sizes = (table.weight.shape[1], weight.shape[1])
    if rnn is None or (read.input_size, read.output_size) != sizes:
        _check_fit(op, table, read, of_cell, weight)
    if context.__class__ is not tuple or len(context) > 0:
        context = _context(op, context, read, device)
    # Without `rnn` some module is called, which may draw, too.
    draws = read.draws or max(dropouts) > 0 or rnn is None
    return Model(
        table, read, rnn, weight, bias, called_head, device, weight is table.weight,
        dtypes_of(weight), context, draws, *dropouts,
    )  # fmt: skip


def parameters_of(module: nn.Module | None) -> list[nn.Parameter]:
    """Return the parameters of a module, if there is one."""
    return [] if module is None else list(module.parameters())


def _check_fit(
    op: str, table: EmbeddingTable, cell: Cell, of_cell: list[Any], head: Tensor
) -> None:
    """Raise if a cell of torch does not fit between the embedding and the head."""
    embedding, width = table.weight, table.weight.shape[1]
    if cell.input_size is not None and cell.input_size != width:
        fail_value(op, table.argument, f"have the cell's input size, {cell.input_size}", width)
    for parameter in of_cell if cell.input_size is not None and not head.is_meta else ():
        if parameter.dtype != embedding.dtype:
            _check_casts(op, embedding, of_cell)
    if cell.output_size is not None and cell.output_size != head.shape[1]:
        contract = f"take the cell's output, {cell.output_size} wide"
        fail_value(op, "head", contract, list(head.shape))


def _dropout(op: str, args: Arguments) -> tuple[float, ...]:
    """Return the rates of the embedding's and the output's dropout: 0 in the cell's eval mode."""
    cell, names = args["cell"], ("embedding_dropout", "output_dropout")
    module = cell if isinstance(cell, nn.Module) else getattr(cell, "__self__", None)
    rates = [number(op, name, args[name], 0, 1) if args[name] != 0 else 0.0 for name in names]
    trains = not isinstance(module, nn.Module) or module.training
    return tuple(rates) if trains else (0.0, 0.0)


def _context(op: str, value: Any, cell: Cell, device: torch.device) -> tuple[Tensor, ...]:
    context = context_of(op, value)
    if context and cell.state_shapes is not None:
        advice = "Wrap the cell: lambda x, state, memory: ..."
        got = f"{len(context)} tensors"
        fail_value(op, "context", "be empty for one of torch's cells", got, advice)
    same_device(op, "context", context, device)
    return context


def _check_casts(op: str, embedding: Tensor, of_cell: list[Any]) -> None:
    """Raise if one of torch's cells has other dtypes than its input, unless autocast is on."""
    if not torch.is_autocast_enabled(embedding.device.type):
        others = {parameter.dtype for parameter in of_cell} - {embedding.dtype}
        dtype, got = dtype_name(embedding.dtype), ", ".join(sorted(map(dtype_name, others)))
        advice = f"Pass cell.to(torch.{dtype}), or call it under torch.autocast"
        fail_type(op, "cell", f"have the embedding's dtype, {dtype}", got, advice)


def _check_computable(op: str, weights: Mapping[str, Tensor]) -> None:
    """Raise if a weight has no data, or is an inference tensor used outside inference mode."""
    for name, weight in weights.items():
        if weight.is_meta or (type(weight) not in (Tensor, nn.Parameter) and is_fake(weight)):
            got = "a meta tensor" if weight.is_meta else "a fake tensor"
            advice = "accumext.decode_memory takes such tensors, for the memory of a call"
            fail_type(op, name, "hold numbers", got, advice)
        if weight.is_inference() and not torch.is_inference_mode_enabled():
            contract = "not be made in torch.inference_mode if it is to be used outside"
            advice = "Make the module outside, or copy.deepcopy(module) there"
            if name == "inputs":
                advice = "Pass inputs.clone()"
            raise RuntimeError(message(op, name, contract, "an inference tensor", advice))


def embedding_table(op: str, embedding: Any) -> EmbeddingTable:
    """Return the table of an embedding argument: an `nn.Embedding` or a [V, E] tensor, checked, or
    a table of observations."""
    if isinstance(embedding, EmbeddingTable):
        return embedding
    if isinstance(embedding, nn.Embedding):
        weights = formula_weights(embedding, "weight")
        if isinstance(weights, str):
            return _table_of_calls(op, embedding)
        weight, padding, limit = weights[0], embedding.padding_idx, embedding.max_norm
        if embedding.scale_grad_by_freq:
            fail_value(op, "embedding", "not scale gradients by frequency", "scale_grad_by_freq")
        if limit is not None and sharded_state(embedding) is not None:
            contract = "have no max_norm if it is sharded, for what lookups write would be lost"
            fail_value(op, "embedding", contract, limit)
        token = 0 if padding is None else padding
        options = (token, padding, limit, embedding.norm_type, embedding.sparse)
        return EmbeddingTable(weight, *options)
    if not isinstance(embedding, Tensor) or embedding.dtype not in FLOAT_DTYPES:
        return _table_of_calls(op, embedding)
    if embedding.dim() != 2:
        fail_value(op, "embedding", "have shape [V, E]", list(embedding.shape))
    return EmbeddingTable(embedding)


def _table_of_calls(op: str, embedding: Any) -> EmbeddingTable:
    """Return a table whose module is called, or raise if the argument is no embedding."""
    weight = _stand_in(embedding, "num_embeddings", "embedding_dim")
    if weight is None:
        contract = "be an nn.Embedding or a floating-point tensor [V, E]"
        _fail_module(op, "embedding", contract, embedding)
    padding = getattr(base_layer(embedding), "padding_idx", None)
    return EmbeddingTable(weight, 0 if padding is None else padding, module=embedding)


def _stand_in(module: Any, *sizes: str) -> Tensor | None:
    """Return a tensor without memory that has the shape, dtype and device of a layer's weight. It
    stands for a layer to be called, such as an adapter or a quantised layer. None if the module has
    no such sizes."""
    if not isinstance(module, nn.Module) or translated_from(module) is not None:
        return None
    layer = base_layer(module)
    shape: list[Any] = [getattr(layer, size, None) for size in sizes]
    if not all(isinstance(size, int) and size > 0 for size in shape):
        return None
    weight: Any = None if changes_when_read(layer) else getattr(layer, "weight", None)
    if type(weight) in (nn.Parameter, Tensor) and weight.dim() == 2 and weight.is_floating_point():
        shape = list(weight.shape)  # the attributes may be outdated, as after a resize
    own = [weight, *module.parameters(), *module.buffers()]
    floats = [t for t in own if isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES]
    like = floats[0] if floats else torch.empty((), device="cpu")
    return torch.empty((), dtype=like.dtype, device=like.device).expand(shape)


def _check_whole(op: str, parameters: Mapping[str, Iterable[Any]]) -> None:
    """Raise if this process has only a shard of a parameter of some argument."""
    for name, given in parameters.items():
        if any(map(is_shard, given)):
            inside = "Call this inside the forward of the fully_shard module that it is a part of"
            advice = f"{inside}, or apply fully_shard to it as well"
            fail_type(op, name, "have whole weights", "shards (DTensor)", advice)


def _fail_module(op: str, name: str, contract: str, given: Any) -> NoReturn:
    """Raise for an argument that is no embedding or head, and advise what to pass instead."""
    translated = translated_from(given)
    if translated is not None:
        itself = "Pass the module itself, of which only the weights are read"
        fail_type(op, name, contract, " ".join(translated), itself)
    fail_type(op, name, contract, type_name(given), _instead(op, name, given))


def _instead(op: str, name: str, given: Any) -> str | None:
    """Return advice on what to pass instead of an argument that is no embedding or head."""
    parts = parts_of(given)
    if name == "head" and isinstance(given, (nn.Embedding, Tensor)):
        word = "embedding.weight" if isinstance(given, nn.Embedding) else "weight"
        return f"Pass ({word}, None)"
    if isinstance(given, nn.Module) and any(map(nn.parameter.is_lazy, given.parameters())):
        return "Call it once before: its weight is not initialised yet"
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
    if parts is None and name == "head" and isinstance(given, nn.Module):
        return "Pass its last nn.Linear, and let the cell do what comes before; or use tbptt"
    if parts is None and not isinstance(given, nn.Module) and callable(given):
        return "Pass the module itself; what else is computed belongs into the cell, or use tbptt"
    return parts


def head_weights(op: str, head: Any) -> tuple[Tensor, Tensor | None, nn.Module | None]:
    """Return weight [V, H] and bias [V] of a head argument, an `nn.Linear` or a pair; or a module
    to be called, with a tensor that stands for its weight."""
    weights = head
    if isinstance(head, nn.Linear):
        weights = formula_weights(head, "weight", "bias")
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        weight = _stand_in(head, "out_features", "in_features")
        if weight is None:
            _fail_module(op, "head", "be an nn.Linear or a pair (weight, bias)", head)
        return weight, None, head
    weight, bias = weights
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES:
        fail_type(op, "head weight", "be a floating-point tensor [V, H]", type_name(weight))
    if weight.dim() != 2 or weight.shape[0] == 0:
        fail_value(op, "head weight", "have shape [V, H] with V >= 1", list(weight.shape))
    if bias is None or (
        isinstance(bias, Tensor) and bias.dtype == weight.dtype
        and bias.device == weight.device and bias.shape == weight.shape[:1]
    ):  # fmt: skip
        return weight, bias, None
    contract = "be a floating-point tensor [V] or None"
    check_vector(op, "head bias", bias, FLOAT_DTYPES, contract, len(weight), weight.device)
    return weight, bias, None
