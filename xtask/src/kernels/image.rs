//! What is in an image, out of cuobjdump's text.

use anyhow::{Context, Result, bail};

/// One kernel for one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) architecture: u32,
    pub(super) registers: u32,
    /// Static, in bytes.
    pub(super) shared: u32,
    /// Stack, local memory, and instructions that touch it: anything else than 0 is a spill or an array in memory.
    pub(super) local: u32,
    /// Products of tensor cores.
    pub(super) mma: usize,
    /// Global loads of 128 bits.
    pub(super) wide_loads: usize,
    /// Atomic operations on global memory.
    pub(super) atomics: usize,
    pub(super) loops: Vec<Loop>,
}

/// What an innermost loop holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) mma: usize,
    pub(super) wide_loads: usize,
    /// Global loads of fewer bits.
    pub(super) narrow_loads: usize,
}

/// An instruction and its address.
struct Instruction<'a> {
    address: u64,
    text: &'a str,
}

/// All kernels of `cuobjdump -sass` and `-res-usage`.
pub(super) fn kernels(sass: &str, usage: &str) -> Result<Vec<Kernel>> {
    let mut kernels = resources(usage)?;
    let mut architecture = 0;
    let mut current: Option<(usize, Vec<Instruction<'_>>)> = None;
    let finish = |current: Option<(usize, Vec<Instruction<'_>>)>, kernels: &mut Vec<Kernel>| {
        if let Some((index, instructions)) = current {
            count(&mut kernels[index], &instructions);
        }
    };
    for line in sass.lines() {
        if let Some(number) = line.strip_prefix("arch = sm_") {
            architecture = number.trim().parse().with_context(|| format!("{line:?}"))?;
        } else if let Some((_, name)) = line.split_once("Function : ") {
            finish(current.take(), &mut kernels);
            let known = |kernel: &Kernel| kernel.name == name.trim() && kernel.architecture == architecture;
            let index = kernels.iter().position(known);
            let index = index.with_context(|| format!("sm_{architecture} {name}: no resource usage"))?;
            current = Some((index, Vec::new()));
        } else if let (Some((_, instructions)), Some(instruction)) = (&mut current, instruction(line)) {
            instructions.push(instruction);
        }
    }
    finish(current, &mut kernels);
    if kernels.is_empty() {
        bail!("the image has no kernels");
    }
    Ok(kernels)
}

/// `        /*0120*/     @P0 BRA 0x600 ;     /* encoding */`
fn instruction(line: &str) -> Option<Instruction<'_>> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let text = rest.split_once(';')?.0.trim();
    Some(Instruction { address: u64::from_str_radix(address, 16).ok()?, text })
}

