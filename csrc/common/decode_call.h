// A call of decode_steps, as both devices take it.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "common/arguments.h"
#include "common/cell_kind.h"

namespace accumext {

// Dropout at one place.
struct Dropout {
  std::optional<Tensor> mask;  // bool: elements that are kept; nothing: all
  double scale;                // factor of these
};

// The arguments of the operator; accumext/decoder/_operators.py says what each is.
struct DecodeCall {
  Tensor table;                // [R, E]
  std::vector<Tensor> cell;    // per layer: weight_ih, weight_hh, bias_ih, bias_hh
  std::vector<Tensor> states;  // per layer: h [T + 1, B, H], and c of an LSTM
  CellKind kind;
  Dropout of_inputs;                   // [T, B, E]
  Dropout between;                     // [T, L - 1, B, H]
  Dropout of_outputs;                  // [T, B, H]
  Tensor inputs;                       // int64 [T, B]
  std::optional<Tensor> teacher;       // int64 [T, B]
  std::optional<Tensor> teacher_mask;  // bool [T, B]
  std::optional<Tensor> active;        // bool [T, B]
  int64_t eos;
  int64_t pad;
  std::optional<Tensor> uniforms;  // double [T, B]
  double temperature;
  Tensor head_weight;               // [V, H]
  std::optional<Tensor> head_bias;  // [V]
  std::optional<Tensor> targets;    // int64 [T, B]; nothing: the tokens
  Tensor tokens;                    // int64 [T, B]
  std::optional<Tensor> exps;       // [rows, V]
  std::optional<Tensor> stats;      // [3, rows]
  std::optional<Tensor> rows;       // int64 [rows]
  int64_t logit_rows;
  int64_t begin, end;         // of the steps
  std::optional<Tensor> pre;  // [L, T, B, 4 H], of a GRU or LSTM on a CPU
};

// The operator: makes a Decoding<T> of the call for sums in T; its run() returns the number of rows
// that went through the head.
template <template <typename> class Decoding>
int64_t decode_steps(Tensor table, TensorList cell, TensorList states, int64_t kind,
                     std::vector<std::optional<Tensor>> dropout_masks,
                     std::vector<double> dropout_scales, Tensor inputs,
                     std::optional<Tensor> teacher, std::optional<Tensor> teacher_mask,
                     std::optional<Tensor> active, int64_t eos, int64_t pad,
                     std::optional<Tensor> uniforms, double temperature, Tensor head_weight,
                     std::optional<Tensor> head_bias, std::optional<Tensor> targets, Tensor tokens,
                     std::optional<Tensor> exps, std::optional<Tensor> stats,
                     std::optional<Tensor> rows, int64_t logit_rows, int64_t begin, int64_t end,
                     std::optional<Tensor> pre) {
  require(dropout_masks.size() == 3 && dropout_scales.size() == 3);
  const DecodeCall call{table,
                        std::move(cell).tensors(),
                        std::move(states).tensors(),
                        cell_kind(kind),
                        {dropout_masks[0], dropout_scales[0]},
                        {dropout_masks[1], dropout_scales[1]},
                        {dropout_masks[2], dropout_scales[2]},
                        inputs,
                        teacher,
                        teacher_mask,
                        active,
                        eos,
                        pad,
                        uniforms,
                        temperature,
                        head_weight,
                        head_bias,
                        targets,
                        tokens,
                        exps,
                        stats,
                        rows,
                        logit_rows,
                        begin,
                        end,
                        pre};
  require(!call.states.empty() && call.states[0].dim() == 3 && inputs.dim() == 2);
  require(table.dim() == 2 && logit_rows >= 1 && temperature > 0.0);
  if (float_dtype(call.states[0]) == Dtype::kDouble) return Decoding<double>(call).run();
  return Decoding<float>(call).run();
}

}  // namespace accumext
