/* Embeddings of a step's tokens: of each row the one that its slot's overlay puts in the token's place or adds, else
   the base's, or zeros for a token past the vocabulary. With no base only rows of overlays are written: behind a gather
   that an engine has already.
   Grid (rows of the step, padding included), one block a row; a padding row is a base row. */
#include "overlay.cuh"

DEVICE void embed_overlay(const EmbedOverlayArgs& args) {
    const uint32_t row = blockIdx.x, token = reinterpret_cast<const uint32_t*>(args.token_ids)[row];
    const int32_t slot = reinterpret_cast<const int32_t*>(args.row_slots)[row];
    const uint32_t width = args.hidden_size;
    /* Null: zeros. */
    uint64_t from = 0;
    bool found = false;
    if (slot >= 0 && token < args.vocab_size + args.max_added) {
        const OverlayEntry overlay = overlay_of(args.overlays, uint32_t(slot));
        found = overlay_has(overlay, token);
        if (found) from = overlay.rows + size_t(overlay_row(overlay, token)) * width * 2;
    }
    if (!found) {
        if (args.base == 0) return;
        if (token < args.vocab_size) from = args.base + size_t(token) * width * 2;
    }
    const auto* source = reinterpret_cast<const uint16_t*>(from);
    auto* out = reinterpret_cast<uint16_t*>(args.out) + size_t(row) * args.stride;
    if (from % 16 == 0 && aligned_rows(args.out, args.stride) && width % 8 == 0) {
#pragma unroll 4
        for (uint32_t i = 8 * threadIdx.x; i < width; i += 8 * THREADS) {
            *reinterpret_cast<uint4*>(out + i) = from == 0 ? make_uint4(0, 0, 0, 0) : load_weights(source + i);
        }
    } else {
        for (uint32_t i = threadIdx.x; i < width; i += THREADS) out[i] = from == 0 ? uint16_t(0) : __ldg(source + i);
    }
}

/* The values are moved and not looked at: one kernel for both element types. */
extern "C" __global__ void __launch_bounds__(THREADS) embed_overlay_16(const __grid_constant__ EmbedOverlayArgs args) {
    embed_overlay(args);
}
SIMT_KERNEL(embed_overlay_16)
