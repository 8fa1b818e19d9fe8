// Headers that a kernels_*.cpp includes before it chooses an instruction set: inline functions of
// these headers may be shared with code for any processor.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Vectors never cross a call here, so how another compiler would pass them does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#if !defined(__clang__)  // gcc 12 warns about its own intrinsics (PR 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
