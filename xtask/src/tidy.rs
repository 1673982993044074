//! What no compiler checks: every source file opens with what it is for, stays readable in length, and holds no
//! history, placeholder or path of a machine; every document that is linked exists.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Lines of a source file, tests apart, above which its head must say why.
const MAX_LINES: usize = 450;

/// Phrases that must not stand in source files, with the reason.
fn banned() -> [(String, &'static str); 7] {
    // Put together here, so that this file does not hold them.
    let join = |parts: [&str; 2]| parts.concat();
    [
        (join(["todo", "!("]), "placeholder"),
        (join(["unimple", "mented!("]), "placeholder"),
        (join(["#[ig", "nore"]), "skipped test"),
        (join(["FIX", "ME"]), "placeholder"),
        (join(["used ", "to be "]), "history in a comment"),
        (join(["no lon", "ger "]), "history in a comment"),
        (join(["/ro", "ot/"]), "path of a machine"),
    ]
}

/// Checks every file that git tracks or would track.
pub(crate) fn run() -> Result<()> {
    let root = crate::root();
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(&root)
        .output()
        .context("git could not be run")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let listing = String::from_utf8(output.stdout)?;
    let mut faults = Vec::new();
    let mut num_files = 0;
    for name in listing.lines() {
        let path = root.join(name);
        let extension = Path::new(name).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let Ok(text) = fs::read_to_string(&path) else { continue };
        match extension {
            "rs" | "cu" | "cuh" => check_source(name, &text, &mut faults),
            "md" => check_links(&root, name, &text, &mut faults),
            _ => continue,
        }
        num_files += 1;
    }
    if !faults.is_empty() {
        bail!("tidy:\n  {}", faults.join("\n  "));
    }
    println!("tidy: {num_files} files");
    Ok(())
}

fn check_source(name: &str, text: &str, faults: &mut Vec<String>) {
    let opens = |line: &&str| ["//!", "/*", "#![doc = include_str!"].iter().any(|mark| line.starts_with(mark));
    let head: Vec<&str> = text.lines().take_while(opens).collect();
    if head.is_empty() {
        faults.push(format!("{name}: does not open with what it is for (//! or a block comment)"));
    }
    let is_test = name.contains("/tests/") || name.ends_with("tests.rs") || name.contains("/benches/");
    let num_lines = text.lines().count();
    let says_why = head.iter().any(|line| line.contains("Long because"));
    if num_lines > MAX_LINES && !is_test && !says_why {
        faults.push(format!("{name}: {num_lines} lines; above {MAX_LINES} its head must say \"Long because ...\""));
    }
    for (index, line) in text.lines().enumerate() {
        for (phrase, why) in banned() {
            if line.contains(&phrase) {
                faults.push(format!("{name}:{}: {phrase:?}: {why}", index + 1));
            }
        }
        if line.ends_with(' ') || line.contains('\t') {
            faults.push(format!("{name}:{}: trailing space or tab", index + 1));
        }
    }
}

/// Every relative link of a Markdown file leads to something that exists.
fn check_links(root: &Path, name: &str, text: &str, faults: &mut Vec<String>) {
    let folder = root.join(name).parent().map(Path::to_path_buf).unwrap_or_default();
    for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let file = target.split('#').next().unwrap_or_default();
        let outside = target.contains("://") || file.is_empty() || file.contains(char::is_whitespace);
        if !outside && !folder.join(file).exists() {
            faults.push(format!("{name}: links to {file}, which does not exist"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{banned, check_source};

    fn faults(name: &str, text: &str) -> Vec<String> {
        let mut faults = Vec::new();
        check_source(name, text, &mut faults);
        faults
    }

    #[test]
    fn a_good_file_has_no_faults() {
        assert_eq!(faults("a/src/b.rs", "//! What it is for.\n\nfn f() {}\n"), Vec::<String>::new());
        assert_eq!(faults("a/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n"), Vec::<String>::new());
    }

    #[test]
    fn each_fault_is_found() {
        assert_eq!(faults("a.rs", "fn f() {}\n").len(), 1);
        assert_eq!(faults("a.rs", &format!("//! Head.\n{}", "x\n".repeat(500))).len(), 1);
        assert_eq!(faults("a.rs", &format!("//! Long because of a table.\n{}", "x\n".repeat(500))).len(), 0);
        assert_eq!(faults("a.rs", "//! Head.\nlet x = 1; \n").len(), 1);
        for (phrase, _) in banned() {
            assert_eq!(faults("a.rs", &format!("//! Head.\n// {phrase}x\n")).len(), 1, "{phrase}");
        }
    }

    #[test]
    fn the_tree_is_tidy() {
        super::run().unwrap();
    }
}
