//! What a kernel must keep to, and the report.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::image::{Kernel, Loop};

/// `kernels/rules.json`: for each kernel, by its name without the element type, what it must keep to on every architecture.
#[derive(Debug, Deserialize)]
pub(super) struct Rules(BTreeMap<String, Rule>);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    /// At most.
    registers: u32,
    /// Static shared memory in bytes, at most.
    shared: u32,
    /// Blocks that a multiprocessor holds at once, at least.
    blocks: u32,
    /// Atomic operations, at most.
    atomics: usize,
    /// An innermost loop with at least so many tensor-core products and 128-bit loads, and no other global loads, is there.
    hot_loop: Option<HotLoop>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HotLoop {
    mma: usize,
    wide_loads: usize,
}

/// What a multiprocessor has: CUDA C++ Programming Guide, technical specifications by compute capability.
struct Multiprocessor {
    warps: u32,
    blocks: u32,
    shared: u32,
}

fn multiprocessor(architecture: u32) -> Multiprocessor {
    let (warps, blocks, kilobytes) = match architecture {
        80 => (64, 32, 164),
        86 => (48, 16, 100),
        89 | 120 | 121 => (48, 24, 100),
        _ => (64, 32, 228),
    };
    Multiprocessor { warps, blocks, shared: kilobytes << 10 }
}

/// Threads of every block.
const WARPS_PER_BLOCK: u32 = 4;
const REGISTERS: u32 = 65_536;
/// The runtime's own share of each block.
const RESERVED_SHARED: u32 = 1024;

/// Blocks that a multiprocessor holds at once. Registers are given out to warps, 256 at a time.
fn occupancy(kernel: &Kernel) -> u32 {
    let has = multiprocessor(kernel.architecture);
    let of_warp = (kernel.registers * 32).next_multiple_of(256).max(256);
    let by_registers = REGISTERS / of_warp / WARPS_PER_BLOCK;
    let by_shared = has.shared / (kernel.shared.next_multiple_of(128) + RESERVED_SHARED);
    by_registers.min(by_shared).min(has.warps / WARPS_PER_BLOCK).min(has.blocks)
}

fn base_name(name: &str) -> &str {
    name.rsplit_once('_').map_or(name, |(base, _)| base)
}

impl Rules {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    }

    /// What does not hold, each with kernel, architecture and both numbers.
    pub(super) fn check(&self, kernels: &[Kernel], architectures: &[u32]) -> Vec<String> {
        let mut faults = Vec::new();
        for kernel in kernels {
            match self.0.get(base_name(&kernel.name)) {
                Some(rule) => rule.check(kernel, &mut faults),
                None => faults.push(format!("{}: no rule", kernel.name)),
            }
        }
        for name in self.0.keys() {
            for architecture in architectures {
                let built = |kernel: &&Kernel| base_name(&kernel.name) == name && kernel.architecture == *architecture;
                if !kernels.iter().any(|kernel| built(&kernel)) {
                    faults.push(format!("{name}: not in the image for sm_{architecture}"));
                }
            }
        }
        faults
    }
}

impl Rule {
    fn check(&self, kernel: &Kernel, faults: &mut Vec<String>) {
        let mut fault = |text: String| faults.push(format!("{} for sm_{}: {text}", kernel.name, kernel.architecture));
        if kernel.registers > self.registers {
            fault(format!("{} registers, {} are allowed", kernel.registers, self.registers));
        }
        if kernel.shared > self.shared {
            fault(format!("{} bytes of shared memory, {} are allowed", kernel.shared, self.shared));
        }
        if kernel.local > 0 {
            fault(format!("{} in local memory: spills, or an array that is not in registers", kernel.local));
        }
        if occupancy(kernel) < self.blocks {
            fault(format!("{} blocks fit on a multiprocessor, {} are wanted", occupancy(kernel), self.blocks));
        }
        if kernel.atomics > self.atomics {
            fault(format!("{} atomic operations, {} are allowed", kernel.atomics, self.atomics));
        }
        if let Some(HotLoop { mma, wide_loads }) = self.hot_loop {
            let is_hot = |l: &&Loop| l.mma >= mma && l.wide_loads >= wide_loads && l.narrow_loads == 0;
            if !kernel.loops.iter().any(|l| is_hot(&l)) {
                fault(format!(
                    "no innermost loop with {mma} products, {wide_loads} loads of 128 bits and no others; there are {:?}",
                    kernel.loops
                ));
            }
        }
    }
}

