//! The binary as its users meet it: what it prints, and how it refuses.
#![cfg(feature = "cli")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

fn model() -> String {
    golden("models/llama").display().to_string()
}

fn adapter(case: &str) -> String {
    golden("adapters/llama").join(case).display().to_string()
}

fn multilora<S: AsRef<str>>(arguments: &[S]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_multilora"))
        .args(arguments.iter().map(AsRef::as_ref))
        .stdin(std::process::Stdio::null())
        .output()
        .expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Bad input: exit code 2, one line on standard error that holds `naming`, nothing on standard output.
#[track_caller]
fn assert_refused<S: AsRef<str>>(arguments: &[S], naming: &[&str]) {
    let output = multilora(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("error: "), "{error}");
    assert!(output.stdout.is_empty());
    let causes: Vec<&str> = error.trim().split(": ").filter(|cause| cause.len() > 12).collect();
    let different: std::collections::BTreeSet<&str> = causes.iter().copied().collect();
    assert_eq!(causes.len(), different.len(), "a cause is said twice: {error}");
    for name in naming {
        assert!(error.contains(name), "{name:?} is not in: {error}");
    }
}

/// `input_ids`, and the tensor `name` as `[rows][positions][vocabulary]`.
fn golden_case(case: &str, name: &str) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
    let bytes = fs::read(golden("adapters/llama").join(case).join("golden.safetensors")).expect("golden data");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let ids = file.tensor("input_ids").expect("ids");
    let positions = ids.shape()[1];
    let ids: Vec<u32> =
        ids.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect();
    let logits = file.tensor(name).expect("logits");
    let vocabulary = logits.shape()[2];
    let logits: Vec<f32> =
        logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect();
    let rows = logits.chunks(positions * vocabulary).map(|row| row.chunks(vocabulary).map(<[f32]>::to_vec).collect());
    (ids.chunks(positions).map(<[u32]>::to_vec).collect(), rows.collect())
}

/// A copy of the tiny model with a tokenizer of the words w0 to w127.
fn model_with_words() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(golden("models/llama").join(file), directory.path().join(file)).expect("a copy");
    }
    let words: serde_json::Map<String, Value> = (0..128).map(|id| (format!("w{id}"), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    });
    fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).expect("a tokenizer");
    directory
}

#[test]
fn score_gives_the_golden_logits_of_a_mixed_batch() {
    let directory = tempfile::tempdir().expect("a directory");
    let requests = directory.path().join("requests.jsonl");
    let cases = [("qv", "logits_adapter"), ("rslora", "logits_adapter"), ("qv", "logits_base")];
    let mut lines = String::new();
    let mut expected = Vec::new();
    for (case, name) in cases {
        let (ids, logits) = golden_case(case, name);
        for (index, (ids, logits)) in ids.iter().zip(logits).enumerate() {
            let adapter = (name == "logits_adapter").then_some(case);
            // Prompts of several lengths, so that decode steps mix with different histories.
            let (prompt, decode) = ids.split_at(ids.len() - 2 * index);
            let line = if decode.is_empty() {
                json!({"adapter": adapter, "token_ids": prompt})
            } else {
                json!({"adapter": adapter, "token_ids": prompt, "decode": decode})
            };
            lines += &format!("{line}\n");
            expected.push((adapter, logits));
        }
    }
    fs::write(&requests, lines).expect("requests");

    let answers = json_lines(&multilora(&[
        "score",
        "--model",
        &model(),
        "--adapter",
        &format!("qv={}", adapter("qv")),
        "--adapter",
        &format!("rslora={}", adapter("rslora")),
        "--requests",
        &requests.display().to_string(),
    ]));
    assert_eq!(answers.len(), expected.len());
    for (answer, (adapter, expected)) in answers.iter().zip(&expected) {
        assert_eq!(answer["adapter"].as_str(), *adapter);
        let found: Vec<Vec<f32>> = serde_json::from_value(answer["logits"].clone()).expect("logits");
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() <= 1e-4, "{found} against {expected}");
        }
    }
}

