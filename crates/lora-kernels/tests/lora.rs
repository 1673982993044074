//! Every body of `support` mounted for every back end. A back end that this machine lacks says so and is not counted.

mod support;

use lora_kernels::cpu::Isa;
use lora_kernels::{Cpu, LoraKernels, Reference};
use support::{bodies, embedding, refusals};

fn cpu(isa: Isa, body: fn(&dyn LoraKernels)) {
    match Cpu::with_isa(isa) {
        Ok(cpu) => body(&cpu),
        Err(error) => eprintln!("skipped: {error}"),
    }
}

macro_rules! mount {
    ($($module:ident::$body:ident),+ $(,)?) => {
        mod reference { $(#[test] fn $body() { crate::$module::$body(&crate::Reference) })+ }
        mod scalar { $(#[test] fn $body() { crate::cpu(crate::Isa::Scalar, crate::$module::$body) })+ }
        mod avx2 { $(#[test] fn $body() { crate::cpu(crate::Isa::Avx2, crate::$module::$body) })+ }
        mod avx512 { $(#[test] fn $body() { crate::cpu(crate::Isa::Avx512, crate::$module::$body) })+ }
    };
}

mount!(
    bodies::matches_the_oracle,
    bodies::reads_nothing_past_the_rank,
    bodies::rank_zero_touches_nothing,
    bodies::rows_do_not_depend_on_company,
    bodies::entries_are_added_in_order,
    bodies::a_run_keeps_to_its_rows,
    bodies::threads_do_not_change_bits,
    embedding::gathers_by_token,
    embedding::refuses_other_tokens,
    refusals::shrink,
    refusals::expand,
    refusals::delta,
);
