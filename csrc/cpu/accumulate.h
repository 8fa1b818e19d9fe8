// The accumulation of a list of gradients, for accumulate_ and for the clipped micro-batch.
#pragma once

#include <vector>

#include "common/arguments.h"
#include "cpu/norm.h"

namespace accumext::cpu {

// main_grad = (overwrite ? 0 : main_grad) + grad * (inv_scale * clip_coef), for every pair. Returns
// the 2-norm of what is now stored, and whether every grad was finite.
Reduced accumulate(const std::vector<Pair>& pairs, double inv_scale, double clip_coef,
                   bool overwrite);

}  // namespace accumext::cpu
