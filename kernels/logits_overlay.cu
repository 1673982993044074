/* Logits of the tokens that a row's slot replaces or adds, written over and behind the base's, and -inf for added
   tokens that the slot lacks. The first entry of a row decides its overlay; the group of that entry owns the row.

   The order of a sum over K: four quarters, one warp each, of 32 * ceil(hidden_size / 128) columns, summed from zero
   by tensor-core products in ascending columns, then added up as ((0 + 1) + 2) + 3. It depends on hidden_size alone.
   A logit is not rounded.

   Grid (tiles of 8 overlay rows that a slot may have, groups that the step may have and behind them any number of
   blocks for the added tokens, none if there are none). Each overlay row is read once a group. */
#include "overlay.cuh"

/* Overlay rows of a block: as few as a product takes, for a slot's rows are few and its blocks read long rows. */
constexpr int OVERLAY_TILE = 8;
constexpr int LOGITS_STRIDE = OVERLAY_TILE + 2;
constexpr int LOGITS_SIZE = WARPS * 8 * LOGITS_STRIDE;

/* A row of x that takes no part. */
constexpr uint32_t NO_ROW = UINT32_MAX;

/* One warp's quarter of the sums of 8 rows of x (on M, of which half is left empty) with 8 overlay rows (on N). */
template <class T, bool ALIGNED>
DEVICE void logits_quarter(float (&acc)[4], const LogitsOverlayArgs& args, const OverlayEntry& overlay, int first,
                           uint32_t x_row) {
    const int lane = threadIdx.x % 32, features = int(args.hidden_size), own = first + lane / 4;
    const int quarter = (features + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int start = int(threadIdx.x / 32) * quarter, end = min(start + quarter, features);
    const bool has_weights = own < int(overlay.num_rows), has_row = x_row != NO_ROW;
    const auto* weights = reinterpret_cast<const uint16_t*>(overlay.rows) + size_t(has_weights ? own : 0) * features;
    const auto* x = reinterpret_cast<const uint16_t*>(args.x) + size_t(has_row ? x_row : 0) * args.x_stride;
    const uint4 none = make_uint4(0, 0, 0, 0);
    /* Operands on their way at once: a block is alone with its sums, and what it reads comes late. */
    constexpr int DEPTH = ALIGNED ? 4 : 1;
    for (int k = start; k < end; k += 32 * DEPTH) {
        uint4 row[DEPTH], column[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int at = k + 32 * i + 8 * (lane % 4), left = end - at;
            column[i] = load_eight<ALIGNED, true>(weights + at, has_weights ? left : 0);
            row[i] = load_eight<ALIGNED, false>(x + at, has_row ? left : 0);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) multiply_32<T>(acc, row[i], none, column[i]);
    }
}

/* What a block knows of its rows, in shared memory. */
struct LogitsTile {
    /* Rows of x, NO_ROW where there is none or another group owns it. */
    uint32_t rows[8];
    /* Tokens of the overlay's rows. */
    uint32_t tokens[OVERLAY_TILE];
};

/* One tile of overlay rows for one group; `meeting` has LOGITS_SIZE floats. */
template <class T>
DEVICE void logits_tile(const LogitsOverlayArgs& args, LogitsTile& tile, float* meeting) {
    const StepMetadata& step = args.step;
    if (blockIdx.y >= step.header->num_groups) return;
    const RowGroup group = step.groups[blockIdx.y];
    const OverlayEntry overlay = overlay_of(args.overlays, group.slot);
    const int first = int(blockIdx.x) * OVERLAY_TILE, count = min(int(overlay.num_rows) - first, OVERLAY_TILE);
    if (count <= 0) return;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread < 8) {
        uint32_t row = NO_ROW;
        if (thread < int(group.count)) {
            const uint32_t index = group.first_entry + thread, candidate = step.entries[index].row;
            if (step.row_entries[step.row_offsets[candidate]] == index) row = candidate;
        }
        tile.rows[thread] = row;
    } else if (thread >= 32 && thread < 32 + count) {
        tile.tokens[thread - 32] = reinterpret_cast<const uint32_t*>(overlay.tokens)[first + thread - 32];
    }
    __syncthreads();

    float acc[4] = {};
    if (aligned_rows(overlay.rows, args.hidden_size) && aligned_rows(args.x, args.x_stride)) {
        logits_quarter<T, true>(acc, args, overlay, first, tile.rows[lane / 4]);
    } else {
        logits_quarter<T, false>(acc, args, overlay, first, tile.rows[lane / 4]);
    }
    auto* mine = meeting + (warp * 8 + lane / 4) * LOGITS_STRIDE + 2 * (lane % 4);
    *reinterpret_cast<float2*>(mine) = make_float2(acc[0], acc[1]);
    __syncthreads();

    const int n = thread / OVERLAY_TILE, own = thread % OVERLAY_TILE;
    if (n >= 8 || own >= count || tile.rows[n] == NO_ROW) return;
    const float* place = meeting + n * LOGITS_STRIDE + own;
    float sum = place[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += place[w * 8 * LOGITS_STRIDE];
    reinterpret_cast<float*>(args.logits)[size_t(tile.rows[n]) * args.stride + tile.tokens[own]] = sum;
}

/* -inf for the added tokens that a row lacks: all those of a row without an overlay. */
DEVICE void mask_added(const LogitsOverlayArgs& args) {
    const size_t block = size_t(blockIdx.y - args.max_groups) * gridDim.x + blockIdx.x;
    const size_t step = size_t(gridDim.y - args.max_groups) * gridDim.x * THREADS;
    for (size_t i = block * THREADS + threadIdx.x; i < size_t(args.num_rows) * args.max_added; i += step) {
        const size_t row = i / args.max_added;
        const uint32_t token = args.vocab_size + uint32_t(i % args.max_added);
        const int32_t slot = reinterpret_cast<const int32_t*>(args.row_slots)[row];
        if (slot >= 0 && overlay_has(overlay_of(args.overlays, uint32_t(slot)), token)) continue;
        reinterpret_cast<float*>(args.logits)[row * args.stride + token] = -INFINITY;
    }
}

template <class T>
DEVICE void logits_overlay(const LogitsOverlayArgs& args, LogitsTile& tile, float* meeting) {
    if (blockIdx.y < args.max_groups) logits_tile<T>(args, tile, meeting);
    else mask_added(args);
}

#define LOGITS_OVERLAY(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ LogitsOverlayArgs args) {      \
        __shared__ __align__(16) float meeting_s[LOGITS_SIZE];                                                        \
        __shared__ LogitsTile tile_s;                                                                                 \
        logits_overlay<T>(args, tile_s, meeting_s);                                                                   \
    }                                                                                                                 \
    SIMT_KERNEL(NAME)

LOGITS_OVERLAY(logits_overlay_bf16, Bf16)
LOGITS_OVERLAY(logits_overlay_f16, F16)
