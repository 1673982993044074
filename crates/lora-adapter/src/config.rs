//! `adapter_config.json`: the numbers that scale an adapter, and every reason that the config gives to refuse it.

use std::collections::BTreeSet;

use lora_math::patterns::{OlderPatterns, Patterns};
use lora_math::scaling::ScalingRule;
use serde_json::{Map, Value};

use crate::declared::Declared;
use crate::error::{Reasons, shown};
use crate::feature::Feature;
use crate::fields;
use crate::json;
use crate::marks::Marks;
use crate::mlx;
use crate::notes::{Note, Origin};
use crate::pair::MAX_RANK;
use crate::reason::Reason;

/// Name of the file.
pub(crate) const CONFIG_FILE: &str = "adapter_config.json";

/// More than any config needs: some trainers write two entries for every module of the model.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// What the config says about ranks and alphas, and who wrote it.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    pub(crate) rule: ScalingRule,
    ranks: Table<usize>,
    alphas: Table<f64>,
    /// The entries of `target_modules` where it is a list.
    targets: Option<BTreeSet<String>>,
    /// What it says about experts.
    pub(crate) marks: Marks,
    /// What it says about tensors beside the pairs.
    pub(crate) declared: Declared,
    pub(crate) origin: Origin,
    pub(crate) tool: Tool,
}

/// Whose rules a config follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    /// PEFT's own, which other trainers write too.
    Peft,
    /// mlx-lm's: a scaling in place of alpha.
    Mlx {
        /// Rank of every pair.
        rank: usize,
    },
    /// A GGUF file of llama.cpp's converter: every pair has its own rank.
    Gguf,
}

impl Tool {
    /// The field that holds the rank, for messages.
    fn rank_field(self) -> &'static str {
        match self {
            Tool::Peft => "r",
            Tool::Mlx { .. } => "lora_parameters.rank",
            Tool::Gguf => "the file",
        }
    }
}

/// A pattern table: its entries as they stand in the file, and compiled with the index of each.
#[derive(Debug)]
struct Table<T> {
    entries: Vec<(String, T)>,
    patterns: Patterns<usize>,
}

impl<T: Copy> Table<T> {
    /// Index, pattern and value of the entry that holds for `path`.
    fn lookup(&self, path: &str) -> Option<(usize, &str, T)> {
        let index = *self.patterns.lookup(path)?;
        let (pattern, value) = self.entries.get(index)?;
        Some((index, pattern, *value))
    }

    /// A note on each entry that is not among `used`.
    fn unused(&self, field: &'static str, used: Vec<Option<usize>>) -> impl Iterator<Item = Note> {
        let used: BTreeSet<usize> = used.into_iter().flatten().collect();
        let unused = self.entries.iter().enumerate().filter(move |(index, _)| !used.contains(index));
        unused.map(move |(_, (pattern, _))| Note::UnusedPattern { field, pattern: shown(pattern) })
    }
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table { entries: Vec::new(), patterns: Patterns::default() }
    }
}

/// Rank and alpha that the config gives for one module.
pub(crate) struct Expected {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    /// Where the rank comes from, for messages.
    pub(crate) rank_source: String,
    rank_entry: Option<usize>,
    alpha_entry: Option<usize>,
}

impl Config {
    /// Reads the config. Reasons are collected, and a config is given wherever its numbers can be used, so that the
    /// ranks of tensors are compared even when something else is refused.
    pub(crate) fn parse(bytes: &[u8], reasons: &mut Reasons, notes: &mut Vec<Note>) -> Option<Config> {
        let object = match json::parse(bytes) {
            Ok(Value::Object(object)) => object,
            Ok(other) => {
                reasons.push(CONFIG_FILE, Reason::NotAnObject { found: json::type_name(&other) });
                return None;
            }
            Err(error) => {
                reasons.push(CONFIG_FILE, Reason::NotJson { message: shown(&error.to_string()) });
                return None;
            }
        };
        if mlx::is_config(&object) {
            return mlx::config(&object, reasons);
        }
        let mut fields = Fields { object: &object, reasons };
        if !fields.method() {
            return None;
        }
        fields.unsupported(notes);
        let rank = fields.number("r", RANK, rank_value);
        let alpha = fields.number("lora_alpha", ALPHA, alpha_value);
        let rule = fields.rule();
        let ranks = fields.table("rank_pattern", RANK, rank_value);
        let alphas = fields.table("alpha_pattern", ALPHA, alpha_value);
        // What is refused already counts as absent, so that the ranks of the tensors are still compared.
        Some(Config {
            rank: rank?,
            alpha: alpha.unwrap_or_default(),
            rule,
            ranks: ranks?,
            alphas: alphas.unwrap_or_default(),
            targets: targets(&object),
            marks: Marks::parse(&object, fields.reasons),
            declared: Declared::parse(&object, fields.reasons),
            origin: origin(&object),
            tool: Tool::Peft,
        })
    }

