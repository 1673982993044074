/* h = A[token] for every entry of a step: the shrink of an embedding. Grid (ceil(entries / 4) for the entries that the step
   may have), one warp an entry. */
#include "gather.cuh"

DEVICE void bgmv_gather(const GatherArgs& args) {
    const uint32_t index = blockIdx.x * WARPS + threadIdx.x / 32;
    const uint32_t num_groups = args.step.header->num_groups;
    if (num_groups == 0) return;
    const RowGroup last = args.step.groups[num_groups - 1];
    if (index >= last.first_entry + last.count) return;
    const SiteEntry entry = table_entry(args.table, args.step.entry_slots[index], args.site);
    gather_row(args, entry, reinterpret_cast<const uint32_t*>(args.token_ids)[args.step.entries[index].row], index);
}

/* The values are moved and not looked at: one kernel for both element types. */
extern "C" __global__ void __launch_bounds__(THREADS) bgmv_gather_16(const __grid_constant__ GatherArgs args) {
    bgmv_gather(args);
}
SIMT_KERNEL(bgmv_gather_16)
