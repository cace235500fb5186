#define TWIN_INSTANCE template
#include "instances.h"