    /// The config of a tool that has no patterns: one alpha for all.
    pub(crate) fn of_other_tool(tool: Tool, alpha: f64, rule: ScalingRule, declared: Declared) -> Config {
        let (rank, producer) = match tool {
            Tool::Peft => (0, None),
            Tool::Mlx { rank } => (rank, Some("mlx-lm")),
            Tool::Gguf => (0, Some("llama.cpp")),
        };
        Config {
            rank,
            alpha,
            rule,
            ranks: Table::default(),
            alphas: Table::default(),
            targets: None,
            marks: Marks::default(),
            declared,
            origin: Origin { producer, ..Origin::default() },
            tool,
        }
    }

    /// Rank and alpha of a module by today's rule.
    pub(crate) fn expected(&self, path: &str) -> Expected {
        let rank = self.ranks.lookup(path);
        let alpha = self.alphas.lookup(path);
        Expected {
            rank: rank.map_or(self.rank, |(_, _, rank)| rank),
            alpha: alpha.map_or(self.alpha, |(_, _, alpha)| alpha),
            rank_source: rank
                .map_or(self.tool.rank_field().to_owned(), |(_, key, _)| format!("rank_pattern {}", shown(key))),
            rank_entry: rank.map(|(index, ..)| index),
            alpha_entry: alpha.map(|(index, ..)| index),
        }
    }

    /// Rank and alpha of each path by the rule of PEFT before 0.14; none where the file says that it is younger, or
    /// where the patterns mean nothing under that rule.
    pub(crate) fn expected_before_0_14(&self, paths: &[&str]) -> Option<Vec<(usize, f64)>> {
        if self.origin.peft_version.is_some() {
            return None;
        }
        let older = OlderPatterns::new(self.ranks.entries.iter().cloned(), self.alphas.entries.iter().cloned()).ok()?;
        let of = |path: &&str| {
            let (rank, alpha) = older.lookup(path);
            (rank.copied().unwrap_or(self.rank), alpha.copied().unwrap_or(self.alpha))
        };
        Some(paths.iter().map(of).collect())
    }

    /// Notes on patterns that decide nothing and on modules that `target_modules` does not name.
    pub(crate) fn remark(&self, paths: &[&str], expected: &[Expected], notes: &mut Vec<Note>) {
        let (ranks, alphas) = expected.iter().map(|expected| (expected.rank_entry, expected.alpha_entry)).unzip();
        notes.extend(self.ranks.unused("rank_pattern", ranks));
        notes.extend(self.alphas.unused("alpha_pattern", alphas));
        if let Some(targets) = &self.targets {
            let named = |suffix: &str| targets.contains(suffix) || self.marks.parameters.contains(suffix);
            let mut missed = paths.iter().filter(|path| !suffixes(path).any(named));
            if let Some(first) = missed.next() {
                notes.push(Note::NotTargeted { num_pairs: 1 + missed.count(), module: shown(first) });
            }
        }
    }
}

/// The object under the reader's eye, and where its reasons go.
pub(crate) struct Fields<'a> {
    pub(crate) object: &'a Map<String, Value>,
    pub(crate) reasons: &'a mut Reasons,
}

const RANK: &str = "a whole number from 1 to 512";
const ALPHA: &str = "a finite number";

impl<'a> Fields<'a> {
    /// A field that says something.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Refuses a field for its value.
    pub(crate) fn refuse_value(&mut self, field: &str, expected: &str) {
        let value = self.object.get(field).unwrap_or(&Value::Null);
        self.refuse(bad_field(field, expected, value));
    }

    /// A switch; none where the field says nothing, or something else, which is refused.
    pub(crate) fn switch(&mut self, field: &str) -> Option<bool> {
        match self.get(field)? {
            Value::Bool(on) => return Some(*on),
            _ => self.refuse_value(field, "true or false"),
        }
        None
    }

