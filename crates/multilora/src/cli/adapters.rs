//! Opening an adapter that the command line names.

use std::path::Path;

use multilora::adapter::{Adapter, AdapterSource, LoadError};
use multilora::engine::checkpoint::ModelConfig;

/// Opens a directory or a GGUF file. In a snapshot of the Hugging Face hub's cache, links are followed inside the folder of
/// its repository; anywhere else none leads out of the adapter's directory.
pub(crate) fn open(path: &Path) -> Result<Adapter, LoadError> {
    match AdapterSource::in_hub_cache(path)? {
        Some(source) => Adapter::read(&source),
        None => Adapter::open(path),
    }
}

/// The adapter with the rows of q and k as the model has them, which a GGUF file leaves to head counts.
pub(crate) fn for_model(adapter: Adapter, config: &ModelConfig) -> Result<Adapter, LoadError> {
    adapter.with_gguf_heads(config.num_heads, config.num_kv_heads)
}
