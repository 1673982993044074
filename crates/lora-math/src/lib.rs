//! Layout, routing and identity for serving many LoRA adapters on one base model.
//!
//! This crate is pure arithmetic on sizes and indices: no GPU, no I/O, no threads, no `unsafe`, no C compiler.
//! Packing, kernels, peers and tests all read the same [`SlotLayout`], so no offset is computed twice.
//!
//! | module | owns |
//! |---|---|
//! | [`shape`] | what a model's layers carry: [`ModelShape`], [`Module`], [`Features`] |
//! | [`layout`] | where A and B of every site stand in a slot image: [`SlotLayout`] |
//! | [`abi`] | the structs that pools write and kernels read: [`SiteEntry`], [`RowEntry`], [`RowGroup`], [`RowTile`] |
//! | [`scaling`] | alpha / rank or alpha / √rank: [`ScalingRule`] |
//! | [`patterns`] | which entry of `rank_pattern` and `alpha_pattern` a module takes: [`Patterns`](patterns::Patterns) |
//! | [`site_table`] | the slot table on the host, and with it the scale table: [`SiteTable`] |
//! | [`selection`] | what a request asks for → [`Route`] |
//! | [`rows`] | the row metadata of a step |
//! | [`tiles`] | the long runs of a step, as in prefill |
//! | [`norm`] | the norms of a model, for adapters that bring their own: [`NormSite`] |
//! | [`moe_route`] | how a row meets its adapter's expert deltas |
//! | [`victim`] | which slot to evict |
//! | [`identity`] | [`AdapterId`]: content digest and generation |
//! | [`tensor_parallel`] | how A and B are cut over ranks |
#![doc = ""]
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod abi;
pub mod identity;
pub mod layout;
pub mod module;
pub mod moe_route;
pub mod norm;
pub mod patterns;
pub mod rows;
pub mod scaling;
pub mod selection;
pub mod shape;
pub mod site;
pub mod site_table;
pub mod tensor_parallel;
pub mod tiles;
pub mod victim;

pub use abi::{RowEntry, RowGroup, RowTile, SiteEntry, TileUse};
pub use identity::{AdapterId, ContentDigest, Generation};
pub use layout::{LayoutError, LayoutOptions, PackedLayout, SiteSpan, SlotDtype, SlotLayout};
pub use module::{Module, ModuleSet};
pub use moe_route::MoeRoute;
pub use norm::{LayerNorm, NormSite};
pub use rows::{RowAdapter, RowRun, StepRows};
pub use scaling::ScalingRule;
pub use selection::{AdapterSelection, Route};
pub use shape::{Features, LayerShape, ModelShape};
pub use site::{Site, SlotId};
pub use site_table::SiteTable;
pub use tiles::StepTiles;
