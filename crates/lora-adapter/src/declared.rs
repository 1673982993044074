//! What the config says about tensors beside the pairs, and whether the file agrees.
//!
//! PEFT reads such tensors only where the config asks for them, and goes on without those that are missing. Here a file and
//! its config tell the same story or the adapter is refused: half of an adapter is another adapter.

use std::collections::{BTreeMap, BTreeSet};

use lora_math::{Module, Site};
use serde_json::{Map, Value};

use crate::blocks::BlockDiagonal;
use crate::config::{CONFIG_FILE, Fields, bad_field};
use crate::error::{Reasons, shown};
use crate::extras::{BaseInit, Extra, Settings};
use crate::marks;
use crate::modules::Target;
use crate::reason::Reason;
use crate::sort::{PairPlan, Sorted};
use crate::tensor_file::FilePlan;

/// Tokens that a config may name, in all: more than any vocabulary.
const MAX_TOKENS: usize = 1 << 20;

/// More layers than any model has.
const MAX_LAYERS: u64 = 1 << 16;

/// What the config says.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    /// A switch that the config lacks says nothing, and the tensors alone count.
    dora: Option<bool>,
    dora_field: &'static str,
    lora_bias: Option<bool>,
    kasa: bool,
    /// `bias` as it stands, where biases were trained.
    bias: Option<String>,
    /// Where PEFT saves every bias that was trained.
    saves_biases: bool,
    modules_to_save: Vec<String>,
    tokens: Tokens,
    pub(crate) blocks: Option<BlockDiagonal>,
    base_init: BaseInit,
    layer_replication: Vec<(usize, usize)>,
    invocation_tokens: Vec<u32>,
    /// Whether the tool computes the logits of a tied model with the adapted embedding.
    ties_pairs: bool,
}

/// `trainable_token_indices`.
#[derive(Debug, Default)]
enum Tokens {
    #[default]
    None,
    /// Of the embedding.
    Embedding(Vec<u32>),
    /// By the end of the module's name.
    ByModule(Vec<(String, Vec<u32>)>),
}

impl Declared {
    /// Reads the fields of a PEFT config.
    pub(crate) fn parse(object: &Map<String, Value>, reasons: &mut Reasons) -> Self {
        let mut fields = Fields { object, reasons };
        let dora = fields.switch("use_dora");
        let lora_bias = fields.switch("lora_bias");
        let kasa = fields.get("kasa_config").is_some();
        let blocks = match fields.get("use_bdlora").filter(|value| **value != Value::Bool(false)) {
            Some(value) => BlockDiagonal::parse(value, fields.reasons),
            None => None,
        };
        let base_init = match fields.get("init_lora_weights").and_then(Value::as_str).map(str::to_lowercase).as_deref()
        {
            Some("pissa") => BaseInit::Pissa,
            Some("olora") => BaseInit::Olora,
            _ if kasa => BaseInit::Kasa,
            _ => BaseInit::Kept,
        };
        if kasa && base_init != BaseInit::Kasa {
            let value = object.get("init_lora_weights").unwrap_or(&Value::Null);
            fields.reasons.push(CONFIG_FILE, bad_field("init_lora_weights", "a plain one beside kasa_config", value));
        }
        Declared {
            dora,
            dora_field: "use_dora",
            lora_bias,
            kasa,
            bias: fields.bias(),
            // The versions between 0.5 and 0.21 save none for "lora_only".
            saves_biases: object.get("bias").is_some_and(|bias| bias == "all")
                || marks::version(object).is_some_and(|version| version >= (0, 21)),
            modules_to_save: fields.names("modules_to_save"),
            tokens: fields.tokens(),
            blocks,
            base_init,
            layer_replication: fields.layer_replication(),
            invocation_tokens: fields.invocation_tokens(),
            ties_pairs: false,
        }
    }

    /// What a config of mlx-lm says.
    pub(crate) fn of_mlx(dora: bool) -> Self {
        Declared { dora: Some(dora), dora_field: "fine_tune_type", ties_pairs: true, ..Declared::default() }
    }

    /// What a GGUF file says.
    pub(crate) fn of_gguf(invocation_tokens: Vec<u32>) -> Self {
        Declared { invocation_tokens, ..Declared::default() }
    }

