/* y += scale * scaling * B h for tiles of up to 64 rows that use the same adapters, which are added in the request's
   order. B is read once a tile.
   Grid (tiles of outputs over all sites, tiles of rows that the step may have); blocks past the step's tiles leave at
   once. */
#include "expand.cuh"

struct ExpandTile {
    int touched[64];
    int h_of[64];
    float factors[64];
};

template <class T>
DEVICE void delta_expand(const ExpandArgs& args, ExpandTile& own, float* out) {
    const StepMetadata& step = args.step;
    if (blockIdx.y >= step.header->num_tiles) return;
    const RowTile rows = step.tiles[blockIdx.y];
    const OutTile tile = out_tile(args);
    const uint32_t num_rows = rows.num_rows;

    bool any = false;
    for (uint32_t use = 0; use < rows.num_uses; use++) {
        const uint32_t slot = step.uses[rows.first_use + use].slot;
        any = any || table_entry(args.table, slot, tile.column).rank != 0;
    }
    if (!any) return;
    if (threadIdx.x < 64) own.touched[threadIdx.x] = threadIdx.x < num_rows;
    __syncthreads();
    const auto row_of = [&](int n) { return rows.first_row + uint32_t(n); };
    move_outputs<T, false>(tile, int(num_rows), own.touched, row_of, out);

    for (uint32_t use = 0; use < rows.num_uses; use++) {
        const TileUse adapter = step.uses[rows.first_use + use];
        const SiteEntry entry = table_entry(args.table, adapter.slot, tile.column);
        if (entry.rank == 0) continue;
        __syncthreads();
        if (threadIdx.x < 64) {
            const uint32_t n = threadIdx.x;
            own.h_of[n] = n < num_rows ? int(rows.first_entry + use * num_rows + n) : -1;
            own.factors[n] = __fmul_rn(adapter.scale, entry.scaling);
        }
        __syncthreads();
        add_use<T, 8>(args, tile, entry, own.h_of, own.factors, out);
    }
    __syncthreads();
    move_outputs<T, true>(tile, int(num_rows), own.touched, row_of, out);
}

#define DELTA_EXPAND(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ExpandArgs args) {             \
        __shared__ __align__(16) float out_s[64 * OUT_STRIDE];                                                        \
        __shared__ ExpandTile tile_s;                                                                                 \
        delta_expand<T>(args, tile_s, out_s);                                                                         \
    }                                                                                                                 \
    SIMT_KERNEL(NAME)

DELTA_EXPAND(delta_expand_bf16, Bf16)
DELTA_EXPAND(delta_expand_f16, F16)
