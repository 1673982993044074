//! The index against a search, blocks byte by byte, and the reference against numbers worked out by hand.

use lora_math::rows::RowsCapacity;
use lora_math::{RowAdapter, SlotId, StepRows};

use super::reference::{EmbedOverlay, LogitsOverlay, embed, logits, oracle_logits, row_diff};
use super::*;
use crate::activations::{Rows, RowsMut};

const SMALL: Vocabulary = Vocabulary { vocab_size: 4, max_added: 2 };

fn step(rows: &[&[u32]], padded_rows: usize) -> StepRows {
    let adapter = |&slot: &u32| RowAdapter { slot: SlotId::new(slot), scale: 1.0 };
    let rows: Vec<Vec<RowAdapter>> = rows.iter().map(|slots| slots.iter().map(adapter).collect()).collect();
    let mut step = StepRows::with_capacity(RowsCapacity { max_rows: 16, max_entries: 16, num_slots: 4 });
    step.stamp(&rows, padded_rows).unwrap();
    step
}

#[test]
fn a_token_is_found_at_its_place_among_all() {
    let vocabulary = Vocabulary { vocab_size: 1500, max_added: 37 };
    let tokens: Vec<u32> = (0..1537).filter(|token| token % 7 == 3 || (500..530).contains(token)).collect();
    for tokens in [&tokens[..], &[], &[0], &[1536], &[31, 32, 511, 512, 1023, 1024]] {
        let index = OverlayIndex::new(tokens, vocabulary).unwrap();
        assert_eq!((index.bitmap().len(), index.counts().len()), (64, 4));
        for token in (0..2100).chain([u32::MAX]) {
            assert_eq!(index.row(token), tokens.iter().position(|&own| own == token), "{token}");
        }
    }
}

#[test]
fn tokens_ascend_and_have_room() {
    let refused = |tokens: &[u32]| OverlayIndex::new(tokens, SMALL).unwrap_err();
    assert_eq!(refused(&[0, 2, 2]), OverlayError::TokenOrder { row: 2, token: 2, before: 2 });
    assert_eq!(refused(&[3, 1]), OverlayError::TokenOrder { row: 1, token: 1, before: 3 });
    assert_eq!(refused(&[5, 6, 7]), OverlayError::TokenOutOfRange { row: 1, token: 6, vocab_size: 4, max_added: 2 });
    assert!(OverlayIndex::new(&[4, 5], SMALL).is_ok());
}

#[test]
fn a_block_holds_what_its_entry_points_to() {
    let vocabulary = Vocabulary { vocab_size: 600, max_added: 8 };
    let layout = OverlayLayout::new(vocabulary, 3, 10).unwrap();
    assert_eq!((layout.index_bytes(), layout.num_bytes()), (128 + 64 + 64, 128 + 64 + 64 + 64));
    let mut block = vec![0xEE; layout.num_bytes()];
    layout.pack(&[33, 601], &[7; 20], &mut block).unwrap();
    let entry = layout.entry(0x4000, 2).unwrap();
    let at = |address: u64| {
        let bytes = &block[(address - 0x4000) as usize..];
        u32::from_le_bytes(bytes[..4].try_into().unwrap())
    };
    assert_eq!([at(entry.bitmap), at(entry.bitmap + 4), at(entry.bitmap + 4 * (601 / 32))], [0, 2, 1 << (601 % 32)]);
    assert_eq!([at(entry.counts), at(entry.counts + 4)], [0, 1]);
    assert_eq!([at(entry.tokens), at(entry.tokens + 4)], [33, 601]);
    assert_eq!(block[layout.index_bytes()..][..21], [&[7; 20][..], &[0xEE]].concat());
    assert_eq!(entry.num_rows, 2);
    let bytes = entry.to_bytes();
    assert_eq!(bytes[..32], [entry.bitmap, entry.counts, entry.tokens, entry.rows].map(u64::to_le_bytes).concat());
    assert_eq!(bytes[32..40], [2, 0, 0, 0, 0, 0, 0, 0]);

    // The next overlay leaves nothing of this one.
    layout.pack(&[5], &[1; 10], &mut block).unwrap();
    let set: u32 = block[..128].iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(set, 1);

    let mut pack = |tokens: &[u32], rows: &[u8], bytes| layout.pack(tokens, rows, &mut block[..bytes]).unwrap_err();
    let whole = layout.num_bytes();
    assert_eq!(pack(&[1, 2, 3, 4], &[0; 40], whole), OverlayError::TooManyRows { rows: 4, max_rows: 3 });
    assert_eq!(pack(&[1], &[0; 11], whole), OverlayError::RowBytes { rows: 1, expected: 10, found: 11 });
    assert_eq!(pack(&[1], &[0; 10], 64), OverlayError::BlockSize { expected: whole, found: 64 });
    assert!(matches!(pack(&[2, 1], &[0; 20], whole), OverlayError::TokenOrder { .. }));
    assert_eq!(layout.entry(0x4000, 4), Err(OverlayError::TooManyRows { rows: 4, max_rows: 3 }));
    assert_eq!(layout.entry(0x4008, 3), Err(OverlayError::Misaligned { address: 0x4008, alignment: 16 }));
    assert!(OverlayLayout::new(vocabulary, i32::MAX as usize, usize::MAX / 4).is_err());
    assert!(OverlayLayout::new(Vocabulary { vocab_size: usize::MAX, max_added: 1 }, 1, 2).is_err());
}

#[test]
fn the_index_of_a_large_vocabulary_is_small() {
    let vocabulary = Vocabulary { vocab_size: 151_936, max_added: 64 };
    let layout = OverlayLayout::new(vocabulary, 64, 4096 * 2).unwrap();
    assert!(layout.index_bytes() <= 32 << 10, "{}", layout.index_bytes());
}

