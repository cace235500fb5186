#pragma once

#include "../ops/attention.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(attention, AttentionArgs)  // over batch x heads x queries

}  // namespace deepinfer::cpu
