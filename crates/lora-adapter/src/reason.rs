//! The kinds of reasons for which an adapter is refused, in the order in which a reader meets them: directory, config,
//! tensor file, single tensors, adapters made in memory. Long because it is one list, with the numbers of each.

use lora_math::Site;
use lora_math::scaling::ScalingError;
use thiserror::Error;

use crate::archive_error::ArchiveError;
use crate::feature::Feature;
use crate::gguf::GgufError;
use crate::keys::Dialect;
use crate::matrix::MatrixError;
use crate::pickle::PickleError;

/// One thing that is wrong with an adapter.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Reason {
    // ---- the directory and its files
    /// The adapter's directory cannot be opened.
    #[error("cannot open the directory: {message}")]
    Directory {
        /// What the system says.
        message: String,
    },
    /// Something else stands in place of the directory.
    #[error("expected a directory, found {found}")]
    NotADirectory {
        /// What it is.
        found: &'static str,
    },
    /// A file that every adapter has is not there.
    #[error("the file is missing")]
    MissingFile,
    /// Something else stands in place of the file.
    #[error("expected a regular file, found {found}")]
    NotRegularFile {
        /// What it is.
        found: &'static str,
    },
    /// A link leads out of the directory that the adapter must stay in.
    #[error("a link leads outside the adapter's directory")]
    OutsideDirectory,
    /// The file cannot be read.
    #[error("cannot read the file: {message}")]
    Unreadable {
        /// What the system says.
        message: String,
    },
    /// The file is longer than any adapter's.
    #[error("the file has {found_bytes} bytes, at most {limit_bytes} are read")]
    FileTooLong {
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// There is no memory for the weights.
    #[error("no memory for {needed_bytes} bytes of weights")]
    OutOfMemory {
        /// Bytes of the file.
        needed_bytes: usize,
    },
    /// The adapter is of a kind that is not supported.
    #[error("not supported: {feature}")]
    UnsupportedFormat {
        /// The kind.
        feature: Feature,
    },

    /// Several folders below the directory hold an adapter each.
    #[error("no adapter here, and several in folders below: {}; give one of them", folders.join(", "))]
    SeveralFolders {
        /// Names of the first few.
        folders: Vec<String>,
    },
    /// Several GGUF files stand in a directory without a config.
    #[error("several GGUF files here: {}; give one of them", files.join(", "))]
    SeveralFiles {
        /// Names of the first few.
        files: Vec<String>,
    },
    /// The index of weights in several files cannot be used.
    #[error("the index of the weights: {message}")]
    BadIndex {
        /// What is wrong with it.
        message: String,
    },
    /// An index names a file that is not a safetensors file of this very directory.
    #[error("expected the plain name of a safetensors file in this directory")]
    BadShardName,
    /// One of several files of weights.
    #[error("in {shard}: {reason}")]
    Shard {
        /// Its name.
        shard: String,
        /// What is wrong with it.
        reason: Box<Reason>,
    },
    /// A file of weights lacks a tensor.
    #[error("tensor {tensor}: expected in {shard} by the index, and not there")]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The file.
        shard: String,
    },
    /// A file of weights holds a tensor that the index does not place there.
    #[error("tensor {tensor}: found in {shard}, where the index does not place it")]
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The file.
        shard: String,
    },

    // ---- adapter_config.json
    /// The config is not JSON.
    #[error("not JSON: {message}")]
    NotJson {
        /// What the parser says, with line and column.
        message: String,
    },
    /// The config is JSON and not an object.
    #[error("expected a JSON object, found {found}")]
    NotAnObject {
        /// Its type.
        found: &'static str,
    },
    /// A field that nothing can stand in for is missing.
    #[error("field `{field}` is missing; expected {expected}")]
    MissingField {
        /// The field.
        field: &'static str,
        /// What it should hold.
        expected: &'static str,
    },
    /// A field has a value that it cannot have.
    #[error("field `{field}`: expected {expected}, found {found}")]
    BadField {
        /// The field, and the entry in it.
        field: String,
        /// What it should hold.
        expected: String,
        /// Its value as JSON.
        found: String,
    },
    /// A pattern that cannot be compiled.
    #[error("field `{field}`: the pattern cannot be used: {message}")]
    BadPattern {
        /// `rank_pattern` or `alpha_pattern`.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A field asks for something that is not supported.
    #[error("field `{field}` is {found}: {feature}, not supported")]
    UnsupportedField {
        /// The field.
        field: &'static str,
        /// Its value as JSON.
        found: String,
        /// What it asks for.
        feature: Feature,
    },

    // ---- the tensor file as a whole
    /// The file ends before what its header says.
    #[error("truncated: {expected_bytes} bytes expected, {found_bytes} found")]
    Truncated {
        /// Bytes that the header asks for, itself included.
        expected_bytes: u64,
        /// Bytes of the file.
        found_bytes: u64,
    },
    /// The file goes on after its last tensor.
    #[error("{expected_bytes} bytes expected, {found_bytes} found: bytes after the last tensor")]
    TrailingBytes {
        /// Bytes that the header asks for, itself included.
        expected_bytes: u64,
        /// Bytes of the file.
        found_bytes: u64,
    },
    /// The header is longer than the format allows.
    #[error("the header has {found_bytes} bytes, the format allows {limit_bytes}")]
    HeaderTooLong {
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The header is not what the format says.
    #[error("bad header: {message}")]
    BadHeader {
        /// What is wrong, with line and column.
        message: String,
    },
    /// Two tensors have one name.
    #[error("tensor {tensor}: the name stands twice in the header")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// The offsets of a tensor run backwards.
    #[error("tensor {tensor}: offsets {begin}..{end} run backwards")]
    BadOffsets {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// A tensor does not begin where the one before it ends.
    #[error("tensor {tensor}: begins at byte {found} of the data, expected {expected}")]
    BadStart {
        /// The tensor.
        tensor: String,
        /// End of the tensor before it.
        expected: u64,
        /// Where it begins.
        found: u64,
    },
    /// Shape, dtype and bytes of a tensor disagree.
    #[error("tensor {tensor}: shape {shape:?} of {dtype} does not fit {found_bytes} bytes")]
    WrongByteCount {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its dtype.
        dtype: String,
        /// Bytes between its offsets.
        found_bytes: u64,
    },
    /// An archive of torch that cannot be read.
    #[error("{0}")]
    Archive(#[from] ArchiveError),
    /// A pickle that holds something other than tensors.
    #[error("{0}")]
    Pickle(#[from] PickleError),
    /// A GGUF file that is not an adapter that is read.
    #[error("{0}")]
    Gguf(#[from] GgufError),
    /// The file holds no A and B at all.
    #[error("no LoRA pair in the file ({num_tensors} tensors); the adapter would act as the base model")]
    NoPairs {
        /// Tensors in the file.
        num_tensors: usize,
    },

    // ---- single tensors
    /// Tensors of a kind that is not supported.
    #[error("{num_tensors} tensors hold {feature}, not supported (the first is {tensor})")]
    UnsupportedTensors {
        /// The kind.
        feature: Feature,
        /// How many there are.
        num_tensors: usize,
        /// The first, by name.
        tensor: String,
    },
    /// Tensors named in a way that is not supported.
    #[error(
        "{num_tensors} tensors are named with {dialect}, expected base_model.model.model.layers.N.… (the first is {tensor})"
    )]
    UnsupportedDialect {
        /// The way they are named.
        dialect: Dialect,
        /// How many there are.
        num_tensors: usize,
        /// The first, by name.
        tensor: String,
    },
    /// A tensor whose module or suffix is not known.
    #[error("tensor {tensor}: no such {part} is known")]
    UnknownTensor {
        /// The tensor.
        tensor: String,
        /// Which part of the name is not known.
        part: &'static str,
    },
    /// A tensor without elements.
    #[error("tensor {tensor}: shape {shape:?} holds nothing")]
    EmptyTensor {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A or B that is not a matrix.
    #[error("tensor {tensor}: expected two dimensions, found shape {shape:?}")]
    NotAMatrix {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A or B in a dtype that cannot be read.
    #[error("tensor {tensor}: expected F64, F32, F16, BF16, F8_E4M3 or F8_E5M2, found {dtype}")]
    UnsupportedDtype {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// A tensor beside the pairs with another number of dimensions than its kind has.
    #[error("tensor {tensor}: expected {expected}, found shape {shape:?}")]
    ExtraDimensions {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// What its kind has.
        expected: &'static str,
    },
    /// A tensor that belongs to a pair, and no such pair.
    #[error("tensor {tensor}: {place} without a LoRA pair there")]
    WithoutPair {
        /// The tensor.
        tensor: String,
        /// What it is, and where.
        place: String,
    },
    /// A tensor that belongs to a pair, of another size than the pair.
    #[error("tensor {tensor}: shape {found:?}, expected {expected:?} by the pair of {pair}")]
    ExtraSize {
        /// The tensor.
        tensor: String,
        /// Its shape; a vector has one row.
        found: [usize; 2],
        /// Its shape by the pair.
        expected: [usize; 2],
        /// A of the pair.
        pair: String,
    },
    /// The config says that tensors of a kind are there, and they are not.
    #[error("field `{field}` is {value}, and {num_missing} {what} missing (the first of {first})")]
    Missing {
        /// The field.
        field: &'static str,
        /// Its value as JSON.
        value: String,
        /// What is missing.
        what: &'static str,
        /// How many.
        num_missing: usize,
        /// The place of the first, or the entry of the field.
        first: String,
    },
    /// The config says that tensors of a kind are not there, and they are.
    #[error("field `{field}` is {value}, and the file holds {num_tensors} tensors of that kind (the first is {first})")]
    Undeclared {
        /// The field.
        field: &'static str,
        /// Its value as JSON.
        value: String,
        /// How many.
        num_tensors: usize,
        /// The first.
        first: String,
    },
    /// Token rows that are not as many as the config names tokens.
    #[error("tensor {tensor}: {found} rows, expected {expected} by the config's trainable_token_indices")]
    TokenCount {
        /// The tensor.
        tensor: String,
        /// Its rows.
        found: usize,
        /// Tokens of the config.
        expected: usize,
    },
    /// A half of a block-diagonal pair that cannot be cut into its blocks.
    #[error("tensor {tensor}: {rows} rows, expected a multiple of the {num_blocks} blocks of use_bdlora")]
    UnevenBlocks {
        /// The tensor.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// Blocks by the config.
        num_blocks: usize,
    },
    /// A without B, or B without A.
    #[error("tensor {tensor}: its other half {missing} is missing")]
    HalfPair {
        /// The half that is there.
        tensor: String,
        /// The half that is not.
        missing: String,
    },
    /// Two tensors name one place.
    #[error("tensors {first} and {second} name one place, {place}")]
    AmbiguousTensor {
        /// The place: a site, or the experts of a layer.
        place: String,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// Two tensors belong to adapters of different names, so the file holds more than one adapter.
    #[error("tensors {first} and {second} belong to adapters of different names; expected one adapter in a file")]
    SeveralAdapters {
        /// A tensor of one of them.
        first: String,
        /// A tensor of another.
        second: String,
    },
    /// A and B that cannot be multiplied.
    #[error(
        "tensors {a} {a_shape:?} and {b} {b_shape:?}: expected [rank, in_features] and [out_features, rank] of one rank"
    )]
    PairMismatch {
        /// Name of A.
        a: String,
        /// Shape of A.
        a_shape: [usize; 2],
        /// Name of B.
        b: String,
        /// Shape of B.
        b_shape: [usize; 2],
    },
    /// A rank beyond what adapters can have.
    #[error("tensor {tensor}: rank {found}, expected 1 to {max}")]
    RankTooLarge {
        /// The tensor.
        tensor: String,
        /// Its rank.
        found: usize,
        /// The largest.
        max: usize,
    },
    /// The rank of a tensor is not the one that the config gives for its module.
    #[error("tensor {tensor}: rank {found}, expected {expected} by the config's {source_field}")]
    RankDisagrees {
        /// The tensor.
        tensor: String,
        /// Its rank.
        found: usize,
        /// The rank by the config.
        expected: usize,
        /// `r`, or the pattern that matches.
        source_field: String,
    },
    /// A parameter that holds all experts, and nothing that says which one.
    #[error(
        "tensor {tensor}: holds all experts of a layer; target_parameters names {target_parameters}, which does not say whether it is gate_up_proj or down_proj"
    )]
    UnknownParameter {
        /// A of the pair.
        tensor: String,
        /// Entries of the config's `target_parameters`.
        target_parameters: String,
    },
    /// Stacked experts whose shapes fit no way of laying them out.
    #[error(
        "stacked experts (parameter, columns of A, rows of B) {shapes:?}: no hidden size {}and expert size fit them all",
        known(hidden_size)
    )]
    ExpertShapes {
        /// The first few: parameter, columns of A, rows of B.
        shapes: Vec<(&'static str, usize, usize)>,
        /// By the other modules of the file.
        hidden_size: Option<usize>,
    },
    /// Two stacked parameters of different numbers of experts.
    #[error("tensor {tensor}: {rows} rows of rank {rank} are {found} experts, expected {expected} as in {other}")]
    ExpertCount {
        /// A of the pair.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// The rank by the config.
        rank: usize,
        /// Experts by both.
        found: usize,
        /// Experts of the other parameter.
        expected: usize,
        /// A of the other parameter.
        other: String,
    },
    /// Rows of stacked experts that the rank of the config does not divide.
    #[error(
        "tensor {tensor}: {rows} rows for all experts, expected a multiple of {rank} by the config's {source_field}"
    )]
    ExpertRows {
        /// A of the pair.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// The rank by the config.
        rank: usize,
        /// `r`, or the pattern that matches.
        source_field: String,
    },
    /// Gate and up in one matrix with an odd number of rows.
    #[error("tensor {tensor}: {rows} rows for gate and up, expected an even number")]
    OddGateUp {
        /// B of the pair.
        tensor: String,
        /// Its rows.
        rows: usize,
    },
    /// More pairs of experts than any model has.
    #[error("the stacked experts of the file make {found} pairs, at most {max} are read")]
    TooManyExperts {
        /// Pairs that the file would make.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// Alpha and rank that give no scaling.
    #[error("tensor {tensor}: {error}")]
    Scaling {
        /// A of the pair.
        tensor: String,
        /// What is wrong with them.
        error: ScalingError,
    },
    /// The elements of a tensor.
    #[error("tensor {0}")]
    Matrix(#[from] MatrixError),

    // ---- adapters made in memory
    /// One site given twice.
    #[error("{site}: given twice")]
    DuplicateSite {
        /// The site.
        site: Site,
    },
    /// A module at a kind of site where it cannot stand.
    #[error("{site}: this module cannot stand there")]
    MisplacedSite {
        /// The site.
        site: Site,
    },
}

fn known(hidden_size: &Option<usize>) -> String {
    hidden_size.map(|size| format!("({size} by the other modules) ")).unwrap_or_default()
}
