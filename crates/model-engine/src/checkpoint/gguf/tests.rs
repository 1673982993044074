//! Malformed files: each is refused with the reason, and none panics or allocates by its own word.

use super::{GgufError, GgufFile, MetadataValue};

/// Builds a file byte by byte.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn header(num_tensors: u64, num_keys: u64) -> Self {
        let mut writer = Self::default();
        writer.0.extend(b"GGUF");
        writer.u32(3).u64(num_tensors).u64(num_keys)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    /// A tensor entry of F32.
    fn tensor(mut self, name: &str, sizes: &[u64], offset: u64) -> Self {
        self = self.string(name).u32(sizes.len() as u32);
        for &size in sizes {
            self = self.u64(size);
        }
        self.u32(0).u64(offset)
    }

    /// Pads to where data begin and adds `num_bytes` of them.
    fn data(mut self, num_bytes: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + num_bytes, 0);
        self
    }

    fn error(&self) -> GgufError {
        GgufFile::parse(&self.0).unwrap_err()
    }
}

fn valid() -> Writer {
    Writer::header(2, 3)
        .string("list")
        .u32(9)
        .u32(8)
        .u64(2)
        .string("a")
        .string("bc")
        .string("nested")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(1)
        .u64(3)
        .bytes(&[255, 0, 1])
        .string("flag")
        .u32(7)
        .bytes(&[1])
        .tensor("x", &[4, 2], 0)
        .tensor("y", &[2], 32)
        .data(40)
}

#[test]
fn a_valid_file_is_read() {
    let bytes = valid().0;
    let file = GgufFile::parse(&bytes).unwrap();
    assert_eq!(file.get("flag").unwrap().as_bool(), Some(true));
    let list: Vec<_> = file.get("list").unwrap().as_array().unwrap().iter().collect();
    assert_eq!(list, [MetadataValue::String("a"), MetadataValue::String("bc")]);
    let nested = file.get("nested").unwrap().as_array().unwrap().iter().next().unwrap();
    let numbers: Vec<_> = nested.as_array().unwrap().iter().collect();
    assert_eq!(numbers, [-1, 0, 1].map(MetadataValue::Signed));
    // The fastest size comes first in the file and last in the shape.
    assert_eq!(file.tensor("x").unwrap().shape, [2, 4]);
    assert_eq!(file.dequantize(file.tensor("y").unwrap()), [0.0, 0.0]);
}

#[test]
fn every_shorter_file_is_refused() {
    let bytes = valid().0;
    for len in 0..bytes.len() {
        assert!(GgufFile::parse(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
}

#[test]
fn no_single_byte_makes_a_file_panic() {
    let bytes = valid().0;
    for index in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[index] = value;
            if let Ok(file) = GgufFile::parse(&changed) {
                for (_, tensor) in file.tensors() {
                    assert_eq!(file.dequantize(tensor).len(), tensor.num_elements);
                }
                for (_, value) in file.metadata() {
                    let _ = (value.summary(), value.as_array().map(|array| array.iter().count()));
                }
            }
        }
    }
}

#[test]
fn other_formats_and_versions_are_named() {
    assert_eq!(GgufFile::parse(b"PK\x03\x04").unwrap_err(), GgufError::Magic { found: b"PK\x03\x04".to_vec() });
    let mut old = valid();
    old.0[4] = 1;
    assert_eq!(old.error(), GgufError::Version { found: 1 });
    // A big-endian 3.
    let mut swapped = valid();
    swapped.0[4..8].copy_from_slice(&[0, 0, 0, 3]);
    assert_eq!(swapped.error(), GgufError::Version { found: 3 << 24 });
}

#[test]
fn claimed_counts_beyond_the_file_are_refused_before_anything_is_allocated() {
    let truncated =
        |writer: &Writer| assert!(matches!(writer.error(), GgufError::Truncated { .. }), "{}", writer.error());
    truncated(&Writer::header(u64::MAX, 0));
    truncated(&Writer::header(0, u64::MAX));
    truncated(&Writer::header(0, 1).u64(u64::MAX).data(64));
    truncated(&Writer::header(0, 1).string("k").u32(8).u64(u64::MAX - 7).data(64));
    truncated(&Writer::header(0, 1).string("k").u32(9).u32(10).u64(u64::MAX / 4).data(64));
    truncated(&Writer::header(0, 1).string("k").u32(9).u32(0).u64(1 << 40).data(64));
    truncated(&Writer::header(1, 0).tensor("t", &[1 << 40], 0).data(64));
    truncated(&Writer::header(1, 0).tensor("t", &[8], 64).data(64));
    truncated(&Writer::header(1, 0).tensor("t", &[8], u64::MAX - 31).data(64));
}

#[test]
fn what_contradicts_the_format_is_named() {
    let invalid = |writer: &Writer, word: &str| {
        let message = writer.error().to_string();
        assert!(message.contains(word), "{word:?} not in {message}");
    };
    invalid(&Writer::header(0, 1).string("k").u32(13).data(64), "value type of k is 13");
    invalid(&Writer::header(0, 1).string("k").u32(7).bytes(&[2]).data(64), "expected 0 or 1");
    invalid(&Writer::header(0, 1).u64(2).bytes(&[0xff, 0xfe]).u32(7).data(64), "UTF-8");
    invalid(&Writer::header(0, 1).string("").u32(7).data(64), "0 bytes long");
    invalid(&Writer::header(1, 0).tensor("t", &[], 0).data(64), "number of dimensions of t is 0");
    invalid(&Writer::header(1, 0).tensor("t", &[1; 5], 0).data(64), "number of dimensions of t is 5");
    invalid(&Writer::header(1, 0).tensor("t", &[1 << 33, 1 << 33], 0).data(64), "a size that fits");
    invalid(&Writer::header(1, 0).tensor("t", &[8], 8).data(64), "multiple of 32");
    invalid(&Writer::header(1, 0).string("t").u32(1).u64(32).u32(16).u64(0).data(64), "Q4_K");
    // Q4_0 rows are whole blocks.
    invalid(&Writer::header(1, 0).string("t").u32(1).u64(33).u32(2).u64(0).data(64), "multiple of 32 (Q4_0)");
    invalid(&Writer::header(2, 0).tensor("t", &[16], 0).tensor("u", &[8], 32).data(64), "where t ends");
    let twice = Writer::header(2, 0).tensor("t", &[8], 0).tensor("t", &[8], 32).data(64);
    assert_eq!(twice.error(), GgufError::Duplicate { what: "tensor", name: "t".to_owned() });
    let alignment = Writer::header(0, 1).string("general.alignment").u32(4).u32(24).data(64);
    invalid(&alignment, "general.alignment is 24");
}

#[test]
fn arrays_nest_only_so_deep() {
    let mut writer = Writer::header(0, 1).string("k").u32(9);
    for _ in 0..100_000 {
        writer = writer.u32(9).u64(1);
    }
    assert!(matches!(writer.error(), GgufError::Invalid { .. }), "{}", writer.error());
}
