/* Bounds and alignment: a rank and a tail that go one too far, vectors that start between their boundaries. */
#include "cases.h"

// h = A x for a matrix of `rank` rows; the last row of its last block is one too many.
template <bool FAULT>
__device__ void shrink(const float* a, const float* x, float* h, int rank, int features) {
    int row = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (FAULT ? row > rank : row >= rank) return;
    float sum = 0;
    for (int k = 0; k < features; k++) sum += a[row * features + k] * x[k];
    h[row] = sum;
}
extern "C" __global__ void rank_bound_fault(const float* a, const float* x, float* h, int rank, int features) {
    shrink<true>(a, x, h, rank, features);
}
extern "C" __global__ void rank_bound_twin(const float* a, const float* x, float* h, int rank, int features) {
    shrink<false>(a, x, h, rank, features);
}
FAULT_CASE(rank_bound) {
    constexpr int rank = 12, features = 20;
    Buffer<float> a(rank * features, 0.5f), x(features, 2), h(rank);
    launch(kernel, 1, 32, 0, (const float*)a.get(), (const float*)x.get(), h.get(), rank, features);
    bool right = true;
    for (int row = 0; row < rank; row++) right = right && near(h[row], features);
    return right;
}

// Adds to a vector in steps of the block; the tail's bound lets the element after the last one through.
template <bool FAULT>
__device__ void add_tail(float* y, int features) {
    for (int i = int(threadIdx.x); FAULT ? i <= features : i < features; i += int(blockDim.x)) y[i] += 1;
}
extern "C" __global__ void tail_bound_fault(float* y, int features) { add_tail<true>(y, features); }
extern "C" __global__ void tail_bound_twin(float* y, int features) { add_tail<false>(y, features); }
FAULT_CASE(tail_bound) {
    Buffer<float> y(67, 1);
    launch(kernel, 1, 32, 0, y.get(), 67);
    bool right = true;
    for (int i = 0; i < 67; i++) right = right && near(y[i], 2);
    return right;
}

// Through the checked load, which every mode sees.
extern "C" __global__ void misaligned_load_fault(const float* in, float* out) {
    float4 v = __ldg(reinterpret_cast<const float4*>(in + 1 + 4 * threadIdx.x));
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
extern "C" __global__ void misaligned_load_twin(const float* in, float* out) {
    const float* from = in + 1 + 4 * threadIdx.x;
    out[threadIdx.x] = __ldg(from) + __ldg(from + 1) + __ldg(from + 2) + __ldg(from + 3);
}
FAULT_CASE(misaligned_load) {
    Buffer<float4> in(9, float4{1, 1, 1, 1});
    Buffer<float> out(8);
    launch(kernel, 1, 8, 0, (const float*)in.get(), out.get());
    bool right = true;
    for (int i = 0; i < 8; i++) right = right && near(out[i], 4);
    return right;
}

// Through a plain pointer, which only the undefined-behaviour sanitizer sees for sure.
extern "C" __global__ void misaligned_pointer_fault(const float* in, float* out) {
    float4 v = *reinterpret_cast<const float4*>(in + 1 + 4 * threadIdx.x);
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
extern "C" __global__ void misaligned_pointer_twin(const float* in, float* out) {
    float4 v = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x);
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
FAULT_CASE(misaligned_pointer) {
    Buffer<float4> in(9, float4{1, 1, 1, 1});
    Buffer<float> out(8);
    launch(kernel, 1, 8, 0, (const float*)in.get(), out.get());
    bool right = true;
    for (int i = 0; i < 8; i++) right = right && near(out[i], 4);
    return right;
}

// Static and dynamic shared arrays, one element too far.
template <bool FAULT>
__device__ void shift(float* cells, float* out, int n) {
    int t = int(threadIdx.x);
    cells[t] = float(t);
    __syncthreads();
    out[t] = FAULT || t + 1 < n ? cells[t + 1] : 0;
}
extern "C" __global__ void static_shared_fault(float* out, int n) {
    __shared__ float over_s[32];
    shift<true>(over_s, out, n);
}
extern "C" __global__ void static_shared_twin(float* out, int n) {
    __shared__ float within_s[32];
    shift<false>(within_s, out, n);
}
FAULT_CASE(static_shared) {
    Buffer<float> out(32);
    launch(kernel, 1, 32, 0, out.get(), 32);
    return near(out[31], 0) && near(out[0], 1);
}
extern "C" __global__ void dynamic_shared_fault(float* out, int n) {
    DYN_SMEM(bytes);
    shift<true>(reinterpret_cast<float*>(bytes), out, n);
}
extern "C" __global__ void dynamic_shared_twin(float* out, int n) {
    DYN_SMEM(bytes);
    shift<false>(reinterpret_cast<float*>(bytes), out, n);
}
FAULT_CASE(dynamic_shared) {
    Buffer<float> out(32);
    launch(kernel, 1, 32, 32 * sizeof(float), out.get(), 32);
    return near(out[31], 0) && near(out[0], 1);
}
