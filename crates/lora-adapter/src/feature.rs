//! What adapter files can hold beyond A and B of attention and dense MLP: one name for each kind, so that a refusal
//! says what it is that is not supported.

use std::fmt;

/// Something that an adapter holds or asks for and that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Feature {
    /// `peft_type` names a method that is not LoRA.
    OtherPeftMethod,
    /// Magnitude vectors (`use_dora`).
    Dora,
    /// A bias on B, scaled like the rest of the delta (`lora_bias`).
    LoraBias,
    /// Trained biases of the base model (`bias`).
    TrainedBias,
    /// Whole modules saved with the adapter (`modules_to_save`, or embeddings of another vocabulary size).
    ReplacedModule,
    /// Replaced rows of the embedding or the head (`trainable_token_indices`).
    TrainableTokens,
    /// A copy of the base model's embedding or head.
    BaseWeightCopy,
    /// LoRA on one projection that holds q, k and v, or gate and up.
    FusedProjection,
    /// An adapter that acts from its invocation tokens on (`alora_invocation_tokens`).
    InvocationTokens,
    /// Layers of the base model repeated (`layer_replication`).
    LayerReplication,
    /// A diagonal between A and B, on a base with singular components removed (`kasa_config`).
    Kasa,
    /// An initialisation that changes the base weights (`init_lora_weights`).
    AlteringInit,
    /// LoRA over group means of a GPTQ base (`use_qalora`).
    QaLora,
    /// Routing between adapters at run time (`arrow_config`).
    Arrow,
    /// A base model whose weights are stored `[in, out]` (`fan_in_fan_out`).
    FanInFanOut,
    /// Weights of mlx-lm beside a config that is not mlx-lm's.
    Mlx,
    /// A GGUF adapter beside a config of PEFT.
    Gguf,
}

impl Feature {
    /// What it is, as part of a sentence.
    pub fn describe(self) -> &'static str {
        match self {
            Feature::OtherPeftMethod => "a PEFT method other than LORA",
            Feature::Dora => "DoRA (magnitude vectors)",
            Feature::LoraBias => "a bias on lora_B",
            Feature::TrainedBias => "trained biases of the base model",
            Feature::ReplacedModule => "whole modules saved with the adapter (modules_to_save)",
            Feature::TrainableTokens => "trained rows of the embedding or head (trainable tokens)",
            Feature::BaseWeightCopy => "a copy of the base model's embedding or head",
            Feature::FusedProjection => "LoRA on a fused projection (qkv or gate_up)",
            Feature::InvocationTokens => "activated LoRA (invocation tokens)",
            Feature::LayerReplication => "replicated base layers",
            Feature::Kasa => "KaSA (a diagonal between A and B, and an altered base)",
            Feature::AlteringInit => "an initialisation that alters the base weights",
            Feature::QaLora => "QALoRA",
            Feature::Arrow => "Arrow routing between adapters",
            Feature::FanInFanOut => "a base model with transposed (Conv1D) weights",
            Feature::Mlx => "weights of mlx-lm beside a config of PEFT",
            Feature::Gguf => "a GGUF file beside a config of PEFT (give the file itself)",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.describe())
    }
}
