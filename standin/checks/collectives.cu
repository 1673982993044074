/* What warps and barriers compute, for tests that know the answers from elsewhere. */
#include "simt.h"

// One row of results a kind, 32 lanes each: idx, xor, down and up in groups of 8, ballot, any, all, sum.
extern "C" __global__ void warp_results(const int* in, int* out) {
    int lane = int(threadIdx.x), value = in[lane];
    out[0 * 32 + lane] = __shfl_sync(0xffffffffu, value, 5, 8);
    out[1 * 32 + lane] = __shfl_xor_sync(0xffffffffu, value, 3);
    out[2 * 32 + lane] = __shfl_down_sync(0xffffffffu, value, 2, 8);
    out[3 * 32 + lane] = __shfl_up_sync(0xffffffffu, value, 2, 8);
    out[4 * 32 + lane] = int(__ballot_sync(0xffffffffu, value % 3 == 0));
    out[5 * 32 + lane] = __any_sync(0xffffffffu, value == 77);
    out[6 * 32 + lane] = __all_sync(0xffffffffu, value >= 0);
    out[7 * 32 + lane] = __reduce_add_sync(0xffffffffu, value);
}
SIMT_KERNEL(warp_results)

// Sum over a block of any size through barriers; how many are odd through the barrier's own vote.
extern "C" __global__ void block_results(const int* in, int* out) {
    DYN_SMEM(bytes);
    int* sums = reinterpret_cast<int*>(bytes);
    unsigned t = threadIdx.x + blockDim.x * threadIdx.y, n = blockDim.x * blockDim.y;
    unsigned base = (blockIdx.x + gridDim.x * blockIdx.y) * n;
    sums[t] = in[base + t];
    __syncthreads();
    for (unsigned step = 1; step < n; step *= 2) {
        int other = t >= step ? sums[t - step] : 0;
        __syncthreads();
        sums[t] += other;
        __syncthreads();
    }
    int odd = __syncthreads_count(in[base + t] % 2);
    if (t == n - 1) {
        out[2 * (base / n)] = sums[t];
        out[2 * (base / n) + 1] = odd;
    }
}
SIMT_KERNEL(block_results)

// d = a b + c for one 16 x 16 and one 16 x 8 tile, row-major, with the fragments laid out as the PTX ISA says.
template <bool BF16>
__device__ void multiply_tile(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    int lane = int(threadIdx.x), group = lane / 4, t = lane % 4;
    auto pair = [](uint16_t low, uint16_t high) { return uint32_t(low) | uint32_t(high) << 16; };
    uint32_t fragment_a[4], fragment_b[2];
    for (int i = 0; i < 4; i++) {
        int row = group + 8 * (i % 2), k = 2 * t + 8 * (i / 2);
        fragment_a[i] = pair(a[16 * row + k], a[16 * row + k + 1]);
    }
    for (int i = 0; i < 2; i++) {
        int k = 2 * t + 8 * i;
        fragment_b[i] = pair(b[8 * k + group], b[8 * (k + 1) + group]);
    }
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c[8 * (group + 8 * (i / 2)) + 2 * t + i % 2];
    if (BF16) {
        simt::mma_m16n8k16_bf16(sum, fragment_a, fragment_b, sum);
    } else {
        simt::mma_m16n8k16_f16(sum, fragment_a, fragment_b, sum);
    }
    for (int i = 0; i < 4; i++) d[8 * (group + 8 * (i / 2)) + 2 * t + i % 2] = sum[i];
}
extern "C" __global__ void multiply_bf16(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    multiply_tile<true>(a, b, c, d);
}
SIMT_KERNEL(multiply_bf16)
extern "C" __global__ void multiply_f16(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
    multiply_tile<false>(a, b, c, d);
}
SIMT_KERNEL(multiply_f16)

// The same product with its fragments loaded from shared memory by ldmatrix.
extern "C" __global__ void multiply_ldmatrix(const uint16_t* a, const uint16_t* b, float* d) {
    __shared__ __align__(16) uint16_t a_s[256], b_s[128];
    int lane = int(threadIdx.x);
    for (int i = 0; i < 8; i++) a_s[lane * 8 + i] = a[lane * 8 + i];
    for (int i = 0; i < 4; i++) b_s[lane * 4 + i] = b[lane * 4 + i];
    __syncwarp();
    uint32_t fragment_a[4], fragment_b[2];
    simt::ldmatrix_x4(fragment_a, &a_s[16 * (lane % 16) + 8 * (lane / 16)]);
    simt::ldmatrix_x2_trans(fragment_b, &b_s[8 * (lane % 16)]);
    float sum[4] = {0, 0, 0, 0};
    simt::mma_m16n8k16_bf16(sum, fragment_a, fragment_b, sum);
    for (int i = 0; i < 4; i++) d[8 * (lane / 4 + 8 * (i / 2)) + 2 * (lane % 4) + i % 2] = sum[i];
}
SIMT_KERNEL(multiply_ldmatrix)
