//! A problem's operands in device memory.

use conformance::kernels::{Image, MAX_RANK, NUM_SLOTS, Problem};
use cudarc::driver::{CudaSlice, DevicePtr};
use lora_kernels::SiteRef;
use lora_kernels::cuda::{CudaStep, DeviceRows, DeviceRowsMut, DeviceTable, Workspace};

use crate::backend::{OnDevice, Value};

/// Slots, a table, inputs, outputs, and what the outputs are before an operation.
pub struct Operands<T> {
    problem: Problem,
    values: CudaSlice<u16>,
    entries: CudaSlice<u8>,
    num_sites: usize,
    x: CudaSlice<T>,
    y: Vec<CudaSlice<T>>,
    base: Vec<CudaSlice<T>>,
    /// Of each buffer in `y`.
    widths: Vec<usize>,
    /// Garbage between two rows of x and of y.
    gap: usize,
}

impl<T: Value> Operands<T> {
    /// The operands of a problem, laid out as its case says.
    #[must_use]
    pub fn new(device: &OnDevice, problem: &Problem) -> Self {
        let case = problem.case;
        let image = Image::new(problem);
        let values = device.stream.clone_htod(&image.values).expect("an upload");
        let entries = device.stream.clone_htod(&table_bytes(device, &image, &values)).expect("an upload");
        // Rows that are not packed lie on boundaries of 16 bytes where their width allows it.
        let gap = if case.packed { 5 } else { 8 };
        let x = device.upload::<T>(&problem.x, case.in_features, gap);
        let widths: Vec<usize> = problem.sites.iter().map(|site| site.features.out_features).collect();
        let (outputs, widths) = if case.side_by_side {
            let rows = (0..problem.num_rows()).flat_map(|row| beside(&problem.y, &widths, row));
            (vec![rows.collect()], vec![widths.iter().sum()])
        } else {
            (problem.y.clone(), widths)
        };
        let upload = || outputs.iter().zip(&widths).map(|(y, &width)| device.upload(y, width, gap)).collect();
        let (y, base) = (upload(), upload());
        Operands { problem: problem.clone(), values, entries, num_sites: image.num_sites, x, y, base, widths, gap }
    }

    /// Puts other adapters in the place of those that are there: the same sizes, other values. Graphs that captured the
    /// addresses stay valid.
    pub fn load(&mut self, device: &OnDevice, problem: &Problem) {
        let image = Image::new(problem);
        device.stream.memcpy_htod(&image.values, &mut self.values).expect("an upload");
        let entries = table_bytes(device, &image, &self.values);
        device.stream.memcpy_htod(&entries, &mut self.entries).expect("an upload");
        self.problem.pairs.clone_from(&problem.pairs);
    }

    /// The problem, as it is with these adapters.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Sets the outputs to what they are before an operation: in place of a base product.
    pub fn reset(&mut self, device: &OnDevice) {
        for (y, base) in self.y.iter_mut().zip(&self.base) {
            device.stream.memcpy_dtod(base, y).expect("a copy");
        }
    }

    /// Shrink and expand of a step.
    pub fn apply(&mut self, device: &OnDevice, step: &CudaStep, workspace: &mut Workspace) {
        let (rows, case) = (self.problem.num_rows(), self.problem.case);
        let address = self.entries.device_ptr(&device.stream).0;
        // SAFETY: table and values live as long as these operands, which tests keep until the work has run.
        let table = unsafe { DeviceTable::from_raw(address, NUM_SLOTS, self.num_sites, case.dtype, MAX_RANK) };
        let sites = &self.problem.sites;
        let x = DeviceRows::strided(&self.x, rows, case.in_features, case.in_features + self.gap).expect("rows");
        device.kernels.shrink(&table, step, sites, x, workspace).expect("a shrink");
        let mut views: Vec<DeviceRowsMut<'_, T>> = self
            .y
            .iter_mut()
            .zip(&self.widths)
            .map(|(y, &width)| DeviceRowsMut::strided(y, rows, width, width + self.gap).expect("rows"))
            .collect();
        device.kernels.expand(&table, step, sites, workspace, &mut views).expect("an expand");
    }

    /// The outputs of each site; what lies between rows must be as it was.
    #[must_use]
    pub fn outputs(&self, device: &OnDevice) -> Vec<Vec<f32>> {
        let without_gaps = |(y, &width): (&CudaSlice<T>, &usize)| -> Vec<f32> {
            let values = device.download(y);
            let rows = values.chunks_exact(width + self.gap).take(self.problem.num_rows());
            rows.flat_map(|row| {
                assert!(row[width..].iter().all(|value| value.is_nan()), "a write between the rows");
                row[..width].to_vec()
            })
            .collect()
        };
        let found: Vec<Vec<f32>> = self.y.iter().zip(&self.widths).map(without_gaps).collect();
        if self.problem.case.side_by_side { apart(&found[0], &self.problem.sites) } else { found }
    }
}

/// The slot table over values in device memory.
fn table_bytes(device: &OnDevice, image: &Image, values: &CudaSlice<u16>) -> Vec<u8> {
    image.entries(values.device_ptr(&device.stream).0).into_iter().flat_map(|entry| entry.to_bytes()).collect()
}

/// A row of all sites' outputs, one behind the other.
fn beside(y: &[Vec<f32>], widths: &[usize], row: usize) -> Vec<f32> {
    y.iter().zip(widths).flat_map(|(y, &width)| y[row * width..][..width].iter().copied()).collect()
}

/// The outputs of each site, out of rows that have all of them.
fn apart(values: &[f32], sites: &[SiteRef]) -> Vec<Vec<f32>> {
    let total = sites.iter().map(|site| site.features.out_features).sum::<usize>();
    let mut first = 0;
    sites
        .iter()
        .map(|site| {
            let width = site.features.out_features;
            let column = values.chunks_exact(total).flat_map(|row| row[first..first + width].to_vec()).collect();
            first += width;
            column
        })
        .collect()
}
