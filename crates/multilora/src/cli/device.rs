//! What the command says of CUDA devices.

use lora_kernels::cuda::{NoDevice, probe};

/// One line on standard error: which device there is, or why there is none, and what runs instead.
pub(crate) fn tell() {
    eprintln!("note: {}", note(&probe()));
}

fn note(found: &Result<usize, NoDevice>) -> String {
    match found {
        Ok(count) => {
            let devices = if *count == 1 { "CUDA device" } else { "CUDA devices" };
            format!(
                "{count} {devices} found and not used: the base model has no forward pass on CUDA yet; the CPU runs it"
            )
        }
        Err(why) => format!("{why}; the CPU runs the model"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_one_line() {
        let one = note(&Ok(1));
        assert_eq!(
            one,
            "1 CUDA device found and not used: the base model has no forward pass on CUDA yet; the CPU runs it"
        );
        assert!(note(&Ok(2)).starts_with("2 CUDA devices found"));
        let none = note(&Err(NoDevice::NoDevice));
        assert_eq!(none, "the CUDA driver has no device; the CPU runs the model");
        // Whatever this machine has.
        assert!(!note(&probe()).contains('\n'));
    }
}
