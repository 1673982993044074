//! A site: one place of a model that can carry A and B; and the id of a slot.

use std::fmt;

use crate::module::Module;

/// One place that can carry A and B. The derived order is not the layout's order; only
/// [`SlotLayout`](crate::SlotLayout) says where a site stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Site {
    /// A projection of a layer.
    Layer {
        /// Layer index, from 0.
        layer: usize,
        /// The projection.
        module: Module,
    },
    /// A projection of one routed expert of a layer.
    Expert {
        /// Layer index, from 0.
        layer: usize,
        /// Expert index in the layer, from 0.
        expert: usize,
        /// The projection.
        module: Module,
    },
    /// The embedding or the head.
    Vocabulary {
        /// [`Module::EmbedTokens`] or [`Module::LmHead`].
        module: Module,
    },
}

impl Site {
    /// The site of `module` in `layer`.
    pub fn layer(layer: usize, module: Module) -> Self {
        Site::Layer { layer, module }
    }

    /// The module at this site.
    pub fn module(self) -> Module {
        match self {
            Site::Layer { module, .. } | Site::Expert { module, .. } | Site::Vocabulary { module } => module,
        }
    }

    /// The layer of this site; none for the embedding and the head.
    pub fn layer_index(self) -> Option<usize> {
        match self {
            Site::Layer { layer, .. } | Site::Expert { layer, .. } => Some(layer),
            Site::Vocabulary { .. } => None,
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Site::Layer { layer, module } => write!(f, "layer {layer} {module}"),
            Site::Expert { layer, expert, module } => write!(f, "layer {layer} expert {expert} {module}"),
            Site::Vocabulary { module } => write!(f, "{module}"),
        }
    }
}

/// A row of the slot table, where a resident generation lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u32);

impl SlotId {
    /// The slot with this index. Whether a pool has that many slots is checked where the slot is used.
    pub const fn new(index: u32) -> Self {
        SlotId(index)
    }

    /// The index, from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The index as kernels read it.
    pub const fn raw(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}
