//! Text to token ids and back, and chat messages to text.
//!
//! The work is done by the `tokenizers` crate; this module builds its tokenizer from a Hugging Face directory
//! (`tokenizer.json`) or from GGUF metadata, keeps the chat template beside it, and streams text as tokens come.
//! Which tokens end a generation is the configuration's business
//! ([`ModelConfig::eos_token_ids`](crate::checkpoint::ModelConfig::eos_token_ids)).

mod chat;
mod gguf;
mod stream;

use std::error::Error;
use std::path::{Path, PathBuf};

pub use chat::{ChatMessage, ChatTemplate};
pub use stream::TokenStream;

/// Why there is no tokenizer, or why it refused its input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The checkpoint carries none.
    #[error("no tokenizer: {expected} is absent; prompts can still be given as token ids")]
    Absent {
        /// What was looked for.
        expected: String,
    },
    /// The checkpoint carries one of a kind that is not built here.
    #[error("unsupported {what} {found:?} (supported: {supported}); prompts can still be given as token ids")]
    Unsupported {
        /// Which field.
        what: &'static str,
        /// Its value.
        found: String,
        /// The values that work.
        supported: &'static str,
    },
    /// A part of the tokenizer's data contradicts another or has the wrong type.
    #[error("invalid tokenizer data: {what} is {found}, expected {expected}")]
    Invalid {
        /// Which part.
        what: String,
        /// What it is.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A file beside the checkpoint cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A JSON file does not parse.
    #[error("{}: invalid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The `tokenizers` crate refused.
    #[error("{action}: {source}")]
    Library {
        /// What was being done.
        action: &'static str,
        /// What the crate said.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The chat template does not compile or refused the messages.
    #[error("chat template: {source}")]
    Template {
        /// What the template engine, or the template itself, said.
        source: minijinja::Error,
    },
}

impl TokenizerError {
    fn library(action: &'static str) -> impl FnOnce(Box<dyn Error + Send + Sync>) -> Self {
        move |source| Self::Library { action, source }
    }

    fn invalid(what: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), found: found.to_string(), expected: expected.into() }
    }
}

/// A base model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    chat_template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a Hugging Face directory, and the chat template from `chat_template.jinja` or else
    /// from `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Absent`] when there is no `tokenizer.json`, others when a file is malformed.
    pub fn from_hf_dir(directory: &Path) -> Result<Self, TokenizerError> {
        let path = directory.join("tokenizer.json");
        if !path.is_file() {
            return Err(TokenizerError::Absent { expected: path.display().to_string() });
        }
        let mut inner =
            tokenizers::Tokenizer::from_file(&path).map_err(TokenizerError::library("reading tokenizer.json"))?;
        // Both are habits of training code that such files may have stored; a prompt is never cut or padded here.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(TokenizerError::library("reading tokenizer.json"))?;
        Ok(Self { inner, chat_template: ChatTemplate::from_hf_dir(directory)? })
    }

    /// The ids of `text`. Special tokens written out in the text become their ids; with `add_special_tokens` the
    /// model's own beginning (and, rarely, end) token is added as its files say. Leave that out for the text of a
    /// chat template, which writes them itself.
    ///
    /// # Errors
    /// [`TokenizerError::Library`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, add_special_tokens);
        Ok(encoding.map_err(TokenizerError::library("encoding"))?.get_ids().to_vec())
    }

    /// The text of `ids`; special tokens are left out on request, ids that the vocabulary lacks always.
    ///
    /// # Errors
    /// [`TokenizerError::Library`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skip_special_tokens).map_err(TokenizerError::library("decoding"))
    }

    /// A decoder for tokens that come one by one.
    #[must_use]
    pub fn stream(&self, skip_special_tokens: bool) -> TokenStream<'_> {
        TokenStream::new(self, skip_special_tokens)
    }

    /// The id of the token spelled `token`.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The spelling of token `id`.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The number of tokens, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The chat template, when the checkpoint has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }
}
