//! What stands in the way of a first launch, each told as what it is.

use conformance::kernels::NUM_SLOTS;
use conformance_cuda::{OnDevice, on_kernels, on_standin};
use cuda_standin::Mode;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use half::{bf16, f16};
use lora_kernels::cuda::{
    CudaError, CudaKernels, CudaStep, DeviceRows, DeviceRowsMut, DeviceTable, NoDevice, StepBounds, Workspace,
    WorkspaceCapacity, probe,
};
use lora_kernels::{KernelError, SiteRef};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SlotDtype, SlotId, StepRows};

#[test]
fn a_machine_without_a_driver_or_device_says_so() {
    // In this process there is what the machine has; a device on it is no fault.
    if let Err(NoDevice::NoDriver { .. }) = probe() {
        let text = probe().expect_err("still no driver").to_string();
        assert!(text.starts_with("no CUDA driver: ") && !text.contains('\n'), "{text}");
    }
    on_standin("a_machine_without_a_driver_or_device_says_so", &[Mode::PLAIN], || {
        assert!(probe().expect("the stand-in's device") >= 1);
    });
}

#[test]
fn a_driver_without_a_device_says_so() {
    on_standin("a_driver_without_a_device_says_so", &[Mode::PLAIN], || {
        // SAFETY: this process has one thread that looks at the environment, and the driver has not started.
        unsafe { std::env::set_var("STANDIN_NO_DEVICE", "1") };
        assert!(matches!(probe(), Err(NoDevice::NoDevice)));
    });
}

#[test]
fn images_that_do_not_load_are_refused() {
    on_standin("images_that_do_not_load_are_refused", &[Mode::PLAIN], || {
        let context = CudaContext::new(0).expect("a context");
        // SAFETY: the stand-in looks at the first bytes only.
        let load = |image: &[u8]| unsafe { CudaKernels::load_image(&context, image) };
        let error = load(b"").expect_err("no image");
        assert!(matches!(error, CudaError::NoImage));
        let text = error.to_string();
        for way in ["nvcc", "CUDA_HOME", "KERNELS_REQUIRED=1", "KERNELS_FATBIN", "load_image"] {
            assert!(text.contains(way), "{text}");
        }
        assert!(matches!(load(b"not an image of any kind"), Err(CudaError::ImageRefused { .. })));
        load(b"STANDIN\n").expect("the stand-in's image");
    });
}

/// An engine's operands, of which each check spoils one.
struct Engine {
    device: OnDevice,
    step: CudaStep,
    workspace: Workspace,
    entries: CudaSlice<u8>,
}

const CAPACITY: RowsCapacity = RowsCapacity { max_rows: 4, max_entries: 4, num_slots: NUM_SLOTS };
const BOUNDS: StepBounds = StepBounds { rows: CAPACITY, max_groups: 4, max_tiles: 0, max_uses: 0 };
const SITE: SiteRef = SiteRef { index: 1, features: Features { in_features: 16, out_features: 8 } };

impl Engine {
    fn new() -> Self {
        let device = OnDevice::new(RowsCapacity { max_rows: 0, max_entries: 0, num_slots: NUM_SLOTS }, 1);
        let mut step = CudaStep::new(&device.stream, BOUNDS).expect("a step");
        let mut rows = StepRows::with_capacity(CAPACITY);
        rows.stamp(&[[RowAdapter { slot: SlotId::new(1), scale: 1.0 }]; 3], 4).expect("rows");
        step.upload(&rows, None).expect("an upload");
        let capacity = WorkspaceCapacity { bounds: BOUNDS, max_sites: 1, max_rank: 8, max_in_features: 256 };
        let workspace = Workspace::new(&device.stream, capacity).expect("a workspace");
        // Every entry is empty: no adapter touches any site.
        let entries = device.stream.alloc_zeros(NUM_SLOTS * 2 * 24).expect("a table");
        Engine { device, step, workspace, entries }
    }

    fn table(&self, num_slots: usize, dtype: SlotDtype, max_rank: usize) -> DeviceTable<'static> {
        let address = self.entries.device_ptr(&self.device.stream).0;
        // SAFETY: the entries live as long as this engine, and all of them are empty.
        unsafe { DeviceTable::from_raw(address, num_slots, 2, dtype, max_rank) }
    }

    fn zeros<T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits>(&self, count: usize) -> CudaSlice<T> {
        self.device.stream.alloc_zeros(count).expect("memory")
    }
}

