//! The names of Python that a pickle of tensors may use: this list is all that a file can ask for.

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    /// Its name in safetensors files.
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
}

const fn dtype(name: &'static str, bytes: u64) -> Dtype {
    Dtype { name, bytes }
}

/// Storage classes of module `torch`.
const STORAGES: [(&str, Dtype); 12] = [
    ("FloatStorage", dtype("F32", 4)),
    ("DoubleStorage", dtype("F64", 8)),
    ("HalfStorage", dtype("F16", 2)),
    ("BFloat16Storage", dtype("BF16", 2)),
    ("LongStorage", dtype("I64", 8)),
    ("IntStorage", dtype("I32", 4)),
    ("ShortStorage", dtype("I16", 2)),
    ("CharStorage", dtype("I8", 1)),
    ("ByteStorage", dtype("U8", 1)),
    ("BoolStorage", dtype("BOOL", 1)),
    ("ComplexFloatStorage", dtype("C64", 8)),
    ("ComplexDoubleStorage", dtype("C128", 16)),
];

/// Dtypes of module `torch` that have no storage class.
const DTYPES: [(&str, Dtype); 8] = [
    ("float8_e4m3fn", dtype("F8_E4M3", 1)),
    ("float8_e5m2", dtype("F8_E5M2", 1)),
    ("float8_e4m3fnuz", dtype("F8_E4M3FNUZ", 1)),
    ("float8_e5m2fnuz", dtype("F8_E5M2FNUZ", 1)),
    ("float8_e8m0fnu", dtype("F8_E8M0", 1)),
    ("uint16", dtype("U16", 2)),
    ("uint32", dtype("U32", 4)),
    ("uint64", dtype("U64", 8)),
];

/// A name that a pickle of tensors may use.
#[derive(Clone, Copy, Debug)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildTensorWithDtype,
    RebuildParameter,
    Storage(Option<Dtype>),
    Dtype(Dtype),
}

impl Global {
    pub(super) fn find(module: &str, name: &str) -> Option<Global> {
        let among = |table: &[(&str, Dtype)]| table.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype);
        match (module, name) {
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::RebuildTensor),
            ("torch._utils", "_rebuild_tensor_v3") => Some(Global::RebuildTensorWithDtype),
            ("torch._utils", "_rebuild_parameter") => Some(Global::RebuildParameter),
            ("torch.storage", "UntypedStorage") => Some(Global::Storage(None)),
            ("torch", _) => {
                among(&STORAGES).map(|dtype| Global::Storage(Some(dtype))).or_else(|| among(&DTYPES).map(Global::Dtype))
            }
            _ => None,
        }
    }
}
