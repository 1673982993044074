/* h = A x for tiles of up to 64 rows that use the same adapters: long runs, as in prefill. A is read once a tile.
   Grid (chunks, sites * splits of the rank, tiles that the step may have); blocks past the step's tiles leave at once. */
#include "shrink.cuh"

template <class T>
DEVICE void delta_shrink(const ShrinkArgs& args, float* meeting, uint32_t* row_of, unsigned* last) {
    const uint32_t index = blockIdx.z;
    if (index >= args.step.header->num_tiles) return;
    const RowTile tile = args.step.tiles[index];
    if (threadIdx.x < tile.num_rows) row_of[threadIdx.x] = tile.first_row + threadIdx.x;
    __syncthreads();
    for (uint32_t use = 0; use < tile.num_uses; use++) {
        const uint32_t slot = args.step.uses[tile.first_use + use].slot;
        const uint32_t first_entry = tile.first_entry + use * tile.num_rows;
        /* Uses of the tiles are numbered through: each has partial sums and a ticket of its own. */
        const ShrinkRows rows{row_of, int(tile.num_rows), slot, first_entry, tile.first_use + use};
        /* Shared memory is used again behind barriers of the next use. */
        shrink_block<T, 8>(args, rows, meeting, last);
    }
}

/* Blocks of a multiprocessor are named so that ptxas gives each the registers that its loop needs, on every device. */
#define DELTA_SHRINK(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) NAME(const __grid_constant__ ShrinkArgs args) {             \
        __shared__ __align__(16) float meeting_s[MEETING_SIZE<8>];                                                    \
        __shared__ uint32_t rows_s[64];                                                                               \
        __shared__ unsigned last_s;                                                                                   \
        delta_shrink<T>(args, meeting_s, rows_s, &last_s);                                                            \
    }                                                                                                                 \
    SIMT_KERNEL(NAME)

DELTA_SHRINK(delta_shrink_bf16, Bf16)
DELTA_SHRINK(delta_shrink_f16, F16)
