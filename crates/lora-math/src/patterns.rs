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
//! Keys come from untrusted files: their length and the size of what they compile to are bounded, and so is the number of
//! keys that a lookup tries, by [`MAX_REGEX_KEYS`] and [`MAX_PATH_SHAPES`]. Trying one takes time linear in the path. Python's expressions that this crate's engine lacks (look-around,
//! back-references, `\Z`) or reads otherwise (nested classes) are refused with the key.

mod index;

use std::collections::HashMap;

use regex::RegexBuilder;
use thiserror::Error;

use self::index::{Key, KeyIndex};

/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 16 << 10;

/// Most keys of one table that are more than a path (paths, which some trainers write for every module, are unbounded).
pub const MAX_REGEX_KEYS: usize = 256;

/// Most shapes (a length, and the places of the dots) that the paths among the keys of one table may have. A model with
/// experts whose every module is named has some dozen.
pub const MAX_PATH_SHAPES: usize = 512;

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
    /// Keys that are paths are of too many shapes.
    #[error("pattern keys that are paths have more than {max_shapes} different lengths and places of dots")]
    TooManyShapes {
        /// The bound.
        max_shapes: usize,
    },
}

/// A table of patterns under PEFT's rule of today.
#[derive(Clone, Debug)]
pub struct Patterns<T> {
    index: KeyIndex,
    values: Vec<T>,
}

impl<T> Patterns<T> {
    /// The entries in file order. Every key is checked, whether or not a module ever meets it.
    pub fn new(entries: impl IntoIterator<Item = (String, T)>) -> Result<Self, PatternError> {
        let mut compiler = Compiler::new(Rule::Current);
        let mut patterns = Patterns::default();
        for (key, value) in entries {
            patterns.index.push(compiler.compile(&key)?)?;
            patterns.values.push(value);
        }
        Ok(patterns)
    }

    /// The value of the first entry whose key matches `path`; none where the config's own value holds. Takes no longer
    /// for more keys that are paths.
    pub fn lookup(&self, path: &str) -> Option<&T> {
        self.values.get(self.index.first_match(path)?)
    }

    /// Whether the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Patterns { index: KeyIndex::new(Rule::Current, MAX_PATH_SHAPES), values: Vec::new() }
    }
}

/// The tables of ranks and of alphas under the rule of PEFT 0.6 to 0.13.
#[derive(Clone, Debug)]
pub struct OlderPatterns<R, A> {
    /// Keys of the ranks, then keys of the alphas, both in file order.
    index: KeyIndex,
    /// For each key, the first rank and the first alpha of that name.
    named: Vec<(Option<usize>, Option<usize>)>,
    ranks: Vec<R>,
    alphas: Vec<A>,
}

impl<R, A> OlderPatterns<R, A> {
    /// Both tables, entries in file order.
    pub fn new(
        ranks: impl IntoIterator<Item = (String, R)>,
        alphas: impl IntoIterator<Item = (String, A)>,
    ) -> Result<Self, PatternError> {
        let (rank_keys, ranks): (Vec<String>, Vec<R>) = ranks.into_iter().unzip();
        let (alpha_keys, alphas): (Vec<String>, Vec<A>) = alphas.into_iter().unzip();
        let mut index = KeyIndex::new(Rule::Older, 2 * MAX_PATH_SHAPES);
        for keys in [&rank_keys, &alpha_keys] {
            let mut compiler = Compiler::new(Rule::Older);
            for key in keys {
                index.push(compiler.compile(key)?)?;
            }
        }
        let (first_rank, first_alpha) = (first_positions(&rank_keys), first_positions(&alpha_keys));
        let named = |key: &String| (first_rank.get(&**key).copied(), first_alpha.get(&**key).copied());
        let named = rank_keys.iter().chain(&alpha_keys).map(named).collect();
        Ok(OlderPatterns { index, named, ranks, alphas })
    }

    /// Rank and alpha of `path`: the first key that matches, ranks' keys before alphas', names the entry in both tables.
    /// So where a rank's key hits, an alpha under another key that would match too is not applied.
    pub fn lookup(&self, path: &str) -> (Option<&R>, Option<&A>) {
        let hit = self.index.first_match(path).and_then(|position| self.named.get(position));
        let (rank, alpha) = hit.copied().unwrap_or_default();
        (rank.and_then(|rank| self.ranks.get(rank)), alpha.and_then(|alpha| self.alphas.get(alpha)))
    }
}

