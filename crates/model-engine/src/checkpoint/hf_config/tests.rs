//! Both spellings of `config.json`, the defaults of each class, and what is refused.

use std::path::Path;

use serde_json::{Value, json};

use super::super::config::{Architecture, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling};
use super::parse;

fn base(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    })
}

/// `base` with the fields of `changes` set.
fn with(mut base: Value, changes: Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

fn read(config: &Value) -> ModelConfig {
    parse(Path::new("config.json"), &config.to_string(), None).unwrap()
}

fn refusal(config: &Value) -> String {
    parse(Path::new("config.json"), &config.to_string(), None).unwrap_err().to_string()
}

#[test]
fn classes_have_their_own_defaults() {
    let llama = read(&base("llama"));
    assert_eq!((llama.head_dim, llama.qkv_bias, llama.o_bias, llama.mlp_bias), (16, false, false, false));
    assert_eq!((llama.bos_token_id, &llama.eos_token_ids[..]), (Some(1), &[2][..]));
    assert_eq!((llama.max_position_embeddings, llama.tie_word_embeddings, llama.qk_norm), (2048, false, false));
    assert_eq!((llama.rope.theta, llama.rms_norm_eps), (10_000.0, 1e-6));

    let qwen2 = read(&base("qwen2"));
    assert_eq!((qwen2.head_dim, qwen2.qkv_bias, qwen2.o_bias), (16, true, false));
    assert_eq!((qwen2.bos_token_id, &qwen2.eos_token_ids[..]), (None, &[][..]));

    let qwen3 = read(&base("qwen3"));
    assert_eq!((qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm), (128, false, true));
    assert_eq!(qwen3.architecture, Architecture::Qwen3);
}

#[test]
fn fields_that_a_class_does_not_read_are_ignored_as_it_ignores_them() {
    let qwen2 = read(&with(base("qwen2"), json!({"attention_bias": false, "mlp_bias": true, "sliding_window": 8})));
    assert_eq!((qwen2.qkv_bias, qwen2.mlp_bias), (true, false));
    let llama = read(&with(base("llama"), json!({"pretraining_tp": 2, "attention_bias": true, "mlp_bias": true})));
    assert_eq!((llama.qkv_bias, llama.o_bias, llama.mlp_bias), (true, true, true));
}

#[test]
fn absent_kv_heads_are_not_null_kv_heads() {
    let mut config = with(base("llama"), json!({"num_attention_heads": 64, "head_dim": 16}));
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(read(&config).num_kv_heads, 64);
    config["model_type"] = json!("qwen2");
    assert_eq!(read(&config).num_kv_heads, 32);
    config["num_key_value_heads"] = Value::Null;
    assert_eq!(read(&config).num_kv_heads, 64);
}

#[test]
fn rope_is_read_in_both_spellings() {
    let old = json!({"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}});
    let new = json!({"max_position_embeddings": 131072, "rope_parameters": {
        "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}});
    let rope = read(&with(base("llama"), old)).rope;
    assert_eq!(rope, read(&with(base("llama"), new)).rope);
    assert_eq!(rope.theta, 5e5);
    let expected = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(rope.scaling, RopeScaling::Llama3(expected));

    // The oldest spelling of the kind.
    let oldest = json!({"rope_scaling": {"type": "linear", "factor": 2.0}});
    assert_eq!(read(&with(base("llama"), oldest)).rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn yarn_fills_in_what_the_file_leaves_out() {
    let rope = json!({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}});
    let expected = YarnScaling {
        factor: 4.0,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 4096,
        truncate: true,
    };
    assert_eq!(read(&with(base("qwen2"), rope)).rope.scaling, RopeScaling::Yarn(expected));
}

#[test]
fn end_tokens_of_generation_config_take_precedence() {
    let config = with(base("llama"), json!({"eos_token_id": [7, 3, 7]}));
    assert_eq!(read(&config).eos_token_ids, [3, 7]);
    let parse = |generation: &str| {
        parse(Path::new("config.json"), &config.to_string(), Some(generation)).unwrap().eos_token_ids
    };
    assert_eq!(parse(r#"{"eos_token_id": [9, 8]}"#), [8, 9]);
    assert_eq!(parse(r#"{"eos_token_id": null}"#), [3, 7]);
    assert_eq!(parse("{}"), [3, 7]);
}

#[test]
fn windows_are_refused_only_where_they_act() {
    let window = |first| json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": first});
    read(&with(base("qwen2"), window(2)));
    let message = refusal(&with(base("qwen2"), window(1)));
    assert!(message.contains("sliding_window") && message.contains("8 tokens from layer 1 of 2"), "{message}");
    read(&with(base("qwen3"), json!({"layer_types": ["full_attention", "full_attention"]})));
    let message = refusal(&with(base("qwen3"), json!({"layer_types": ["full_attention", "sliding_attention"]})));
    assert!(message.contains("sliding_attention"), "{message}");
    let message = refusal(&with(base("qwen3"), json!({"layer_types": ["full_attention"]})));
    assert!(message.contains("layer_types"), "{message}");
}

#[test]
fn other_arithmetic_is_refused_by_name() {
    let cases = [
        (json!({"model_type": "mistral"}), ["model_type", "mistral"]),
        (json!({"model_type": null}), ["model_type", "null"]),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), ["architectures", "LlamaForCausalLM"]),
        (json!({"quantization_config": {"quant_method": "gptq"}}), ["quantization_config", "gptq"]),
        (json!({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}), ["auto_map", "modeling_x.X"]),
        (json!({"num_local_experts": 8}), ["num_local_experts", "8"]),
        (json!({"hidden_act": "gelu"}), ["hidden_act", "gelu"]),
        (json!({"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "0.5"]),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), ["rope_parameters.partial_rotary_factor", "0.5"]),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), ["rope_type", "longrope"]),
        (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), ["full_attention", "layer type"]),
        (json!({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}), ["mrope_section", "[1,2]"]),
        (json!({"rope_scaling": {"type": "linear"}}), ["rope_scaling.factor", "absent"]),
        (json!({"rope_scaling": {"type": "linear", "factor": -1.0}}), ["rope factor", "-1"]),
        (json!({"rope_theta": 0.0}), ["rope theta", "0"]),
        (json!({"rope_interleaved": true}), ["rope_interleaved", "true"]),
        (json!({"num_key_value_heads": 3}), ["attention heads", "KV heads, 3"]),
        (json!({"num_attention_heads": 5, "num_key_value_heads": 5}), ["hidden_size", "multiple"]),
        (json!({"head_dim": 7}), ["head_dim", "7"]),
        (json!({"num_hidden_layers": 1u64 << 29}), ["layers", "536870912"]),
        (json!({"hidden_size": 1u64 << 40}), ["hidden_size", "2^30"]),
        (json!({"vocab_size": "128"}), ["vocab_size", "\"128\""]),
        (json!({"rms_norm_eps": -1.0}), ["rms_norm_eps", "-1"]),
    ];
    for (changes, words) in cases {
        let message = refusal(&with(base("llama"), changes));
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} not in {message}");
        assert!(message.starts_with("config.json: "), "{message}");
    }
}

#[test]
fn what_is_no_object_is_refused() {
    for text in ["", "[]", "3", "{"] {
        assert!(parse(Path::new("config.json"), text, None).is_err(), "{text}");
    }
}
