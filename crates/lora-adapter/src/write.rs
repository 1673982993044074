//! A prepared adapter written as a plain one: the directory that PEFT, and every other reader, loads without the base
//! weights.
//!
//! What is written is read back and compared before it stands under its name, so a directory that is there is the adapter.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use lora_math::{Module, Site};
use safetensors::tensor::{Dtype, SafeTensorError, TensorView, serialize_to_file};
use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::adapter::Adapter;
use crate::config::CONFIG_FILE;
use crate::error::LoadError;
use crate::matrix::{FileDtype, Matrix};
use crate::pair::LoraPair;
use crate::prepare::PreparedAdapter;
use crate::weights::WEIGHTS_FILE;

/// Why a plain adapter is not written. Nothing stands under its name then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// Something stands there already.
    #[error("{} is there already", .path.display())]
    Exists {
        /// The directory asked for.
        path: PathBuf,
    },
    /// What the adapter does is more than a plain adapter can say.
    #[error("{what} cannot be written as a plain adapter")]
    NotPlain {
        /// Where, and what it is.
        what: String,
    },
    /// A site that PEFT names in no single way.
    #[error("{site}: has no name in a plain adapter")]
    Unnamed {
        /// The site.
        site: Site,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The tensor file cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Tensors {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: SafeTensorError,
    },
    /// What was written does not read back.
    #[error("what was written does not read back: {0}")]
    Unreadable(#[from] LoadError),
    /// What was written reads back as another adapter.
    #[error("{site}: reads back with other numbers than were written")]
    Changed {
        /// The first site that differs.
        site: Site,
    },
}

/// Writes `prepared` as a PEFT directory at `path`: pairs as they are, each site's rank and alpha by patterns.
///
/// # Errors
/// [`WriteError`]. Gains, shifts and norms refuse: no plain pair stands for them. Nothing is overwritten.
pub fn write_plain(prepared: &PreparedAdapter, path: &Path) -> Result<(), WriteError> {
    let vectors = prepared.vectors();
    let site = vectors.sites.keys().map(|site| format!("{site}: DoRA or a bias")).next();
    if let Some(what) = site.or_else(|| vectors.norms.keys().map(|norm| format!("{norm}: a norm of its own")).next()) {
        return Err(WriteError::NotPlain { what });
    }
    let paths = prepared.pairs().map(|(site, pair)| Ok((module_path(site)?, site, pair)));
    let paths: Vec<(String, Site, &LoraPair)> = paths.collect::<Result<_, WriteError>>()?;
    if path.symlink_metadata().is_ok() {
        return Err(WriteError::Exists { path: path.to_owned() });
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| WriteError::Io { path, source }
    };
    if let Some(parent) = partial.parent() {
        fs::create_dir_all(parent).map_err(io(parent))?;
    }
    fs::create_dir(&partial).map_err(io(&partial))?;
    let written = write_files(&paths, prepared, &partial).and_then(|()| fs::rename(&partial, path).map_err(io(path)));
    if written.is_err() {
        // The first error is the one to tell.
        drop(fs::remove_dir_all(&partial));
    }
    written
}

fn write_files(
    paths: &[(String, Site, &LoraPair)],
    prepared: &PreparedAdapter,
    directory: &Path,
) -> Result<(), WriteError> {
    let config_path = directory.join(CONFIG_FILE);
    let config = serde_json::to_string_pretty(&config(paths)).unwrap_or_default();
    fs::write(&config_path, config).map_err(|source| WriteError::Io { path: config_path, source })?;
    let tensors = paths.iter().flat_map(|(path, site, pair)| {
        let is_embedding = *site == Site::Vocabulary { module: Module::EmbedTokens };
        [("A", pair.a()), ("B", pair.b())].map(|(half, matrix)| {
            let suffix = if is_embedding { format!("lora_embedding_{half}") } else { format!("lora_{half}.weight") };
            (format!("base_model.model.{path}.{suffix}"), matrix)
        })
    });
    let path = directory.join(WEIGHTS_FILE);
    let failed = |source| WriteError::Tensors { path: path.clone(), source };
    let views = tensors.map(|(name, matrix)| Ok((name, view(matrix).map_err(failed)?)));
    let views: Vec<(String, TensorView<'_>)> = views.collect::<Result<_, WriteError>>()?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(views, Some(metadata), &path).map_err(failed)?;
    let read = Adapter::open(directory)?;
    let same = |site| {
        read.pair(site).zip(prepared.pair(site)).is_some_and(|(read, pair)| {
            read.a() == pair.a() && read.b() == pair.b() && read.scaling() == pair.scaling()
        })
    };
    match prepared.pairs().map(|(site, _)| site).find(|site| !same(*site)) {
        Some(site) => Err(WriteError::Changed { site }),
        None => Ok(()),
    }
}

fn view(matrix: &Matrix) -> Result<TensorView<'_>, SafeTensorError> {
    let dtype = match matrix.dtype() {
        FileDtype::F64 => Dtype::F64,
        FileDtype::F32 => Dtype::F32,
        FileDtype::F16 => Dtype::F16,
        FileDtype::Bf16 => Dtype::BF16,
        FileDtype::F8E4m3 => Dtype::F8_E4M3,
        FileDtype::F8E5m2 => Dtype::F8_E5M2,
    };
    TensorView::new(dtype, vec![matrix.rows(), matrix.cols()], matrix.bytes())
}

/// The config: rank and alpha of the most sites, and patterns for the others.
fn config(paths: &[(String, Site, &LoraPair)]) -> Value {
    // Alpha over rank is rounded to f32 once, so this gives the scaling back.
    let alpha = |pair: &LoraPair| f64::from(pair.scaling()) * pair.rank() as f64;
    let rank = most_common(paths.iter().map(|(.., pair)| pair.rank()));
    let alpha_bits = most_common(paths.iter().map(|(.., pair)| alpha(pair).to_bits()));
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for (path, _, pair) in paths {
        let pattern = path.replace('.', "\\.");
        if pair.rank() != rank {
            ranks.insert(pattern.clone(), pair.rank().into());
        }
        if alpha(pair).to_bits() != alpha_bits {
            alphas.insert(pattern, alpha(pair).into());
        }
    }
    let modules: Vec<&str> = paths.iter().map(|(path, ..)| path.as_str()).collect();
    json!({
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": f64::from_bits(alpha_bits),
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": ranks,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    })
}

/// The value that stands most often; of equals the smallest.
fn most_common<T: Ord + Copy + Default>(values: impl Iterator<Item = T>) -> T {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value).unwrap_or_default()
}

/// The module's path in a transformers model.
fn module_path(site: Site) -> Result<String, WriteError> {
    let (layer, module) = match site {
        Site::Vocabulary { module: Module::EmbedTokens } => return Ok("model.embed_tokens".to_owned()),
        Site::Vocabulary { module: Module::LmHead } => return Ok("lm_head".to_owned()),
        Site::Layer { layer, module } => (layer, module),
        _ => return Err(WriteError::Unnamed { site }),
    };
    let block = match module {
        Module::QProj | Module::KProj | Module::VProj | Module::OProj => "self_attn",
        Module::GateProj | Module::UpProj | Module::DownProj => "mlp",
        _ => return Err(WriteError::Unnamed { site }),
    };
    Ok(format!("model.layers.{layer}.{block}.{}", module.name()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lora_math::ScalingRule;
    use lora_math::shape::{AttentionSize, LayerShape};

    use super::*;
    use crate::prepare;

    fn pair(rank: usize, [input, out]: [usize; 2], alpha: f64) -> LoraPair {
        let numbers = |count: usize| (0..count).map(|at| (at % 17) as f32 / 7.0 - 1.0).collect::<Vec<_>>();
        let a = Matrix::from_f32(rank, input, &numbers(rank * input)).unwrap();
        let b = Matrix::from_f32(out, rank, &numbers(out * rank)).unwrap();
        LoraPair::new(a, b, alpha, ScalingRule::RankStabilized).unwrap()
    }

    fn prepared() -> PreparedAdapter {
        let attention = AttentionSize { hidden_size: 8, q_features: 8, kv_features: 4, o_features: 8 };
        let shape = lora_math::ModelShape::uniform(8, 9, 2, LayerShape::new().with_attention(attention)).unwrap();
        let pairs = [
            (Site::layer(0, Module::QProj), pair(3, [8, 8], 7.0)),
            (Site::layer(1, Module::QProj), pair(3, [8, 8], 7.0)),
            (Site::layer(1, Module::VProj), pair(5, [8, 4], 0.1)),
            (Site::Vocabulary { module: Module::EmbedTokens }, pair(2, [9, 8], 1.0)),
            (Site::Vocabulary { module: Module::LmHead }, pair(2, [8, 9], -1.0)),
        ];
        prepare(Adapter::from_pairs(pairs).unwrap(), &shape).unwrap()
    }

    #[test]
    fn a_plain_adapter_reads_back_as_itself() {
        let root = tempfile::tempdir().unwrap();
        let (path, prepared) = (root.path().join("a/b"), prepared());
        write_plain(&prepared, &path).unwrap();
        let read = Adapter::open(&path).unwrap();
        assert_eq!(read.content(), prepared.content());
        assert_eq!(read.notes(), [crate::Note::NegativeAlpha { num_pairs: 1 }]);
        let names: BTreeSet<_> = path.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        // What is there stays.
        let again = write_plain(&prepared, &path).unwrap_err();
        assert!(matches!(again, WriteError::Exists { .. }), "{again}");
        assert_eq!(path.parent().unwrap().read_dir().unwrap().count(), 1, "nothing beside it");
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), b"").unwrap();
        let under_a_file = write_plain(&prepared(), &root.path().join("file/a")).unwrap_err();
        assert!(matches!(under_a_file, WriteError::Io { .. }), "{under_a_file}");
        assert_eq!(root.path().read_dir().unwrap().count(), 1);
    }
}