    fn refuse(&mut self, reason: Reason) {
        self.reasons.push(CONFIG_FILE, reason);
    }

    /// Whether `peft_type` is LORA; the fields of another method mean other things.
    fn method(&mut self) -> bool {
        let reason = match self.object.get("peft_type") {
            Some(Value::String(method)) if method == "LORA" => return true,
            Some(other) => {
                let feature = Feature::OtherPeftMethod;
                Reason::UnsupportedField { field: "peft_type", found: found(other), feature }
            }
            None => Reason::MissingField { field: "peft_type", expected: "\"LORA\"" },
        };
        self.refuse(reason);
        false
    }

    /// Every field by the table: what is not supported is refused, what is not known is noted.
    fn unsupported(&mut self, notes: &mut Vec<Note>) {
        for (name, value) in self.object {
            match fields::find(name) {
                Some(field) => {
                    if let Some(feature) = field.refusal(value) {
                        self.refuse(Reason::UnsupportedField { field: field.name, found: found(value), feature });
                    }
                }
                None => notes.push(Note::UnknownField { field: shown(name), value: found(value) }),
            }
        }
    }

    fn number<T>(&mut self, field: &'static str, expected: &'static str, read: fn(&Value) -> Option<T>) -> Option<T> {
        let Some(value) = self.object.get(field) else {
            self.refuse(Reason::MissingField { field, expected });
            return None;
        };
        let number = read(value);
        if number.is_none() {
            self.refuse(bad_field(field, expected, value));
        }
        number
    }

    fn rule(&mut self) -> ScalingRule {
        match self.switch("use_rslora") {
            Some(true) => ScalingRule::RankStabilized,
            _ => ScalingRule::Standard,
        }
    }

    fn table<T: Copy>(
        &mut self,
        field: &'static str,
        expected: &'static str,
        read: fn(&Value) -> Option<T>,
    ) -> Option<Table<T>> {
        let object = match self.object.get(field) {
            None | Some(Value::Null) => return Some(Table::default()),
            Some(Value::Object(object)) => object,
            Some(other) => {
                self.refuse(bad_field(field, "an object of patterns", other));
                return None;
            }
        };
        let mut entries = Vec::with_capacity(object.len());
        for (key, value) in object {
            match read(value) {
                Some(number) => entries.push((key.clone(), number)),
                None => self.refuse(bad_field(&format!("{field}[{}]", shown(key)), expected, value)),
            }
        }
        let patterns = Patterns::new(entries.iter().enumerate().map(|(index, (key, _))| (key.clone(), index)));
        match patterns {
            Ok(patterns) if entries.len() == object.len() => Some(Table { entries, patterns }),
            Ok(_) => None,
            Err(error) => {
                self.refuse(Reason::BadPattern { field, message: shown(&error.to_string()) });
                None
            }
        }
    }
}

/// A rank, as a config gives it.
pub(crate) fn rank_value(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|rank| usize::try_from(rank).ok()).filter(|rank| (1..=MAX_RANK).contains(rank))
}

fn alpha_value(value: &Value) -> Option<f64> {
    value.as_f64().filter(|alpha| alpha.is_finite())
}

pub(crate) fn bad_field(field: &str, expected: &str, value: &Value) -> Reason {
    Reason::BadField { field: field.to_owned(), expected: expected.to_owned(), found: found(value) }
}

/// A value for messages.
fn found(value: &Value) -> String {
    shown(&value.to_string())
}

fn targets(object: &Map<String, Value>) -> Option<BTreeSet<String>> {
    let list = object.get("target_modules")?.as_array()?;
    Some(list.iter().filter_map(|entry| entry.as_str().map(str::to_owned)).collect())
}

fn origin(object: &Map<String, Value>) -> Origin {
    let text = |field: &str| object.get(field).and_then(Value::as_str).filter(|text| !text.is_empty()).map(shown);
    let unsloth = object.get("auto_mapping").and_then(|mapping| mapping.get("unsloth_fixed")).is_some();
    Origin {
        peft_version: text("peft_version"),
        base_model: text("base_model_name_or_path"),
        producer: unsloth.then_some("Unsloth"),
    }
}

/// The path, and its ends after each dot.
fn suffixes(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
    std::iter::once(path).chain(ends)
}
