// The loss of whole distributions (head_objective in accumext/decoder/_operators.py), of a word and
// of a row. T is a number or a vector of them. The caller computes the exponentials.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace accumext {

// The numbers of a word, from the peaks of both rows of logits and the temperature.
template <typename T>
struct DistributionTerms {
  T d, log_tempered, log_teacher;  // z - peak; d / temperature; (teacher - its peak) / temperature
  T e, tempered, teacher;          // their exponentials
};

// Sums over the vocabulary of e, of e * d, of tempered, of teacher, and of teacher times
// log_teacher - log_tempered.
enum DistributionSum { kOfExp, kOfProduct, kOfTempered, kOfTeacher, kOfCross, kDistributionSums };

// The gradient is e * (of_exp + of_product * d) + of_tempered * tempered - of_teacher * teacher.
template <typename T>
struct DistributionFactors {
  T of_exp, of_product, of_tempered, of_teacher;
};

// weight * x, or 0 if the weight is 0: x may then be infinite.
template <typename T>
ACCUMEXT_HOST_DEVICE inline T weighted(const T& weight, const T& x) {
  return weight == 0 ? T{} : weight * x;
}

template <typename T>
ACCUMEXT_HOST_DEVICE inline void add_terms(const DistributionTerms<T>& word, bool teaches,
                                           T (&sums)[kDistributionSums]) {
  sums[kOfExp] += word.e;
  sums[kOfProduct] += weighted(word.e, word.d);
  sums[kOfTempered] += word.tempered;
  if (!teaches) return;
  sums[kOfTeacher] += word.teacher;
  sums[kOfCross] += weighted(word.teacher, word.log_teacher - word.log_tempered);
}

template <typename T>
ACCUMEXT_HOST_DEVICE inline T distribution_gradient(const DistributionTerms<T>& word, bool teaches,
                                                    const DistributionFactors<T>& factors) {
  const T g = word.e * factors.of_exp + factors.of_product * weighted(word.e, word.d) +
              factors.of_tempered * word.tempered;
  return teaches ? g - factors.of_teacher * word.teacher : g;
}

// q log(q / p), from the teacher's probability q and the logarithm of the model's p.
ACCUMEXT_HOST_DEVICE inline double divergence_term(double q, double log_p) {
  return q == 0.0 ? 0.0 : q * (std::log(q) - log_p);
}

struct DistributionRules {
  double z_loss;
  double entropy_weight;
  double soft_scale;  // of the distance to the teacher, in units of the temperature
};

struct Distribution {
  double lse, entropy, divergence;
  DistributionFactors<double> factors;
};

// The results of a row whose logsumexp has the weight `share` in the loss. `divergence` and `mass`:
// sums of divergence_term and of q over the words whose probabilities are given.
ACCUMEXT_HOST_DEVICE inline Distribution distribution_of(const double (&sums)[kDistributionSums],
                                                         double peak, double share, bool teaches,
                                                         double divergence, double mass,
                                                         const DistributionRules& rules) {
  const double total = sums[kOfExp], log_total = std::log(total), taught = sums[kOfTeacher];
  Distribution row{};
  row.lse = peak + log_total;
  row.entropy = log_total - sums[kOfProduct] / total;
  row.divergence = divergence;
  if (teaches) {
    mass += 1.0;
    row.divergence += sums[kOfCross] / taught - std::log(taught) + std::log(sums[kOfTempered]);
    row.factors.of_teacher = rules.soft_scale / taught;
  }
  row.factors.of_exp =
      (share + 2 * rules.z_loss * row.lse + rules.entropy_weight * (row.entropy - log_total)) /
      total;
  row.factors.of_product = rules.entropy_weight / total;
  row.factors.of_tempered = rules.soft_scale * mass / sums[kOfTempered];
  return row;
}

}  // namespace accumext
