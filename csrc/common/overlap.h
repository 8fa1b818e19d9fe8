// Memory that elements share: those of one strided tensor, and those of two. Answers are exact but
// where the search for a common address is given up, and then they say yes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "common/layout.h"

namespace accumext {

// The search of one question may try so many values; strides of real tensors need a handful.
constexpr int64_t kMostTries = 1 << 14;

// The movement of an address, in steps of `stride` > 0, of which there may be any number in [low,
// high].
struct Term {
  int64_t stride;
  int64_t low;
  int64_t high;
};

// Tells whether a sum of one multiple of every term's stride can be `target`: depth first from the
// largest stride on, among the values that leave the smaller ones something they can reach.
class Reach {
 public:
  explicit Reach(std::vector<Term> terms) : terms_(std::move(terms)), rests_(terms_.size() + 1) {
    std::sort(terms_.begin(), terms_.end(),
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    for (size_t k = terms_.size(); k-- > 0;) {
      const Term& term = terms_[k];
      const Rest& after = rests_[k + 1];
      rests_[k] = {after.least + term.stride * term.low, after.most + term.stride * term.high,
                   std::gcd(after.divisor, term.stride)};
    }
  }

  bool includes(int64_t target) {
    tries_ = 0;
    return search(0, target);
  }

 private:
  struct Rest {  // of the terms from one on: what sums they have
    int64_t least = 0;
    int64_t most = 0;
    int64_t divisor = 0;  // of every sum
  };

  bool search(size_t k, int64_t target) {
    const Rest& rest = rests_[k];
    if (target < rest.least || target > rest.most) return false;
    if (k == terms_.size()) return true;
    if (target % rest.divisor != 0) return false;
    const Term& term = terms_[k];
    const Rest& after = rests_[k + 1];
    const int64_t low = std::max(term.low, ceil_div(target - after.most, term.stride));
    const int64_t high = std::min(term.high, floor_div(target - after.least, term.stride));
    // Only every `step`th value leaves a multiple of what divides all later sums.
    const int64_t step = after.divisor == 0 ? 1 : after.divisor / rest.divisor;
    const int64_t first = solution(term.stride / rest.divisor, target / rest.divisor, step);
    for (int64_t x = low + modulo(first - low, step); x <= high; x += step) {
      if (++tries_ > kMostTries || search(k + 1, target - x * term.stride)) return true;
    }
    return false;
  }

  // An x with a * x = b (modulo m), where a has no factor of m.
  static int64_t solution(int64_t a, int64_t b, int64_t m) {
    int64_t r0 = m, r1 = modulo(a, m), x0 = 0, x1 = 1;
    while (r1 > 0) {
      const int64_t quotient = r0 / r1;
      r0 = std::exchange(r1, r0 - quotient * r1);
      x0 = std::exchange(x1, x0 - quotient * x1);
    }
    return static_cast<int64_t>(static_cast<__int128>(modulo(x0, m)) * modulo(b, m) % m);
  }

  static int64_t modulo(int64_t a, int64_t m) { return (a % m + m) % m; }
  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
  static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  std::vector<Term> terms_;
  std::vector<Rest> rests_;
  int64_t tries_ = 0;
};

// Tells whether two elements of an operand share an address. Mostly, ordered by stride, a dimension
// steps over everything that the smaller ones reach; where not, some difference of indices has to
// be 0.
template <int kOperands>
bool overlaps_itself(Layout<kOperands> dims, int operand) {
  std::erase_if(dims, [](const Dim<kOperands>& dim) { return dim.size == 1; });
  std::sort(dims.begin(), dims.end(), [operand](const Dim<kOperands>& a, const Dim<kOperands>& b) {
    return a.stride[operand] < b.stride[operand];
  });
  int64_t reach = 0;
  bool nested = true;
  for (const Dim<kOperands>& dim : dims) {
    if (dim.stride[operand] == 0) return true;
    nested = nested && dim.stride[operand] > reach;
    reach += dim.stride[operand] * (dim.size - 1);
  }
  if (nested) return false;
  std::vector<Term> smaller;
  for (const Dim<kOperands>& dim : dims) {  // the largest of those in which the indices differ
    std::vector<Term> terms = smaller;
    terms.push_back({dim.stride[operand], 1, dim.size - 1});
    if (Reach(std::move(terms)).includes(0)) return true;
    smaller.push_back({dim.stride[operand], 1 - dim.size, dim.size - 1});
  }
  return false;
}

// Where the elements of a tensor lie: sum of index * stride, from its address on.
struct Lattice {
  int64_t address;
  int64_t element;           // bytes
  std::vector<Dim<1>> dims;  // strides in elements
};

// Tells whether any byte belongs to an element of both.
inline bool share_memory(const Lattice& a, const Lattice& b) {
  const int64_t distance = b.address - a.address;
  int64_t unit = std::min(a.element, b.element);  // bytes: of powers of 2, so it divides both
  if (distance % unit != 0) unit = 1;
  std::vector<Term> terms;
  const auto add = [&terms](int64_t stride, int64_t low, int64_t high) {
    if (stride == 0 || low == high) return;
    for (Term& term : terms) {
      if (term.stride != stride) continue;
      term.low += low;
      term.high += high;
      return;
    }
    terms.push_back({stride, low, high});
  };
  for (const Dim<1>& dim : a.dims) add(dim.stride[0] * (a.element / unit), 0, dim.size - 1);
  for (const Dim<1>& dim : b.dims) add(dim.stride[0] * (b.element / unit), 1 - dim.size, 0);
  add(1, 1 - b.element / unit, a.element / unit - 1);
  return Reach(std::move(terms)).includes(distance / unit);
}

// The bytes [begin, end) within which all elements of a tensor lie.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t owner;  // as the caller numbers the tensors
};

// The ranges of what a call writes: finds those that meet, without looking at all pairs of them.
class WrittenRanges {
 public:
  explicit WrittenRanges(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
    const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    if (!std::is_sorted(ranges_.begin(), ranges_.end(), before)) {
      std::sort(ranges_.begin(), ranges_.end(), before);
    }
    for (size_t i = 1; i < ranges_.size(); ++i) {
      apart_ = apart_ && ranges_[i - 1].end <= ranges_[i].begin;
    }
  }

