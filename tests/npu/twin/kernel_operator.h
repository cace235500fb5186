// Stands in for CANN's header of this name: a subset of the Ascend C programming interface, written from its public
// documents, that runs kernels on a host and checks them (machine.h). What is not here, no kernel may use.
#pragma once

#include "copy.h"
#include "cube.h"
#include "entry.h"
#include "instances.h"
#include "machine.h"
#include "repeats.h"
#include "select.h"
#include "tensor.h"
#include "types.h"
#include "vector.h"

#define __aicore__
#define __global__
#define __vector__
#define __cube__
#define __gm__
#define GM_ADDR __gm__ uint8_t*