fn count(kernel: &mut Kernel, instructions: &[Instruction<'_>]) {
    let all = |of: fn(&str) -> bool| instructions.iter().filter(|instruction| of(instruction.text)).count();
    kernel.mma = all(is_mma);
    kernel.wide_loads = all(|text| is_load(text) && is_wide(text));
    kernel.atomics = all(|text| has(text, &["ATOM", "ATOMG", "RED", "REDG"]));
    kernel.local += all(|text| has(text, &["LDL", "STL"])) as u32;
    let spans: Vec<(u64, u64)> = instructions.iter().filter_map(backward_branch).collect();
    let inside = |a: &(u64, u64), b: &(u64, u64)| a != b && b.0 <= a.0 && a.1 <= b.1;
    for span in spans.iter().filter(|span| !spans.iter().any(|other| inside(other, span))) {
        let body = || instructions.iter().filter(|i| (span.0..=span.1).contains(&i.address)).map(|i| i.text);
        kernel.loops.push(Loop {
            mma: body().filter(|text| is_mma(text)).count(),
            wide_loads: body().filter(|text| is_load(text) && is_wide(text)).count(),
            narrow_loads: body().filter(|text| is_load(text) && !is_wide(text)).count(),
        });
    }
}

/// Target and address of a branch that goes back: a loop.
fn backward_branch(instruction: &Instruction<'_>) -> Option<(u64, u64)> {
    if !has(instruction.text, &["BRA"]) {
        return None;
    }
    let target = instruction.text.rsplit_once("0x")?.1;
    let digits = target.find(|c: char| !c.is_ascii_hexdigit()).map_or(target, |end| &target[..end]);
    let target = u64::from_str_radix(digits, 16).ok()?;
    (target <= instruction.address).then_some((target, instruction.address))
}

/// Whether an instruction is one of these, whatever its predicate and modifiers.
fn has(text: &str, operations: &[&str]) -> bool {
    let operation = text.split_whitespace().find(|word| !word.starts_with('@'));
    let name = operation.map(|operation| operation.split('.').next().unwrap_or(operation));
    name.is_some_and(|name| operations.contains(&name))
}

fn is_mma(text: &str) -> bool {
    has(text, &["HMMA"])
}

fn is_load(text: &str) -> bool {
    has(text, &["LDG"])
}

fn is_wide(text: &str) -> bool {
    text.contains(".128")
}

/// Kernels with their registers and memory, out of `-res-usage`.
fn resources(usage: &str) -> Result<Vec<Kernel>> {
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut architecture = 0;
    let mut name = None;
    for line in usage.lines() {
        if let Some(number) = line.strip_prefix("arch = sm_") {
            architecture = number.trim().parse().with_context(|| format!("{line:?}"))?;
        } else if let Some(function) = line.trim().strip_prefix("Function ") {
            name = Some(function.trim_end_matches(':').to_owned());
        } else if let (true, Some(name)) = (line.trim_start().starts_with("REG:"), name.take()) {
            let number = |key: &str| -> Result<u32> {
                let value = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix(':'));
                value.and_then(|value| value.parse().ok()).with_context(|| format!("no {key} in {line:?}"))
            };
            let local = number("STACK")? + number("LOCAL")?;
            // From 9.0 on the number holds the runtime's own share of each block.
            let reserved = if architecture >= 90 { 1024 } else { 0 };
            let (registers, shared) = (number("REG")?, number("SHARED")?.saturating_sub(reserved));
            kernels.push(Kernel { name, architecture, registers, shared, local, ..Kernel::default() });
        }
    }
    Ok(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: &str = "\
Fatbin elf code:
arch = sm_80
Resource usage:
 Common:
  GLOBAL:0
 Function shrink_bf16:
  REG:80 STACK:16 SHARED:2084 LOCAL:0 CONSTANT[2]:8 CONSTANT[0]:504 TEXTURE:0 SURFACE:0 SAMPLER:0
";

    const SASS: &str = "\
arch = sm_80
\t\tFunction : shrink_bf16
\t.headerflags\t@\"EF_CUDA_SM80\"
        /*0000*/                   LDG.E.U16.CONSTANT R4, [R4.64] ;     /* 0x0000000c04047981 */
                                                                        /* 0x000ea8000c1e1900 */
        /*0010*/              @!P0 LDG.E.NA.128.CONSTANT R8, [R8.64] ;  /* 0x0 */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x0 */
        /*0030*/               @P0 BRA 0x10 ;                           /* 0x0 */
        /*0040*/                   LDG.E R4, [R4.64] ;                  /* 0x0 */
        /*0050*/                   STL [R1], R2 ;                       /* 0x0 */
        /*0060*/               @P0 BRA 0x40 ;                           /* 0x0 */
        /*0070*/                   ATOMG.E.ADD.STRONG.GPU PT, R5, [R2.64], R5 ; /* 0x0 */
        /*0080*/               @P1 BRA 0x0 ;                            /* 0x0 */
        /*0090*/                   BRA 0x90;                            /* 0x0 */
";

    #[test]
    fn a_kernel_is_counted_with_its_innermost_loops() {
        let kernels = kernels(SASS, USAGE).unwrap();
        let [kernel] = &kernels[..] else { panic!("{kernels:?}") };
        assert_eq!((kernel.name.as_str(), kernel.architecture), ("shrink_bf16", 80));
        assert_eq!((kernel.registers, kernel.shared, kernel.local), (80, 2084, 17));
        assert_eq!((kernel.mma, kernel.wide_loads, kernel.atomics), (1, 1, 1));
        let hot = Loop { mma: 1, wide_loads: 1, narrow_loads: 0 };
        assert_eq!(kernel.loops, [hot, Loop { narrow_loads: 1, ..Loop::default() }, Loop::default()]);
    }

    #[test]
    fn text_without_kernels_is_refused() {
        assert!(kernels("", "").is_err());
        assert!(kernels(SASS, "").is_err(), "a function of unknown registers");
    }
}
