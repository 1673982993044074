//! Every seeded fault is caught in the modes that can see it, and its correct twin passes in all of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use cuda_standin::{Mode, Variant, build_program, sources_in};

/// What a fault shows itself by.
#[derive(Clone, Copy, Debug)]
enum Shown {
    /// Numbers that are wrong or not numbers: exit code 1.
    Wrong,
    /// A report of the emulation with these words: exit code 3.
    Report(&'static str),
    /// A sanitizer's report with these words, whatever the exit code.
    Sanitizer(&'static str),
}

use Shown::{Report, Sanitizer, Wrong};

/// Cases, and for each what the modes show: plain, address, thread, thread with unordered blocks. `None`: nothing need
/// show there.
const CASES: &[(&str, [Option<Shown>; 4])] = &[
    ("missing_barrier", [Some(Wrong), Some(Wrong), RACE, RACE_BLOCKS]),
    ("reused_tile", [Some(Wrong), Some(Wrong), RACE, None]),
    ("divergent_barrier", [DIVERGENT; 4]),
    ("exited_thread", [EXITED; 4]),
    ("missing_lanes", [MISSING; 4]),
    ("waiting_elsewhere", [ELSEWHERE; 4]),
    ("lane_outside", [OUTSIDE; 4]),
    ("missing_syncwarp", [None, None, RACE, None]),
    ("early_read", [Some(Wrong), Some(Wrong), Some(Wrong), Some(Wrong)]),
    ("rank_bound", [None, HEAP, None, None]),
    ("tail_bound", [None, HEAP, None, None]),
    ("misaligned_load", [MISALIGNED; 4]),
    ("misaligned_pointer", [None, Some(Sanitizer("misaligned address")), None, None]),
    ("static_shared", [Some(Wrong), Some(Sanitizer("global-buffer-overflow")), None, None]),
    ("dynamic_shared", [None, HEAP, None, None]),
    ("shared_place", [None, None, None, RACE]),
];

const RACE: Option<Shown> = Some(Sanitizer("data race"));
/// A race on a static shared array is left out where blocks are unordered: there its address stands for many arrays.
const RACE_BLOCKS: Option<Shown> = Some(Wrong);
const HEAP: Option<Shown> = Some(Sanitizer("heap-buffer-overflow"));
const DIVERGENT: Option<Shown> = Some(Report("divergent barrier"));
const EXITED: Option<Shown> = Some(Report("returned, while 40 threads wait at the barrier"));
const MISSING: Option<Shown> = Some(Report("lanes 0x0000ffff wait for it"));
const ELSEWHERE: Option<Shown> = Some(Report("deadlock: 48 threads at the barrier"));
const OUTSIDE: Option<Shown> = Some(Report("lane 7 reads lane 8, which is not in mask 0x000000ff"));
const MISALIGNED: Option<Shown> = Some(Report("load of 16 bytes"));

const MODES: [Mode; 4] = [Mode::PLAIN, Mode::ADDRESS, Mode::THREAD, Mode::BLOCKS];

fn program(variant: Variant) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("faults");
    build_program(variant, "faults", &sources_in(&folder, &["cu", "cpp"])).unwrap_or_else(|error| panic!("{error}"))
}

fn run(program: &Path, mode: Mode, arguments: &[&str]) -> (Output, String) {
    let mut command = Command::new(program);
    mode.set_up(command.args(arguments));
    let output = command.output().expect("the program of faults runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, text)
}

#[test]
fn faults_are_caught_and_twins_pass() {
    let mut wrong = Vec::new();
    for (index, mode) in MODES.into_iter().enumerate() {
        let program = program(mode.variant);
        for (case, shown) in CASES {
            let (output, text) = run(&program, mode, &[case, "twin"]);
            if !output.status.success() {
                wrong.push(format!("{case}: twin in {mode:?}: {}\n{text}", output.status));
            }
            let Some(shown) = shown[index] else { continue };
            let (output, text) = run(&program, mode, &[case, "fault"]);
            let caught = match shown {
                Wrong => output.status.code() == Some(1),
                Report(words) => {
                    let head = format!("simt: kernel {case}_fault, block (0,0,0), ");
                    output.status.code() == Some(3) && text.contains(&head) && text.contains(words)
                }
                Sanitizer(words) => !output.status.success() && text.contains(words),
            };
            if !caught {
                wrong.push(format!("{case}: fault in {mode:?} is not {shown:?}: {}\n{text}", output.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn twins_pass_in_any_order() {
    let program = program(Variant::Plain);
    for seed in 1..=5 {
        for (case, _) in CASES {
            let (output, text) = run(&program, Mode::shuffled(seed), &[case, "twin"]);
            assert!(output.status.success(), "{case} with seed {seed}: {}\n{text}", output.status);
        }
    }
}

#[test]
fn every_case_of_the_program_is_in_the_table() {
    let (output, text) = run(&program(Variant::Plain), Mode::PLAIN, &[]);
    assert!(output.status.success(), "{text}");
    let listed: BTreeSet<&str> = text.lines().collect();
    assert_eq!(listed, CASES.iter().map(|(case, _)| *case).collect());
}