    /// Compares the file with what the config says. Gives the settings of the adapter.
    pub(crate) fn check(&self, sorted: &Sorted, plan: &FilePlan, reasons: &mut Reasons) -> Settings {
        let mut check = Check { sorted, plan, reasons };
        let is_embedding = |site: &Site| *site == Site::Vocabulary { module: Module::EmbedTokens };
        check.switch(self.dora_field, self.dora, "magnitude vectors are", Extra::Magnitude, |_| true);
        // PEFT has no bias for the pair of an embedding.
        check.switch("lora_bias", self.lora_bias, "biases of lora_B are", Extra::LoraBias, |site| !is_embedding(site));
        check.switch("kasa_config", Some(self.kasa), "diagonals are", Extra::Diagonal, |_| true);
        if let Some(value) = &self.bias
            && !self.saves_biases
            && !sorted.extras.keys().any(|extra| matches!(extra, Extra::Bias(_)))
        {
            let first = "every module that has one".to_owned();
            let what = "trained biases, which the versions of PEFT before 0.21 do not save, are";
            check.missing("bias", value.clone(), what, 1, first);
        }
        for name in &self.modules_to_save {
            let mut whole = sorted.extras.iter().filter(|(extra, _)| {
                matches!(extra, Extra::Weight(_) | Extra::Norm(_) | Extra::Bias(_) | Extra::BaseCopy(_))
            });
            // As PEFT chooses them: by the plain end of the path, not at a dot.
            if !whole.any(|(_, extra)| extra.path.ends_with(name.as_str())) {
                let value = shown(&Value::from(self.modules_to_save.clone()).to_string());
                check.missing("modules_to_save", value, "whole modules are", 1, shown(name));
            }
        }
        if let Some(blocks) = &self.blocks {
            check.blocks(blocks);
        }
        let token_ids = check.tokens(&self.tokens);
        Settings {
            base_init: self.base_init,
            token_ids,
            layer_replication: self.layer_replication.clone(),
            invocation_tokens: self.invocation_tokens.clone(),
            embedding_serves_head: self.ties_pairs
                && sorted
                    .pairs
                    .iter()
                    .any(|pair| pair.target == Target::Site(Site::Vocabulary { module: Module::EmbedTokens })),
        }
    }
}

/// The file beside the config.
struct Check<'a> {
    sorted: &'a Sorted,
    plan: &'a FilePlan,
    reasons: &'a mut Reasons,
}

impl Check<'_> {
    fn missing(&mut self, field: &'static str, value: String, what: &'static str, num_missing: usize, first: String) {
        self.reasons.push(CONFIG_FILE, Reason::Missing { field, value, what, num_missing, first });
    }

    /// A tensor of one kind at every pair where the switch is on, at none where it is off.
    fn switch(
        &mut self,
        field: &'static str,
        switch: Option<bool>,
        what: &'static str,
        extra: fn(Site) -> Extra,
        wanted: impl Fn(&Site) -> bool,
    ) {
        let site = |pair: &PairPlan| match pair.target {
            Target::Site(site) => Some(site),
            _ => None,
        };
        let holds = |site: Site| self.sorted.extras.contains_key(&extra(site));
        let pairs = || self.sorted.pairs.iter();
        let found: Vec<_> = pairs().filter(|pair| site(pair).is_some_and(holds)).collect();
        // Where the config does not say, tensors of the kind say it.
        let is_on = switch.unwrap_or(!found.is_empty());
        if is_on {
            let lacks = |pair: &&PairPlan| site(pair).is_none_or(|site| wanted(&site) && !holds(site));
            let mut lacking = pairs().filter(lacks);
            if let Some(first) = lacking.next() {
                let (num_missing, first) = (1 + lacking.count(), first.target.to_string());
                self.missing(field, "switched on".to_owned(), what, num_missing, first);
            }
        } else if let Some(Target::Site(site)) = found.first().map(|pair| pair.target) {
            let first = self.sorted.extras[&extra(site)].matrix.tensor.to_string();
            let (value, num_tensors) = ("switched off".to_owned(), found.len());
            self.reasons.push(CONFIG_FILE, Reason::Undeclared { field, value, num_tensors, first });
        }
    }

    /// Every pair has one half in blocks, unless the config allows for others.
    fn blocks(&mut self, blocks: &BlockDiagonal) {
        for pair in &self.sorted.pairs {
            if let Err(expected) = blocks.half_of(&pair.path) {
                let path = Value::from(shown(&pair.path));
                self.reasons.push(CONFIG_FILE, bad_field("use_bdlora", expected, &path));
            }
        }
    }

    /// The tokens of all token rows.
    fn tokens(&mut self, tokens: &Tokens) -> BTreeMap<Module, Vec<u32>> {
        const FIELD: &str = "trainable_token_indices";
        let entries: Vec<(&str, &[u32])> = match tokens {
            Tokens::None => Vec::new(),
            Tokens::Embedding(tokens) => vec![("embed_tokens", tokens)],
            Tokens::ByModule(entries) => entries.iter().map(|(name, tokens)| (&**name, &**tokens)).collect(),
        };
        let mut by_module = BTreeMap::new();
        let mut used = BTreeSet::new();
        for (&extra, planned) in &self.sorted.extras {
            let Extra::TokenRows(site) = extra else { continue };
            let tensor = planned.matrix.tensor.to_string();
            let named = |name: &str| {
                let rest = planned.path.strip_suffix(name);
                rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            };
            let Some(entry) = entries.iter().position(|(name, _)| named(name)) else {
                let value = "without an entry for this module".to_owned();
                self.reasons
                    .push(CONFIG_FILE, Reason::Undeclared { field: FIELD, value, num_tensors: 1, first: tensor });
                continue;
            };
            used.insert(entry);
            let (found, expected) = (planned.matrix.shape[0], entries[entry].1.len());
            if found != expected {
                self.reasons.push(self.plan.file, Reason::TokenCount { tensor, found, expected });
            }
            by_module.insert(site.module(), entries[entry].1.to_vec());
        }
        // On a tied model one tensor serves embedding and head, and the config may name both with the same tokens.
        let covered =
            |index: usize| used.contains(&index) || used.iter().any(|other| entries[*other].1 == entries[index].1);
        if let Some(missing) = (0..entries.len()).find(|index| !covered(*index)) {
            let (name, tokens) = entries[missing];
            self.missing(FIELD, format!("{} tokens", tokens.len()), "token rows are", 1, shown(name));
        }
        by_module
    }
}

