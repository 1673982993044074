//! Row metadata: the worked example, its promises on any batch, and that a refill allocates nothing.

use proptest::prelude::*;

use super::*;

fn adapter(slot: u32, scale: f32) -> RowAdapter {
    RowAdapter { slot: SlotId::new(slot), scale }
}

fn step(max_rows: usize, max_entries: usize, num_slots: usize) -> StepRows {
    StepRows::with_capacity(RowsCapacity { max_rows, max_entries, num_slots })
}

#[test]
fn worked_example() {
    let mut step = step(8, 8, 2);
    let rows = [vec![adapter(1, 1.0)], vec![], vec![adapter(0, 0.5)], vec![adapter(1, 2.0)]];
    step.stamp(&rows, 5).unwrap();
    assert_eq!(step.num_rows(), 4);
    assert_eq!(step.row_slots(), [1, -1, 0, 1, -1]);
    let entry = |row, scale| RowEntry { row, scale };
    assert_eq!(step.entries(), [entry(2, 0.5), entry(0, 1.0), entry(3, 2.0)]);
    let group = |slot, first_entry, count| RowGroup { slot, first_entry, count };
    assert_eq!(step.groups(), [group(0, 0, 1), group(1, 1, 2)]);
    assert_eq!(step.row_offsets(), [0, 1, 1, 2, 3, 3]);
    assert_eq!(step.all_row_entries(), [1, 0, 2]);
    assert_eq!(step.row_entries(3), [2]);
    assert_eq!(step.row_entries(4), [0u32; 0]);
}

#[test]
fn several_adapters_of_a_row_keep_the_requests_order() {
    let mut step = step(2, 8, 4);
    step.stamp(&[vec![adapter(3, 1.0), adapter(0, 2.0), adapter(2, 3.0)], vec![adapter(0, 4.0)]], 2).unwrap();
    assert_eq!(step.row_slots(), [3, 0]);
    let scales: Vec<f32> = step.row_entries(0).iter().map(|&entry| step.entries()[entry as usize].scale).collect();
    assert_eq!(scales, [1.0, 2.0, 3.0]);
}

#[test]
fn groups_end_at_eight_entries() {
    let mut step = step(32, 32, 2);
    step.stamp(&[[adapter(1, 1.0)]; 19], 19).unwrap();
    let counts: Vec<_> = step.groups().iter().map(|group| (group.slot, group.first_entry, group.count)).collect();
    assert_eq!(counts, [(1, 0, 8), (1, 8, 8), (1, 16, 3)]);
}

#[test]
fn a_refused_step_leaves_the_buffers_usable() {
    let mut step = step(3, 3, 2);
    let good = [vec![adapter(1, 1.0)], vec![adapter(0, 1.0)]];
    step.stamp(&good, 3).unwrap();
    let reference = step.clone();
    let one = |slot, scale| vec![vec![adapter(slot, scale)]];
    let refused = [
        (vec![vec![]; 4], 4, RowsError::TooManyRows { rows: 4, max_rows: 3 }),
        (one(0, 1.0), 4, RowsError::TooManyRows { rows: 4, max_rows: 3 }),
        (vec![vec![adapter(0, 1.0); 4]], 1, RowsError::TooManyEntries { entries: 4, max_entries: 3 }),
        (one(0, 1.0), 0, RowsError::PaddedTooSmall { rows: 1, padded_rows: 0 }),
        (one(2, 1.0), 1, RowsError::SlotOutOfRange { row: 0, slot: SlotId::new(2), num_slots: 2 }),
        (one(u32::MAX, 1.0), 1, RowsError::SlotOutOfRange { row: 0, slot: SlotId::new(u32::MAX), num_slots: 2 }),
        (one(1, f32::INFINITY), 1, RowsError::BadScale { row: 0, slot: SlotId::new(1), scale: f32::INFINITY }),
    ];
    for (rows, padded_rows, error) in refused {
        assert_eq!(step.stamp(&rows, padded_rows), Err(error));
        assert_eq!((step.num_rows(), step.row_slots().len(), step.entries().len(), step.groups().len()), (0, 0, 0, 0));
        step.stamp(&good, 3).unwrap();
        assert_eq!(step.row_slots, reference.row_slots);
        assert_eq!(step.entries, reference.entries);
        assert_eq!(step.groups, reference.groups);
        assert_eq!(step.row_entries, reference.row_entries);
    }
}

const NUM_SLOTS: u32 = 4;

fn any_rows() -> impl Strategy<Value = Vec<Vec<RowAdapter>>> {
    let adapters = prop::collection::vec((0..NUM_SLOTS, -2.0..2.0f32), 0..3);
    let row = adapters.prop_map(|uses| uses.into_iter().map(|(slot, scale)| adapter(slot, scale)).collect());
    prop::collection::vec(row, 0..48)
}

