//! A tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizers whose definition is known.
//!
//! GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) and leaves its definition to the reader. The ones built here
//! are those of the models' own `tokenizer.json`. llama.cpp's `default` stands for "unknown" and approximates, so it
//! is refused: ids that are nearly right are worse than none.

use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::{ChatTemplate, Tokenizer, TokenizerError};
use crate::checkpoint::gguf::{GgufFile, MetadataArray, MetadataValue};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";

/// Token types of ggml: control tokens are special, user-defined ones are matched in text but are ordinary output.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Llama 3's pre-tokenizer; Qwen2's differs in taking digits one by one.
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A pre-tokenizer of GGUF by name.
#[derive(Clone, Copy)]
enum Pre {
    Gpt2,
    Smollm,
    LlamaBpe,
    Qwen2,
}

impl Pre {
    const SUPPORTED: &'static str = "gpt-2, smollm, llama-bpe, qwen2";

    fn from_name(name: &str) -> Result<Self, TokenizerError> {
        Ok(match name {
            "gpt-2" => Self::Gpt2,
            "smollm" => Self::Smollm,
            "llama-bpe" => Self::LlamaBpe,
            "qwen2" => Self::Qwen2,
            other => {
                return Err(TokenizerError::Unsupported {
                    what: PRE,
                    found: other.to_owned(),
                    supported: Self::SUPPORTED,
                });
            }
        })
    }

    fn build(self) -> Result<PreTokenizerWrapper, TokenizerError> {
        // Arguments: no space before the first word, offsets trimmed, GPT-2's own splitting or none.
        let byte_level = |splits| ByteLevel::new(false, true, splits);
        let split_first = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(TokenizerError::library("building the pre-tokenizer"))?;
            Ok(Sequence::new(vec![split.into(), byte_level(false).into()]).into())
        };
        match self {
            Self::Gpt2 => Ok(byte_level(true).into()),
            Self::Smollm => Ok(Sequence::new(vec![Digits::new(true).into(), byte_level(true).into()]).into()),
            Self::LlamaBpe => split_first(LLAMA3_PATTERN),
            Self::Qwen2 => split_first(QWEN2_PATTERN),
        }
    }
}

impl Tokenizer {
    /// Builds the tokenizer that the metadata of `file` describe.
    ///
    /// # Errors
    /// [`TokenizerError`] when there is none, it is of a kind that is not built here, or its parts contradict each
    /// other.
    pub fn from_gguf(file: &GgufFile<'_>) -> Result<Self, TokenizerError> {
        let text = |key: &str| file.get(key).and_then(MetadataValue::as_str);
        let Some(model) = text(MODEL) else {
            return Err(TokenizerError::Absent { expected: MODEL.to_owned() });
        };
        if model != "gpt2" {
            let found = model.to_owned();
            return Err(TokenizerError::Unsupported { what: MODEL, found, supported: "gpt2" });
        }
        let pre = Pre::from_name(text(PRE).unwrap_or_default())?;
        let tokens = strings(file, TOKENS)?;

        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary(&tokens)?, merges(file)?)
            .ignore_merges(matches!(pre, Pre::LlamaBpe))
            .build()
            .map_err(TokenizerError::library("building the vocabulary"))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(pre.build()?));
        inner.with_decoder(Some(ByteLevelDecoder::new(false, true, true)));
        if matches!(pre, Pre::Qwen2) {
            inner.with_normalizer(Some(NFC)).map_err(TokenizerError::library("building the normalizer"))?;
        }
        let added = added_tokens(file, &tokens)?;
        inner.add_tokens(added).map_err(TokenizerError::library("adding special tokens"))?;

        let bos = token(file, &tokens, BOS)?;
        let eos = token(file, &tokens, EOS)?;
        if let Some(processor) = post_processor(file, bos, eos)? {
            inner.with_post_processor(Some(processor));
        }
        let spelling = |token: Option<(u32, &str)>| token.map(|(_, spelling)| spelling.to_owned());
        let chat_template =
            text("tokenizer.chat_template").map(|source| ChatTemplate::new(source, spelling(bos), spelling(eos)));
        Ok(Self { inner, chat_template })
    }
}

fn array<'a>(file: &GgufFile<'a>, key: &str) -> Result<MetadataArray<'a>, TokenizerError> {
    match file.get(key) {
        None => Err(TokenizerError::Absent { expected: key.to_owned() }),
        Some(value) => value.as_array().ok_or_else(|| TokenizerError::invalid(key, value.summary(), "a list")),
    }
}

