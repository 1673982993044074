/* h = A x for every entry of a step, each with the adapter of its own slot: one block a chunk of K, site and group.
   Grid (chunks, sites * splits of the rank, groups that the step may have); blocks past the step's groups leave at once,
   so a captured launch serves every step. */
#include "shrink.cuh"

template <class T>
DEVICE void bgmv_shrink(const ShrinkArgs& args, float* meeting, uint32_t* row_of, unsigned* last) {
    const uint32_t index = blockIdx.z;
    if (index >= args.step.header->num_groups) return;
    const RowGroup group = args.step.groups[index];
    if (threadIdx.x < group.count) row_of[threadIdx.x] = args.step.entries[group.first_entry + threadIdx.x].row;
    __syncthreads();
    const ShrinkRows rows{row_of, int(group.count), group.slot, group.first_entry, index};
    shrink_block<T, 1>(args, rows, meeting, last);
}

/* Blocks of a multiprocessor are named so that ptxas gives each the registers that its loop needs, on every device. */
#define BGMV_SHRINK(NAME, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 6) NAME(const __grid_constant__ ShrinkArgs args) {             \
        __shared__ __align__(16) float meeting_s[MEETING_SIZE<1>];                                                    \
        __shared__ uint32_t rows_s[8];                                                                                \
        __shared__ unsigned last_s;                                                                                   \
        bgmv_shrink<T>(args, meeting_s, rows_s, &last_s);                                                             \
    }                                                                                                                 \
    SIMT_KERNEL(NAME)

BGMV_SHRINK(bgmv_shrink_bf16, Bf16)
BGMV_SHRINK(bgmv_shrink_f16, F16)