impl Fields<'_> {
    fn bias(&mut self) -> Option<String> {
        match self.get("bias")?.as_str() {
            Some("none") => {}
            Some(value @ ("all" | "lora_only")) => return Some(format!("\"{value}\"")),
            _ => self.refuse_value("bias", "\"none\", \"all\" or \"lora_only\""),
        }
        None
    }

    fn names(&mut self, field: &str) -> Vec<String> {
        let Some(value) = self.get(field) else { return Vec::new() };
        let names =
            value.as_array().and_then(|list| list.iter().map(|name| name.as_str().map(str::to_owned)).collect());
        names.unwrap_or_else(|| {
            self.refuse_value(field, "a list of names");
            Vec::new()
        })
    }

    fn tokens(&mut self) -> Tokens {
        const FIELD: &str = "trainable_token_indices";
        let parsed = match self.get(FIELD) {
            None => return Tokens::None,
            Some(Value::Object(modules)) => modules
                .iter()
                .map(|(name, list)| Some((name.clone(), token_list(list)?)))
                .collect::<Option<Vec<_>>>()
                .map(Tokens::ByModule),
            Some(list) => token_list(list).map(Tokens::Embedding),
        };
        match parsed {
            Some(Tokens::Embedding(tokens)) if tokens.is_empty() => Tokens::None,
            Some(tokens) => tokens,
            None => {
                self.refuse_value(FIELD, "distinct tokens, as a list or by module");
                Tokens::None
            }
        }
    }

    fn invocation_tokens(&mut self) -> Vec<u32> {
        const FIELD: &str = "alora_invocation_tokens";
        let Some(value) = self.get(FIELD) else { return Vec::new() };
        let tokens = value.as_array().and_then(|list| list.iter().map(token).collect::<Option<Vec<u32>>>());
        match tokens {
            Some(tokens) if !tokens.is_empty() && tokens.len() <= MAX_TOKENS => return tokens,
            _ => self.refuse_value(FIELD, "a list of one or more tokens"),
        }
        Vec::new()
    }

    fn layer_replication(&mut self) -> Vec<(usize, usize)> {
        const FIELD: &str = "layer_replication";
        let Some(value) = self.get(FIELD) else { return Vec::new() };
        let range = |range: &Value| match range.as_array()?.as_slice() {
            [first, end] => {
                let (first, end) = (first.as_u64()?, end.as_u64()?);
                (first < end && end <= MAX_LAYERS).then_some((first as usize, end as usize))
            }
            _ => None,
        };
        let ranges = value.as_array().and_then(|list| list.iter().map(range).collect::<Option<Vec<_>>>());
        match ranges {
            Some(ranges) if !ranges.is_empty() => return ranges,
            _ => self.refuse_value(FIELD, "a list of [first, end) ranges of layers"),
        }
        Vec::new()
    }
}

fn token(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|token| u32::try_from(token).ok())
}

/// Distinct tokens, in the order of the list.
fn token_list(value: &Value) -> Option<Vec<u32>> {
    let tokens: Vec<u32> = value.as_array()?.iter().map(token).collect::<Option<_>>()?;
    let distinct: BTreeSet<u32> = tokens.iter().copied().collect();
    (distinct.len() == tokens.len() && tokens.len() <= MAX_TOKENS).then_some(tokens)
}