#[test]
fn generate_answers_each_prompt_with_its_own_adapter() {
    let directory = model_with_words();
    let model = directory.path().display().to_string();
    let with = |uses: &[&str], more: &[&str]| {
        let mut arguments: Vec<String> =
            ["generate", "--model", &model, "--max-new-tokens", "8", "--raw", "--adapter"].map(str::to_owned).to_vec();
        arguments.push(format!("one={}", adapter("all_linear")));
        for name in uses {
            arguments.extend(["--prompt", "w5 w17 w60", "--use", name].map(str::to_owned));
        }
        arguments.extend(more.iter().map(|s| (*s).to_owned()));
        multilora(&arguments)
    };
    let texts = |output: &Output| -> Vec<String> {
        let lines = json_lines(output);
        let (stats, results) = lines.split_last().expect("lines");
        assert_eq!(stats["type"], "stats");
        results.iter().map(|line| line["text"].as_str().expect("text").to_owned()).collect()
    };
    let base = texts(&with(&["base"], &["--json"]));
    let one = texts(&with(&["one"], &["--json"]));
    assert_ne!(base, one, "an adapter that changes nothing shows nothing");
    let mixed = texts(&with(&["one", "base", "one"], &["--json"]));
    assert_eq!(mixed, [&one[..], &base[..], &one[..]].concat());

    let printed = stdout(&with(&["one", "base"], &[]));
    let heads = [format!("── one ── w5 w17 w60\n{}\n", one[0]), format!("── base ── w5 w17 w60\n{}\n", base[0])];
    assert_eq!(printed, heads.concat());

    let hot = |seed: &str| texts(&with(&["one", "one"], &["--json", "--temperature", "2", "--seed", seed]));
    assert_eq!(hot("7"), hot("7"));
    assert_ne!(hot("7"), hot("8"));
}

#[test]
fn inspect_says_what_is_there_and_what_is_wrong() {
    let loads = multilora(&["inspect", &adapter("rslora"), "--model", &model(), "--json"]);
    let report = &json_lines(&loads)[0];
    assert_eq!(report["loads"], true);
    assert_eq!(report["adapter"]["sites"][0]["module"], "q_proj");
    assert!(report["slot"]["image_bytes"].as_u64().expect("bytes") > 0);

    let refused = multilora(&["inspect", &adapter("init_pissa_niter_4"), "--json"]);
    assert_eq!(refused.status.code(), Some(2));
    let report: Value = serde_json::from_slice(&refused.stdout).expect("JSON");
    assert_eq!(report["loads"], false);
    assert!(report["reasons"].to_string().contains("pissa_niter_4"), "{report}");

    // The same tensors on a model of other widths: every site is a reason.
    let other = golden("models/qwen3").display().to_string();
    let misfit = multilora(&["inspect", &adapter("all_linear"), "--model", &other]);
    assert_eq!(misfit.status.code(), Some(2));
    let text = String::from_utf8_lossy(&misfit.stdout);
    assert!(text.contains("verdict: refused") && text.contains("q_proj"), "{text}");
}

/// One GGUF file gives the logits of the adapter that it was made of, and is inspected like any other.
#[test]
fn a_gguf_file_is_an_adapter() {
    let file = golden("gguf/llama/all_linear.gguf").display().to_string();
    let text = stdout(&multilora(&["inspect", &file]));
    assert!(text.contains("verdict: loads") && text.contains("llama.cpp"), "{text}");
    let text = stdout(&multilora(&["inspect", &file, "--model", &model()]));
    assert!(text.contains("verdict: loads on"), "{text}");
    let (ids, expected) = golden_case("all_linear", "logits_adapter");
    let directory = tempfile::tempdir().expect("a directory");
    let requests = directory.path().join("requests.jsonl");
    let lines: String = ids.iter().map(|ids| format!("{}\n", json!({"adapter": "a", "token_ids": ids}))).collect();
    fs::write(&requests, lines).expect("requests");
    let (named, requests) = (format!("a={file}"), requests.display().to_string());
    let answers = json_lines(&multilora(&["score", "--model", &model(), "--adapter", &named, "--requests", &requests]));
    assert_eq!(answers.len(), expected.len());
    for (answer, expected) in answers.iter().zip(&expected) {
        let found: Vec<Vec<f32>> = serde_json::from_value(answer["logits"].clone()).expect("logits");
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() <= 1e-4, "{found} against {expected}");
        }
    }
}

