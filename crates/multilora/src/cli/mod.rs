//! The subcommands of the binary, one a file, and what they share.

pub(crate) mod adapters;
pub(crate) mod bytes;
pub(crate) mod convert;
#[cfg(feature = "cuda")]
pub(crate) mod device;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod score;
pub(crate) mod setup;

/// An error with its causes in one line. A cause that the text before it ends with already is not said again: some
/// errors show their cause themselves.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if !line.ends_with(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow::anyhow!("c").context("b: c").context("a");
        assert_eq!(one_line(&error), "a: b: c");
        assert_eq!(one_line(&anyhow::anyhow!("two\n  lines")), "two lines");
    }
}
