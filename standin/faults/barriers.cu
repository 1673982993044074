/* Barriers: one that is missing before a read, one that is missing before a buffer is used again, one in two branches,
   and one that a thread has left. */
#include "cases.h"

template <bool FAULT>
__device__ void reverse(float* tile, const float* in, float* out) {
    unsigned t = threadIdx.x, n = blockDim.x, base = blockIdx.x * n;
    tile[t] = in[base + t];
    if (!FAULT) __syncthreads();
    out[base + t] = tile[n - 1 - t];
}
extern "C" __global__ void missing_barrier_fault(const float* in, float* out) {
    __shared__ float missing_s[128];
    reverse<true>(missing_s, in, out);
}
extern "C" __global__ void missing_barrier_twin(const float* in, float* out) {
    __shared__ float present_s[128];
    reverse<false>(present_s, in, out);
}
FAULT_CASE(missing_barrier) {
    Buffer<float> in(256), out(256);
    for (int i = 0; i < 256; i++) in[i] = float(i);
    launch(kernel, 2, 128, 0, (const float*)in.get(), out.get());
    bool right = true;
    for (int i = 0; i < 256; i++) right = right && near(out[i], float(i / 128 * 128 + 127 - i % 128));
    return right;
}

// Sums tiles of its neighbour's values; the tile is written again while a neighbour may still read it.
template <bool FAULT>
__device__ void sum_tiles(float* tile, const float* in, float* out, int num_tiles) {
    unsigned t = threadIdx.x, n = blockDim.x;
    float sum = 0;
    for (int i = 0; i < num_tiles; i++) {
        tile[t] = in[i * n + t];
        __syncthreads();
        sum += tile[(t + 1) % n];
        if (!FAULT) __syncthreads();
    }
    out[t] = sum;
}
extern "C" __global__ void reused_tile_fault(const float* in, float* out, int num_tiles) {
    __shared__ float reused_s[64];
    sum_tiles<true>(reused_s, in, out, num_tiles);
}
extern "C" __global__ void reused_tile_twin(const float* in, float* out, int num_tiles) {
    __shared__ float waited_s[64];
    sum_tiles<false>(waited_s, in, out, num_tiles);
}
FAULT_CASE(reused_tile) {
    Buffer<float> in(64 * 3), out(64);
    for (int i = 0; i < 64 * 3; i++) in[i] = float(i);
    launch(kernel, 1, 64, 0, (const float*)in.get(), out.get(), 3);
    bool right = true;
    for (int t = 0; t < 64; t++) right = right && near(out[t], float(3 * ((t + 1) % 64) + 192));
    return right;
}

extern "C" __global__ void divergent_barrier_fault(float* out) {
    __shared__ float branches_s[64];
    branches_s[threadIdx.x] = 1;
    if (threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = branches_s[threadIdx.x + 32];
    } else {
        out[threadIdx.x] = 1;
        __syncthreads();
    }
}
extern "C" __global__ void divergent_barrier_twin(float* out) {
    __shared__ float together_s[64];
    together_s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = threadIdx.x < 32 ? together_s[threadIdx.x + 32] : 1;
}
FAULT_CASE(divergent_barrier) {
    Buffer<float> out(64);
    launch(kernel, 1, 64, 0, out.get());
    bool right = true;
    for (int t = 0; t < 64; t++) right = right && near(out[t], 1);
    return right;
}

template <bool FAULT>
__device__ void first_of(float* cell, float* out, int rows) {
    if (FAULT && int(threadIdx.x) >= rows) return;
    if (threadIdx.x == 0) *cell = 7;
    __syncthreads();
    if (int(threadIdx.x) < rows) out[threadIdx.x] = *cell;
}
extern "C" __global__ void exited_thread_fault(float* out, int rows) {
    __shared__ float left_s;
    first_of<true>(&left_s, out, rows);
}
extern "C" __global__ void exited_thread_twin(float* out, int rows) {
    __shared__ float stayed_s;
    first_of<false>(&stayed_s, out, rows);
}
FAULT_CASE(exited_thread) {
    Buffer<float> out(40);
    launch(kernel, 1, 64, 0, out.get(), 40);
    bool right = true;
    for (int t = 0; t < 40; t++) right = right && near(out[t], 7);
    return right;
}