/// The slot of each entry, by the groups.
fn entry_slots(step: &StepRows) -> Vec<u32> {
    step.groups().iter().flat_map(|group| std::iter::repeat_n(group.slot, group.count as usize)).collect()
}

proptest! {
    #[test]
    fn any_batch_is_grouped_sorted_and_found_again(rows in any_rows(), padding in 0..5usize) {
        let padded_rows = rows.len() + padding;
        let mut step = step(64, 128, NUM_SLOTS as usize);
        step.stamp(&rows, padded_rows).unwrap();

        let mut next_entry = 0;
        for group in step.groups() {
            prop_assert_eq!(group.first_entry, next_entry);
            prop_assert!((1..=MAX_GROUP_ROWS as u32).contains(&group.count));
            next_entry += group.count;
        }
        prop_assert_eq!(next_entry as usize, step.entries().len());
        for pair in step.groups().windows(2) {
            prop_assert!(pair[0].slot < pair[1].slot || pair[0].count as usize == MAX_GROUP_ROWS);
        }
        let slots = entry_slots(&step);
        prop_assert!(slots.iter().zip(step.entries()).map(|(slot, entry)| (*slot, entry.row)).is_sorted());

        prop_assert_eq!(step.row_slots().len(), padded_rows);
        let mut used = vec![0; step.entries().len()];
        for row in 0..padded_rows {
            let found: Vec<RowAdapter> = step.row_entries(row).iter().map(|&entry| {
                used[entry as usize] += 1;
                assert_eq!(step.entries()[entry as usize].row as usize, row);
                adapter(slots[entry as usize], step.entries()[entry as usize].scale)
            }).collect();
            let named = rows.get(row).map_or(&[][..], Vec::as_slice);
            prop_assert_eq!(&found, named);
            let first = named.first().map_or(-1, |adapter| adapter.slot.raw() as i32);
            prop_assert_eq!(step.row_slots()[row], first);
        }
        prop_assert!(used.iter().all(|&count| count == 1));
    }

    #[test]
    fn a_refill_allocates_nothing(steps in prop::collection::vec(any_rows(), 1..6)) {
        let mut step = step(64, 128, NUM_SLOTS as usize);
        let places = |step: &StepRows| [
            (step.row_slots.as_ptr().addr(), step.row_slots.capacity()),
            (step.entries.as_ptr().addr(), step.entries.capacity()),
            (step.groups.as_ptr().addr(), step.groups.capacity()),
            (step.row_offsets.as_ptr().addr(), step.row_offsets.capacity()),
            (step.row_entries.as_ptr().addr(), step.row_entries.capacity()),
            (step.slot_places.as_ptr().addr(), step.slot_places.capacity()),
        ];
        let before = places(&step);
        step.stamp(&[[adapter(0, 1.0), adapter(1, 1.0)]; 64], 64).unwrap();
        for rows in &steps {
            step.stamp(rows, 64).unwrap();
        }
        prop_assert_eq!(places(&step), before);
    }

    #[test]
    fn routed_runs_cover_the_other_adapters_rows(
        slots in prop::collection::vec(prop::option::of(0..3u32), 0..24),
        active in prop::option::of((0..3u32).prop_map(SlotId::new)),
    ) {
        let routes: Vec<Route> =
            slots.iter().map(|slot| slot.map_or(Route::Base, |slot| Route::Slot(SlotId::new(slot)))).collect();
        let runs = routed_runs(&routes, active);
        let mut run_of_row = vec![None; routes.len()];
        for run in &runs {
            prop_assert!(!run.rows.is_empty());
            for row in run.rows.clone() {
                prop_assert_eq!(run_of_row[row].replace(run.slot), None);
            }
        }
        for (row, route) in routes.iter().enumerate() {
            prop_assert_eq!(run_of_row[row], route.slot().filter(|slot| Some(*slot) != active));
        }
        for pair in runs.windows(2) {
            prop_assert!(pair[0].rows.end <= pair[1].rows.start);
            prop_assert!(pair[0].rows.end < pair[1].rows.start || pair[0].slot != pair[1].slot);
        }
    }
}

#[test]
fn routed_runs_by_example() {
    let slot = |index| Route::Slot(SlotId::new(index));
    let routes = [slot(1), slot(1), Route::Base, slot(1), slot(0), slot(0), slot(2), slot(2)];
    let run = |index, rows| RowRun { slot: SlotId::new(index), rows };
    assert_eq!(routed_runs(&routes, Some(SlotId::new(0))), [run(1, 0..2), run(1, 3..4), run(2, 6..8)]);
    assert_eq!(routed_runs(&routes, None), [run(1, 0..2), run(1, 3..4), run(0, 4..6), run(2, 6..8)]);
    assert_eq!(routed_runs(&[Route::Base; 3], None), []);
}