/// A table of kernels by architectures: registers, shared bytes, blocks of a multiprocessor; products and 128-bit loads.
pub(super) fn report(kernels: &[Kernel]) -> String {
    let mut lines: BTreeMap<&str, Vec<&Kernel>> = BTreeMap::new();
    for kernel in kernels {
        lines.entry(&kernel.name).or_default().push(kernel);
    }
    let mut text = String::from(
        "kernel: for each architecture registers/blocks of a multiprocessor; shared bytes; of the first mma and 128-bit loads\n",
    );
    for (name, mut kernels) in lines {
        kernels.sort_by_key(|kernel| kernel.architecture);
        let each =
            kernels.iter().map(|kernel| format!("{}: {}/{}", kernel.architecture, kernel.registers, occupancy(kernel)));
        let each: Vec<String> = each.collect();
        let first = kernels[0];
        text += &format!(
            "  {name:<20} {}; {} B; {} mma, {} loads\n",
            each.join("  "),
            first.shared,
            first.mma,
            first.wide_loads
        );
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel {
            name: "shrink_bf16".into(),
            architecture: 80,
            registers: 80,
            shared: 2084,
            mma: 4,
            wide_loads: 6,
            atomics: 1,
            loops: vec![Loop { mma: 4, wide_loads: 6, narrow_loads: 0 }],
            ..Kernel::default()
        }
    }

    fn faults(change: impl Fn(&mut Kernel)) -> Vec<String> {
        let rules = r#"{"shrink": {"registers": 80, "shared": 4096, "blocks": 6, "atomics": 1,
                        "hot_loop": {"mma": 4, "wide_loads": 6}}}"#;
        let rules: Rules = serde_json::from_str(rules).unwrap();
        let mut kernel = kernel();
        change(&mut kernel);
        rules.check(&[kernel], &[80])
    }

    #[test]
    fn every_rule_can_be_broken() {
        assert_eq!(faults(|_| {}), [] as [&str; 0]);
        let broken = faults(|kernel| kernel.registers = 90);
        assert_eq!(
            broken,
            [
                "shrink_bf16 for sm_80: 90 registers, 80 are allowed",
                "shrink_bf16 for sm_80: 5 blocks fit on a multiprocessor, 6 are wanted"
            ]
        );
        assert!(faults(|kernel| kernel.shared = 5000)[0].contains("5000 bytes of shared memory, 4096 are allowed"));
        assert!(faults(|kernel| kernel.local = 4)[0].contains("4 in local memory"));
        assert!(faults(|kernel| kernel.atomics = 2)[0].contains("2 atomic operations, 1 are allowed"));
        assert!(faults(|kernel| kernel.loops[0].narrow_loads = 1)[0].contains("no innermost loop"));
        assert!(faults(|kernel| kernel.loops[0].mma = 3)[0].contains("no innermost loop"));
        assert_eq!(faults(|kernel| kernel.name = "other_bf16".into())[0], "other_bf16: no rule");
        assert_eq!(faults(|kernel| kernel.architecture = 90)[0], "shrink: not in the image for sm_80");
    }

    #[test]
    fn blocks_of_a_multiprocessor_are_the_least_of_what_each_resource_allows() {
        let blocks = |architecture, registers, shared| {
            occupancy(&Kernel { architecture, registers, shared, ..Kernel::default() })
        };
        assert_eq!(blocks(80, 32, 0), 16, "warps");
        assert_eq!(blocks(86, 32, 0), 12, "warps");
        assert_eq!(blocks(80, 128, 0), 4, "registers");
        assert_eq!(blocks(89, 64, 34_560), 2, "shared memory");
        assert_eq!(blocks(90, 64, 34_560), 6, "shared memory");
    }

    #[test]
    fn the_rules_of_the_tree_are_read() {
        Rules::read(&crate::root().join("kernels/rules.json")).unwrap();
    }
}
