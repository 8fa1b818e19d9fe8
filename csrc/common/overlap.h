// Tells whether elements share memory: within one strided tensor, or between two. The answers are
// those of accumext/tensors/memory_overlap.py, which says in which cases they may be yes although
// nothing is shared.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "common/layout.h"

namespace accumext {

// Tells whether two elements of an operand may share an address. They do not if, in the order of
// strides, each dimension steps over all that smaller ones reach.
template <int kOperands>
bool overlaps_itself(Layout<kOperands> dims, int operand) {
  std::sort(dims.begin(), dims.end(), [operand](const Dim<kOperands>& a, const Dim<kOperands>& b) {
    return a.stride[operand] < b.stride[operand];
  });
  int64_t reach = 0;
  for (const Dim<kOperands>& dim : dims) {
    if (dim.size == 1) continue;
    if (dim.stride[operand] <= reach) return true;
    reach += dim.stride[operand] * (dim.size - 1);
  }
  return false;
}

// The places of a tensor's elements: its address plus the sum of index * stride.
struct Lattice {
  int64_t address;
  int64_t extent;            // bytes from the first element to the end of the last
  std::vector<Dim<1>> dims;  // those that move: strides > 0, in bytes
};

// Tells whether any byte may belong to an element of both. For any division into inner and outer
// dimensions, the inner ones span one block of memory. The outer ones of both tensors move blocks
// by multiples of the greatest common divisor of their strides: the tensors are apart if their
// blocks are, at every such multiple.
inline bool share_memory(const Lattice& a, const Lattice& b) {
  if (b.address < a.address) return share_memory(b, a);
  const int64_t distance = b.address - a.address;
  int64_t blocks[] = {a.extent, b.extent};
  if (distance >= a.extent) return false;
  std::vector<std::array<int64_t, 3>> outward;  // stride, size, of which tensor
  for (int64_t which : {0, 1}) {
    for (const Dim<1>& dim : (which == 0 ? a : b).dims) {
      outward.push_back({dim.stride[0], dim.size, which});
    }
  }
  std::sort(outward.begin(), outward.end(), std::greater<>());
  int64_t period = 0;
  for (const auto& [stride, size, which] : outward) {
    period = std::gcd(period, stride);
    blocks[which] -= stride * (size - 1);
    const int64_t ahead = distance % period;
    if (blocks[0] <= ahead && ahead <= period - blocks[1]) return false;
  }
  return true;
}

// The bytes [begin, end) within which all elements of a tensor lie.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t owner;  // as the caller numbers the tensors
};

// The ranges that a call writes: finds overlapping ones without looking at all pairs.
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

  // Tells whether predicate(owner, owner) holds for any two owners whose ranges overlap.
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

  // Tells whether predicate(owner) holds for any owner whose range overlaps this one. Quickest if
  // calls come in the order of addresses.
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
  bool apart_ = true;          // no two overlap
  int64_t next_ = 0;           // the first range that begins behind that of the last query
};

}  // namespace accumext
