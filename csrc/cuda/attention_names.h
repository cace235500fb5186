// How generated sources name the enumerators of attention.
#pragma once

#include "../ops/attention.h"

namespace deepinfer::cuda {

inline const char* name_of(AttentionMask mask) {
  switch (mask) {
    case AttentionMask::none: return "AttentionMask::none";
    case AttentionMask::causal: return "AttentionMask::causal";
    case AttentionMask::boolean: return "AttentionMask::boolean";
    case AttentionMask::added: return "AttentionMask::added";
  }
  return "";
}

}  // namespace deepinfer::cuda
