//! Token overlays: the kernels on the stand-in device against the reference of `lora-kernels`.

use conformance_cuda::{OnDevice, SLOW_MODES, Value, on_kernels};
use cuda_standin::Mode;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::{bf16, f16};
use lora_kernels::cuda::{CudaStep, DeviceOverlays, DeviceRows, DeviceRowsMut, StepBounds};
use lora_kernels::overlay::reference::{self, EmbedOverlay, LogitsOverlay};
use lora_kernels::overlay::{Overlay, OverlayEntry, OverlayIndex, OverlayLayout, Vocabulary};
use lora_kernels::{Rows, RowsMut};
use lora_math::rows::RowsCapacity;
use lora_math::{RowAdapter, SlotId, StepRows};

const NUM_SLOTS: usize = 4;

/// Sizes of one comparison. Rows of matrices start `gap` values behind the end of the one before.
#[derive(Clone, Copy, Debug)]
struct Case {
    hidden_size: usize,
    vocabulary: Vocabulary,
    /// Overlay rows of slot 0; other slots have others, and slot 2 has none.
    overlay_rows: usize,
    num_rows: usize,
    padding: usize,
    gap: usize,
}

fn cases() -> Vec<Case> {
    let vocabularies = [(5, 0), (33, 3), (511, 1), (512, 17), (1100, 0), (700, 400)];
    let widths = [(1, 0), (8, 0), (40, 8), (130, 3), (576, 0), (264, 8), (7, 1)];
    let mut cases = Vec::new();
    for (turn, &(hidden_size, gap)) in widths.iter().enumerate() {
        for (other, &(vocab_size, max_added)) in vocabularies.iter().enumerate() {
            cases.push(Case {
                hidden_size,
                vocabulary: Vocabulary { vocab_size, max_added },
                overlay_rows: [1, 2, 8, 9, 40][(turn + other) % 5].min(vocab_size),
                num_rows: [0, 1, 4, 11, 21][(turn + 2 * other) % 5],
                padding: (turn + other) % 3,
                gap,
            });
        }
    }
    cases
}

/// One case in five: both types, tails, and added tokens are among them.
fn few_cases() -> Vec<Case> {
    cases().into_iter().step_by(5).collect()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn values<T: Value>(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| T::narrow(self.below(2001) as f32 / 1000.0 - 1.0).widen()).collect()
    }
}

/// What a case is made of, on the host.
struct Operands {
    indices: Vec<Option<OverlayIndex>>,
    rows_of: Vec<Vec<f32>>,
    step: StepRows,
    token_ids: Vec<u32>,
    base: Vec<f32>,
    x: Vec<f32>,
}

impl Operands {
    fn new<T: Value>(case: &Case, random: &mut Random) -> Self {
        let tokens = case.vocabulary.num_tokens();
        let mut indices = Vec::new();
        let mut rows_of = Vec::new();
        for slot in 0..NUM_SLOTS {
            let count = if slot == 2 { 0 } else { (case.overlay_rows + 3 * slot).min(tokens) };
            // The last token of all is among those of slot 0, the first among those of slot 1.
            let mut chosen: Vec<u32> = match slot {
                0 => vec![tokens as u32 - 1],
                _ => vec![0],
            };
            while chosen.len() < count {
                let token = random.below(tokens) as u32;
                if !chosen.contains(&token) {
                    chosen.push(token);
                }
            }
            chosen.sort_unstable();
            let index = (count > 0).then(|| OverlayIndex::new(&chosen, case.vocabulary).expect("tokens"));
            indices.push(index);
            rows_of.push(random.values::<T>(count * case.hidden_size));
        }
        let uses = |row: usize| -> Vec<RowAdapter> {
            let slot = |slot: usize| RowAdapter { slot: SlotId::new(slot as u32), scale: 1.0 };
            match row % 6 {
                5 => vec![],
                // The first adapter decides.
                4 => vec![slot(1), slot(0)],
                other => vec![slot(other % NUM_SLOTS)],
            }
        };
        let rows: Vec<_> = (0..case.num_rows).map(uses).collect();
        let total = case.num_rows + case.padding;
        let mut step = StepRows::with_capacity(capacity(case));
        step.stamp(&rows, total).expect("a step that fits");
        // Tokens of overlays, others, added ones, and one past the end.
        let token_ids = (0..total)
            .map(|row| match row % 4 {
                0 => indices[0].as_ref().map_or(0, |index| index.tokens()[random.below(index.tokens().len())]),
                1 => tokens as u32 - 1,
                2 => random.below(tokens) as u32,
                _ => (tokens + random.below(50)) as u32,
            })
            .collect();
        let base = random.values::<T>(case.vocabulary.vocab_size * case.hidden_size);
        let x = random.values::<T>(total * case.hidden_size);
        Operands { indices, rows_of, step, token_ids, base, x }
    }

