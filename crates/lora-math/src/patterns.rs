//! `rank_pattern` and `alpha_pattern` of an adapter's config: which entry of the table a module takes.
//!
//! The rule is PEFT's (its `get_pattern_key`): an entry's key is a regular expression, put into
//! `re.match(r"(.*\.)?(KEY)$", path)`, so it must match the whole module path or the path's end after a dot. The first
//! entry of the file that matches wins. `path` is the module path without `base_model.model.`. Rank and alpha are looked
//! up apart, each in its own [`Patterns`].
//!
//! PEFT 0.6 to 0.13 had another rule, [`OlderPatterns`]: one key for both tables, and `re.match(r".*\.KEY$", path)`
//! without the group. A file does not say which of the two it was trained under.
//!
//! Keys come from untrusted files: their length, their number and the size of what they compile to are bounded, and
//! matching takes time linear in the path. Python's expressions that this crate's engine lacks (look-around,
//! back-references, `\Z`) or reads otherwise (nested classes) are refused with the key.

use regex::RegexBuilder;
use thiserror::Error;

/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 16 << 10;

/// Most keys of one table that are more than a path (paths, which some trainers write for every module, are unbounded).
pub const MAX_REGEX_KEYS: usize = 256;

/// Most bytes that one key may compile to, and its matcher may cache.
pub const MAX_REGEX_BYTES: usize = 256 << 10;

/// A key that cannot be evaluated as PEFT does it. Trying again will not help.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PatternError {
    /// The key does not compile: not a regular expression, or one with look-around or back-references.
    #[error("pattern key {key:?} cannot be evaluated: {reason}")]
    Unsupported {
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The key compiles, and means something else in Python: a character class holds `[`, `&&`, `--` or `~~`.
    #[error("pattern key {key:?} has a character class that Python reads otherwise")]
    ReadsDifferently {
        /// The key.
        key: String,
    },
    /// The key compiles to too much.
    #[error("pattern key {key:?} compiles to more than {max_bytes} bytes")]
    TooLarge {
        /// The key.
        key: String,
        /// The bound.
        max_bytes: usize,
    },
    /// The key is too long.
    #[error("a pattern key has {key_bytes} bytes, more than {max_bytes}")]
    KeyTooLong {
        /// Bytes of the key.
        key_bytes: usize,
        /// The bound.
        max_bytes: usize,
    },
    /// Too many keys are more than a path.
    #[error("more than {max_keys} pattern keys are regular expressions")]
    TooManyKeys {
        /// The bound.
        max_keys: usize,
    },
}

/// A table of patterns under PEFT's rule of today.
#[derive(Clone, Debug)]
pub struct Patterns<T> {
    entries: Vec<(Key, T)>,
}

impl<T> Patterns<T> {
    /// The entries in file order. Every key is checked, whether or not a module ever meets it.
    pub fn new(entries: impl IntoIterator<Item = (String, T)>) -> Result<Self, PatternError> {
        let mut compiler = Compiler::default();
        let compile = |(key, value): (String, T)| Ok((compiler.compile(&key, Rule::Current)?, value));
        Ok(Patterns { entries: entries.into_iter().map(compile).collect::<Result<_, _>>()? })
    }

    /// The value of the first entry whose key matches `path`; none where the config's own value holds.
    pub fn lookup(&self, path: &str) -> Option<&T> {
        self.entries.iter().find(|(key, _)| key.matches(path)).map(|(_, value)| value)
    }

    /// Whether the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Patterns { entries: Vec::new() }
    }
}

/// The tables of ranks and of alphas under the rule of PEFT 0.6 to 0.13.
#[derive(Clone, Debug)]
pub struct OlderPatterns<R, A> {
    /// Keys of the ranks, then keys of the alphas, both in file order.
    keys: Vec<(String, Key)>,
    ranks: Vec<(String, R)>,
    alphas: Vec<(String, A)>,
}

impl<R, A> OlderPatterns<R, A> {
    /// Both tables, entries in file order.
    pub fn new(
        ranks: impl IntoIterator<Item = (String, R)>,
        alphas: impl IntoIterator<Item = (String, A)>,
    ) -> Result<Self, PatternError> {
        let ranks: Vec<_> = ranks.into_iter().collect();
        let alphas: Vec<_> = alphas.into_iter().collect();
        let (mut rank_compiler, mut alpha_compiler) = (Compiler::default(), Compiler::default());
        let rank_keys = ranks.iter().map(|(key, _)| Ok((key.clone(), rank_compiler.compile(key, Rule::Older)?)));
        let alpha_keys = alphas.iter().map(|(key, _)| Ok((key.clone(), alpha_compiler.compile(key, Rule::Older)?)));
        let keys = rank_keys.chain(alpha_keys).collect::<Result<_, _>>()?;
        Ok(OlderPatterns { keys, ranks, alphas })
    }

    /// Rank and alpha of `path`: the first key that matches, ranks' keys before alphas', names the entry in both tables.
    /// So where a rank's key hits, an alpha under another key that would match too is not applied.
    pub fn lookup(&self, path: &str) -> (Option<&R>, Option<&A>) {
        match self.keys.iter().find(|(_, key)| key.matches(path)) {
            Some((name, _)) => (entry(&self.ranks, name), entry(&self.alphas, name)),
            None => (None, None),
        }
    }
}

