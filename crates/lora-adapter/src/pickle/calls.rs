//! What a pickle of tensors may call, and what each call makes of its arguments: descriptions in the machine's tables. The
//! opcodes and the stack are the machine's.

use super::names::Global;
use super::{Machine, PickleError, Storage, Tensor, Value};
use crate::error::shown;

/// Dimensions of a tensor.
const MAX_DIMS: usize = 8;

impl<'a> Machine<'a> {
    pub(super) fn global(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        match Global::find(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => {
                let global = format!("{}.{}", shown(module), shown(name));
                Err(PickleError::ForbiddenGlobal { global, offset: self.opcode_at })
            }
        }
    }

    fn bad_arguments(&self, call: &'static str) -> PickleError {
        PickleError::BadArguments { call, offset: self.opcode_at }
    }

    /// The storage that a tuple on the stack names.
    pub(super) fn persistent(&mut self) -> Result<(), PickleError> {
        let bad = self.bad_arguments("a storage");
        let Value::Tuple(first, count) = self.pop()? else { return Err(bad) };
        let storage = match *self.items(first, count) {
            [
                Value::Str("storage"),
                Value::Global(Global::Storage(dtype)),
                Value::Str(key),
                Value::Str(_),
                Value::Int(length),
            ] => u64::try_from(length).ok().map(|num_elements| Storage { key, dtype, num_elements }),
            _ => None,
        };
        self.keep(2)?;
        self.storages.push(storage.ok_or(bad)?);
        self.push(Value::Storage(self.storages.len() - 1))
    }

    pub(super) fn reduce(&mut self) -> Result<(), PickleError> {
        let (arguments, callee) = (self.pop()?, self.pop()?);
        let (Value::Tuple(first, count), Value::Global(global)) = (arguments, callee) else {
            return Err(PickleError::ForbiddenCall { offset: self.opcode_at });
        };
        match global {
            Global::OrderedDict if count == 0 => self.dict(),
            Global::OrderedDict => Err(self.bad_arguments("OrderedDict")),
            Global::RebuildTensor => self.tensor(first, count, false),
            Global::RebuildTensorWithDtype => self.tensor(first, count, true),
            Global::RebuildParameter => match *self.items(first, count) {
                [tensor @ Value::Tensor(_), Value::Bool, Value::Dict(_)] => self.push(tensor),
                _ => Err(self.bad_arguments("_rebuild_parameter")),
            },
            Global::Storage(_) | Global::Dtype(_) => Err(PickleError::ForbiddenCall { offset: self.opcode_at }),
        }
    }

    /// Storage, offset, sizes, strides, whether it is trained, hooks, its dtype in the newer form; metadata may follow.
    fn tensor(&mut self, first: usize, count: usize, with_dtype: bool) -> Result<(), PickleError> {
        let bad = self.bad_arguments("a tensor");
        let (storage, offset, sizes, strides, rest) = match self.items(first, count) {
            [Value::Storage(storage), Value::Int(offset), sizes, strides, Value::Bool, Value::Dict(_), rest @ ..] => {
                (self.storages[*storage], *offset, *sizes, *strides, rest)
            }
            _ => return Err(bad),
        };
        let dtype = match (with_dtype, rest, storage.dtype) {
            (true, [Value::Global(Global::Dtype(dtype)), more @ ..], None) if self.is_plain(more) => *dtype,
            (false, more, Some(dtype)) if self.is_plain(more) => dtype,
            _ => return Err(bad),
        };
        let (shape, strides) = (self.dims(sizes), self.dims(strides));
        let (Some(shape), Some(strides), Ok(offset)) = (shape, strides, u64::try_from(offset)) else { return Err(bad) };
        if shape.len() != strides.len() {
            return Err(bad);
        }
        self.keep(shape.len() + 1)?;
        self.tensors.push(Tensor { storage, dtype, offset, shape, strides });
        self.push(Value::Tensor(self.tensors.len() - 1))
    }

    /// Whether the metadata of a tensor, its last argument, says nothing: torch writes there that the stored elements
    /// are to be negated or conjugated.
    fn is_plain(&self, metadata: &[Value<'a>]) -> bool {
        match metadata {
            [] | [Value::None] => true,
            [Value::Dict(dict)] => self.dicts[*dict].is_empty(),
            _ => false,
        }
    }

    fn dims(&self, value: Value<'a>) -> Option<Vec<u64>> {
        let Value::Tuple(first, count) = value else { return None };
        let whole = |item: &Value<'_>| match item {
            Value::Int(dim) => u64::try_from(*dim).ok(),
            _ => None,
        };
        if count <= MAX_DIMS { self.items(first, count).iter().map(whole).collect() } else { None }
    }

    /// The state of a dictionary: versions of modules, which mean nothing for tensors.
    pub(super) fn build(&mut self) -> Result<(), PickleError> {
        let state = self.pop()?;
        let plain = match (self.top()?, state) {
            (Value::Dict(_), Value::Dict(state)) => {
                self.dicts[state].iter().all(|(key, _)| matches!(key, Value::Str("_metadata")))
            }
            _ => false,
        };
        if plain { Ok(()) } else { Err(PickleError::ForbiddenCall { offset: self.opcode_at }) }
    }
}
