/* Blocks: two that add to one place without an order between them, beside partial sums that one block adds up. */
#include "cases.h"

extern "C" __global__ void shared_place_fault(const float* in, float* out, float*) {
    if (threadIdx.x == 0) out[0] += in[blockIdx.x];
}
extern "C" __global__ void shared_place_twin(const float* in, float*, float* partial) {
    if (threadIdx.x == 0) partial[blockIdx.x] = in[blockIdx.x];
}
extern "C" __global__ void add_partial(const float* partial, float* out, int n) {
    if (threadIdx.x > 0) return;
    for (int i = 0; i < n; i++) out[0] += partial[i];
}
SIMT_KERNEL(add_partial)
FAULT_CASE(shared_place) {
    Buffer<float> in(8), out(1), partial(8);
    for (int i = 0; i < 8; i++) in[i] = float(i);
    launch(kernel, 8, 32, 0, (const float*)in.get(), out.get(), partial.get());
    launch("add_partial", 1, 32, 0, (const float*)partial.get(), out.get(), 8);
    return near(out[0], 28);
}
