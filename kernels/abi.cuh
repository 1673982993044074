/* The structs that the host writes and kernels read. Each has a twin in Rust with the same sizes and offsets: the first
   three in lora-math/src/abi.rs, the others in lora-kernels/src/cuda/abi.rs. All addresses are device addresses. */
#pragma once
#include <cstddef>
#include <cstdint>

/* One entry of the slot table, at [slot][site]. A is [rank, in_features] (of an embedding [in_features, rank]), B
   [out_features, rank], row-major; delta = scaling * B A x. Rank 0: the adapter does not touch the site, and the other
   fields are not read. */
struct SiteEntry {
    uint64_t a, b;
    uint32_t rank;
    float scaling;
};

/* One use of an adapter by a row. */
struct RowEntry {
    uint32_t row;
    float scale;
};

/* At most 8 consecutive entries of one slot. */
struct RowGroup {
    uint32_t slot, first_entry, count;
};

/* Consecutive rows that use the same adapters in the same order: `num_uses` of them from `first_use` on. h of use u and
   row i of the tile is entry `first_entry + u * num_rows + i`. */
struct RowTile {
    uint32_t first_row, num_rows, first_use, num_uses, first_entry;
};

/* One adapter of a tile. */
struct TileUse {
    uint32_t slot;
    float scale;
};

/* How much of the step's buffers counts; a step without adapters has none of either. */
struct StepHeader {
    uint32_t num_groups, num_tiles;
};

/* The row metadata of a step: fixed addresses, contents refilled each step. */
struct StepMetadata {
    const StepHeader* header;
    const RowGroup* groups;
    const RowEntry* entries;
    /* Slot of each entry. */
    const uint32_t* entry_slots;
    /* Row r owns row_entries[row_offsets[r] .. row_offsets[r + 1]], indices of entries in the request's order. */
    const uint32_t* row_offsets;
    const uint32_t* row_entries;
    const RowTile* tiles;
    const TileUse* uses;
};

/* The pool's slot table. */
struct TableView {
    const SiteEntry* entries;
    uint32_t num_sites;
    uint32_t reserved;
};

constexpr int MAX_SITES = 4;

/* One site of a launch: its column in the table and its output `[rows, out_features]`, rows `stride` elements apart. */
struct SiteOutput {
    uint64_t y;
    uint32_t stride;
    uint32_t site;
    uint32_t out_features;
    /* The first block along x that works on this site in an expand. */
    uint32_t first_block;
};

struct ShrinkArgs {
    TableView table;
    StepMetadata step;
    /* Input `[rows, in_features]`, rows `stride` elements apart. */
    uint64_t x;
    uint32_t stride;
    uint32_t in_features;
    /* Columns of K that one block sums, a multiple of 256. */
    uint32_t chunk;
    uint32_t num_chunks;
    uint32_t num_sites;
    uint32_t sites[MAX_SITES];
    /* Elements between two h: at least every rank, a multiple of 8. */
    uint32_t h_stride;
    /* f32 `[group or tile][site][chunk][h_stride][rows of it]`. */
    uint64_t partials;
    /* One for each group or tile, site and block along y; 0 before and after each launch. */
    uint64_t tickets;
    /* `[entry][site][h_stride]`. */
    uint64_t h;
};

struct ExpandArgs {
    TableView table;
    StepMetadata step;
    uint64_t h;
    uint32_t h_stride;
    uint32_t num_sites;
    SiteOutput sites[MAX_SITES];
};

struct GatherArgs {
    TableView table;
    StepMetadata step;
    /* u32 for each row of the step. */
    uint64_t token_ids;
    uint32_t site;
    uint32_t vocab_size;
    uint64_t h;
    uint32_t h_stride;
    uint32_t reserved;
};

static_assert(sizeof(SiteEntry) == 24 && offsetof(SiteEntry, rank) == 16 && offsetof(SiteEntry, scaling) == 20, "");
static_assert(sizeof(RowEntry) == 8 && sizeof(RowGroup) == 12 && sizeof(RowTile) == 20 && sizeof(TileUse) == 8, "");
static_assert(sizeof(StepHeader) == 8 && sizeof(StepMetadata) == 64 && sizeof(TableView) == 16, "");
static_assert(sizeof(SiteOutput) == 24 && offsetof(SiteOutput, site) == 12, "");
static_assert(sizeof(ShrinkArgs) == 152 && offsetof(ShrinkArgs, x) == 80 && offsetof(ShrinkArgs, sites) == 108, "");
static_assert(offsetof(ShrinkArgs, h_stride) == 124 && offsetof(ShrinkArgs, partials) == 128, "");
static_assert(sizeof(ExpandArgs) == 192 && offsetof(ExpandArgs, h) == 80 && offsetof(ExpandArgs, sites) == 96, "");
static_assert(sizeof(GatherArgs) == 112 && offsetof(GatherArgs, token_ids) == 80 && offsetof(GatherArgs, h) == 96, "");
