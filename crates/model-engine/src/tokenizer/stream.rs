//! Text from tokens that come one by one.

use super::{Tokenizer, TokenizerError};

/// Decodes a growing sequence and gives each piece of text once, holding back bytes that do not make a character yet.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// Ids whose text may still change, after some whose text is out: their company decides about spaces.
    ids: Vec<u32>,
    /// How many of `ids` have been given out.
    num_given: usize,
}

impl<'a> TokenStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), num_given: 0 }
    }

    /// The text that `id` completes, if any.
    ///
    /// # Errors
    /// [`TokenizerError::Library`].
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TokenizerError> {
        self.ids.push(id);
        let text = self.pending()?;
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        self.ids.drain(..self.num_given);
        self.num_given = self.ids.len();
        Ok(Some(text))
    }

    /// What is still held back, with replacement characters for bytes that never made a character.
    ///
    /// # Errors
    /// [`TokenizerError::Library`].
    pub fn finish(self) -> Result<Option<String>, TokenizerError> {
        let text = self.pending()?;
        Ok((!text.is_empty()).then_some(text))
    }

    fn pending(&self) -> Result<String, TokenizerError> {
        let given = self.tokenizer.decode(&self.ids[..self.num_given], self.skip_special_tokens)?;
        let all = self.tokenizer.decode(&self.ids, self.skip_special_tokens)?;
        Ok(all.get(given.len()..).unwrap_or_default().to_owned())
    }
}
