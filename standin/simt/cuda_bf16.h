/* The name under which kernels look for bf16; everything stands in simt.h. */
#pragma once
#include "simt.h"
