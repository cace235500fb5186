// The enumerators of a quantised format as facts of a kernel.
#pragma once

#include "../ops/quant.h"

namespace deepinfer::cuda {

inline const char* name_of(Code code) {
  switch (code) {
    case Code::e4m3: return "Code::e4m3";
    case Code::int8: return "Code::int8";
    case Code::e2m1: return "Code::e2m1";
  }
  return "";
}

inline const char* name_of(ScaleType type) {
  switch (type) {
    case ScaleType::f32: return "ScaleType::f32";
    case ScaleType::power: return "ScaleType::power";
    case ScaleType::e8m0: return "ScaleType::e8m0";
    case ScaleType::packed: return "ScaleType::packed";
  }
  return "";
}

}  // namespace deepinfer::cuda
