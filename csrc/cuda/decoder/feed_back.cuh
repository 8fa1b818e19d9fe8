// Consequences of a step's tokens: which rows have ended, the inputs of the next step, and their
// rows of the embedding.
#pragma once

#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// A table, and the memory to which its rows are copied.
struct Lookup {
  AnyMatrix table;    // [words, width]
  AnyMatrix rows;     // [rows, width], any dtype
  int64_t words = 0;  // a token outside [0, words) ends the program
  int64_t width = 0;
  const bool* kept = nullptr;  // [rows, width]: elements that dropout keeps; or null: all
  double scale = 1.0;          // of the elements that are kept

  // The same for rows from `first` on.
  Lookup from(int64_t first) const {
    Lookup rest = *this;
    rest.rows = rows.from_row(first);
    if (kept != nullptr) rest.kept += first * width;
    return rest;
  }

  // Copies one row with `threads` threads, of which this is the `thread`-th.
  __device__ void copy(int64_t row, int64_t token, int thread, int threads) const {
    if (token < 0 || token >= words) __trap();
    with_type(table.dtype, [&](auto from_type) {
      with_type(rows.dtype, [&](auto to_type) {
        const auto* from = table.as<decltype(from_type)>().at(token, 0);
        auto* to = rows.as<decltype(to_type)>().at(row, 0);
        for (int64_t i = thread; i < width; i += threads) {
          const bool keeps = kept == nullptr || kept[row * width + i];
          to[i] = rounded<decltype(to_type)>(keeps ? load<double>(from[i]) * scale : 0.0);
        }
      });
    });
  }
};

// The memory through which a step's tokens affect later steps. Pointers begin at the first row of
// the launch.
struct FeedBack {
  int64_t* rows = nullptr;             // [rows]: names, from first_row on; or null
  int64_t first_row = 0;               // t B + the first row of the launch
  const bool* active = nullptr;        // [rows] of the step, or null: all are
  int64_t pad = 0;                     // the input of an inactive row
  int64_t later = 0;                   // number of later steps; 0: the members below are not used
  bool* active_later = nullptr;        // [later, B], or null: all are
  int64_t batch = 0;                   // B
  int64_t eos = -1;                    // ends a row; -1: nothing does
  const int64_t* teacher = nullptr;    // [rows] of the next step, fed instead of the token, or null
  const bool* teacher_mask = nullptr;  // [rows]: for which rows; or null: for all
  int64_t* inputs = nullptr;           // [rows] of the next step, to be written
  Lookup lookup{};                     // the rows of the embedding for them

  // The same of the rows from `first` on.
  FeedBack from(int64_t first) const {
    FeedBack rest = *this;
    const auto move = [first](auto*& pointer) {
      if (pointer != nullptr) pointer += first;
    };
    move(rest.rows);
    rest.first_row += first;
    move(rest.active);
    move(rest.active_later);
    move(rest.teacher);
    move(rest.teacher_mask);
    move(rest.inputs);
    rest.lookup = lookup.from(first);
    return rest;
  }

  __device__ bool is_live(int64_t row) const { return active == nullptr || active[row]; }

  __device__ bool ends(int64_t row, int64_t token) const {
    return eos >= 0 && is_live(row) && token == eos;
  }

  // The next input of a row whose token this is.
  __device__ int64_t input(int64_t row, int64_t token) const {
    const bool goes_on = active_later == nullptr || (active_later[row] && !ends(row, token));
    if (!goes_on) return pad;
    const bool taught = teacher != nullptr && (teacher_mask == nullptr || teacher_mask[row]);
    return taught ? teacher[row] : token;
  }

  // Writes the consequences for a row with this token and next input, with all threads of a block.
  __device__ void lead_on(int64_t row, int64_t token, int64_t input) const {
    lookup.copy(row, input, static_cast<int>(threadIdx.x), kBlockSize);
    if (!ends(row, token)) return;
    for (int64_t t = threadIdx.x; t < later; t += kBlockSize) active_later[t * batch + row] = false;
  }
};

}  // namespace accumext::cuda
