/* h = A[token]: what the gathers of groups and of tiles share. A of an embedding is [vocab_size, rank] and read by token. */
#pragma once
#include "common.cuh"

/* One warp's copy of a row of A to an entry of h, zeros behind it up to a whole vector of 8; a token past the vocabulary
   gives zeros. */
DEVICE void gather_row(const GatherArgs& args, const SiteEntry& entry, uint32_t token, size_t index) {
    const auto* a = reinterpret_cast<const uint16_t*>(entry.a) + size_t(token) * entry.rank;
    auto* h = reinterpret_cast<uint16_t*>(args.h) + index * args.h_stride;
    for (uint32_t r = threadIdx.x % 32; r < (entry.rank + 7) / 8 * 8; r += 32) {
        h[r] = r < entry.rank && token < args.vocab_size ? a[r] : uint16_t(0);
    }
}
