//! Which crate may depend on which, checked against `cargo metadata`.
//!
//! The table is the architecture: an edge that is not in it fails here, so it is a decision and not an accident.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// For each crate of the workspace, the crates of the workspace that it may use.
const ALLOWED: &[(&str, &[&str])] = &[
    ("lora-math", &[]),
    ("lora-adapter", &["lora-math"]),
    ("lora-pool", &["lora-adapter", "lora-math"]),
    ("lora-kernels", &["lora-math"]),
    ("model-engine", &["lora-pool", "lora-kernels", "lora-adapter", "lora-math"]),
    ("multilora", &["model-engine", "lora-pool", "lora-kernels", "lora-adapter", "lora-math"]),
    ("conformance", &["multilora", "model-engine", "lora-pool", "lora-kernels", "lora-adapter", "lora-math"]),
    ("xtask", &[]),
    ("cuda-standin", &[]),
    ("conformance-cuda", &["conformance", "cuda-standin", "lora-kernels", "lora-math"]),
];

/// All that lora-math may reach, whatever the path, to build and to run: it promises no GPU, no I/O, no threads and no C
/// compiler, so a new name here is looked at first. (`blake3` names `cc` for its C parts, which its feature `pure` leaves
/// out; the gate proves it by a build whose C compiler fails.)
const CLOSURE_OF_MATH: &[&str] = &[
    "aho-corasick",
    "arrayref",
    "arrayvec",
    "blake3",
    "cc",
    "cfg-if",
    "constant_time_eq",
    "cpufeatures",
    "find-msvc-tools",
    "libc",
    "memchr",
    "proc-macro2",
    "quote",
    "regex",
    "regex-automata",
    "regex-syntax",
    "shlex",
    "syn",
    "thiserror",
    "thiserror-impl",
    "unicode-ident",
];

/// Crates that must not be reachable from a crate with its default features, whatever the path. `cargo metadata` joins the
/// features that all members ask for, so this table is checked against `cargo tree`.
const UNREACHABLE: &[(&str, &[&str])] = &[
    ("lora-adapter", &["cudarc", "rayon", "tokio"]),
    ("lora-kernels", &["cudarc", "tokio"]),
    ("lora-pool", &["cudarc", "rayon", "tokio"]),
    ("model-engine", &["cudarc", "tokio"]),
];

/// Checks all three tables.
pub(crate) fn run() -> Result<()> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(crate::root())
        .output()
        .context("cargo metadata could not be run")?;
    if !output.status.success() {
        bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let graph = Graph::new(&metadata)?;

    let mut faults = Vec::new();
    let known: BTreeSet<&str> = ALLOWED.iter().map(|(name, _)| *name).collect();
    for member in &graph.members {
        if !known.contains(member.as_str()) {
            faults.push(format!("{member} is not in the table of xtask/src/deps.rs"));
        }
    }
    for (name, allowed) in ALLOWED {
        for dependency in graph.direct(name) {
            let inside = graph.members.contains(dependency);
            if inside && !allowed.contains(&dependency) {
                faults.push(format!("{name} depends on {dependency}, which the architecture does not allow"));
            }
        }
    }
    for dependency in graph.reachable("lora-math") {
        if !CLOSURE_OF_MATH.contains(&dependency) {
            faults.push(format!("lora-math reaches {dependency}, which is not in its list"));
        }
    }
    for (name, banned) in UNREACHABLE {
        let reachable = reachable_by_default(name)?;
        for dependency in banned.iter().filter(|dependency| reachable.contains(**dependency)) {
            faults.push(format!("{name} reaches {dependency}"));
        }
    }
    if !faults.is_empty() {
        bail!("dependency directions:\n  {}", faults.join("\n  "));
    }
    println!("dependency directions hold for {} crates", ALLOWED.len());
    Ok(())
}

/// All that a crate reaches to build and to run with its default features.
fn reachable_by_default(name: &str) -> Result<BTreeSet<String>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["tree", "--package", name, "--edges", "normal,build", "--prefix", "none", "--locked", "--target", "all"])
        .current_dir(crate::root())
        .output()
        .context("cargo tree could not be run")?;
    if !output.status.success() {
        bail!("cargo tree of {name} failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Names of the crates that each crate uses; dev-dependencies left out, since they reach no user.
struct Graph {
    members: BTreeSet<String>,
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    fn new(metadata: &Value) -> Result<Self> {
        let array = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
        let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
        let packages = array(metadata, "packages");
        let name_of: BTreeMap<String, String> =
            packages.iter().map(|package| (text(package, "id"), text(package, "name"))).collect();
        let members =
            array(metadata, "workspace_members").iter().filter_map(|id| name_of.get(id.as_str()?).cloned()).collect();
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for node in array(&metadata["resolve"], "nodes") {
            let from = name_of.get(&text(&node, "id")).context("a node without a package")?;
            for dependency in array(&node, "deps") {
                let used = array(&dependency, "dep_kinds").iter().any(|kind| kind["kind"] != "dev");
                if let (true, Some(to)) = (used, name_of.get(&text(&dependency, "pkg"))) {
                    edges.entry(from.clone()).or_default().insert(to.clone());
                }
            }
        }
        Ok(Graph { members, edges })
    }

    fn direct(&self, name: &str) -> impl Iterator<Item = &str> {
        self.edges.get(name).into_iter().flatten().map(String::as_str)
    }

    fn reachable(&self, name: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut queue: VecDeque<&str> = self.direct(name).collect();
        while let Some(next) = queue.pop_front() {
            if seen.insert(next) {
                queue.extend(self.direct(next));
            }
        }
        seen
    }
}