#[test]
fn operands_that_do_not_agree_are_refused_before_a_launch() {
    on_kernels("operands_that_do_not_agree_are_refused_before_a_launch", &[Mode::PLAIN], || {
        let mut engine = Engine::new();
        let table = engine.table(NUM_SLOTS, SlotDtype::Bf16, 8);
        let kernels = &engine.device.kernels;
        let x = engine.zeros::<bf16>(4 * 16);
        let mut y = engine.zeros::<bf16>(4 * 8);
        macro_rules! shrink {
            ($table:expr, $sites:expr, $x:expr, $width:expr) => {
                kernels.shrink(
                    $table,
                    &engine.step,
                    $sites,
                    DeviceRows::new(&$x, $width).expect("rows"),
                    &mut engine.workspace,
                )
            };
        }
        macro_rules! refused {
            ($result:expr, $text:expr) => {
                assert_eq!($result.expect_err("a refusal").to_string(), $text)
            };
        }
        refused!(
            kernels.expand(
                &table,
                &engine.step,
                &[SITE],
                &engine.workspace,
                &mut [DeviceRowsMut::new(&mut y, 8).expect("rows")]
            ),
            "expand of 3 entries × 1 sites, but the buffer holds a shrink of 0 × 0"
        );
        refused!(
            shrink!(&engine.table(NUM_SLOTS, SlotDtype::F16, 8), &[SITE], x, 16),
            "the slot table holds F16, the activations are Bf16: on CUDA they are of one 16-bit type"
        );
        refused!(
            shrink!(&engine.table(2, SlotDtype::Bf16, 8), &[SITE], x, 16),
            "a step with 5 slots does not fit: the buffers hold 2"
        );
        refused!(
            shrink!(&engine.table(NUM_SLOTS, SlotDtype::Bf16, 9), &[SITE], x, 16),
            "a launch needs 9 ranks: the workspace has 8"
        );
        refused!(
            shrink!(&table, &[SiteRef { index: 2, ..SITE }], x, 16),
            "site 2 is out of range: the slot table has 2 sites"
        );
        refused!(shrink!(&table, &[SITE; 5], x, 16), "5 sites: a launch has at most 4");
        refused!(
            shrink!(&table, &[SITE; 2], x, 16),
            "a launch needs 48 values between shrink and expand: the workspace has 32"
        );
        refused!(shrink!(&table, &[SITE], x, 32), "the input has 2 rows, expected 4");
        let narrow = engine.zeros::<bf16>(4 * 8);
        refused!(shrink!(&table, &[SITE], narrow, 8), "the input has width 8, expected 16");
        let half = engine.zeros::<f16>(4 * 16);
        assert!(matches!(shrink!(&table, &[SITE], half, 16), Err(CudaError::Dtype { .. })));

        shrink!(&table, &[SITE], x, 16).expect("a shrink");
        refused!(
            kernels.expand(
                &table,
                &engine.step,
                &[SITE],
                &engine.workspace,
                &mut [DeviceRowsMut::new(&mut y, 16).expect("rows")]
            ),
            "the output has width 16, expected 8"
        );
        let other = engine.device.stream.context().new_stream().expect("a stream");
        let mut elsewhere = Workspace::new(&other, engine.workspace.capacity()).expect("a workspace");
        let rows = DeviceRows::new(&x, 16).expect("rows");
        let result = kernels.shrink(&table, &engine.step, &[SITE], rows, &mut elsewhere);
        assert!(matches!(result, Err(CudaError::StreamMismatch)));
        let error = DeviceRows::strided(&x, 4, 16, 17).expect_err("rows past the end");
        assert!(matches!(error, CudaError::View { num_rows: 4, width: 16, stride: 17, values: 64 }));
        assert!(matches!(DeviceRows::new(&x, 15), Err(CudaError::Kernel(KernelError::RaggedRows { .. }))));

        let bytes = engine.workspace.num_bytes();
        assert_eq!(bytes, 2 * 4 * 8 + 4 * (4 * 8 * 8 + 4), "h, partial sums of one chunk, tickets");
        // After all refusals the right operands still go.
        kernels
            .expand(
                &table,
                &engine.step,
                &[SITE],
                &engine.workspace,
                &mut [DeviceRowsMut::new(&mut y, 8).expect("rows")],
            )
            .expect("an expand");
        engine.device.stream.synchronize().expect("work that runs");
    });
}