/// Adapters that need the base weights: gains, norms, an initialisation that changed the base, pairs of embedding and
/// head; all in one batch.
#[test]
fn adapters_are_prepared_with_the_weights_of_the_model() {
    let cases = ["dora_emb", "mts_norm", "lora_bias", "init_pissa", "embed_head_lora"];
    let directory = tempfile::tempdir().expect("a directory");
    let requests = directory.path().join("requests.jsonl");
    let (mut lines, mut expected) = (String::new(), Vec::new());
    for case in cases {
        let (ids, logits) = golden_case(case, "logits_adapter");
        lines.extend(ids.iter().map(|ids| format!("{}\n", json!({"adapter": case, "token_ids": ids}))));
        expected.extend(logits);
        let text = stdout(&multilora(&["inspect", &adapter(case), "--model", &model()]));
        assert!(text.contains("verdict: loads on"), "{text}");
    }
    fs::write(&requests, lines).expect("requests");
    let (model, requests) = (model(), requests.display().to_string());
    let adapters: Vec<String> = cases.iter().map(|case| format!("--adapter={case}={}", adapter(case))).collect();
    let mut arguments = vec!["score", "--model", &model, "--requests", &requests];
    arguments.extend(adapters.iter().map(String::as_str));
    let answers = json_lines(&multilora(&arguments));
    assert_eq!(answers.len(), expected.len());
    for (answer, expected) in answers.iter().zip(&expected) {
        let found: Vec<Vec<f32>> = serde_json::from_value(answer["logits"].clone()).expect("logits");
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() <= 1e-4, "{}: {found} against {expected}", answer["adapter"]);
        }
    }
    let limited = multilora(&["inspect", &adapter("init_pissa"), "--model", &model, "--max-prepare-seconds", "0"]);
    assert_eq!(limited.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&limited.stdout).contains("multilora convert"));
}

