//! See `entry::config`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use multilora_fuzz::{entry, scratch};

fuzz_target!(|input: &[u8]| {
    entry::config(scratch(), input);
});
