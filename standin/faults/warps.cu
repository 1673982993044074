/* Warps: a shuffle that half of the lanes do not come to because they have returned or wait elsewhere, one that reads a
   lane outside its mask, and memory that lanes hand over with a shuffle where __syncwarp is needed. */
#include "cases.h"

extern "C" __global__ void missing_lanes_fault(float* out) {
    float value = float(threadIdx.x);
    if (threadIdx.x < 16) {
        for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    if (threadIdx.x == 0) out[0] = value;
}
extern "C" __global__ void missing_lanes_twin(float* out) {
    float value = float(threadIdx.x);
    if (threadIdx.x < 16) {
        for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(0x0000ffffu, value, step);
    }
    if (threadIdx.x == 0) out[0] = value;
}
FAULT_CASE(missing_lanes) {
    Buffer<float> out(1);
    launch(kernel, 1, 32, 0, out.get());
    return near(out[0], 120);
}

extern "C" __global__ void waiting_elsewhere_fault(float* out) {
    float value = 1;
    if (threadIdx.x < 16) value += __shfl_xor_sync(0xffffffffu, value, 8);
    __syncthreads();
    out[threadIdx.x] = value;
}
extern "C" __global__ void waiting_elsewhere_twin(float* out) {
    float value = 1, other = __shfl_xor_sync(0xffffffffu, value, 8);
    if (threadIdx.x < 16) value += other;
    __syncthreads();
    out[threadIdx.x] = value;
}
FAULT_CASE(waiting_elsewhere) {
    Buffer<float> out(64);
    launch(kernel, 1, 64, 0, out.get());
    return near(out[0], 2) && near(out[16], 1) && near(out[63], 1);
}

extern "C" __global__ void lane_outside_fault(float* out) {
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffu, float(threadIdx.x), int(threadIdx.x) + 1);
}
extern "C" __global__ void lane_outside_twin(float* out) {
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffu, float(threadIdx.x), (int(threadIdx.x) + 1) % 8);
}
FAULT_CASE(lane_outside) {
    Buffer<float> out(8);
    launch(kernel, 1, 32, 0, out.get());
    bool right = true;
    for (int lane = 0; lane < 8; lane++) right = right && near(out[lane], float((lane + 1) % 8));
    return right;
}

template <bool FAULT>
__device__ void hand_over(float* cells, float* out) {
    unsigned lane = threadIdx.x;
    cells[lane] = float(lane);
    if (FAULT) {
        __shfl_sync(0xffffffffu, lane, 0);
    } else {
        __syncwarp();
    }
    out[lane] = cells[31 - lane];
}
extern "C" __global__ void missing_syncwarp_fault(float* out) {
    __shared__ float shuffled_s[32];
    hand_over<true>(shuffled_s, out);
}
extern "C" __global__ void missing_syncwarp_twin(float* out) {
    __shared__ float synced_s[32];
    hand_over<false>(synced_s, out);
}
FAULT_CASE(missing_syncwarp) {
    Buffer<float> out(32);
    launch(kernel, 1, 32, 0, out.get());
    bool right = true;
    for (int lane = 0; lane < 32; lane++) right = right && near(out[lane], float(31 - lane));
    return right;
}