fn strings<'a>(file: &GgufFile<'a>, key: &str) -> Result<Vec<&'a str>, TokenizerError> {
    let strings: Option<Vec<_>> = array(file, key)?.iter().map(|value| value.as_str()).collect();
    strings.ok_or_else(|| TokenizerError::invalid(key, "a list of other values", "a list of strings"))
}

fn vocabulary(tokens: &[&str]) -> Result<Vocab, TokenizerError> {
    let mut vocabulary = Vocab::default();
    for (token, id) in tokens.iter().zip(0u32..) {
        if let Some(other) = vocabulary.insert((*token).to_owned(), id) {
            let found = format!("{token:?} at both {other} and {id}");
            return Err(TokenizerError::invalid(TOKENS, found, "every token once"));
        }
    }
    Ok(vocabulary)
}

fn merges(file: &GgufFile<'_>) -> Result<Merges, TokenizerError> {
    let pair = |merge: &&str| {
        // Both parts have at least one character, and the first may begin with a space.
        let first = merge.chars().next()?.len_utf8();
        let space = first + merge.get(first..)?.find(' ')?;
        Some((merge[..space].to_owned(), merge[space + 1..].to_owned()))
    };
    strings(file, MERGES)?
        .iter()
        .map(|merge| {
            pair(merge).ok_or_else(|| TokenizerError::invalid(MERGES, format!("{merge:?}"), "two parts and a space"))
        })
        .collect()
}

fn added_tokens(file: &GgufFile<'_>, tokens: &[&str]) -> Result<Vec<AddedToken>, TokenizerError> {
    let types = array(file, TOKEN_TYPES)?;
    if types.len() != tokens.len() {
        let expected = format!("{}, one for each token", tokens.len());
        return Err(TokenizerError::invalid(TOKEN_TYPES, types.len(), expected));
    }
    let kinds = types.iter().map(|value| value.as_u64());
    Ok(tokens
        .iter()
        .zip(kinds)
        .filter(|(_, kind)| matches!(kind, Some(CONTROL | USER_DEFINED)))
        .map(|(token, kind)| AddedToken::from(*token, kind == Some(CONTROL)).normalized(false))
        .collect())
}

/// The token whose id stands under `key`.
fn token<'t>(
    file: &GgufFile<'_>,
    tokens: &[&'t str],
    key: &'static str,
) -> Result<Option<(u32, &'t str)>, TokenizerError> {
    let Some(value) = file.get(key) else { return Ok(None) };
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
    match id.and_then(|id| Some((id, *tokens.get(id as usize)?))) {
        Some(token) => Ok(Some(token)),
        None => {
            let expected = format!("an id below {}", tokens.len());
            Err(TokenizerError::invalid(key, value.summary(), expected))
        }
    }
}

/// Adds the tokens before and after a text that the file asks for.
fn post_processor(
    file: &GgufFile<'_>,
    bos: Option<(u32, &str)>,
    eos: Option<(u32, &str)>,
) -> Result<Option<TemplateProcessing>, TokenizerError> {
    let wanted = |key: &str| file.get(key).and_then(MetadataValue::as_bool).unwrap_or(false);
    let before = bos.filter(|_| wanted("tokenizer.ggml.add_bos_token"));
    let after = eos.filter(|_| wanted("tokenizer.ggml.add_eos_token"));
    if before.is_none() && after.is_none() {
        return Ok(None);
    }
    // `$A` is the text; the others are looked up among the special tokens by these fixed names.
    let mut template = Vec::new();
    template.extend(before.map(|_| "[bos]"));
    template.push("$A");
    template.extend(after.map(|_| "[eos]"));
    let special = before.iter().map(|(id, _)| ("[bos]", *id)).chain(after.iter().map(|(id, _)| ("[eos]", *id)));
    let special: Vec<(String, u32)> = special.map(|(name, id)| (name.to_owned(), id)).collect();
    let processor = TemplateProcessing::builder()
        .try_single(template)
        .and_then(|builder| {
            builder.special_tokens(special);
            builder.build().map_err(|error| error.to_string())
        })
        .map_err(|error| TokenizerError::library("building the post-processor")(error.into()))?;
    Ok(Some(processor))
}
