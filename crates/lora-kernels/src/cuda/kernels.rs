//! The operations: checks, arguments, launches.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use lora_math::SlotDtype;

use super::abi::{ExpandArgs, GatherArgs, MAX_SITES, ShrinkArgs, TableView};
use super::error::CudaError;
use super::image;
use super::shapes::{self, Grid};
use super::step::{CudaStep, StepCounts};
use super::views::{DeviceRows, DeviceRowsMut, DeviceTable, Element};
use super::workspace::Workspace;
use crate::error::{KernelError, Operand};
use crate::table::SiteRef;

/// The kernels that know the element type.
pub(super) struct Typed {
    bgmv_shrink: CudaFunction,
    bgmv_expand: CudaFunction,
    delta_shrink: CudaFunction,
    delta_expand: CudaFunction,
    pub(super) logits_overlay: CudaFunction,
}

/// LoRA on rows that use different adapters, on a CUDA device.
///
/// Made from an engine's own context; every launch goes to the stream of the [`CudaStep`] and [`Workspace`] that it names.
/// Nothing is allocated on the device by an operation, nothing is global, and no operation waits for the device, so all of
/// them can be captured in a graph.
pub struct CudaKernels {
    bf16: Typed,
    f16: Typed,
    bgmv_gather: CudaFunction,
    delta_gather: CudaFunction,
    pub(super) embed_overlay: CudaFunction,
    pub(super) row_diff: CudaFunction,
}

impl CudaKernels {
    /// Loads the kernels that this build carries.
    ///
    /// # Errors
    /// [`CudaError::NoImage`] where it was built without nvcc; [`CudaError::ImageRefused`] where they are for other
    /// devices.
    pub fn load(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        // SAFETY: the image is the one that this release's build script made of this release's sources.
        unsafe { Self::load_image(context, image::image()?) }
    }

    /// Loads kernels from an image of the caller's: a fat binary or a cubin.
    ///
    /// # Safety
    /// The image is whole, for the driver reads as far as its headers say; and it was built of the kernels that this
    /// release of the crate ships, for a kernel of this name with other arguments would read them as addresses.
    ///
    /// # Errors
    /// [`CudaError::ImageRefused`], [`CudaError::MissingKernel`].
    pub unsafe fn load_image(context: &Arc<CudaContext>, image: &[u8]) -> Result<Self, CudaError> {
        let module = image::load(context, image)?;
        Ok(CudaKernels {
            bf16: Typed {
                bgmv_shrink: function(&module, "bgmv_shrink_bf16")?,
                bgmv_expand: function(&module, "bgmv_expand_bf16")?,
                delta_shrink: function(&module, "delta_shrink_bf16")?,
                delta_expand: function(&module, "delta_expand_bf16")?,
                logits_overlay: function(&module, "logits_overlay_bf16")?,
            },
            f16: Typed {
                bgmv_shrink: function(&module, "bgmv_shrink_f16")?,
                bgmv_expand: function(&module, "bgmv_expand_f16")?,
                delta_shrink: function(&module, "delta_shrink_f16")?,
                delta_expand: function(&module, "delta_expand_f16")?,
                logits_overlay: function(&module, "logits_overlay_f16")?,
            },
            bgmv_gather: function(&module, "bgmv_gather_16")?,
            delta_gather: function(&module, "delta_gather_16")?,
            embed_overlay: function(&module, "embed_overlay_16")?,
            row_diff: function(&module, "row_diff_16")?,
        })
    }

    pub(super) fn typed<T: Element>(&self) -> &Typed {
        if T::DTYPE == SlotDtype::F16 { &self.f16 } else { &self.bf16 }
    }

