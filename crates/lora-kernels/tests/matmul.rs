//! The base product of every instruction set against the oracle, and the bits of its rows.

mod support;

use half::{bf16, f16};
use lora_kernels::cpu::Isa;
use lora_kernels::reference::oracle;
use lora_kernels::{Cpu, KernelError, Operand, Reference, Rows, RowsMut, WeightView};
use lora_math::Features;
use support::{Values, assert_close, bits};

/// A weight in each dtype, from the same values.
struct Weight {
    features: Features,
    f32: Vec<f32>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}

impl Weight {
    fn new(in_features: usize, out_features: usize) -> Self {
        let f32 = Values::new(1).vector(in_features * out_features);
        let f16 = f32.iter().map(|&value| f16::from_f32(value)).collect();
        let bf16 = f32.iter().map(|&value| bf16::from_f32(value)).collect();
        Weight { features: Features { in_features, out_features }, f32, f16, bf16 }
    }

    fn views(&self) -> [(&'static str, WeightView<'_>); 3] {
        [
            ("f32", WeightView::f32(&self.f32, self.features).expect("sizes agree")),
            ("f16", WeightView::f16(&self.f16, self.features).expect("sizes agree")),
            ("bf16", WeightView::bf16(&self.bf16, self.features).expect("sizes agree")),
        ]
    }
}

fn each_cpu(check: impl Fn(Cpu)) {
    for isa in Isa::ALL {
        match Cpu::with_isa(isa) {
            Ok(cpu) => check(cpu),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
}

fn matmul(cpu: Cpu, x: &[f32], weight: &WeightView<'_>, bias: Option<&[f32]>) -> Vec<f32> {
    let Features { in_features, out_features } = weight.features();
    let mut y = vec![f32::NAN; x.len() / in_features * out_features];
    let x = Rows::new(x, in_features).expect("whole rows");
    cpu.matmul(x, weight, bias, RowsMut::new(&mut y, out_features).expect("whole rows")).expect("matmul");
    y
}

const SHAPES: [(usize, usize); 9] =
    [(1, 1), (7, 5), (31, 6), (64, 13), (100, 48), (576, 97), (1027, 50), (2048, 7), (3000, 100)];
const ROWS: [usize; 9] = [0, 1, 2, 3, 4, 5, 9, 64, 131];

#[test]
fn matches_the_oracle() {
    for (i, &(in_features, out_features)) in SHAPES.iter().enumerate() {
        let weight = Weight::new(in_features, out_features);
        let bias = Values::new(2).vector(out_features);
        for (j, num_rows) in [ROWS[i], ROWS[(i + 4) % 9], ROWS[(i + 7) % 9]].into_iter().enumerate() {
            let x = Values::new(3).vector(num_rows * in_features);
            let bias = (j != 1).then_some(&bias[..]);
            for (dtype, view) in weight.views() {
                let expected = oracle::matmul(Rows::new(&x, in_features).expect("whole rows"), &view, bias);
                let what = format!("{dtype} [{out_features}, {in_features}], {num_rows} rows");
                let mut y = vec![f32::NAN; num_rows * out_features];
                let rows = Rows::new(&x, in_features).expect("whole rows");
                Reference
                    .matmul(rows, &view, bias, RowsMut::new(&mut y, out_features).expect("whole rows"))
                    .expect(&what);
                let widened: Vec<_> = y.iter().map(|&value| f64::from(value)).collect();
                assert_close(&format!("reference, {what}"), &widened, &expected, out_features, 4e-6);
                each_cpu(|cpu| {
                    let y: Vec<_> = matmul(cpu, &x, &view, bias).into_iter().map(f64::from).collect();
                    assert_close(&format!("{}, {what}", cpu.isa().name()), &y, &expected, out_features, 1e-6);
                });
            }
        }
    }
}

/// The rows of a large product, one by one and in small batches, on one thread and several.
#[test]
fn rows_do_not_depend_on_company() {
    let (in_features, out_features, num_rows) = (1700, 301, 150);
    let weight = Weight::new(in_features, out_features);
    let bias = Values::new(2).vector(out_features);
    let x = Values::new(3).vector(num_rows * in_features);
    each_cpu(|cpu| {
        for (dtype, view) in weight.views() {
            let all = matmul(cpu, &x, &view, Some(&bias));
            for batch_rows in [1, 2, 3, 8, 33] {
                let y: Vec<_> =
                    x.chunks(batch_rows * in_features).flat_map(|x| matmul(cpu, x, &view, Some(&bias))).collect();
                assert!(bits(&all) == bits(&y), "{}, {dtype}: {batch_rows} rows at a time", cpu.isa().name());
            }
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                let y = pool.install(|| matmul(cpu, &x, &view, Some(&bias)));
                assert!(bits(&all) == bits(&y), "{}, {dtype}: {threads} threads", cpu.isa().name());
            }
        }
    });
}

/// f32 weights that bf16 holds exactly give the bits of the bf16 weight.
#[test]
fn dtypes_share_the_order_of_sums() {
    let (in_features, out_features) = (1200, 20);
    let weight = Weight::new(in_features, out_features);
    let widened: Vec<_> = weight.bf16.iter().map(|value| value.to_f32()).collect();
    let widened = WeightView::f32(&widened, weight.features).expect("sizes agree");
    for num_rows in [1, 9] {
        let x = Values::new(3).vector(num_rows * in_features);
        each_cpu(|cpu| {
            let [_, _, (_, narrow)] = weight.views();
            assert_eq!(bits(&matmul(cpu, &x, &narrow, None)), bits(&matmul(cpu, &x, &widened, None)));
        });
    }
}

#[test]
fn sizes_that_do_not_agree_are_refused() {
    let weight = Weight::new(8, 4);
    let [(_, view), ..] = weight.views();
    let x = [0.0; 16];
    each_cpu(|cpu| {
        let refused = |x_width: usize, y_len: usize, y_width: usize, bias: Option<&[f32]>| {
            let mut y = vec![7.0; y_len];
            let x = Rows::new(&x, x_width).expect("whole rows");
            let rows = RowsMut::new(&mut y, y_width).expect("whole rows");
            let error = cpu.matmul(x, &view, bias, rows).expect_err("sizes that do not agree");
            assert!(y.iter().all(|&y| y == 7.0), "{error}");
            error
        };
        assert_eq!(refused(4, 16, 4, None), KernelError::Width { operand: Operand::Input, expected: 8, found: 4 });
        assert_eq!(refused(8, 10, 5, None), KernelError::Width { operand: Operand::Output, expected: 4, found: 5 });
        assert_eq!(refused(8, 4, 4, None), KernelError::RowCount { operand: Operand::Output, expected: 2, found: 1 });
        assert_eq!(refused(8, 8, 4, Some(&[0.0; 3])), KernelError::BiasSize { out_features: 4, values: 3 });
    });
    let features = Features { in_features: 8, out_features: 5 };
    assert_eq!(
        WeightView::f32(&weight.f32, features).expect_err("a row is missing"),
        KernelError::WeightSize { out_features: 5, in_features: 8, values: 32 }
    );
    assert_eq!(Rows::new(&x, 5).expect_err("ragged"), KernelError::RaggedRows { values: 16, width: 5 });
    assert_eq!(Rows::new(&x, 0).expect_err("no width"), KernelError::RaggedRows { values: 16, width: 0 });
}