    fn overlays<'a>(&'a self, case: &Case) -> Vec<Option<Overlay<'a>>> {
        let overlay = |(index, rows): (&'a Option<OverlayIndex>, &'a Vec<f32>)| {
            let rows = Rows::new(rows, case.hidden_size).expect("whole rows");
            index.as_ref().map(|index| Overlay::new(index, rows).expect("a row for each token"))
        };
        self.indices.iter().zip(&self.rows_of).map(overlay).collect()
    }
}

fn capacity(case: &Case) -> RowsCapacity {
    let max_rows = case.num_rows + case.padding;
    RowsCapacity { max_rows, max_entries: 2 * max_rows, num_slots: NUM_SLOTS }
}

/// The table of overlays in device memory, and the blocks behind it.
struct Table {
    entries: CudaSlice<u8>,
    max_rows: usize,
    _blocks: CudaSlice<u8>,
}

impl Table {
    fn new<T: Value>(device: &OnDevice, case: &Case, operands: &Operands) -> Self {
        let max_rows = (case.overlay_rows + 3 * NUM_SLOTS).min(case.vocabulary.num_tokens());
        let layout = OverlayLayout::new(case.vocabulary, max_rows, 2 * case.hidden_size).expect("a layout");
        // What an earlier overlay left is garbage.
        let mut blocks = vec![0xff; NUM_SLOTS * layout.num_bytes()];
        for (block, (index, rows)) in
            blocks.chunks_exact_mut(layout.num_bytes()).zip(operands.indices.iter().zip(&operands.rows_of))
        {
            let rows: Vec<u8> = rows.iter().flat_map(|&value| bits::<T>(value).to_le_bytes()).collect();
            if let Some(index) = index {
                layout.pack(index.tokens(), &rows, block).expect("a block");
            }
        }
        let blocks = device.stream.clone_htod(&blocks).expect("an upload");
        let base = blocks.device_ptr(&device.stream).0;
        let entry = |(slot, index): (usize, &Option<OverlayIndex>)| match index {
            Some(index) => {
                let address = base + (slot * layout.num_bytes()) as u64;
                layout.entry(address, index.tokens().len()).expect("an entry")
            }
            // Of an entry without rows nothing else is read.
            None => OverlayEntry { bitmap: 1, counts: 1, tokens: 1, rows: 1, num_rows: 0, reserved: 0 },
        };
        let entries: Vec<u8> = operands.indices.iter().enumerate().flat_map(|slot| entry(slot).to_bytes()).collect();
        let entries = device.stream.clone_htod(&entries).expect("an upload");
        Table { entries, max_rows, _blocks: blocks }
    }

    fn view(&self, device: &OnDevice, case: &Case) -> DeviceOverlays<'_> {
        let address = self.entries.device_ptr(&device.stream).0;
        // SAFETY: entries and blocks live as long as this table, which tests keep until the work has run.
        unsafe { DeviceOverlays::from_raw(address, NUM_SLOTS, self.max_rows, case.vocabulary) }
    }
}

fn bits<T: Value>(value: f32) -> u16 {
    match T::DTYPE {
        lora_math::SlotDtype::F16 => f16::from_f32(value).to_bits(),
        _ => bf16::from_f32(value).to_bits(),
    }
}

