/* h = A x for up to 8 * NT rows that use one slot: what the shrinks of bgmv and of delta share, so that both give the
   same bits.

   The order of a sum over K: chunks of `chunk` columns, one block each; in a chunk four quarters, one warp each, summed
   from zero by tensor-core products in ascending columns; the quarters are added up as ((0 + 1) + 2) + 3, then the chunks
   in ascending order by the block that finishes last. It depends on in_features alone. h is rounded once, at the end.

   A block works through ranks 16 at a time, tiles blockIdx.y, blockIdx.y + gridDim.y / num_sites, ... of its site. */
#pragma once
#include "common.cuh"

constexpr int RANK_TILE = 16;

/* Between two rows of the buffer in which warps meet: lanes that write at once spread over the banks. */
template <int NT>
constexpr int MEETING_STRIDE = NT == 1 ? 8 : 8 * NT + 8;
template <int NT>
constexpr int MEETING_SIZE = WARPS * RANK_TILE * MEETING_STRIDE<NT>;

/* The rows that a block works on. */
struct ShrinkRows {
    /* In shared memory: row of x of each, for `count` of them. */
    const uint32_t* rows;
    int count;
    uint32_t slot;
    /* Entry of h of the first row; they follow one another. */
    uint32_t first_entry;
    /* Index of the group or tile (and use) among all, which names the block's partial sums and tickets. */
    uint32_t part;
};

/* One warp's quarter of a chunk: 16 ranks by 8 * NT rows from `first_row` on. */
template <class T, int NT, bool ALIGNED>
DEVICE void shrink_quarter(float (&acc)[NT][4], const ShrinkArgs& args, const ShrinkRows& rows, const uint16_t* a,
                           int rank, int first_rank, int first_column, int first_row) {
    const int lane = threadIdx.x % 32, group = lane / 4, part = 8 * (lane % 4);
    const auto* x = reinterpret_cast<const uint16_t*>(args.x);
    const int k_end = int(args.in_features), quarter = int(args.chunk) / WARPS;
    const int low = first_rank + group, high = low + 8;
#pragma unroll(NT == 1 ? 2 : 1)
    for (int step = 0; step < quarter; step += 32) {
        const int k = first_column + step + part, left = k_end - k;
        const uint4 a_low = load_eight<ALIGNED, true>(a + size_t(low) * k_end + k, low < rank ? left : 0);
        const uint4 a_high = load_eight<ALIGNED, true>(a + size_t(high) * k_end + k, high < rank ? left : 0);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const int n = first_row + 8 * nt + group;
            const uint32_t row = n < rows.count ? rows.rows[n] : 0;
            const uint4 x_row = load_eight<ALIGNED, false>(x + size_t(row) * args.stride + k, n < rows.count ? left : 0);
            multiply_32<T>(acc[nt], a_low, a_high, x_row);
        }
    }
}

/* All of a block's work on one chunk; `meeting` has MEETING_SIZE<NT> floats. */
template <class T, int NT, bool ALIGNED>
DEVICE void shrink_chunk(const ShrinkArgs& args, const ShrinkRows& rows, const SiteEntry& entry, float* partials,
                         int first_tile, int tile_step, float* meeting) {
    constexpr int ROWS = 8 * NT, STRIDE = MEETING_STRIDE<NT>;
    /* Values that are read one at a time take a register each: then 8 rows at once, and A once for each 8. */
    constexpr int AT_ONCE = ALIGNED ? NT : 1;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int rank = int(entry.rank), chunk = blockIdx.x;
    const int first_column = chunk * int(args.chunk) + warp * int(args.chunk) / WARPS;
    for (int tile = first_tile; tile * RANK_TILE < rank; tile += tile_step) {
#pragma unroll 1
        for (int first_row = 0; first_row < rows.count; first_row += 8 * AT_ONCE) {
            float acc[AT_ONCE][4] = {};
            shrink_quarter<T, AT_ONCE, ALIGNED>(acc, args, rows, reinterpret_cast<const uint16_t*>(entry.a), rank,
                                                tile * RANK_TILE, first_column, first_row);
            float* mine = meeting + warp * RANK_TILE * STRIDE + first_row + 2 * (lane % 4);
#pragma unroll
            for (int nt = 0; nt < AT_ONCE; nt++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    auto* pair = reinterpret_cast<float2*>(mine + (lane / 4 + 8 * half) * STRIDE + 8 * nt);
                    *pair = make_float2(acc[nt][2 * half], acc[nt][2 * half + 1]);
                }
            }
        }
        __syncthreads();
        for (int i = thread; i < RANK_TILE * ROWS; i += THREADS) {
            const int r = i / ROWS, n = i % ROWS, at = r * STRIDE + n;
            if (tile * RANK_TILE + r >= rank || n >= rows.count) continue;
            float sum = meeting[at];
#pragma unroll
            for (int w = 1; w < WARPS; w++) sum += meeting[w * RANK_TILE * STRIDE + at];
            partials[(size_t(chunk) * args.h_stride + tile * RANK_TILE + r) * ROWS + n] = sum;
        }
        __syncthreads();
    }
}

