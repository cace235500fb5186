#pragma once

#include "../ops/mqa_logits.h"
#include "isa.h"

namespace deepinfer::cpu {

DEEPINFER_KERNEL(mqa_logits, MqaLogitsArgs)  // over rows x chunks

}  // namespace deepinfer::cpu