/// Links of the hub's cache lead to the contents in its repository's folder, and are followed there only.
#[cfg(unix)]
#[test]
fn a_snapshot_of_the_hub_cache_is_inspected() {
    let cache = tempfile::tempdir().expect("a directory");
    let repository = cache.path().join("models--owner--name");
    let snapshot = repository.join("snapshots/0123");
    fs::create_dir_all(&snapshot).expect("a directory");
    fs::create_dir_all(repository.join("blobs")).expect("a directory");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(golden("adapters/llama/qv").join(name), repository.join("blobs").join(name)).expect("a copy");
        let target = Path::new("../../blobs").join(name);
        std::os::unix::fs::symlink(target, snapshot.join(name)).expect("a link");
    }
    let text = stdout(&multilora(&["inspect", &snapshot.display().to_string()]));
    assert!(text.contains("verdict: loads"), "{text}");
    let elsewhere = cache.path().join("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::os::unix::fs::symlink(snapshot.join(name), elsewhere.join(name)).expect("a link");
    }
    let output = multilora(&["inspect", &elsewhere.display().to_string()]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn plan_counts_the_bytes_of_the_layout() {
    let output =
        multilora(&["plan", "--model", &model(), "--max-rank", "8", "--slots", "3", "--budget", "1MiB", "--json"]);
    let plan = &json_lines(&output)[0];
    let slot_bytes = plan["slot_bytes"].as_u64().expect("bytes");
    let table_bytes = plan["table_bytes"].as_u64().expect("bytes");
    assert_eq!(plan["pool_bytes"].as_u64(), Some(3 * slot_bytes + table_bytes));
    assert_eq!(plan["adapters_in_budget"].as_u64(), Some((1 << 20) / (slot_bytes + table_bytes / 3)));
    let shares: f64 = plan["modules"].as_array().expect("modules").iter().filter_map(|m| m["share"].as_f64()).sum();
    assert!((0.9..=1.0).contains(&shares), "{shares}");
    let text = stdout(&multilora(&["plan", "--model", &model(), "--max-rank", "8", "--slots", "3"]));
    assert!(text.contains("q_proj") && text.contains('█'), "{text}");

    // Embedding and head of 128 tokens and 64 features, rank 8 in bf16.
    let all = ["--with", "lm_head", "--with", "embed_tokens", "--json"];
    let all = multilora(&[&["plan", "--model", &model(), "--max-rank", "8", "--slots", "3"], &all[..]].concat());
    let all = json_lines(&all)[0]["slot_bytes"].as_u64();
    assert_eq!(all, Some(slot_bytes + 2 * (128 + 64) * 8 * 2));
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let model = model();
    let qv = format!("a={}", adapter("qv"));
    let scratch = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let nowhere = scratch.path().join("nowhere").display().to_string();
    let empty = scratch.path().display().to_string();

    assert_refused(&["plan", "--model", &nowhere, "--max-rank", "8", "--slots", "1"], &["nowhere"]);
    assert_refused(&["plan", "--model", &empty, "--max-rank", "8", "--slots", "1"], &["config.json"]);
    let text = file("text.gguf", "root");
    assert_refused(&["plan", "--model", &text, "--max-rank", "8", "--slots", "1"], &["not a GGUF file", "\"root\""]);
    assert_refused(&["plan", "--model", &model, "--max-rank", "0", "--slots", "1"], &["max_rank"]);
    let huge = u64::MAX.to_string();
    assert_refused(&["plan", "--model", &model, "--max-rank", &huge, "--slots", "1"], &["overflow"]);
    assert_refused(&["inspect", &adapter("qv"), "--model", &nowhere], &["nowhere"]);

    let score = |requests: &str, more: &[&str], naming: &[&str]| {
        let mut arguments = vec!["score", "--model", &model, "--requests", requests];
        arguments.extend_from_slice(more);
        assert_refused(&arguments, naming);
    };
    let good = file("good", r#"{"adapter": null, "token_ids": [1, 2]}"#);
    score(&nowhere, &[], &["nowhere"]);
    score(&file("empty", "\n"), &[], &["no requests"]);
    score(&file("text", "hello"), &[], &["line 1"]);
    score(&file("second", "{\"adapter\": null, \"token_ids\": [1]}\n{}"), &[], &["line 2", "token_ids"]);
    score(&file("field", r#"{"adapter": null, "token_ids": [1], "x": 1}"#), &[], &["`x`"]);
    score(&file("none", r#"{"adapter": null, "token_ids": []}"#), &[], &["token_ids is empty"]);
    score(&file("negative", r#"{"adapter": null, "token_ids": [-1]}"#), &[], &["line 1"]);
    score(&file("past", r#"{"adapter": null, "token_ids": [128]}"#), &[], &["128"]);
    score(&file("name", r#"{"adapter": "b", "token_ids": [1]}"#), &["--adapter", &qv], &["\"b\"", "request 1"]);
    score(&good, &["--adapter", &qv, "--adapter", &qv], &["two adapters", "\"a\""]);
    score(&good, &["--adapter", &format!("a={nowhere}")], &["\"a\"", "nowhere"]);
    let no_files = tempfile::tempdir().expect("a directory");
    let no_files = format!("a={}", no_files.path().display());
    score(&good, &["--adapter", &no_files], &["\"a\"", "adapter_config.json"]);
    score(&good, &["--adapter", &format!("a={empty}")], &["\"a\"", "not a GGUF file"]);
    score(&good, &["--adapter", &format!("a={}", adapter("tti_list"))], &["\"a\"", "trainable tokens"]);
    let pissa = format!("a={}", adapter("init_pissa"));
    score(&good, &["--adapter", &pissa, "--max-prepare-seconds", "0"], &["\"a\"", "multilora convert"]);
    let other = golden("adapters/qwen3/all_linear").display().to_string();
    score(&good, &["--adapter", &format!("a={other}")], &["\"a\"", "layer 0"]);

    let words = model_with_words();
    let words = words.path().display().to_string();
    let generate = |more: &[&str], naming: &[&str]| {
        let mut arguments = vec!["generate", "--model", &words, "--adapter", &qv];
        arguments.extend_from_slice(more);
        assert_refused(&arguments, naming);
    };
    generate(&[], &["no prompt"]);
    generate(&["--prompt", "w1", "--use", "b"], &["\"b\"", "base, a"]);
    generate(&["--prompt", "w1", "--use", "a", "--use", "a"], &["2 --use for 1 prompts"]);
    generate(&["--prompt", "w1", "--temperature", "nan"], &["temperature"]);
    generate(&["--prompt", ""], &["empty prompt"]);
    generate(&["--prompt", &"w1 ".repeat(5000)], &["5000 tokens"]);
    assert_refused(&["generate", "--model", &model, "--prompt", "w1"], &["tokenizer"]);
}

#[test]
fn wrong_usage_ends_with_code_2() {
    for arguments in [
        vec!["generate"],
        vec!["generate", "--model", "m", "--adapter", "no-directory", "--prompt", "x"],
        vec!["generate", "--model", "m", "--adapter", "base=somewhere", "--prompt", "x"],
        vec!["generate", "--model", "m", "--max-new-tokens", "0", "--prompt", "x"],
        vec!["plan", "--model", "m", "--max-rank", "-1", "--slots", "1"],
        vec!["dance"],
    ] {
        let output = multilora(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
}