fn entry<'a, T>(entries: &'a [(String, T)], name: &str) -> Option<&'a T> {
    entries.iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

/// How a key is put into its expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// `(.*\.)?(KEY)$`
    Current,
    /// `.*\.KEY$`: a dot must stand before the key, and an alternation in the key is not held together.
    Older,
}

/// A key ready to be matched.
#[derive(Clone, Debug)]
enum Key {
    /// Letters, digits, `_`, `-`, and dots that stand for any character. Adapters may name every module this way, and
    /// comparing is a thousand times cheaper than compiling.
    Path { path: String, rule: Rule },
    /// Anything else.
    Regex(regex::Regex),
}

impl Key {
    fn matches(&self, path: &str) -> bool {
        // No module path holds a newline; the two engines differ there (`$` before a last newline in Python).
        if path.contains('\n') {
            return false;
        }
        match self {
            Key::Path { path: key, rule } => {
                let mut rest = path.chars().rev();
                let covered = key.chars().rev().all(|k| rest.next().is_some_and(|c| k == '.' || k == c));
                let before = rest.next();
                covered && (before == Some('.') || (before.is_none() && *rule == Rule::Current))
            }
            // The leftmost match starts at 0 exactly where a match at the start exists: Python's `re.match`.
            Key::Regex(regex) => regex.find(path).is_some_and(|found| found.start() == 0),
        }
    }
}

/// Compiles the keys of one table within the bounds.
#[derive(Default)]
struct Compiler {
    num_regexes: usize,
}

impl Compiler {
    fn compile(&mut self, key: &str, rule: Rule) -> Result<Key, PatternError> {
        if key.len() > MAX_KEY_BYTES {
            return Err(PatternError::KeyTooLong { key_bytes: key.len(), max_bytes: MAX_KEY_BYTES });
        }
        if is_path(key) {
            return Ok(Key::Path { path: key.to_owned(), rule });
        }
        self.num_regexes += 1;
        if self.num_regexes > MAX_REGEX_KEYS {
            return Err(PatternError::TooManyKeys { max_keys: MAX_REGEX_KEYS });
        }
        if reads_differently(key) {
            return Err(PatternError::ReadsDifferently { key: key.to_owned() });
        }
        compile_regex(key, rule).map(Key::Regex)
    }
}

fn is_path(key: &str) -> bool {
    key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
}

fn compile_regex(key: &str, rule: Rule) -> Result<regex::Regex, PatternError> {
    let expression = match rule {
        Rule::Current => format!(r"(.*\.)?({key})$"),
        Rule::Older => format!(r".*\.{key}$"),
    };
    RegexBuilder::new(&expression)
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES)
        .build()
        .map_err(|error| pattern_error(key, &error))
}

fn pattern_error(key: &str, error: &regex::Error) -> PatternError {
    let key = key.to_owned();
    if let regex::Error::CompiledTooBig(max_bytes) = *error {
        return PatternError::TooLarge { key, max_bytes };
    }
    // The engine's message draws the expression on several lines; its last line is the reason.
    let message = error.to_string();
    let reason = message.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
    PatternError::Unsupported { key, reason }
}

/// Whether a character class of `key` holds `[` or a doubled `&`, `-` or `~`: set notation here, plain characters in
/// Python.
fn reads_differently(key: &str) -> bool {
    let mut in_class = false;
    // Whether the class has no member yet: a `]` there is a member, in both languages.
    let mut at_start = false;
    let mut previous = None;
    let mut chars = key.chars();
    while let Some(c) = chars.next() {
        let before = previous.replace(c);
        match c {
            '\\' => {
                chars.next();
                (at_start, previous) = (false, None);
            }
            '[' if in_class => return true,
            '&' | '-' | '~' if in_class && before == Some(c) => return true,
            '[' => (in_class, at_start) = (true, true),
            '^' if at_start && before == Some('[') => {}
            ']' if !at_start => in_class = false,
            _ => at_start = false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn through_regex(key: &str, rule: Rule) -> Key {
        Key::Regex(compile_regex(key, rule).expect("a path is a regular expression"))
    }

    proptest! {
        /// Short alphabets make hits likely on both sides.
        #[test]
        fn a_path_key_matches_as_its_expression_does(
            key in "[ab.]{0,4}|[a.]{1,3}b",
            paths in prop::collection::vec("[ab.é]{0,6}", 16),
        ) {
            for rule in [Rule::Current, Rule::Older] {
                let plain = Key::Path { path: key.clone(), rule };
                let regex = through_regex(&key, rule);
                for path in &paths {
                    prop_assert_eq!(plain.matches(path), regex.matches(path), "{} on {} by {:?}", key, path, rule);
                }
            }
        }
    }

    #[test]
    fn set_notation_is_seen_only_inside_a_class() {
        for key in ["[a&&b]", "[a--b]", "[[:alpha:]]", "[]a[b]", "[^][a]", "x[a~~]"] {
            assert!(reads_differently(key), "{key}");
        }
        for key in ["a&&b", "--", r"[\[a]", "[a-z]-[b]", "[]a]--", r"\[--", "[a]~~", "[a-z0-9_-]+", "[a^][b]"] {
            assert!(!reads_differently(key), "{key}");
        }
    }
}