fn first_positions(keys: &[String]) -> HashMap<&str, usize> {
    let mut positions = HashMap::new();
    for (key, position) in keys.iter().zip(0..) {
        positions.entry(key.as_str()).or_insert(position);
    }
    positions
}

/// How a key is put into its expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// `(.*\.)?(KEY)$`
    Current,
    /// `.*\.KEY$`: a dot must stand before the key, and an alternation in the key is not held together.
    Older,
}

/// Compiles the keys of one table within the bounds.
struct Compiler {
    rule: Rule,
    num_regexes: usize,
}

impl Compiler {
    fn new(rule: Rule) -> Self {
        Compiler { rule, num_regexes: 0 }
    }

    fn compile(&mut self, key: &str) -> Result<Key, PatternError> {
        if key.len() > MAX_KEY_BYTES {
            return Err(PatternError::KeyTooLong { key_bytes: key.len(), max_bytes: MAX_KEY_BYTES });
        }
        if is_path(key) {
            return Ok(Key::Path(key.to_owned()));
        }
        self.num_regexes += 1;
        if self.num_regexes > MAX_REGEX_KEYS {
            return Err(PatternError::TooManyKeys { max_keys: MAX_REGEX_KEYS });
        }
        if reads_differently(key) {
            return Err(PatternError::ReadsDifferently { key: key.to_owned() });
        }
        compile_regex(key, self.rule).map(Key::Regex)
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

    /// Every key as a regular expression, by the rule as it is written.
    fn expressions(keys: &[String], rule: Rule) -> Vec<regex::Regex> {
        let compile = |key: &String| compile_regex(key, rule).expect("the tests' keys are regular expressions");
        keys.iter().map(compile).collect()
    }

    /// The first that matches, all tried in order.
    fn linear(expressions: &[regex::Regex], path: &str) -> Option<usize> {
        expressions.iter().position(|regex| regex.find(path).is_some_and(|found| found.start() == 0))
    }

    /// Short alphabets make hits likely, of several keys at once.
    fn key() -> impl Strategy<Value = String> {
        let regexes = prop::sample::select(vec!["(a|b)", ".*b", r"[ab]\.[ab]", "^a", "a*", "a|.*b"]);
        prop_oneof![4 => "[ab.]{0,4}|[a.]{1,3}b|[ab]", 1 => regexes.prop_map(str::to_owned)]
    }

    proptest! {
        #[test]
        fn a_lookup_finds_what_trying_every_key_finds(
            ranks in prop::collection::vec(key(), 0..8),
            alphas in prop::collection::vec(key(), 0..8),
            paths in prop::collection::vec("[ab.é]{0,6}", 16),
        ) {
            let numbered = |keys: &[String]| keys.iter().cloned().zip(0usize..).collect::<Vec<_>>();
            let current = Patterns::new(numbered(&ranks)).unwrap();
            let older = OlderPatterns::new(numbered(&ranks), numbered(&alphas)).unwrap();
            let both: Vec<String> = ranks.iter().chain(&alphas).cloned().collect();
            let (by_current, by_older) = (expressions(&ranks, Rule::Current), expressions(&both, Rule::Older));
            for path in &paths {
                let expected = linear(&by_current, path);
                prop_assert_eq!(current.lookup(path).copied(), expected, "{:?} on {:?}", &ranks, path);
                let name = linear(&by_older, path).map(|position| &both[position]);
                let entry = |keys: &[String]| keys.iter().position(|key| Some(key) == name);
                let (rank, alpha) = older.lookup(path);
                prop_assert_eq!((rank.copied(), alpha.copied()), (entry(&ranks), entry(&alphas)), "{:?} on {:?}", both, path);
            }
        }
    }

    /// Every module of a model with 48 layers of 128 experts, named.
    #[test]
    fn what_a_lookup_tries_does_not_grow_with_the_number_of_paths() {
        let experts = |layer| (0..128).map(move |expert| format!("model.layers.{layer}.mlp.experts.{expert}"));
        let modules = |module: String| ["gate_proj", "up_proj", "down_proj"].map(|name| format!("{module}.{name}"));
        let keys: Vec<String> = (0..48).flat_map(experts).flat_map(modules).collect();
        assert_eq!(keys.len(), 18_432);
        let patterns = Patterns::new(keys.iter().cloned().zip(0..)).unwrap();
        // One or two digits of the layer, one to three of the expert, and the shorter name of up_proj.
        assert_eq!((patterns.index.num_shapes(), patterns.index.num_regexes()), (2 * 3 * 2, 0));
        assert!(keys.iter().zip(0..).all(|(key, position)| patterns.lookup(key) == Some(&position)));
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
