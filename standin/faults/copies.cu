/* Async copies: a tile that is read before its copy has landed, as when a pipeline waits for one group too few. */
#include "cases.h"

template <int PENDING>
__device__ void sum_pipeline(float* out, const float* in, int num_tiles) {
    DYN_SMEM(stages);
    auto* tile = reinterpret_cast<float*>(stages);
    unsigned t = threadIdx.x, n = blockDim.x;
    simt::cp_async<16>(&tile[4 * t], &in[4 * t]);
    simt::cp_async_commit();
    float sum = 0;
    for (int i = 0; i < num_tiles; i++) {
        if (i + 1 < num_tiles) {
            simt::cp_async<16>(&tile[4 * n * ((i + 1) % 2) + 4 * t], &in[4 * n * (i + 1) + 4 * t]);
        }
        simt::cp_async_commit();
        simt::cp_async_wait<PENDING>();
        __syncthreads();
        for (int j = 0; j < 4; j++) sum += tile[4 * n * (i % 2) + (4 * t + 5 + j) % (4 * n)];
        __syncthreads();
    }
    out[t] = sum;
}
extern "C" __global__ void early_read_fault(float* out, const float* in, int num_tiles) {
    sum_pipeline<2>(out, in, num_tiles);
}
extern "C" __global__ void early_read_twin(float* out, const float* in, int num_tiles) {
    sum_pipeline<1>(out, in, num_tiles);
}
FAULT_CASE(early_read) {
    constexpr int threads = 32, tiles = 3;
    Buffer<float> in(threads * 4 * tiles), out(threads);
    for (size_t i = 0; i < in.size; i++) in[i] = float(i);
    launch(kernel, 1, threads, threads * 4 * 2 * sizeof(float), out.get(), (const float*)in.get(), tiles);
    bool right = true;
    for (int t = 0; t < threads; t++) {
        float expected = 0;
        for (int i = 0; i < tiles; i++) {
            for (int j = 0; j < 4; j++) expected += float(i * 128 + (4 * t + 5 + j) % 128);
        }
        right = right && near(out[t], expected);
    }
    return right;
}
