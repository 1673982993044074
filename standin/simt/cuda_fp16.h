/* The name under which kernels look for fp16; everything stands in simt.h. */
#pragma once
#include "simt.h"
