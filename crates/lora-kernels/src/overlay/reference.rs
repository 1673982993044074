//! What the overlay kernels compute, in plain loops on the host: sums in index order, one f32 accumulator. Not meant to
//! be fast.

use lora_math::StepRows;

use super::{Overlay, OverlayError, Vocabulary};
use crate::activations::{Rows, RowsMut};
use crate::error::{KernelError, Operand};
use crate::reference::entry_slot;

/// Embeddings of a step's tokens, with overlays.
#[derive(Clone, Copy, Debug)]
pub struct EmbedOverlay<'a> {
    /// Of each slot; none where its adapter has no overlay on the embedding.
    pub overlays: &'a [Option<Overlay<'a>>],
    /// The tokens of all of them.
    pub vocabulary: Vocabulary,
    /// The step. The first adapter of a row decides its overlay.
    pub rows: &'a StepRows,
    /// One for each row, padding included.
    pub token_ids: &'a [u32],
    /// The base's table `[vocab_size, hidden_size]`; without it rows without an overlay are left as they are.
    pub base: Option<Rows<'a>>,
}

/// Logits of replaced and added tokens.
#[derive(Clone, Copy, Debug)]
pub struct LogitsOverlay<'a> {
    /// Of each slot; none where its adapter has no overlay on the head.
    pub overlays: &'a [Option<Overlay<'a>>],
    /// The tokens of all of them.
    pub vocabulary: Vocabulary,
    /// The rows that have logits. The first adapter of a row decides its overlay.
    pub rows: &'a StepRows,
    /// Input of the head `[rows, hidden_size]`, padding rows included.
    pub x: Rows<'a>,
}

/// Fills `out` `[rows, hidden_size]`: the row of the overlay where the row's adapter has the token, else the base's
/// row, or zeros for a token past the vocabulary.
///
/// # Errors
/// Sizes that do not agree, before anything is written.
pub fn embed(op: &EmbedOverlay<'_>, mut out: RowsMut<'_>) -> Result<(), OverlayError> {
    let num_rows = op.rows.row_slots().len();
    check_rows(Operand::Input, num_rows, op.token_ids.len())?;
    check_rows(Operand::Output, num_rows, out.num_rows())?;
    check_overlays(op.overlays, op.rows, op.vocabulary, out.width())?;
    if let Some(base) = op.base {
        check_rows(Operand::Input, op.vocabulary.vocab_size, base.num_rows())?;
        check_width(Operand::Input, out.width(), base.width())?;
    }
    for (row, &token) in op.token_ids.iter().enumerate() {
        let own = overlay_of(op.overlays, op.rows, row);
        let own = own.and_then(|overlay| Some(overlay.rows().row(overlay.index().row(token)?)));
        let out = out.row_mut(row);
        match (own, op.base) {
            (Some(own), _) => out.copy_from_slice(own),
            (None, Some(base)) if (token as usize) < base.num_rows() => out.copy_from_slice(base.row(token as usize)),
            (None, Some(_)) => out.fill(0.0),
            (None, None) => {}
        }
    }
    Ok(())
}

/// Overwrites in `logits` `[rows, vocab_size + max_added]` the tokens that each row's overlay has, and sets the added
/// tokens that it lacks to −∞; all others keep their bits.
///
/// # Errors
/// Sizes that do not agree, before anything is written.
pub fn logits(op: &LogitsOverlay<'_>, mut logits: RowsMut<'_>) -> Result<(), OverlayError> {
    check_logits(op)?;
    check_rows(Operand::Output, op.x.num_rows(), logits.num_rows())?;
    check_width(Operand::Output, op.vocabulary.num_tokens(), logits.width())?;
    for row in 0..op.x.num_rows() {
        let logits = logits.row_mut(row);
        logits[op.vocabulary.vocab_size..].fill(f32::NEG_INFINITY);
        for (token, own) in overlay_rows(op, row) {
            logits[token as usize] = op.x.row(row).iter().zip(own).map(|(x, w)| x * w).sum();
        }
    }
    Ok(())
}

