/* What an adapter puts in place of rows of a vocabulary matrix, or adds behind its end, and how a token's row is found.
   The twins of the structs, and the code that builds an index, stand in lora-kernels/src/overlay.rs. */
#pragma once
#include "common.cuh"

/* Bits of an index that share one count. */
constexpr uint32_t COUNT_BITS = 512;

/* The overlay of one slot on one matrix, at [slot] of a table; a tied embedding and head have one each, with the same
   addresses. Tokens are below vocab_size + max_added, which is the same for all slots. No rows: the adapter has no
   overlay, and the other fields are not read. */
struct OverlayEntry {
    /* One bit for each token, in u32 words from the lowest bit on, whole blocks of COUNT_BITS. */
    uint64_t bitmap;
    /* u32 for each block: bits that are set in the blocks before. */
    uint64_t counts;
    /* u32 for each row: its token, ascending. */
    uint64_t tokens;
    /* `[num_rows, hidden_size]`. */
    uint64_t rows;
    uint32_t num_rows;
    uint32_t reserved;
};

struct EmbedOverlayArgs {
    /* OverlayEntry for each slot. */
    uint64_t overlays;
    /* u32 for each row of the step. */
    uint64_t token_ids;
    /* i32 for each row of the step: its slot, -1 for none. */
    uint64_t row_slots;
    /* The base's table `[vocab_size, hidden_size]`. Null: rows without an overlay are left as they are. */
    uint64_t base;
    /* `[rows, hidden_size]`, rows `stride` elements apart. */
    uint64_t out;
    uint32_t stride;
    uint32_t hidden_size;
    uint32_t vocab_size;
    uint32_t max_added;
};

struct LogitsOverlayArgs {
    /* Of the rows that have logits. */
    StepMetadata step;
    /* OverlayEntry for each slot. */
    uint64_t overlays;
    /* i32 for each row: the slot of its first entry, -1 for none. */
    uint64_t row_slots;
    /* Input of the head `[rows, hidden_size]`, rows `x_stride` elements apart. */
    uint64_t x;
    /* f32 `[rows, vocab_size + max_added]`, rows `stride` elements apart. */
    uint64_t logits;
    uint32_t x_stride;
    uint32_t stride;
    uint32_t hidden_size;
    uint32_t vocab_size;
    uint32_t max_added;
    uint32_t num_rows;
    /* Groups that the step may have, one block along y each; the blocks behind them see to the added tokens. */
    uint32_t max_groups;
    uint32_t reserved;
};

struct RowDiffArgs {
    /* Both `[num_rows, width]`. */
    uint64_t base, tuned;
    /* u8 for each row. */
    uint64_t flags;
    uint32_t num_rows;
    uint32_t width;
};

static_assert(sizeof(OverlayEntry) == 40 && offsetof(OverlayEntry, counts) == 8, "");
static_assert(offsetof(OverlayEntry, rows) == 24 && offsetof(OverlayEntry, num_rows) == 32, "");
static_assert(sizeof(EmbedOverlayArgs) == 56 && offsetof(EmbedOverlayArgs, base) == 24, "");
static_assert(offsetof(EmbedOverlayArgs, stride) == 40 && offsetof(EmbedOverlayArgs, max_added) == 52, "");
static_assert(sizeof(LogitsOverlayArgs) == 128 && offsetof(LogitsOverlayArgs, overlays) == 64, "");
static_assert(offsetof(LogitsOverlayArgs, x_stride) == 96 && offsetof(LogitsOverlayArgs, max_groups) == 120, "");
static_assert(sizeof(RowDiffArgs) == 32 && offsetof(RowDiffArgs, num_rows) == 24, "");

DEVICE OverlayEntry overlay_of(uint64_t overlays, uint32_t slot) {
    return reinterpret_cast<const OverlayEntry*>(overlays)[slot];
}

/* Whether the overlay has a row for the token, which is below vocab_size + max_added. */
DEVICE bool overlay_has(const OverlayEntry& overlay, uint32_t token) {
    if (overlay.num_rows == 0) return false;
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(overlay.bitmap) + token / 32);
    return word >> (token % 32) & 1;
}

/* The row of a token that the overlay has: as many as there are bits before its own. */
DEVICE uint32_t overlay_row(const OverlayEntry& overlay, uint32_t token) {
    const auto* words = reinterpret_cast<const uint32_t*>(overlay.bitmap);
    const uint32_t block = token / COUNT_BITS, own = token / 32;
    uint32_t row = __ldg(reinterpret_cast<const uint32_t*>(overlay.counts) + block);
    for (uint32_t word = block * (COUNT_BITS / 32); word < own; word++) row += __popc(__ldg(words + word));
    return row + __popc(__ldg(words + own) & ((1u << (token % 32)) - 1));
}
