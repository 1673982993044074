//! The projections of a transformer that can carry a LoRA pair, in the order every layout uses.

use std::fmt;

/// A projection that can carry A and B. The declaration order is the order inside a layer of every slot layout:
/// it is frozen, since two nodes that exchange slot images must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Module {
    /// Attention query projection (`q_proj`); doubled `out_features` where the query carries an output gate.
    QProj,
    /// Attention key projection.
    KProj,
    /// Attention value projection.
    VProj,
    /// Attention output projection.
    OProj,
    /// Dense MLP gate projection.
    GateProj,
    /// Dense MLP up projection.
    UpProj,
    /// Dense MLP down projection.
    DownProj,
    /// Linear attention, fused q, k, v and z input projection (Qwen3-Next naming).
    InProjQkvz,
    /// Linear attention, fused b and a input projection (Qwen3-Next naming).
    InProjBa,
    /// Linear attention q, k and v input projection (Qwen3.5 naming).
    InProjQkv,
    /// Linear attention z input projection (Qwen3.5 naming).
    InProjZ,
    /// Linear attention b input projection (Qwen3.5 naming).
    InProjB,
    /// Linear attention a input projection (Qwen3.5 naming).
    InProjA,
    /// Linear attention output projection.
    LinearOutProj,
    /// MoE router.
    Router,
    /// Shared expert gate projection.
    SharedGateProj,
    /// Shared expert up projection.
    SharedUpProj,
    /// Shared expert down projection.
    SharedDownProj,
    /// The scalar gate of the shared expert (one output feature).
    SharedExpertGate,
    /// Gate projection of one routed expert.
    ExpertGateProj,
    /// Up projection of one routed expert.
    ExpertUpProj,
    /// Down projection of one routed expert.
    ExpertDownProj,
    /// Token embedding: A is `[rank, vocab_size]`, in a slot `[vocab_size, rank]` and read by token; B is
    /// `[hidden_size, rank]`.
    EmbedTokens,
    /// Output head.
    LmHead,
}

/// Which part of an adapter a module belongs to. [`SlotLayout`](crate::SlotLayout) lays out [`Part::Layer`], behind it
/// [`Part::Vocabulary`] where it is asked for, and refuses [`Part::Expert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Projections that a layer has once.
    Layer,
    /// Projections that a layer has once for each routed expert.
    Expert,
    /// Embedding and head.
    Vocabulary,
}

impl Module {
    /// Every module, in layout order.
    pub const ALL: [Module; 24] = [
        Module::QProj,
        Module::KProj,
        Module::VProj,
        Module::OProj,
        Module::GateProj,
        Module::UpProj,
        Module::DownProj,
        Module::InProjQkvz,
        Module::InProjBa,
        Module::InProjQkv,
        Module::InProjZ,
        Module::InProjB,
        Module::InProjA,
        Module::LinearOutProj,
        Module::Router,
        Module::SharedGateProj,
        Module::SharedUpProj,
        Module::SharedDownProj,
        Module::SharedExpertGate,
        Module::ExpertGateProj,
        Module::ExpertUpProj,
        Module::ExpertDownProj,
        Module::EmbedTokens,
        Module::LmHead,
    ];

    /// A short unique name, as shown to people and written in reports.
    pub fn name(self) -> &'static str {
        match self {
            Module::QProj => "q_proj",
            Module::KProj => "k_proj",
            Module::VProj => "v_proj",
            Module::OProj => "o_proj",
            Module::GateProj => "gate_proj",
            Module::UpProj => "up_proj",
            Module::DownProj => "down_proj",
            Module::InProjQkvz => "in_proj_qkvz",
            Module::InProjBa => "in_proj_ba",
            Module::InProjQkv => "in_proj_qkv",
            Module::InProjZ => "in_proj_z",
            Module::InProjB => "in_proj_b",
            Module::InProjA => "in_proj_a",
            Module::LinearOutProj => "out_proj",
            Module::Router => "router",
            Module::SharedGateProj => "shared_expert.gate_proj",
            Module::SharedUpProj => "shared_expert.up_proj",
            Module::SharedDownProj => "shared_expert.down_proj",
            Module::SharedExpertGate => "shared_expert_gate",
            Module::ExpertGateProj => "experts.gate_proj",
            Module::ExpertUpProj => "experts.up_proj",
            Module::ExpertDownProj => "experts.down_proj",
            Module::EmbedTokens => "embed_tokens",
            Module::LmHead => "lm_head",
        }
    }

    /// The part of an adapter that this module belongs to.
    pub fn part(self) -> Part {
        match self {
            Module::ExpertGateProj | Module::ExpertUpProj | Module::ExpertDownProj => Part::Expert,
            Module::EmbedTokens | Module::LmHead => Part::Vocabulary,
            _ => Part::Layer,
        }
    }

    const fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of modules.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ModuleSet(u32);

impl ModuleSet {
    /// No module.
    pub const EMPTY: ModuleSet = ModuleSet(0);
    /// Attention and dense MLP: what a fixed-stride slot covers by default.
    pub const DENSE: ModuleSet = ModuleSet(
        Module::QProj.bit()
            | Module::KProj.bit()
            | Module::VProj.bit()
            | Module::OProj.bit()
            | Module::GateProj.bit()
            | Module::UpProj.bit()
            | Module::DownProj.bit(),
    );

    /// Whether `module` is in the set.
    pub fn contains(self, module: Module) -> bool {
        self.0 & module.bit() != 0
    }

    /// The set with `module` added.
    #[must_use]
    pub fn with(self, module: Module) -> Self {
        ModuleSet(self.0 | module.bit())
    }

    /// The modules of the set, in layout order.
    pub fn iter(self) -> impl Iterator<Item = Module> {
        Module::ALL.into_iter().filter(move |&module| self.contains(module))
    }
}

impl FromIterator<Module> for ModuleSet {
    fn from_iter<I: IntoIterator<Item = Module>>(modules: I) -> Self {
        modules.into_iter().fold(ModuleSet::EMPTY, ModuleSet::with)
    }
}

impl fmt::Debug for ModuleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