/// A logit of an overlay in double precision, for checks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverlayLogit {
    /// The row of the step.
    pub row: usize,
    /// The token that is replaced or added.
    pub token: u32,
    /// `Σ_k x[k] · w[k]`.
    pub logit: f64,
    /// `Σ_k |x[k] · w[k]|`, on which the error of a sum in f32 is bounded.
    pub magnitude: f64,
}

/// All logits that [`logits`] computes, in double precision, row after row.
///
/// # Errors
/// As for [`logits`].
pub fn oracle_logits(op: &LogitsOverlay<'_>) -> Result<Vec<OverlayLogit>, OverlayError> {
    check_logits(op)?;
    let of_row = |row: usize| {
        overlay_rows(op, row).map(move |(token, own)| {
            let products = || op.x.row(row).iter().zip(own).map(|(&x, &w)| f64::from(x) * f64::from(w));
            OverlayLogit { row, token, logit: products().sum(), magnitude: products().map(f64::abs).sum() }
        })
    };
    Ok((0..op.x.num_rows()).flat_map(of_row).collect())
}

/// For each row whether `tuned` differs from `base` in any bit. Bits and not values: an overlay gives back what was
/// saved to the last bit, at the cost of a row that differs in the sign of a zero alone.
///
/// # Errors
/// [`OverlayError::RowPairs`] unless both are the same whole number of rows.
pub fn row_diff(base: &[u8], tuned: &[u8], row_bytes: usize) -> Result<Vec<bool>, OverlayError> {
    if row_bytes == 0 || base.len() != tuned.len() || !base.len().is_multiple_of(row_bytes) {
        return Err(OverlayError::RowPairs { base: base.len(), tuned: tuned.len(), row_bytes });
    }
    Ok(base.chunks_exact(row_bytes).zip(tuned.chunks_exact(row_bytes)).map(|(base, tuned)| base != tuned).collect())
}

/// The overlay of a row's first adapter.
fn overlay_of<'a>(overlays: &'a [Option<Overlay<'a>>], rows: &StepRows, row: usize) -> Option<&'a Overlay<'a>> {
    let &first = rows.row_entries(row).first()?;
    overlays[entry_slot(rows, first) as usize].as_ref()
}

/// The tokens of a row's overlay, each with its row.
fn overlay_rows<'a>(op: &LogitsOverlay<'a>, row: usize) -> impl Iterator<Item = (u32, &'a [f32])> {
    overlay_of(op.overlays, op.rows, row).into_iter().flat_map(|overlay| {
        let tokens = overlay.index().tokens().iter().enumerate();
        tokens.map(move |(own, &token)| (token, overlay.rows().row(own)))
    })
}

fn check_logits(op: &LogitsOverlay<'_>) -> Result<(), OverlayError> {
    check_rows(Operand::Input, op.rows.row_slots().len(), op.x.num_rows())?;
    check_overlays(op.overlays, op.rows, op.vocabulary, op.x.width())
}

/// Every slot of the step has a place, and every overlay is of the vocabulary and the width.
fn check_overlays(
    overlays: &[Option<Overlay<'_>>],
    rows: &StepRows,
    vocabulary: Vocabulary,
    width: usize,
) -> Result<(), OverlayError> {
    if let Some(group) = rows.groups().iter().find(|group| group.slot as usize >= overlays.len()) {
        return Err(KernelError::SlotOutOfRange { slot: group.slot, num_slots: overlays.len() }.into());
    }
    for overlay in overlays.iter().flatten() {
        check_width(Operand::Input, width, overlay.rows().width())?;
        check_width(Operand::Output, vocabulary.num_tokens(), overlay.index().vocabulary().num_tokens())?;
    }
    Ok(())
}

fn check_rows(operand: Operand, expected: usize, found: usize) -> Result<(), OverlayError> {
    if expected == found { Ok(()) } else { Err(KernelError::RowCount { operand, expected, found }.into()) }
}

fn check_width(operand: Operand, expected: usize, found: usize) -> Result<(), OverlayError> {
    if expected == found { Ok(()) } else { Err(KernelError::Width { operand, expected, found }.into()) }
}
