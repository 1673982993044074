/* y += scale * scaling * B h for every row of a step: one block a tile of outputs and group. The group of a row's first
   entry owns the row and adds all of the row's entries, in the request's order; B is read once for the first entries of
   the group, and once more for each further entry of a row. A row to which nothing is added is not touched.
   Grid (tiles of outputs over all sites, groups that the step may have); blocks past the step's groups leave at once. */
#include "expand.cuh"

/* What a block knows of the rows of its group, in shared memory. */
struct ExpandGroup {
    uint32_t rows[8];
    /* Further entries of the row: from row_entries[next[n]] on, `more[n]` of them. */
    uint32_t next[8];
    uint32_t more[8];
    int touched[8];
    /* Of the use that is being added. */
    int h_of[8];
    float factors[8];
};

template <class T>
DEVICE void bgmv_expand(const ExpandArgs& args, ExpandGroup& own, float* out) {
    const StepMetadata& step = args.step;
    if (blockIdx.y >= step.header->num_groups) return;
    const RowGroup group = step.groups[blockIdx.y];
    const OutTile tile = out_tile(args);
    const SiteEntry first = table_entry(args.table, group.slot, tile.column);

    if (threadIdx.x < 8) {
        const uint32_t n = threadIdx.x, index = group.first_entry + n;
        own.h_of[n] = -1, own.touched[n] = 0, own.more[n] = 0;
        if (n < group.count) {
            const RowEntry entry = step.entries[index];
            const uint32_t start = step.row_offsets[entry.row], end = step.row_offsets[entry.row + 1];
            own.rows[n] = entry.row;
            if (step.row_entries[start] == index) {
                own.next[n] = start + 1, own.more[n] = end - start - 1;
                if (first.rank != 0) own.h_of[n] = int(index), own.touched[n] = 1;
                own.factors[n] = __fmul_rn(entry.scale, first.scaling);
                for (uint32_t at = start + 1; at < end; at++) {
                    const uint32_t slot = step.entry_slots[step.row_entries[at]];
                    if (table_entry(args.table, slot, tile.column).rank != 0) own.touched[n] = 1;
                }
            }
        }
    }
    __syncthreads();

    const auto row_of = [&](int n) { return own.rows[n]; };
    move_outputs<T, false>(tile, int(group.count), own.touched, row_of, out);
    __syncthreads();
    if (first.rank != 0) add_use<T, 1>(args, tile, first, own.h_of, own.factors, out);

    for (uint32_t n = 0; n < group.count; n++) {
        for (uint32_t i = 0; i < own.more[n]; i++) {
            const uint32_t index = step.row_entries[own.next[n] + i];
            const SiteEntry entry = table_entry(args.table, step.entry_slots[index], tile.column);
            if (entry.rank == 0) continue;
            __syncthreads();
            if (threadIdx.x < 8) {
                own.h_of[threadIdx.x] = threadIdx.x == n ? int(index) : -1;
                own.factors[threadIdx.x] = __fmul_rn(step.entries[index].scale, entry.scaling);
            }
            __syncthreads();
            add_use<T, 1>(args, tile, entry, own.h_of, own.factors, out);
        }
    }
    __syncthreads();
    move_outputs<T, true>(tile, int(group.count), own.touched, row_of, out);
}

#define BGMV_EXPAND(NAME, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ExpandArgs args) {             \
        __shared__ __align__(16) float out_s[8 * OUT_STRIDE];                                                         \
        __shared__ ExpandGroup group_s;                                                                               \
        bgmv_expand<T>(args, group_s, out_s);                                                                         \
    }                                                                                                                 \
    SIMT_KERNEL(NAME)

BGMV_EXPAND(bgmv_expand_bf16, Bf16)
BGMV_EXPAND(bgmv_expand_f16, F16)