fn device() -> OnDevice {
    OnDevice::new(RowsCapacity { max_rows: 0, max_entries: 0, num_slots: NUM_SLOTS }, 1)
}

fn step(device: &OnDevice, case: &Case, operands: &Operands) -> CudaStep {
    let mut step = CudaStep::new(&device.stream, StepBounds::grouped(capacity(case))).expect("a step");
    step.upload(&operands.step, None).expect("an upload");
    step
}

/// Rows without the garbage between them, which must be as it was.
fn without_gaps(values: &[f32], case: &Case, width: usize, rows: usize) -> Vec<f32> {
    let kept = values.chunks_exact(width + case.gap).take(rows);
    kept.flat_map(|row| {
        assert!(row[width..].iter().all(|value| value.is_nan()), "a write between the rows");
        row[..width].to_vec()
    })
    .collect()
}

fn embeddings<T: Value>(device: &OnDevice, case: &Case, random: &mut Random) {
    let operands = Operands::new::<T>(case, random);
    let rows = case.num_rows + case.padding;
    let before = random.values::<T>(rows * case.hidden_size);
    let table = Table::new::<T>(device, case, &operands);
    let (overlays, step) = (table.view(device, case), step(device, case, &operands));
    let mut token_ids = operands.token_ids.clone();
    token_ids.push(0);
    let tokens = device.stream.clone_htod(&token_ids).expect("an upload");
    let base = device.upload::<T>(&operands.base, case.hidden_size, 0);
    for with_base in [true, false] {
        let mut out = device.upload::<T>(&before, case.hidden_size, case.gap);
        let view = DeviceRowsMut::strided(&mut out, rows, case.hidden_size, case.hidden_size + case.gap).expect("rows");
        let base_rows = DeviceRows::strided(&base, case.vocabulary.vocab_size, case.hidden_size, case.hidden_size);
        let base_rows = with_base.then(|| base_rows.expect("rows"));
        device.kernels.embed_overlay(&overlays, &step, &tokens, base_rows, view).expect("embeddings");
        let found = without_gaps(&device.download(&out), case, case.hidden_size, rows);

        let mut expected = before.clone();
        let op = EmbedOverlay {
            overlays: &operands.overlays(case),
            vocabulary: case.vocabulary,
            rows: &operands.step,
            token_ids: &operands.token_ids,
            base: with_base.then(|| Rows::new(&operands.base, case.hidden_size).expect("whole rows")),
        };
        reference::embed(&op, RowsMut::new(&mut expected, case.hidden_size).expect("whole rows")).expect("embeddings");
        let differs = found.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{case:?}, base: {with_base}, width {}", case.hidden_size);
    }
}

fn logits<T: Value>(device: &OnDevice, case: &Case, random: &mut Random) {
    let operands = Operands::new::<T>(case, random);
    let rows = case.num_rows + case.padding;
    let width = case.vocabulary.num_tokens();
    let before = random.values::<T>(rows * width);
    let table = Table::new::<T>(device, case, &operands);
    let (overlays, step) = (table.view(device, case), step(device, case, &operands));
    let x = device.upload::<T>(&operands.x, case.hidden_size, case.gap);
    let with_gaps: Vec<f32> = before
        .chunks_exact(width)
        .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(f32::NAN, case.gap)))
        .chain([f32::NAN])
        .collect();
    let mut out = device.stream.clone_htod(&with_gaps).expect("an upload");
    let x = DeviceRows::<T>::strided(&x, rows, case.hidden_size, case.hidden_size + case.gap).expect("rows");
    let view = DeviceRowsMut::strided(&mut out, rows, width, width + case.gap).expect("rows");
    device.kernels.logits_overlay(&overlays, &step, x, view).expect("logits");
    let mut found = vec![0.0; out.len()];
    device.stream.memcpy_dtoh(&out, &mut found).expect("a download");
    device.stream.synchronize().expect("work that runs");
    let found = without_gaps(&found, case, width, rows);

    let overlays = operands.overlays(case);
    let op = LogitsOverlay {
        overlays: &overlays,
        vocabulary: case.vocabulary,
        rows: &operands.step,
        x: Rows::new(&operands.x, case.hidden_size).expect("whole rows"),
    };
    // Everything but the overlays' own logits to the bit, and those as near as sums in f32 come.
    let mut expected = before.clone();
    reference::logits(&op, RowsMut::new(&mut expected, width).expect("whole rows")).expect("logits");
    let mut own = vec![false; expected.len()];
    for logit in reference::oracle_logits(&op).expect("logits") {
        let at = logit.row * width + logit.token as usize;
        own[at] = true;
        let off = (f64::from(found[at]) - logit.logit).abs();
        let allowed = 2e-6 * logit.magnitude + 1e-30;
        assert!(off <= allowed, "{case:?}: {logit:?}, found {}, off by {off:e} of {allowed:e}", found[at]);
    }
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let same = own[at] || found.to_bits() == expected.to_bits();
        assert!(same, "{case:?}: row {}, token {}: {found}, expected {expected}", at / width, at % width);
    }
}