/// Slot 0 replaces token 1 and adds 4, slot 1 has no overlay, slot 2 adds 5.
fn overlays() -> (OverlayIndex, OverlayIndex) {
    (OverlayIndex::new(&[1, 4], SMALL).unwrap(), OverlayIndex::new(&[5], SMALL).unwrap())
}

#[test]
fn embeds_by_the_first_adapter_of_a_row() {
    let (first, third) = overlays();
    let overlays = [
        Some(Overlay::new(&first, Rows::new(&[10.0, 11.0, 40.0, 41.0], 2).unwrap()).unwrap()),
        None,
        Some(Overlay::new(&third, Rows::new(&[50.0, 51.0], 2).unwrap()).unwrap()),
    ];
    let base: Vec<f32> = (0..8).map(|value| value as f32).collect();
    let rows = step(&[&[0], &[0], &[], &[2, 0], &[0, 2], &[1], &[2], &[2]], 9);
    let token_ids = [1, 2, 1, 1, 4, 1, 4, 5, 9];
    let op = EmbedOverlay {
        overlays: &overlays,
        vocabulary: SMALL,
        rows: &rows,
        token_ids: &token_ids,
        base: Some(Rows::new(&base, 2).unwrap()),
    };
    let mut out = [-1.0; 18];
    embed(&op, RowsMut::new(&mut out, 2).unwrap()).unwrap();
    let wanted = [10., 11., 4., 5., 2., 3., 2., 3., 40., 41., 2., 3., 0., 0., 50., 51., 0., 0.];
    assert_eq!(out, wanted);

    let mut out = [-1.0; 18];
    embed(&EmbedOverlay { base: None, ..op }, RowsMut::new(&mut out, 2).unwrap()).unwrap();
    let wanted = [10., 11., -1., -1., -1., -1., -1., -1., 40., 41., -1., -1., -1., -1., 50., 51., -1., -1.];
    assert_eq!(out, wanted);

    let refused = |op: EmbedOverlay<'_>, width| embed(&op, RowsMut::new(&mut [0.0; 18][..], width).unwrap()).is_err();
    assert!(refused(EmbedOverlay { token_ids: &token_ids[1..], ..op }, 2) && refused(op, 1) && refused(op, 3));
    assert!(refused(EmbedOverlay { overlays: &overlays[..2], ..op }, 2));
    assert!(refused(EmbedOverlay { base: Some(Rows::new(&base[2..], 2).unwrap()), ..op }, 2));
    assert!(refused(EmbedOverlay { vocabulary: Vocabulary { max_added: 3, ..SMALL }, ..op }, 2));
}

#[test]
fn logits_are_replaced_appended_and_masked() {
    let (first, third) = overlays();
    let overlays = [
        Some(Overlay::new(&first, Rows::new(&[1.0, 2.0, 3.0, 4.0], 2).unwrap()).unwrap()),
        None,
        Some(Overlay::new(&third, Rows::new(&[5.0, 6.0], 2).unwrap()).unwrap()),
    ];
    let x = [1.0, 1.0, 1.0, -1.0, 2.0, 0.0, 0.0, 2.0, 9.0, 9.0];
    let rows = step(&[&[0], &[], &[2, 0], &[1]], 5);
    let op = LogitsOverlay { overlays: &overlays, vocabulary: SMALL, rows: &rows, x: Rows::new(&x, 2).unwrap() };
    let mut out = [0.5f32; 30];
    logits(&op, RowsMut::new(&mut out, 6).unwrap()).unwrap();
    const NONE: f32 = f32::NEG_INFINITY;
    let base = [0.5, 0.5, 0.5, 0.5, NONE, NONE];
    let wanted = [[0.5, 3.0, 0.5, 0.5, 7.0, NONE], base, [0.5, 0.5, 0.5, 0.5, NONE, 10.0], base, base];
    assert_eq!(out, *wanted.as_flattened());

    let found = oracle_logits(&op).unwrap();
    let found: Vec<_> = found.iter().map(|one| (one.row, one.token, one.logit, one.magnitude)).collect();
    assert_eq!(found, [(0, 1, 3.0, 3.0), (0, 4, 7.0, 7.0), (2, 5, 10.0, 10.0)]);

    assert!(logits(&op, RowsMut::new(&mut out[..24], 6).unwrap()).is_err());
    assert!(logits(&op, RowsMut::new(&mut out[..25], 5).unwrap()).is_err());
    assert!(
        logits(&LogitsOverlay { x: Rows::new(&x[2..], 2).unwrap(), ..op }, RowsMut::new(&mut out, 6).unwrap()).is_err()
    );
    assert!(oracle_logits(&LogitsOverlay { overlays: &[], ..op }).is_err());
}

#[test]
fn rows_differ_by_bits() {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let base = bytes(&[1.0, 2.0, 0.0, 3.0, f32::NAN, 4.0]);
    let tuned = bytes(&[1.0, 2.0, -0.0, 3.0, f32::NAN, 4.5]);
    assert_eq!(row_diff(&base, &tuned, 8).unwrap(), [false, true, true]);
    assert_eq!(row_diff(&base, &base, 8).unwrap(), [false; 3]);
    assert_eq!(row_diff(&[], &[], 8).unwrap(), [false; 0]);
    for (tuned, row_bytes) in [(&tuned[..23], 8), (&tuned[..16], 8), (&tuned[..], 7), (&tuned[..], 0)] {
        assert!(row_diff(&base, tuned, row_bytes).is_err());
    }
}
