/* y += factor * B h for up to 8 * NT rows and 128 outputs: what the expands of bgmv and of delta share, so that both give
   the same bits.

   The order of a sum over ranks: tensor-core products from zero, 32 ranks at a time in ascending order; then
   y = fma(factor, sum, y) in f32 for one use after the other, and one rounding when y is stored. It depends on the rank
   alone. */
#pragma once
#include "common.cuh"

/* Outputs of a block and of a warp. */
constexpr int OUT_TILE = 128;
constexpr int WARP_OUT = OUT_TILE / WARPS;
/* f32 between two rows of a block's outputs. */
constexpr int OUT_STRIDE = OUT_TILE + 4;

/* The outputs that a block works on: `first` to `first + count` of its site. */
struct OutTile {
    uint64_t y;
    uint32_t stride;
    int site, first, count, out_features;
    /* Column of the site in the slot table. */
    uint32_t column;
};

/* The site and tile of blockIdx.x. */
DEVICE OutTile out_tile(const ExpandArgs& args) {
    int site = 0;
    while (site + 1 < int(args.num_sites) && blockIdx.x >= args.sites[site + 1].first_block) site++;
    const SiteOutput& output = args.sites[site];
    const int first = int(blockIdx.x - output.first_block) * OUT_TILE, features = int(output.out_features);
    return OutTile{output.y, output.stride, site, first, min(OUT_TILE, features - first), features, output.site};
}

/* Sum over the ranks for the warp's outputs. h of row n is at `h_of[n]`; -1: the row takes no part, its sum is 0. */
template <class T, int NT, bool ALIGNED>
DEVICE void expand_ranks(float (&acc)[2][NT][4], const ExpandArgs& args, const OutTile& tile, const SiteEntry& entry,
                         const int* h_of) {
    const int lane = threadIdx.x % 32, group = lane / 4, part = 8 * (lane % 4);
    const int rank = int(entry.rank), first = tile.first + int(threadIdx.x / 32) * WARP_OUT + group;
    const auto* b = reinterpret_cast<const uint16_t*>(entry.b);
    const auto* h = reinterpret_cast<const uint16_t*>(args.h);
    for (int step = 0; step < rank; step += 32) {
        const int r = step + part, left = rank - r;
        uint4 low[2], high[2];
#pragma unroll
        for (int mt = 0; mt < 2; mt++) {
            const int n = first + 16 * mt;
            low[mt] = load_eight<ALIGNED, true>(b + size_t(n) * rank + r, n < tile.out_features ? left : 0);
            high[mt] = load_eight<ALIGNED, true>(b + size_t(n + 8) * rank + r, n + 8 < tile.out_features ? left : 0);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            /* h is whole vectors of 8, zeros behind the rank. */
            const int entry_of = h_of[8 * nt + group];
            const uint16_t* place = h + (size_t(max(entry_of, 0)) * args.num_sites + tile.site) * args.h_stride + r;
            const uint4 row = load_eight<true, false>(place, entry_of < 0 ? 0 : left);
#pragma unroll
            for (int mt = 0; mt < 2; mt++) multiply_32<T>(acc[mt][nt], low[mt], high[mt], row);
        }
    }
}

/* Adds one use of each row to the block's outputs `[8 * NT][OUT_STRIDE]` in shared memory; row n takes part where
   `h_of[n]` is not -1, with `factors[n]`. Each thread owns the places that it adds to. */
template <class T, int NT>
DEVICE void add_use(const ExpandArgs& args, const OutTile& tile, const SiteEntry& entry, const int* h_of,
                    const float* factors, float* out) {
    float acc[2][NT][4] = {};
    if (aligned_rows(entry.b, entry.rank)) {
        expand_ranks<T, NT, true>(acc, args, tile, entry, h_of);
    } else {
        expand_ranks<T, NT, false>(acc, args, tile, entry, h_of);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n = 8 * nt + 2 * (lane % 4) + i;
            if (h_of[n] < 0) continue;
            const float factor = factors[n];
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float* place = out + n * OUT_STRIDE + warp * WARP_OUT + 16 * mt + 8 * half + lane / 4;
                    *place = fmaf(factor, acc[mt][nt][2 * half + i], *place);
                }
            }
        }
    }
}

/* Moves y of the rows with `touched[n]` to the block's outputs, or back. */
template <class T, bool STORE, class RowOf>
DEVICE void move_outputs(const OutTile& tile, int num_rows, const int* touched, RowOf row_of, float* out) {
    auto* y = reinterpret_cast<uint16_t*>(tile.y);
    const bool aligned = aligned_rows(tile.y, tile.stride) && tile.out_features % 8 == 0;
    for (int i = threadIdx.x; i < num_rows * (OUT_TILE / 8); i += THREADS) {
        const int n = i / (OUT_TILE / 8), first = 8 * (i % (OUT_TILE / 8)), count = min(8, tile.count - first);
        if (!touched[n] || count <= 0) continue;
        uint16_t* place = y + size_t(row_of(n)) * tile.stride + tile.first + first;
        float* values = out + n * OUT_STRIDE + first;
        if (aligned) {
            alignas(16) uint16_t bits[8];
            auto* vector = reinterpret_cast<uint4*>(bits);
            if (!STORE) *vector = *reinterpret_cast<const uint4*>(place);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                if (STORE) bits[e] = T::to_bits(T::narrow(values[e]));
                else values[e] = T::widen(T::from_bits(bits[e]));
            }
            if (STORE) *reinterpret_cast<uint4*>(place) = *vector;
        } else {
            for (int e = 0; e < count; e++) {
                if (STORE) place[e] = T::to_bits(T::narrow(values[e]));
                else values[e] = T::widen(T::from_bits(place[e]));
            }
        }
    }
}
