//! What is wrong with a pickle, with the place in it.

use thiserror::Error;

/// Why a pickle is not read. Never worth a retry with the same file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleError {
    /// It ends in the middle.
    #[error("it ends at byte {offset} of the pickle, before its end mark")]
    Truncated {
        /// Where the missing bytes should be.
        offset: usize,
    },
    /// An opcode that no dictionary of tensors needs.
    #[error("opcode {opcode:#04x} at byte {offset} of the pickle is not one of those that tensors need")]
    ForbiddenOpcode {
        /// The opcode.
        opcode: u8,
        /// Where it stands.
        offset: usize,
    },
    /// A name of Python code that is not on the list.
    #[error("{global} at byte {offset} of the pickle is not one of the names that tensors need; nothing was run")]
    ForbiddenGlobal {
        /// Module and name.
        global: String,
        /// Where it stands.
        offset: usize,
    },
    /// A call of something that is not a function of the list, or a state given to something that takes none.
    #[error("a call at byte {offset} of the pickle that tensors do not need; nothing was run")]
    ForbiddenCall {
        /// Where it stands.
        offset: usize,
    },
    /// A call on the list with other arguments than `torch.save` writes.
    #[error("{call} at byte {offset} of the pickle has other arguments than torch.save writes")]
    BadArguments {
        /// What is called.
        call: &'static str,
        /// Where.
        offset: usize,
    },
    /// The stack does not hold what an opcode takes.
    #[error("the opcode at byte {offset} of the pickle takes what is not on the stack")]
    BadStack {
        /// Where it stands.
        offset: usize,
    },
    /// The memo has no such entry.
    #[error("the pickle asks at byte {offset} for entry {index} of its memo, which is not there")]
    BadMemo {
        /// The entry.
        index: u32,
        /// Where.
        offset: usize,
    },
    /// More values than a file of tensors has.
    #[error("more than {limit} values at byte {offset} of the pickle")]
    TooMany {
        /// The limit.
        limit: usize,
        /// Where.
        offset: usize,
    },
    /// Text that is not UTF-8, or a number of more than 64 bits.
    #[error("a value at byte {offset} of the pickle is not one that tensors need")]
    BadValue {
        /// Where.
        offset: usize,
    },
    /// Bytes after the end mark.
    #[error("the pickle ends at byte {offset}, its file goes on")]
    TrailingBytes {
        /// Where the end mark stands.
        offset: usize,
    },
    /// The file holds something other than a dictionary.
    #[error("expected a dictionary of tensors, found {found}")]
    NotADictionary {
        /// What it is.
        found: &'static str,
    },
    /// An entry of the dictionary is not a named tensor.
    #[error("entry {entry}: expected a tensor, found {found}")]
    NotATensor {
        /// Its key.
        entry: String,
        /// What it is.
        found: &'static str,
    },
}
