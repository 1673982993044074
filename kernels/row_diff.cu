/* Which rows of a saved matrix differ from the base's: 1 where a bit of the row does, else 0. Bits and not values: an
   overlay gives back what was saved to the last bit, at the cost of a row that differs in the sign of a zero alone; and
   equal NaNs are no difference. One kernel for both element types.
   Grid (ceil(rows / 4)), one warp a row. */
#include "overlay.cuh"

DEVICE void row_diff(const RowDiffArgs& args) {
    const uint32_t row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, width = args.width;
    if (row >= args.num_rows) return;
    const auto* base = reinterpret_cast<const uint16_t*>(args.base) + size_t(row) * width;
    const auto* tuned = reinterpret_cast<const uint16_t*>(args.tuned) + size_t(row) * width;
    uint32_t differ = 0;
    if (aligned_rows(args.base, width) && aligned_rows(args.tuned, width)) {
#pragma unroll 4
        for (uint32_t i = 8 * lane; i < width; i += 8 * 32) {
            const uint4 a = load_weights(base + i), b = load_weights(tuned + i);
            differ |= (a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w);
        }
    } else {
        for (uint32_t i = lane; i < width; i += 32) differ |= __ldg(base + i) ^ __ldg(tuned + i);
    }
    const bool any = __any_sync(0xffffffffu, differ != 0);
    if (lane == 0) reinterpret_cast<uint8_t*>(args.flags)[row] = any;
}

extern "C" __global__ void __launch_bounds__(THREADS) row_diff_16(const __grid_constant__ RowDiffArgs args) {
    row_diff(args);
}
SIMT_KERNEL(row_diff_16)
