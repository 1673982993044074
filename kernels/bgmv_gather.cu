/* h = A[token] for every entry of a step: the shrink of an embedding, whose A is [vocab_size, rank] and read by token.
   A token past the vocabulary gives zeros. Grid (ceil(entries / 4) for the entries that the step may have), one warp an
   entry. */
#include "common.cuh"

DEVICE void bgmv_gather(const GatherArgs& args) {
    const uint32_t index = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t num_groups = args.step.header->num_groups;
    if (num_groups == 0) return;
    const RowGroup last = args.step.groups[num_groups - 1];
    if (index >= last.first_entry + last.count) return;
    const SiteEntry entry = table_entry(args.table, args.step.entry_slots[index], args.site);
    const uint32_t token = reinterpret_cast<const uint32_t*>(args.token_ids)[args.step.entries[index].row];
    const auto* a = reinterpret_cast<const uint16_t*>(entry.a) + size_t(token) * entry.rank;
    auto* h = reinterpret_cast<uint16_t*>(args.h) + size_t(index) * args.h_stride;
    for (uint32_t r = lane; r < (entry.rank + 7) / 8 * 8; r += 32) {
        h[r] = r < entry.rank && token < args.vocab_size ? a[r] : uint16_t(0);
    }
}

/* The values are moved and not looked at: one kernel for both element types. */
extern "C" __global__ void __launch_bounds__(THREADS) bgmv_gather_16(const __grid_constant__ GatherArgs args) {
    bgmv_gather(args);
}
SIMT_KERNEL(bgmv_gather_16)
