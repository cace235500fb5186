#pragma once

#include "../ops/sampling.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(sample, SampleArgs)           // over rows
DEEPINFER_KERNEL(spec_verify, SpecVerifyArgs)  // over the batch

}  // namespace deepinfer::cpu
