/* h = A[token] for the tiles of a step: the shrink of an embedding, for long runs. Grid (tiles that the step may have), rows of
   a tile over the warps of its block. */
#include "gather.cuh"

DEVICE void delta_gather(const GatherArgs& args) {
    if (blockIdx.x >= args.step.header->num_tiles) return;
    const RowTile tile = args.step.tiles[blockIdx.x];
    const auto* tokens = reinterpret_cast<const uint32_t*>(args.token_ids) + tile.first_row;
    for (uint32_t use = 0; use < tile.num_uses; use++) {
        const SiteEntry entry = table_entry(args.table, args.step.uses[tile.first_use + use].slot, args.site);
        for (uint32_t n = threadIdx.x / 32; n < tile.num_rows; n += WARPS) {
            gather_row(args, entry, tokens[n], tile.first_entry + use * tile.num_rows + n);
        }
    }
}

/* The values are moved and not looked at: one kernel for both element types. */
extern "C" __global__ void __launch_bounds__(THREADS) delta_gather_16(const __grid_constant__ GatherArgs args) {
    delta_gather(args);
}
SIMT_KERNEL(delta_gather_16)
