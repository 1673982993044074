//! The suite's back end on a CUDA device, the stand-in's or another.

use std::cell::RefCell;
use std::sync::Arc;

use conformance::kernels::{Backend, MAX_RANK, Problem};
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use half::{bf16, f16};
use lora_kernels::cuda::{CudaKernels, CudaStep, Element, StepBounds, Workspace, WorkspaceCapacity};
use lora_math::SlotDtype;
use lora_math::rows::RowsCapacity;

use crate::operands::Operands;

/// An element type with its conversions.
pub trait Value: Element + DeviceRepr {
    /// The nearest value.
    fn narrow(value: f32) -> Self;
    /// The same value.
    fn widen(self) -> f32;
    /// The value with these bits.
    fn from_bits(bits: u16) -> Self;
}

impl Value for bf16 {
    fn narrow(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn from_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
}

impl Value for f16 {
    fn narrow(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn from_bits(bits: u16) -> Self {
        f16::from_bits(bits)
    }
}

/// Kernels, a stream and a workspace of one context.
pub struct OnDevice {
    /// The kernels.
    pub kernels: CudaKernels,
    /// The stream of all work.
    pub stream: Arc<CudaStream>,
    workspace: RefCell<Workspace>,
}

impl OnDevice {
    /// The first device; `rows` and `max_in_features` size the workspace, which all problems share, so that each finds what
    /// the one before left.
    #[must_use]
    pub fn new(rows: RowsCapacity, max_in_features: usize) -> Self {
        let context = crate::context();
        let kernels = crate::kernels(&context);
        let stream = context.new_stream().expect("a stream");
        let bounds = StepBounds::tiled(rows);
        let capacity = WorkspaceCapacity { bounds, max_sites: 3, max_rank: MAX_RANK, max_in_features };
        let workspace = RefCell::new(Workspace::new(&stream, capacity).expect("a workspace"));
        OnDevice { kernels, stream, workspace }
    }

    /// A copy of rows in device memory, each followed by `gap` values of garbage.
    pub fn upload<T: Value>(&self, values: &[f32], width: usize, gap: usize) -> CudaSlice<T> {
        let garbage = std::iter::repeat_n(f32::NAN, gap);
        let rows = values.chunks_exact(width).flat_map(|row| row.iter().copied().chain(garbage.clone()));
        let mut rows: Vec<T> = rows.map(T::narrow).collect();
        if rows.is_empty() {
            rows.push(T::narrow(f32::NAN));
        }
        self.stream.clone_htod(&rows).expect("an upload")
    }

    /// All values of a buffer.
    pub fn download<T: Value>(&self, buffer: &CudaSlice<T>) -> Vec<f32> {
        let mut values = vec![T::narrow(0.0); buffer.len()];
        self.stream.memcpy_dtoh(buffer, &mut values).expect("a download");
        self.stream.synchronize().expect("work that runs");
        values.into_iter().map(T::widen).collect()
    }

    fn run<T: Value>(&self, problem: &Problem) -> Vec<Vec<f32>> {
        let mut operands = Operands::<T>::new(self, problem);
        let (groups, tiles) = problem.step();
        let mut step = CudaStep::new(&self.stream, StepBounds::tiled(problem.capacity())).expect("a step");
        step.upload(&groups, tiles.as_ref()).expect("an upload");
        operands.apply(self, &step, &mut self.workspace.borrow_mut());
        operands.outputs(self)
    }
}

impl Backend for OnDevice {
    fn activations(&self, slots: SlotDtype) -> Option<SlotDtype> {
        matches!(slots, SlotDtype::Bf16 | SlotDtype::F16).then_some(slots)
    }

    fn apply(&self, problem: &Problem) -> Vec<Vec<f32>> {
        if problem.case.dtype == SlotDtype::F16 { self.run::<f16>(problem) } else { self.run::<bf16>(problem) }
    }
}
