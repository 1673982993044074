//! What the keys and values of a block of tokens depend on, as a key: two blocks with equal keys hold equal bits.
//!
//! A key is a BLAKE3 digest over the key of the block before and the block's tokens; the first one's predecessor names the
//! adapter's contents (or the base), its scale, and the salt, each part with its length in front, so that no two different
//! lists of parts run together.

use lora_math::ContentDigest;

/// The key of a block, or of what stands before the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PrefixKey([u8; 32]);

impl PrefixKey {
    /// What all blocks of a sequence depend on beside their tokens. `adapter` is the contents with the request's scale, none
    /// the base model.
    pub(crate) fn root(adapter: Option<(ContentDigest, f32)>, salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        match adapter {
            Some((content, scale)) => {
                part(b"adapter");
                part(content.bytes());
                part(&scale.to_bits().to_le_bytes());
            }
            None => part(b"base"),
        }
        part(salt);
        PrefixKey(*hasher.finalize().as_bytes())
    }

    /// The key of the block of these tokens behind the block of this key.
    pub(crate) fn next(self, token_ids: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in token_ids {
            hasher.update(&token.to_le_bytes());
        }
        PrefixKey(*hasher.finalize().as_bytes())
    }
}

/// How far the blocks of a sequence have keys.
#[derive(Debug)]
pub(crate) struct PrefixState {
    /// Of the last whole block.
    pub(crate) key: PrefixKey,
    /// Whole blocks.
    pub(crate) num_blocks: usize,
    /// Tokens behind them.
    pub(crate) tail: Vec<u32>,
}

impl PrefixState {
    pub(crate) fn new(root: PrefixKey) -> Self {
        PrefixState { key: root, num_blocks: 0, tail: Vec::new() }
    }

    /// Takes tokens in, and gives index and key of every block that they complete to `completed`.
    pub(crate) fn push(&mut self, token_ids: &[u32], block_tokens: usize, mut completed: impl FnMut(usize, PrefixKey)) {
        for &token in token_ids {
            self.tail.push(token);
            if self.tail.len() == block_tokens {
                self.key = self.key.next(&self.tail);
                completed(self.num_blocks, self.key);
                self.num_blocks += 1;
                self.tail.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_key_counts() {
        let content = |byte| ContentDigest::new([byte; 32]);
        let roots = [
            PrefixKey::root(None, b""),
            PrefixKey::root(None, b"a"),
            PrefixKey::root(Some((content(1), 1.0)), b""),
            PrefixKey::root(Some((content(2), 1.0)), b""),
            PrefixKey::root(Some((content(1), 0.5)), b""),
            PrefixKey::root(Some((content(1), 1.0)), b"a"),
            // Parts that run together: the salt is not read as another part.
            PrefixKey::root(None, b"adapter"),
        ];
        let mut keys: Vec<PrefixKey> = roots.to_vec();
        for root in roots {
            keys.extend([root.next(&[1, 2]), root.next(&[2, 1]), root.next(&[1]).next(&[2])]);
        }
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{index}");
        }
    }

    #[test]
    fn cuts_do_not_change_keys() {
        let tokens: Vec<u32> = (0..21).collect();
        let keys = |cut: usize| {
            let mut state = PrefixState::new(PrefixKey::root(None, b""));
            let mut keys = Vec::new();
            for part in tokens.chunks(cut) {
                state.push(part, 8, |index, key| keys.push((index, key)));
            }
            assert_eq!((state.num_blocks, state.tail.len()), (2, 5));
            keys
        };
        assert_eq!(keys(1), keys(21));
        assert_eq!(keys(8), keys(3));
        assert_eq!(keys(8).len(), 2);
    }
}
