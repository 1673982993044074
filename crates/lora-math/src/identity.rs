//! Which adapter exactly: the content of its files, and the generation of its residence.

use std::fmt;

/// Digest of what an adapter applies: its sites, with A, B and scaling of each. Equal contents have equal digests, in
/// every process. Of the config, only what went into the scalings counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentDigest([u8; 32]);

impl ContentDigest {
    /// A digest from its 32 bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        ContentDigest(bytes)
    }

    /// The 32 bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentDigest({self})")
    }
}

/// A number that no two generations of one process share. It grows with every load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(u64);

impl Generation {
    /// The generation before the first load of a counter.
    pub const ZERO: Generation = Generation(0);

    /// The generation after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Generation(self.0 + 1)
    }

    /// The number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {}", self.0)
    }
}

/// One generation of an adapter. A name is only a key by which a pool finds it; the base model has no `AdapterId`
/// (it is [`Route::Base`](crate::Route::Base)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId {
    /// What it contains: keys of prefix caches use this, so a reload of equal contents keeps its cache.
    pub content: ContentDigest,
    /// Which residence it is: two uses are of one residence only where this is equal too.
    pub generation: Generation,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_of_equal_contents_is_another_generation() {
        let content = ContentDigest::new([0xa5; 32]);
        let first = AdapterId { content, generation: Generation::ZERO.next() };
        let second = AdapterId { content, generation: first.generation.next() };
        assert_ne!(first, second);
        assert_eq!(first.content, second.content);
        assert!(first.generation < second.generation);
        assert_eq!((first.generation.number(), second.generation.number()), (1, 2));
    }

    #[test]
    fn a_digest_is_shown_in_hex() {
        let mut bytes = [0; 32];
        (bytes[0], bytes[31]) = (0x0f, 0xf0);
        let digest = ContentDigest::new(bytes);
        assert_eq!(digest.to_string(), format!("0f{}f0", "0".repeat(60)));
        assert_eq!(digest.bytes(), &bytes);
    }
}
