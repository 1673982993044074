//! The bench runs: on the stand-in, with one small shape, where its times mean nothing.

use conformance_cuda::bench::{Bench, Shape};
use conformance_cuda::on_kernels;
use cuda_standin::Mode;

#[test]
fn a_line_is_measured() {
    on_kernels("a_line_is_measured", &[Mode::PLAIN], || {
        let shape = Shape { name: "small", layers: 3, hidden: 64, q: 64, kv: 32, intermediate: 96 };
        // Room for two layers of the three: A and B have 2 bytes a value, rank 4, 2 adapters.
        let values = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64);
        let layer_bytes = 2 * values * 4 * 2;
        let bench = Bench::new(2 * layer_bytes + 1, 1, 4096).expect("a bench");
        let line = bench.line(&shape, 4, 2).expect("a line");
        assert_eq!((line.layers, line.layer_bytes, line.launches_per_layer), (2, layer_bytes, 8));
        assert!(line.layer_us > 0.0 && line.gb_per_s > 0.0 && line.share_of_copy > 0.0);
        assert!(bench.device().expect("a device").1 > 0.0);
    });
}
