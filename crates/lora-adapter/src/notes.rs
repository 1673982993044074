//! What a reader accepted and a person should know: nothing here changes what the adapter computes.

use std::fmt;

use serde::Serialize;

use crate::keys::Dialect;

/// Something accepted and worth knowing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Note {
    /// A config field that no known version of PEFT writes; ignored, as PEFT does.
    UnknownField {
        /// The field.
        field: String,
        /// Its value as JSON.
        value: String,
    },
    /// A text of the file that says how the adapter is to be used; nothing here acts on it.
    Said {
        /// Name of the field.
        field: String,
        /// What it says.
        text: String,
    },
    /// Tensors that only training used.
    TrainingOnlyTensors {
        /// What they belong to.
        method: &'static str,
        /// How many there are.
        num_tensors: usize,
    },
    /// Tensors are named otherwise than PEFT names them; they are read as what they mean.
    OtherNaming {
        /// In which way.
        dialect: Dialect,
        /// How many of them.
        num_tensors: usize,
    },
    /// A pattern that matches no module of the file.
    UnusedPattern {
        /// `rank_pattern` or `alpha_pattern`.
        field: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// Ranks agree with the config only by the matching rule of PEFT before 0.14, so alphas were read by it too.
    OldPatternRule,
    /// `target_modules` names none of the modules of these pairs, though their tensors are there; they are used.
    NotTargeted {
        /// How many pairs.
        num_pairs: usize,
        /// The first such module path.
        module: String,
    },
    /// Alpha is 0 somewhere, so those pairs change nothing.
    ZeroAlpha {
        /// How many pairs.
        num_pairs: usize,
    },
    /// Alpha is negative somewhere.
    NegativeAlpha {
        /// How many pairs.
        num_pairs: usize,
    },
    /// Nothing says how gate and up share the rows of stacked experts; read as gate before up. gpt-oss interleaves them:
    /// [`Adapter::with_gate_up_order`](crate::Adapter::with_gate_up_order) reads them so.
    GateUpOrderAssumed,
    /// Rows of q and k are in llama.cpp's order until the head counts of the base model are given:
    /// [`Adapter::with_gguf_heads`](crate::Adapter::with_gguf_heads).
    HeadsAwaited,
    /// Neither shapes nor versions say which side of the stacked experts is the input.
    OrientationAssumed {
        /// Whether A was read as the side of the output, as PEFT before 0.19 trains most models.
        swapped: bool,
    },
    /// Columns of stacked experts were read as grouped by expert, since a version of Unsloth wrote the file that groups
    /// them and leaves no mark.
    GroupedColumnsAssumed {
        /// How many pairs.
        num_pairs: usize,
    },
    /// The directory holds no adapter itself; the one in a folder of its own name below it was read.
    NamedFolder {
        /// The folder.
        folder: String,
    },
    /// `adapter_model.bin` stands beside the safetensors file; it is not read.
    PickleIgnored,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::UnknownField { field, value } => write!(f, "config field `{field}` = {value} is not known; ignored"),
            Note::Said { field, text } => write!(f, "{field} says: {text}"),
            Note::TrainingOnlyTensors { method, num_tensors } => {
                write!(f, "{num_tensors} tensors of {method} are used in training only; not applied")
            }
            Note::OtherNaming { dialect, num_tensors } => {
                write!(f, "{num_tensors} tensors are named with {dialect}; read as what they mean")
            }
            Note::UnusedPattern { field, pattern } => write!(f, "{field} `{pattern}` matches no module of the file"),
            Note::OldPatternRule => f.write_str(
                "ranks agree with the patterns only by the matching rule of PEFT before 0.14; alphas are read by it too",
            ),
            Note::NotTargeted { num_pairs, module } => {
                write!(f, "{num_pairs} pairs are on modules that target_modules does not name (the first is {module})")
            }
            Note::ZeroAlpha { num_pairs } => write!(f, "alpha is 0 for {num_pairs} pairs: they change nothing"),
            Note::NegativeAlpha { num_pairs } => write!(f, "alpha is negative for {num_pairs} pairs"),
            Note::GateUpOrderAssumed => {
                f.write_str("nothing says how gate and up share the rows of stacked experts; read as gate before up")
            }
            Note::HeadsAwaited => f.write_str("rows of q and k wait for the head counts of the base model"),
            Note::OrientationAssumed { swapped } => {
                let side = if *swapped { "output" } else { "input" };
                write!(f, "neither shapes nor versions say which side of stacked experts A is on; read as the {side}")
            }
            Note::GroupedColumnsAssumed { num_pairs } => {
                write!(f, "columns of {num_pairs} stacked pairs are read as grouped by expert, as unmarked Unsloth files")
            }
            Note::NamedFolder { folder } => write!(f, "read from the folder {folder}, the only adapter there"),
            Note::PickleIgnored => f.write_str("adapter_model.bin is not read: the safetensors file is"),
        }
    }
}

/// What the files say about where they come from. Nothing is checked against it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// Version of PEFT that wrote the config; PEFT before 0.18 does not say.
    pub peft_version: Option<String>,
    /// The base model's name as the trainer knew it.
    pub base_model: Option<String>,
    /// A producer that left its mark.
    pub producer: Option<&'static str>,
}
