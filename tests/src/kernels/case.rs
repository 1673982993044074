//! Which cases are run: a pairwise cover for every day, a fixed few for the slow modes, all of them on request.

use lora_math::SlotDtype;

use super::cover::pairwise;

/// Which row uses which adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// No row uses any.
    Base,
    /// All rows use one.
    One,
    /// Rows use all slots in turn, with base rows between.
    Turns,
    /// Rows use the last slot, and the first one in between.
    LastSlot,
    /// Rows use none to three adapters each, one of them twice, with scales of their own.
    Several,
    /// A long run of one adapter, base rows, a run of two adapters, a short run.
    Runs,
}

/// One set of operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Type of A and B, and of activations where a back end has no other.
    pub dtype: SlotDtype,
    /// Of slot 0; other slots have others.
    pub rank: usize,
    /// Width of x.
    pub in_features: usize,
    /// Width of the first site's output; further sites have others.
    pub out_features: usize,
    /// Projections that read x.
    pub num_sites: usize,
    /// Rows without padding.
    pub num_rows: usize,
    /// Rows of padding.
    pub padding: usize,
    /// Adapters of the rows.
    pub routing: Routing,
    /// A and B one behind the other, aligned to their elements alone; else each on a boundary of 64 bytes.
    pub packed: bool,
    /// All sites write columns of one output.
    pub side_by_side: bool,
    /// Long runs are worked through as tiles.
    pub tiled: bool,
}

const RANKS: &[usize] = &[1, 2, 3, 4, 8, 12, 16, 24, 33, 64, 128];
const DTYPES: &[SlotDtype] = &[SlotDtype::Bf16, SlotDtype::F16];
const ROUTINGS: &[Routing] =
    &[Routing::Base, Routing::One, Routing::Turns, Routing::LastSlot, Routing::Several, Routing::Runs];

/// The values that cases are made of.
struct Grid {
    in_features: &'static [usize],
    out_features: &'static [usize],
    num_rows: &'static [usize],
    paddings: &'static [usize],
}

/// Small widths, aligned and odd, around the sizes at which kernels change what they do.
const SMALL: Grid = Grid {
    in_features: &[1, 7, 8, 40, 255, 256, 264, 576, 1030],
    out_features: &[1, 6, 8, 120, 128, 131, 264],
    num_rows: &[0, 1, 3, 5, 8, 19, 64],
    paddings: &[0, 3],
};

/// With the widths of real models.
const LARGE: Grid = Grid {
    in_features: &[7, 64, 255, 576, 1024, 1536, 2560, 4096, 4104, 11008, 14336],
    out_features: &[1, 24, 131, 192, 576, 1024, 4096],
    num_rows: &[0, 1, 3, 5, 8, 64],
    paddings: &[0, 8],
};

impl Grid {
    fn sizes(&self) -> [usize; 11] {
        let Grid { in_features, out_features, num_rows, paddings } = self;
        let widths = [in_features.len(), out_features.len()];
        let rows = [num_rows.len(), paddings.len()];
        [DTYPES.len(), RANKS.len(), widths[0], widths[1], 3, rows[0], rows[1], ROUTINGS.len(), 2, 2, 2]
    }

    fn case(&self, index: &[usize]) -> Case {
        Case {
            dtype: DTYPES[index[0]],
            rank: RANKS[index[1]],
            in_features: self.in_features[index[2]],
            out_features: self.out_features[index[3]],
            num_sites: index[4] + 1,
            num_rows: self.num_rows[index[5]],
            padding: self.paddings[index[6]],
            routing: ROUTINGS[index[7]],
            packed: index[8] == 1,
            side_by_side: index[9] == 1,
            tiled: index[10] == 1,
        }
    }
}

/// The cases that are compared with the oracle: small ones in which every two values of two parameters meet, or, where
/// `CONFORMANCE_STRIDE` is set, one in so many of the whole grid.
///
/// # Panics
/// If it is set to something else than a number.
#[must_use]
pub fn cases() -> Vec<Case> {
    match std::env::var("CONFORMANCE_STRIDE") {
        Ok(stride) => full_grid(stride.parse().expect("CONFORMANCE_STRIDE is a number")).collect(),
        Err(_) => cover(),
    }
}

