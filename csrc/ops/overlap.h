// Whether strided tensors share memory: what an in-place op has to refuse.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"

namespace deepinfer {

// Do integers c_i in [low_i, high_i] exist with sum(c_i * stride_i) = target? Greatest stride first: what the smaller
// ones can reach leaves one or two candidates for each in any layout that views produce. Answers yes when a layout made
// by hand needs too many steps.
class StrideEquation {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    if (stride == 0) return;
    for (Term& term : terms_)
      if (term.stride == stride) {
        term.low += low;
        term.high += high;
        return;
      }
    terms_.push_back({stride, low, high});
  }

  bool solvable(int64_t target) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    steps_ = 0;
    return search(0, target);
  }

 private:
  struct Term {
    int64_t stride, low, high;
  };

  bool search(size_t i, int64_t target) {
    if (++steps_ > 10000) return true;
    if (i == terms_.size()) return target == 0;
    int64_t rest_low = 0, rest_high = 0;
    for (size_t j = i + 1; j < terms_.size(); ++j) {
      rest_low += terms_[j].low * terms_[j].stride;
      rest_high += terms_[j].high * terms_[j].stride;
    }
    const Term& term = terms_[i];
    const int64_t first = std::max(term.low, ceil_div(target - rest_high, term.stride));
    const int64_t last = std::min(term.high, -ceil_div(rest_low - target, term.stride));
    for (int64_t c = first; c <= last; ++c)
      if (search(i + 1, target - c * term.stride)) return true;
    return false;
  }

  static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  std::vector<Term> terms_;
  int steps_ = 0;
};

// Do two elements of `t` live at the same address?
inline bool overlaps_itself(const Tensor& t) {
  if (t.numel() == 0) return false;
  // Two elements differ first in some dimension d, by 1 or more there and by anything in the dimensions after it.
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 1) continue;
    if (t.stride(d) == 0) return true;
    StrideEquation same_address;
    same_address.add(t.stride(d), 1, t.size(d) - 1);
    for (int64_t e = d + 1; e < t.dim(); ++e) same_address.add(t.stride(e), 1 - t.size(e), t.size(e) - 1);
    if (same_address.solvable(0)) return true;
  }
  return false;
}

// Do an element of `a` and one of `b` share a byte?
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  StrideEquation same_byte;
  int64_t item = a.element_size();
  same_byte.add(1, 0, item - 1);
  for (int64_t d = 0; d < a.dim(); ++d) same_byte.add(a.stride(d) * item, 0, a.size(d) - 1);
  item = b.element_size();
  same_byte.add(1, 1 - item, 0);
  for (int64_t d = 0; d < b.dim(); ++d) same_byte.add(b.stride(d) * item, 1 - b.size(d), 0);
  const auto* a_data = static_cast<const char*>(a.const_data_ptr());
  const auto* b_data = static_cast<const char*>(b.const_data_ptr());
  return same_byte.solvable(b_data - a_data);
}

}  // namespace deepinfer
