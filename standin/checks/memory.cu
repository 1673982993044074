/* Copies, conversions and simple arithmetic, for tests of memory, streams and graphs. */
#include "simt.h"

// y += scale * x, with an argument of each size.
extern "C" __global__ void add_scaled(const float* x, float* y, float scale, int n) {
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += int(gridDim.x * blockDim.x)) y[i] += scale * x[i];
}
SIMT_KERNEL(add_scaled)

// Copies through shared memory in 16-byte async copies; the last vector takes only what is left, the rest is zeros.
extern "C" __global__ void copy_through(const float* x, float* y, int n) {
    DYN_SMEM(bytes);
    auto* tile = reinterpret_cast<float4*>(bytes);
    int t = int(threadIdx.x), left = n - 4 * t;
    int take = left >= 4 ? 16 : left > 0 ? 4 * left : 0;
    simt::cp_async_zfill<16>(&tile[t], x + (take > 0 ? 4 * t : 0), take);
    simt::cp_async_commit();
    simt::cp_async_wait<0>();
    __syncthreads();
    simt::store(reinterpret_cast<float4*>(y) + t, tile[t]);
}
SIMT_KERNEL(copy_through)

// Each bit pattern to f32 and each f32 to both 16-bit floats.
extern "C" __global__ void convert(const float* in, uint16_t* bf16, uint16_t* f16, float* from_bf16, float* from_f16, int n) {
    int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
    f16[i] = __half_as_ushort(__float2half_rn(in[i]));
    if (i < 65536) {
        from_bf16[i] = __bfloat162float(__ushort_as_bfloat16(uint16_t(i)));
        from_f16[i] = __half2float(__ushort_as_half(uint16_t(i)));
    }
}
SIMT_KERNEL(convert)

// Writes one element more than it is told, as a tail that is off by one does.
extern "C" __global__ void write_one_more(float* y, int n) {
    if (int(threadIdx.x) <= n) y[threadIdx.x] = 1;
}
SIMT_KERNEL(write_one_more)

// All blocks write the same places.
extern "C" __global__ void write_one_place(float* y, int n) {
    if (int(threadIdx.x) < n) y[threadIdx.x] = float(blockIdx.x);
}
SIMT_KERNEL(write_one_place)

// A struct by value beside a byte, so that sizes are those of the signature.
struct Mixed {
    int first;
    double second;
};
extern "C" __global__ void take_mixed(unsigned char small, Mixed mixed, double* out) {
    if (threadIdx.x == 0) out[0] = small + mixed.first + mixed.second;
}
SIMT_KERNEL(take_mixed)

extern "C" __global__ void count_blocks(int* counter) {
    if (threadIdx.x == 0) atomicAdd(counter, 1);
}
SIMT_KERNEL(count_blocks)

extern "C" __global__ void load_misaligned(const float* x, float* y) {
    y[threadIdx.x] = __ldg(reinterpret_cast<const float4*>(x + 1)).x;
}
SIMT_KERNEL(load_misaligned)