/// At most 200.
fn cover() -> Vec<Case> {
    pairwise(&SMALL.sizes()).iter().map(|index| SMALL.case(index)).collect()
}

/// Few cases for sanitizers and shuffled orders: at most 40. Each has adapters, and together they have every routing, both
/// types, tiles and groups, tails and whole vectors.
#[must_use]
pub fn sanitized() -> Vec<Case> {
    let mut cases = Vec::new();
    for (position, &routing) in ROUTINGS.iter().enumerate().skip(1) {
        for (turn, &(rank, in_features, out_features)) in
            [(16, 520, 136), (3, 259, 131), (33, 264, 40)].iter().enumerate()
        {
            let odd = (position + turn) % 2 == 1;
            cases.push(Case {
                dtype: DTYPES[usize::from(odd)],
                rank,
                in_features,
                out_features,
                num_sites: 1 + turn,
                num_rows: if routing == Routing::Runs { 40 } else { 11 },
                padding: turn,
                routing,
                packed: turn == 1,
                side_by_side: odd,
                tiled: routing == Routing::Runs || turn == 2,
            });
        }
    }
    cases
}

/// Widths of real models, and ranks past those of the cover, for groups and for tiles.
#[must_use]
pub fn real_shapes() -> Vec<Case> {
    let of = |rank, in_features, out_features, num_sites, num_rows, routing| Case {
        dtype: SlotDtype::Bf16,
        rank,
        in_features,
        out_features,
        num_sites,
        num_rows,
        padding: 0,
        routing,
        packed: false,
        side_by_side: true,
        tiled: routing == Routing::Runs,
    };
    vec![
        // Llama-3-8B: q, k and v; down. SmolLM2-135M: gate and up.
        of(16, 4096, 4096, 3, 4, Routing::Turns),
        of(16, 14336, 4096, 1, 3, Routing::Turns),
        of(8, 576, 1536, 2, 100, Routing::Runs),
        // The largest ranks.
        of(300, 200, 96, 2, 7, Routing::Turns),
        of(512, 264, 40, 1, 30, Routing::Runs),
    ]
}

/// The large grid over types, ranks, widths, rows, routings, layouts, tiles and groups; the other parameters take turns. One
/// case in `stride`.
fn full_grid(stride: usize) -> impl Iterator<Item = Case> {
    let [dtypes, ranks, inputs, outputs, sites, rows, paddings, routings, packed, beside, tiled] = LARGE.sizes();
    let crossed = [dtypes, ranks, inputs, outputs, rows, routings, packed, tiled];
    let count: usize = crossed.iter().product();
    (0..count).step_by(stride.max(1)).map(move |number| {
        let mut rest = number;
        let index = crossed.map(|size| {
            let index = rest % size;
            rest /= size;
            index
        });
        let [dtype, rank, input, output, row, routing, layout, tile] = index;
        // Turns that no product of the sizes above is a multiple of.
        let (site, padding, side) = (number / 7 % sites, number / 13 % paddings, number / 17 % beside);
        LARGE.case(&[dtype, rank, input, output, site, row, padding, routing, layout, side, tile])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_grid_has_every_value() {
        let cases: Vec<Case> = full_grid(1).collect();
        assert_eq!(cases.len(), 2 * 11 * 11 * 7 * 6 * 6 * 2 * 2);
        for sites in 1..=3 {
            for (padding, side_by_side) in [(0, false), (0, true), (8, false), (8, true)] {
                let same =
                    |case: &&Case| (case.num_sites, case.padding, case.side_by_side) == (sites, padding, side_by_side);
                assert!(cases.iter().filter(same).count() > cases.len() / 20);
            }
        }
    }

    #[test]
    fn lists_keep_to_their_sizes() {
        let cover = cover();
        assert!(cover.len() <= 200, "{}", cover.len());
        assert!(sanitized().len() <= 40);
        for routing in ROUTINGS {
            assert!(cover.iter().any(|case| case.routing == *routing && case.num_rows >= 19));
        }
    }
}