/* Adds the chunks up in their order and writes h; ranks up to a whole vector of 8 become zeros, for an expand reads h in
   those. */
template <class T, int NT>
DEVICE void finish_shrink(const ShrinkArgs& args, const ShrinkRows& rows, int site, int rank, const float* partials,
                          int first_tile, int tile_step) {
    constexpr int ROWS = 8 * NT;
    auto* h = reinterpret_cast<uint16_t*>(args.h);
    const int end = (rank + 7) / 8 * 8;
    for (int tile = first_tile; tile * RANK_TILE < rank; tile += tile_step) {
        for (int i = threadIdx.x; i < RANK_TILE * ROWS; i += THREADS) {
            const int r = tile * RANK_TILE + i / ROWS, n = i % ROWS;
            if (r >= end || n >= rows.count) continue;
            float sum = 0;
            if (r < rank) {
                const float* place = partials + size_t(r) * ROWS + n;
                const size_t step = size_t(args.h_stride) * ROWS;
                sum = __ldcg(place);
#pragma unroll 4
                for (int chunk = 1; chunk < int(args.num_chunks); chunk++) sum += __ldcg(place + chunk * step);
            }
            const size_t entry = rows.first_entry + n;
            h[(entry * args.num_sites + site) * args.h_stride + r] = T::to_bits(T::narrow(sum));
        }
    }
}

/* The shrink of one chunk, one site and one group or tile. `last` is one word of shared memory. */
template <class T, int NT>
DEVICE void shrink_block(const ShrinkArgs& args, const ShrinkRows& rows, float* meeting, unsigned* last) {
    const int site = blockIdx.y % args.num_sites;
    const int first_tile = blockIdx.y / args.num_sites, tile_step = gridDim.y / args.num_sites;
    const SiteEntry entry = table_entry(args.table, rows.slot, args.sites[site]);
    if (first_tile * RANK_TILE >= int(entry.rank)) return;

    const size_t part = size_t(rows.part) * args.num_sites + site;
    auto* partials = reinterpret_cast<float*>(args.partials) + part * args.num_chunks * args.h_stride * (8 * NT);
    if (aligned_rows(entry.a, args.in_features) && aligned_rows(args.x, args.stride)) {
        shrink_chunk<T, NT, true>(args, rows, entry, partials, first_tile, tile_step, meeting);
    } else {
        shrink_chunk<T, NT, false>(args, rows, entry, partials, first_tile, tile_step, meeting);
    }

    /* The chunk's last barrier stands before this. */
    auto* ticket = reinterpret_cast<unsigned*>(args.tickets) + part * tile_step + first_tile;
    if (threadIdx.x == 0) *last = take_ticket(ticket) == args.num_chunks - 1;
    __syncthreads();
    if (!*last) return;
    finish_shrink<T, NT>(args, rows, site, int(entry.rank), partials, first_tile, tile_step);
    if (threadIdx.x == 0) *ticket = 0;
}
