//! Typed reading of JSON objects, with errors that name the field.
//!
//! A null counts as absent everywhere: that is how configuration files spell "not set".

use std::path::Path;

use serde_json::{Map, Value};

use super::config::MAX_SIZE;
use super::error::CheckpointError;

/// One JSON object of a configuration file.
pub(crate) struct Fields<'a> {
    path: &'a Path,
    /// The object's own place in the file, empty at the top.
    scope: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, scope: &str, value: &'a Value) -> Result<Self, CheckpointError> {
        match value.as_object() {
            Some(map) => Ok(Self { path, scope: scope.to_owned(), map }),
            None => {
                let field = if scope.is_empty() { "the file" } else { scope };
                Err(CheckpointError::field(path, field, kind(value), "a JSON object"))
            }
        }
    }

    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// Whether the field is written at all, be it null.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// The field unless absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// The field's full name in the file.
    pub(crate) fn name(&self, name: &str) -> String {
        if self.scope.is_empty() { name.to_owned() } else { format!("{}.{name}", self.scope) }
    }

    pub(crate) fn invalid(&self, name: &str, expected: impl Into<String>) -> CheckpointError {
        let found = match self.map.get(name) {
            None => "absent".to_owned(),
            Some(value @ (Value::Array(_) | Value::Object(_))) => kind(value).to_owned(),
            Some(value) => value.to_string(),
        };
        CheckpointError::field(self.path, self.name(name), found, expected)
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.invalid(name, expected)),
        }
    }

    fn required<T>(&self, name: &str, expected: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.invalid(name, expected))
    }

    pub(crate) fn opt_u64(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        self.read(name, "a whole number of at least 0", Value::as_u64)
    }

    pub(crate) fn opt_size(&self, name: &str) -> Result<Option<usize>, CheckpointError> {
        let convert = |value: &Value| {
            let size = usize::try_from(value.as_u64()?).ok()?;
            (1..=MAX_SIZE).contains(&size).then_some(size)
        };
        self.read(name, "a whole number from 1 to 2^30", convert)
    }

    pub(crate) fn size(&self, name: &str) -> Result<usize, CheckpointError> {
        let size = self.opt_size(name)?;
        self.required(name, "a whole number from 1 to 2^30", size)
    }

    pub(crate) fn opt_f64(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.read(name, "a number", Value::as_f64)
    }

    pub(crate) fn f64(&self, name: &str) -> Result<f64, CheckpointError> {
        let number = self.opt_f64(name)?;
        self.required(name, "a number", number)
    }

    pub(crate) fn f64_or(&self, name: &str, default: f64) -> Result<f64, CheckpointError> {
        Ok(self.opt_f64(name)?.unwrap_or(default))
    }

    pub(crate) fn bool_or(&self, name: &str, default: bool) -> Result<bool, CheckpointError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn opt_str(&self, name: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(crate) fn str(&self, name: &str) -> Result<&'a str, CheckpointError> {
        let text = self.opt_str(name)?;
        self.required(name, "a string", text)
    }

    /// The object in field `name`; an empty one counts as absent.
    pub(crate) fn opt_object(&self, name: &str) -> Result<Option<Fields<'a>>, CheckpointError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let fields = Fields::new(self.path, &self.name(name), value)?;
        Ok((!fields.map.is_empty()).then_some(fields))
    }

    /// One token id or a list of them.
    pub(crate) fn opt_token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, CheckpointError> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        self.read(name, "a token id or a list of token ids", |value| match value {
            Value::Array(items) => items.iter().map(id).collect(),
            single => Some(vec![id(single)?]),
        })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