    /// h = A·x for every use of an adapter in the step, at every site; `x` `[rows, in_features]` has the step's rows,
    /// padding included, in a graph the most that there may be. `sites` are up to 4 projections that read the same `x`.
    /// Groups of rows take one launch, tiles of long runs another; a step that has none of either takes none.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn shrink<T: Element>(
        &self,
        table: &DeviceTable<'_>,
        step: &CudaStep,
        sites: &[SiteRef],
        x: DeviceRows<'_, T>,
        workspace: &mut Workspace,
    ) -> Result<(), CudaError> {
        let counts = check_step::<T>(table, step, sites, workspace)?;
        check_rows(Operand::Input, x.shape.num_rows, counts.rows)?;
        let in_features = x.shape.width;
        for site in sites {
            check_width(Operand::Input, site.features.in_features, in_features)?;
        }
        workspace.check_fits(&counts, sites.len(), in_features)?;
        let (chunk, num_chunks) = shapes::chunks(in_features);
        let splits = sites.len() * shapes::rank_splits(table.max_rank.min(workspace.capacity().max_rank));
        let (grouped, tiled) =
            (Grid::new(num_chunks, splits, counts.groups)?, Grid::new(num_chunks, splits, counts.tiles)?);

        let stream = step.stream();
        let (x_address, _x) = x.values.device_ptr(stream);
        let scratch = workspace.addresses();
        let mut columns = [0; MAX_SITES];
        for (column, site) in columns.iter_mut().zip(sites) {
            *column = site.index as u32;
        }
        let args = ShrinkArgs {
            table: table_view(table),
            step: step.metadata(),
            x: x_address,
            stride: x.shape.stride as u32,
            in_features: in_features as u32,
            chunk: chunk as u32,
            num_chunks: num_chunks as u32,
            num_sites: sites.len() as u32,
            sites: columns,
            h_stride: workspace.h_stride() as u32,
            partials: scratch.partials,
            tickets: scratch.tickets,
            h: scratch.h,
        };
        let kernels = self.typed::<T>();
        // SAFETY: `check_step` and the checks above keep every address that the kernels form inside the operands and the
        // workspace; the table's contract covers A and B.
        unsafe {
            launch(stream, &kernels.bgmv_shrink, grouped, &args, "launching bgmv_shrink")?;
            launch(
                stream,
                &kernels.delta_shrink,
                tiled,
                &ShrinkArgs { h: scratch.tile_h, ..args },
                "launching delta_shrink",
            )?;
        }
        workspace.hold(&counts, sites.len());
        Ok(())
    }

    /// h = A\[token of the row\] for every use of an adapter in the step: the shrink of an embedding, whose A lies
    /// `[vocab_size, rank]` and whose `in_features` are the vocabulary. `token_ids` has one for each row of the step,
    /// padding included. The [`expand`](Self::expand) of the same site adds it to the embedded rows. The device reads the
    /// tokens, so those past the vocabulary are no error here: their h is 0.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn gather<T: Element>(
        &self,
        table: &DeviceTable<'_>,
        step: &CudaStep,
        site: &SiteRef,
        token_ids: &dyn DevicePtr<u32>,
        workspace: &mut Workspace,
    ) -> Result<(), CudaError> {
        let counts = check_step::<T>(table, step, std::slice::from_ref(site), workspace)?;
        check_rows(Operand::Input, token_ids.len(), counts.rows)?;
        workspace.check_fits(&counts, 1, 1)?;
        let grouped = Grid::new(counts.entries.div_ceil(shapes::WARPS), 1, 1)?;
        let tiled = Grid::new(counts.tiles, 1, 1)?;

        let stream = step.stream();
        let (tokens, _tokens) = token_ids.device_ptr(stream);
        let scratch = workspace.addresses();
        let args = GatherArgs {
            table: table_view(table),
            step: step.metadata(),
            token_ids: tokens,
            site: site.index as u32,
            vocab_size: site.features.in_features as u32,
            h: scratch.h,
            h_stride: workspace.h_stride() as u32,
            reserved: 0,
        };
        // SAFETY: as in `shrink`; tokens past the vocabulary are not looked up.
        unsafe {
            launch(stream, &self.bgmv_gather, grouped, &args, "launching bgmv_gather")?;
            launch(
                stream,
                &self.delta_gather,
                tiled,
                &GatherArgs { h: scratch.tile_h, ..args },
                "launching delta_gather",
            )?;
        }
        workspace.hold(&counts, 1);
        Ok(())
    }

    /// `y[site][row] += scale · scaling · B·h` for every use of an adapter, those of one row in the request's order; the
    /// workspace holds the shrink of the same step and sites. `y` has an output `[rows, out_features]` for each site, or
    /// one for all of them, with their columns side by side. Rows and sites to which nothing is added keep their bits.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn expand<T: Element>(
        &self,
        table: &DeviceTable<'_>,
        step: &CudaStep,
        sites: &[SiteRef],
        workspace: &Workspace,
        y: &mut [DeviceRowsMut<'_, T>],
    ) -> Result<(), CudaError> {
        let counts = check_step::<T>(table, step, sites, workspace)?;
        workspace.check_holds(&counts, sites.len())?;
        let side_by_side = y.len() == 1 && sites.len() > 1;
        if !side_by_side && y.len() != sites.len() {
            return Err(KernelError::OutputCount { sites: sites.len(), outputs: y.len() }.into());
        }
        if side_by_side {
            let width = sites.iter().map(|site| site.features.out_features).sum();
            check_width(Operand::Output, width, y[0].shape.width)?;
        } else {
            for (site, y) in sites.iter().zip(y.iter()) {
                check_width(Operand::Output, site.features.out_features, y.shape.width)?;
            }
        }
        for y in y.iter() {
            check_rows(Operand::Output, y.shape.num_rows, counts.rows)?;
        }

        let stream = step.stream();
        let mut places = [(0, 0); MAX_SITES];
        // Kept until the launches stand in the stream: what cudarc tracks of the outputs is recorded behind them.
        let mut guards: [Option<SyncOnDrop<'_>>; MAX_SITES] = [const { None }; MAX_SITES];
        for ((place, guard), y) in places.iter_mut().zip(&mut guards).zip(y) {
            let stride = y.shape.stride;
            let (address, sync) = y.values.device_ptr_mut(stream);
            *place = (address, stride);
            *guard = Some(sync);
        }
        if side_by_side {
            let (mut address, stride) = places[0];
            for (place, site) in places.iter_mut().zip(sites) {
                *place = (address, stride);
                address += (site.features.out_features * size_of::<T>()) as u64;
            }
        }
        let (outputs, blocks) = shapes::expand_sites(sites, &places);
        let (grouped, tiled) = (Grid::new(blocks, counts.groups, 1)?, Grid::new(blocks, counts.tiles, 1)?);
        let scratch = workspace.addresses();
        let args = ExpandArgs {
            table: table_view(table),
            step: step.metadata(),
            h: scratch.h,
            h_stride: workspace.h_stride() as u32,
            num_sites: sites.len() as u32,
            sites: outputs,
        };
        let kernels = self.typed::<T>();
        // SAFETY: as in `shrink`; rows of groups and of tiles are different ones, so no two blocks write one place.
        unsafe {
            launch(stream, &kernels.bgmv_expand, grouped, &args, "launching bgmv_expand")?;
            launch(
                stream,
                &kernels.delta_expand,
                tiled,
                &ExpandArgs { h: scratch.tile_h, ..args },
                "launching delta_expand",
            )?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for CudaKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaKernels").finish_non_exhaustive()
    }
}

fn function(module: &Arc<CudaModule>, name: &'static str) -> Result<CudaFunction, CudaError> {
    module.load_function(name).map_err(|source| CudaError::MissingKernel { name, source })
}

/// Launches a kernel of one struct of arguments; nothing for an empty grid.
///
/// # Safety
/// `args` is the struct that the kernel takes, and every address that it forms of it is one of memory that lives until
/// the launch has run.
pub(super) unsafe fn launch<A: DeviceRepr>(
    stream: &CudaStream,
    kernel: &CudaFunction,
    grid: Grid,
    args: &A,
    what: &'static str,
) -> Result<(), CudaError> {
    if grid.is_empty() {
        return Ok(());
    }
    let config =
        LaunchConfig { grid_dim: (grid.0, grid.1, grid.2), block_dim: (shapes::THREADS, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the caller vouches for the arguments; kernels here have blocks of this many threads and no dynamic shared
    // memory.
    unsafe { stream.launch_builder(kernel).arg(args).launch(config) }.map_err(CudaError::driver(what))?;
    Ok(())
}

/// What every operation checks of the table, the step and the workspace; gives what the launch is for.
fn check_step<T: Element>(
    table: &DeviceTable<'_>,
    step: &CudaStep,
    sites: &[SiteRef],
    workspace: &Workspace,
) -> Result<StepCounts, CudaError> {
    if step.stream().cu_stream() != workspace.stream().cu_stream() {
        return Err(CudaError::StreamMismatch);
    }
    if table.dtype != T::DTYPE {
        return Err(CudaError::Dtype { table: table.dtype, activations: T::DTYPE });
    }
    if sites.len() > MAX_SITES {
        return Err(CudaError::TooLarge { what: "sites", count: sites.len(), max: MAX_SITES });
    }
    for site in sites {
        if site.index >= table.num_sites {
            return Err(KernelError::SiteOutOfRange { site: site.index, num_sites: table.num_sites }.into());
        }
        let features = site.features;
        for (what, count) in [("input features", features.in_features), ("output features", features.out_features)] {
            if count > i32::MAX as usize {
                return Err(CudaError::TooLarge { what, count, max: i32::MAX as usize });
            }
        }
    }
    let num_slots = step.bounds().rows.num_slots;
    if num_slots > table.num_slots {
        return Err(CudaError::StepTooLarge { what: "slots", count: num_slots, max: table.num_slots });
    }
    let max_rank = workspace.capacity().max_rank;
    if table.max_rank > max_rank {
        return Err(CudaError::WorkspaceTooSmall { what: "ranks", count: table.max_rank, max: max_rank });
    }
    step.launch_counts()
}

pub(super) fn check_rows(operand: Operand, found: usize, expected: usize) -> Result<(), CudaError> {
    if found < expected { Err(KernelError::RowCount { operand, expected, found }.into()) } else { Ok(()) }
}

pub(super) fn check_width(operand: Operand, expected: usize, found: usize) -> Result<(), CudaError> {
    if expected != found { Err(KernelError::Width { operand, expected, found }.into()) } else { Ok(()) }
}

fn table_view(table: &DeviceTable<'_>) -> TableView {
    TableView { entries: table.address, num_sites: table.num_sites as u32, reserved: 0 }
}