  // Tells whether predicate(owner, owner) holds for any two whose ranges meet.
  template <typename Predicate>
  bool any_pair(const Predicate& predicate) const {
    if (apart_) return false;
    for (size_t i = 0; i < ranges_.size(); ++i) {
      for (size_t j = i + 1; j < ranges_.size() && ranges_[j].begin < ranges_[i].end; ++j) {
        if (predicate(ranges_[i].owner, ranges_[j].owner)) return true;
      }
    }
    return false;
  }

  // Tells whether predicate(owner) holds for any whose range meets this one. Quickest where calls
  // come in the order of addresses.
  template <typename Predicate>
  bool any_meeting(const Range& range, const Predicate& predicate) {
    if (begin_of(next_) < range.end) ++next_;
    if (!(begin_of(next_ - 1) < range.end && range.end <= begin_of(next_))) {
      next_ = std::partition_point(ranges_.begin(), ranges_.end(),
                                   [&](const Range& r) { return r.begin < range.end; }) -
              ranges_.begin();
    }
    for (int64_t i = next_ - 1; i >= 0; --i) {
      const bool meets = ranges_[i].end > range.begin;
      if (meets && predicate(ranges_[i].owner)) return true;
      if (!meets && apart_) return false;
    }
    return false;
  }

 private:
  int64_t begin_of(int64_t i) const {
    if (i < 0) return std::numeric_limits<int64_t>::min();
    if (i == std::ssize(ranges_)) return std::numeric_limits<int64_t>::max();
    return ranges_[i].begin;
  }

  std::vector<Range> ranges_;  // by their begin
  bool apart_ = true;          // no two meet
  int64_t next_ = 0;           // the first that begins behind the last range that was asked about
};

}  // namespace accumext
