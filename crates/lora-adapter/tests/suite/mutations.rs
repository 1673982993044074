//! Random damage: never a panic, and never another adapter than the one that the bytes say.

use proptest::collection::vec;
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::support::{config, file, load, load_bytes, qv};

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_weights_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(load_bytes(config().to_string().as_bytes(), &bytes).is_err());
    }

    #[test]
    fn random_headers_never_panic(text in "[\\{\\}\\[\\]\":,a-z0-9_. -]{0,80}") {
        let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        prop_assert!(load_bytes(config().to_string().as_bytes(), &bytes).is_err());
    }

    #[test]
    fn random_configs_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(load_bytes(&bytes, &file(&qv())).is_err());
    }

    /// A damaged file is refused, or read as another reader reads the same bytes.
    #[test]
    fn damaged_weights_are_refused_or_read_as_they_are(
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = file(&qv());
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(adapter) = load_bytes(config().to_string().as_bytes(), &bytes) {
            let other = SafeTensors::deserialize(&bytes).expect("what loads here is a valid file");
            prop_assert_eq!(other.len(), 2 * adapter.pairs().len());
            for (_, pair) in adapter.pairs() {
                for matrix in [pair.a(), pair.b()] {
                    let tensor = other.tensor(matrix.tensor()).expect("no tensor out of nothing");
                    prop_assert_eq!(tensor.data(), matrix.bytes());
                    prop_assert_eq!(tensor.shape(), [matrix.rows(), matrix.cols()]);
                }
            }
        }
    }

    #[test]
    fn cut_files_are_refused(cut in any::<prop::sample::Index>()) {
        let bytes = file(&qv());
        let cut = cut.index(bytes.len());
        prop_assert!(load_bytes(config().to_string().as_bytes(), &bytes[..cut]).is_err());
    }

    /// One byte of the config changed: refused, or an adapter whose pairs are still those of the file.
    #[test]
    fn damaged_configs_never_change_the_tensors(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = config().to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(adapter) = load_bytes(&bytes, &file(&qv())) {
            let plain = load(&config(), &qv()).unwrap();
            prop_assert_eq!(adapter.pairs().len(), plain.pairs().len());
            for ((site, pair), (other_site, other)) in adapter.pairs().zip(plain.pairs()) {
                prop_assert_eq!((site, pair.a(), pair.b()), (other_site, other.a(), other.b()));
            }
        }
    }
}