fn differences<T: Value>(device: &OnDevice, width: usize, num_rows: usize, random: &mut Random) {
    let base: Vec<u16> = (0..width * num_rows).map(|_| random.next() as u16).collect();
    let mut tuned = base.clone();
    for row in 0..num_rows {
        // The first column, the last, one between, or none; one bit, the sign of a zero among them.
        let column = [Some(0), Some(width - 1), Some(random.below(width)), None][random.below(4)];
        if let Some(column) = column {
            tuned[row * width + column] ^= 1 << random.below(16);
        }
    }
    let upload = |bits: &[u16]| -> CudaSlice<T> {
        let values: Vec<T> = bits.iter().map(|&bits| T::from_bits(bits)).collect();
        device.stream.clone_htod(&values).expect("an upload")
    };
    let (device_base, device_tuned) = (upload(&base), upload(&tuned));
    let mut flags = device.stream.clone_htod(&vec![7u8; num_rows]).expect("an upload");
    let rows = |values| DeviceRows::new(values, width).expect("whole rows");
    let (base_rows, tuned_rows) = (rows(&device_base), rows(&device_tuned));
    device.kernels.row_diff(&device.stream, base_rows, tuned_rows, &mut flags).expect("a difference");
    let mut found = vec![0u8; num_rows];
    device.stream.memcpy_dtoh(&flags, &mut found).expect("a download");
    device.stream.synchronize().expect("work that runs");
    let bytes = |bits: &[u16]| -> Vec<u8> { bits.iter().flat_map(|bits| bits.to_le_bytes()).collect() };
    let expected = reference::row_diff(&bytes(&base), &bytes(&tuned), 2 * width).expect("a difference");
    let expected: Vec<u8> = expected.into_iter().map(u8::from).collect();
    assert_eq!(found, expected, "{num_rows} rows of {width}");
}

fn check_all(cases: &[Case]) {
    let device = device();
    let mut random = Random(11);
    for case in cases {
        embeddings::<bf16>(&device, case, &mut random);
        embeddings::<f16>(&device, case, &mut random);
        logits::<bf16>(&device, case, &mut random);
        logits::<f16>(&device, case, &mut random);
    }
    for (width, num_rows) in [(1, 1), (7, 9), (8, 4), (64, 13), (259, 6), (576, 5)] {
        differences::<bf16>(&device, width, num_rows, &mut random);
        differences::<f16>(&device, width, num_rows, &mut random);
    }
}

#[test]
fn overlays_match_the_reference() {
    on_kernels("overlays_match_the_reference", &[Mode::PLAIN], || check_all(&cases()));
}

#[test]
fn overlays_match_the_reference_in_slow_modes() {
    on_kernels("overlays_match_the_reference_in_slow_modes", &SLOW_MODES, || check_all(&few_cases()));
}
