//! Finding the first key of a table that matches a path, without comparing the path with every key.
//!
//! A key that is a path matches the end of a module path, from its start or behind a dot, and its own dots stand for any
//! character. What a path key compares is therefore decided by its shape: its length, and where its dots stand. An end of
//! the module path with dots written over those places *is* the key, where the key matches. So a lookup asks a hash map
//! once for each shape and place that fit together, whatever the number of keys; tables that trainers write for every
//! module have some dozen shapes. Regular expressions are tried one by one, and only those ahead of the hit so far.

use std::collections::{BTreeMap, HashMap};

use regex::Regex;

use super::{PatternError, Rule};

/// A compiled key.
#[derive(Clone, Debug)]
pub(super) enum Key {
    /// Letters, digits, `_`, `-`, and dots that stand for any character.
    Path(String),
    /// Anything else.
    Regex(Regex),
}

/// The keys of a table, in file order.
#[derive(Clone, Debug)]
pub(super) struct KeyIndex {
    rule: Rule,
    max_shapes: usize,
    num_keys: usize,
    /// Position of the first key of each text.
    paths: HashMap<Box<[u8]>, usize>,
    /// Places of the dots of the path keys, by the length of the key.
    shapes: BTreeMap<usize, Vec<Box<[usize]>>>,
    /// The other keys with their positions, ascending.
    regexes: Vec<(usize, Regex)>,
}

impl KeyIndex {
    pub(super) fn new(rule: Rule, max_shapes: usize) -> Self {
        KeyIndex { rule, max_shapes, num_keys: 0, paths: HashMap::new(), shapes: BTreeMap::new(), regexes: Vec::new() }
    }

    /// Adds the next key of the file.
    pub(super) fn push(&mut self, key: Key) -> Result<(), PatternError> {
        let position = self.num_keys;
        self.num_keys += 1;
        match key {
            Key::Regex(regex) => self.regexes.push((position, regex)),
            Key::Path(path) => {
                let path = path.into_bytes().into_boxed_slice();
                let dots: Box<[usize]> = (0..path.len()).filter(|&at| path[at] == b'.').collect();
                let shapes = self.shapes.entry(path.len()).or_default();
                if !shapes.contains(&dots) {
                    shapes.push(dots);
                    if self.num_shapes() > self.max_shapes {
                        return Err(PatternError::TooManyShapes { max_shapes: self.max_shapes });
                    }
                }
                self.paths.entry(path).or_insert(position);
            }
        }
        Ok(())
    }

    /// Position of the first key that matches `path`.
    pub(super) fn first_match(&self, path: &str) -> Option<usize> {
        // No module path holds a newline; the two engines differ there (`$` before a last newline in Python).
        if path.contains('\n') {
            return None;
        }
        let best = self.first_path(path);
        let ahead = self.regexes.iter().take_while(|(position, _)| best.is_none_or(|best| *position < best));
        // The leftmost match starts at 0 exactly where a match at the start exists: Python's `re.match`.
        let mut hits = ahead.filter(|(_, regex)| regex.find(path).is_some_and(|found| found.start() == 0));
        hits.next().map(|(position, _)| *position).or(best)
    }

    fn first_path(&self, path: &str) -> Option<usize> {
        // One byte for each character: a key's dot stands for one character, and its other characters are ASCII.
        let path: Vec<u8> = path.chars().map(|c| u8::try_from(c).ok().filter(u8::is_ascii).unwrap_or(0xFF)).collect();
        let mut best = None;
        let mut end = Vec::new();
        for (&num_chars, shapes) in self.shapes.range(..=path.len()) {
            let start = path.len() - num_chars;
            let at_boundary = if start == 0 { self.rule == Rule::Current } else { path[start - 1] == b'.' };
            if !at_boundary {
                continue;
            }
            for dots in shapes {
                end.clear();
                end.extend_from_slice(&path[start..]);
                dots.iter().for_each(|&at| end[at] = b'.');
                let hit = self.paths.get(end.as_slice()).copied();
                best = best.into_iter().chain(hit).min();
            }
        }
        best
    }

    /// Hash map lookups that the path keys may cost one module path at most.
    pub(super) fn num_shapes(&self) -> usize {
        self.shapes.values().map(Vec::len).sum()
    }

    #[cfg(test)]
    pub(super) fn num_regexes(&self) -> usize {
        self.regexes.len()
    }
}
