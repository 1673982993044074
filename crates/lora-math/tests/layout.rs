//! The layout walk: its order, frozen by a listing; its promises on any shape; and sizes that do not fit.

use std::collections::BTreeSet;
use std::fmt::Write;

use lora_math::layout::ALIGNMENT;
use lora_math::module::Part;
use lora_math::shape::{AttentionSize, MlpSize};
use lora_math::{
    Features, LayerShape, LayoutError, LayoutOptions, ModelShape, Module, ModuleSet, Site, SiteSpan, SlotDtype, SlotId,
    SlotLayout,
};
use proptest::prelude::*;

fn features(in_features: usize, out_features: usize) -> Features {
    Features { in_features, out_features }
}

fn layer_modules() -> Vec<Module> {
    Module::ALL.into_iter().filter(|module| module.part() == Part::Layer).collect()
}

/// Linear attention in both namings, full attention with a doubled query, experts with a shared one, and a dense MLP.
/// Modules are added out of order: the walk must not depend on it.
fn hybrid_moe() -> ModelShape {
    let moe = |layer: LayerShape| {
        layer
            .with_experts(2, MlpSize { hidden_size: 40, intermediate_size: 24 })
            .with(Module::SharedExpertGate, features(40, 1))
            .with(Module::SharedDownProj, features(16, 40))
            .with(Module::SharedUpProj, features(40, 16))
            .with(Module::SharedGateProj, features(40, 16))
            .with(Module::Router, features(40, 2))
    };
    let linear = moe(LayerShape::new())
        .with(Module::LinearOutProj, features(32, 40))
        .with(Module::InProjBa, features(40, 8))
        .with(Module::InProjQkvz, features(40, 96));
    let attention = moe(LayerShape::new()).with_attention(AttentionSize {
        hidden_size: 40,
        q_features: 64,
        kv_features: 16,
        o_features: 32,
    });
    let dense = LayerShape::new()
        .with(Module::InProjA, features(40, 4))
        .with(Module::InProjB, features(40, 4))
        .with(Module::InProjZ, features(40, 32))
        .with(Module::InProjQkv, features(40, 64))
        .with(Module::LinearOutProj, features(32, 40))
        .with_mlp(MlpSize { hidden_size: 40, intermediate_size: 56 });
    ModelShape::new(40, 101, vec![linear, attention, dense]).unwrap()
}

fn bf16(max_rank: usize) -> LayoutOptions {
    LayoutOptions { modules: layer_modules().into_iter().collect(), max_rank, dtype: SlotDtype::Bf16 }
}

/// The listing was computed by another program from the rule in the module's docs. If this fails, slot images that other
/// nodes packed do not fit here: restore the walk, or raise `LAYOUT_VERSION` with a new listing.
#[test]
fn the_walk_is_frozen() {
    let layout = SlotLayout::new(&hybrid_moe(), bf16(3)).unwrap();
    let mut listing = String::new();
    for (index, span) in layout.spans().iter().enumerate() {
        let SiteSpan { site, features, a_offset, a_bytes, b_offset, b_bytes, .. } = *span;
        let Features { in_features, out_features } = features;
        let site = site.to_string();
        let place = format!("a {a_offset:5}+{a_bytes:3} b {b_offset:5}+{b_bytes:3}");
        writeln!(listing, "{index:2} {site:34} in {in_features:3} out {out_features:3} {place}").unwrap();
    }
    writeln!(listing, "slot_bytes {}", layout.slot_bytes()).unwrap();
    writeln!(listing, "fingerprint {}", layout.fingerprint()).unwrap();
    assert_eq!(listing, include_str!("data/hybrid_moe_layout.txt"), "the layout is now:\n{listing}");
}

#[test]
fn the_fingerprint_sees_every_difference() {
    let shape = hybrid_moe();
    let fingerprint = |shape: &ModelShape, options| SlotLayout::new(shape, options).unwrap().fingerprint();
    let base = bf16(8);
    let wider = {
        let mut layers = shape.layers().to_vec();
        layers[0] = layers[0].clone().with(Module::QProj, features(40, 40));
        ModelShape::new(40, 101, layers).unwrap()
    };
    let swapped = {
        let mut layers = shape.layers().to_vec();
        layers.swap(0, 1);
        ModelShape::new(40, 101, layers).unwrap()
    };
    let fingerprints = [
        fingerprint(&shape, base),
        fingerprint(&shape, LayoutOptions { max_rank: 9, ..base }),
        fingerprint(&shape, LayoutOptions { dtype: SlotDtype::F16, ..base }),
        fingerprint(&shape, LayoutOptions { dtype: SlotDtype::F32, ..base }),
        fingerprint(&shape, LayoutOptions { modules: ModuleSet::DENSE, ..base }),
        fingerprint(&wider, base),
        fingerprint(&swapped, base),
    ];
    let distinct: BTreeSet<_> = fingerprints.iter().map(|fingerprint| *fingerprint.bytes()).collect();
    assert_eq!(distinct.len(), fingerprints.len());
    assert_eq!(fingerprint(&hybrid_moe(), base), fingerprints[0]);
}

/// One layer as the test describes it: modules of any features, in any order, and perhaps experts.
#[derive(Clone, Debug)]
struct Layer {
    modules: Vec<(Module, Features)>,
    experts: Option<(usize, MlpSize)>,
}

#[derive(Clone, Debug)]
struct Case {
    layers: Vec<Layer>,
    options: LayoutOptions,
}

const HIDDEN_SIZE: usize = 17;
const VOCAB_SIZE: usize = 33;
const EXPERT_MODULES: [Module; 3] = [Module::ExpertGateProj, Module::ExpertUpProj, Module::ExpertDownProj];

fn any_layer() -> impl Strategy<Value = Layer> {
    let plain = layer_modules();
    let count = plain.len();
    let sized = |module| (Just(module), (1..50usize, 1..50usize).prop_map(|(i, o)| features(i, o)));
    let modules = prop::sample::subsequence(plain, 0..=count)
        .prop_shuffle()
        .prop_flat_map(move |modules| modules.into_iter().map(sized).collect::<Vec<_>>());
    let size = (1..50usize, 1..50usize)
        .prop_map(|(hidden_size, intermediate_size)| MlpSize { hidden_size, intermediate_size });
    (modules, prop::option::of((1..4usize, size))).prop_map(|(modules, experts)| Layer { modules, experts })
}

fn any_case() -> impl Strategy<Value = Case> {
    let modules = layer_modules();
    let count = modules.len();
    let modules = prop::sample::subsequence(modules, 1..=count);
    let dtype = prop::sample::select(&[SlotDtype::F32, SlotDtype::F16, SlotDtype::Bf16][..]);
    (prop::collection::vec(any_layer(), 1..4), modules, 1..20usize, dtype).prop_map(
        |(layers, modules, max_rank, dtype)| {
            let modules = modules.into_iter().collect();
            Case { layers, options: LayoutOptions { modules, max_rank, dtype } }
        },
    )
}

impl Case {
    fn shape(&self) -> ModelShape {
        let layers = self.layers.iter().map(|layer| {
            let shape = match layer.experts {
                Some((num_experts, size)) => LayerShape::new().with_experts(num_experts, size),
                None => LayerShape::new(),
            };
            layer.modules.iter().fold(shape, |shape, &(module, features)| shape.with(module, features))
        });
        ModelShape::new(HIDDEN_SIZE, VOCAB_SIZE, layers.collect()).unwrap()
    }

    /// Every site that a layout of the case must cover, with its features.
    fn sites(&self) -> BTreeSet<(Site, usize, usize)> {
        let layers = self.layers.iter().enumerate();
        let all = layers.flat_map(|(layer, described)| described.modules.iter().map(move |entry| (layer, entry)));
        all.filter(|(_, (module, _))| self.options.modules.contains(*module))
            .map(|(layer, &(module, Features { in_features, out_features }))| {
                (Site::Layer { layer, module }, in_features, out_features)
            })
            .collect()
    }
}

/// Spans are aligned, of the right size, and follow one another inside the image: so none overlaps another.
fn assert_placed(spans: &[SiteSpan], dtype: SlotDtype, image_bytes: usize) -> Result<(), TestCaseError> {
    let mut free_from = 0;
    for span in spans {
        prop_assert_eq!(span.a_bytes, span.rank * span.features.in_features * dtype.bytes());
        prop_assert_eq!(span.b_bytes, span.rank * span.features.out_features * dtype.bytes());
        for (offset, bytes) in [(span.a_offset, span.a_bytes), (span.b_offset, span.b_bytes)] {
            prop_assert_eq!(offset % ALIGNMENT, 0);
            prop_assert!(offset >= free_from);
            prop_assert!(offset - free_from < ALIGNMENT, "bytes {}..{} are wasted", free_from, offset);
            free_from = offset + bytes;
        }
    }
    prop_assert!(free_from <= image_bytes && image_bytes - free_from < ALIGNMENT);
    prop_assert_eq!(image_bytes % ALIGNMENT, 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_site_stands_once_aligned_and_apart(case in any_case(), slot in 0..1000u32) {
        let expected = case.sites();
        let layout = match SlotLayout::new(&case.shape(), case.options) {
            Ok(layout) => layout,
            Err(error) => {
                prop_assert!(expected.is_empty());
                prop_assert_eq!(error, LayoutError::NoSites { modules: case.options.modules });
                return Ok(());
            }
        };
        assert_placed(layout.spans(), layout.dtype(), layout.slot_bytes())?;
        prop_assert!(layout.spans().iter().all(|span| span.rank == case.options.max_rank));

        let triple = |span: &SiteSpan| (span.site, span.features.in_features, span.features.out_features);
        let covered: BTreeSet<_> = layout.spans().iter().map(triple).collect();
        prop_assert_eq!(covered.len(), layout.num_sites());
        prop_assert_eq!(&covered, &expected);
        for (index, span) in layout.spans().iter().enumerate() {
            prop_assert_eq!(layout.site_index(span.site), Some(index));
        }
        let keys = layout.spans().iter().map(|span| (span.site.layer_index(), span.site.module()));
        prop_assert!(keys.is_sorted());

        for layer in 0..=case.layers.len() {
            for module in Module::ALL {
                let site = Site::layer(layer, module);
                let exists = expected.iter().any(|(covered, ..)| *covered == site);
                prop_assert_eq!(layout.site_index(site).is_some(), exists);
            }
            for module in EXPERT_MODULES {
                let site = Site::Expert { layer, expert: 0, module };
                prop_assert_eq!(layout.site_index(site), None);
            }
        }
        for module in [Module::EmbedTokens, Module::LmHead] {
            prop_assert_eq!(layout.site_index(Site::Vocabulary { module }), None);
        }
        let offset = layout.slot_base_offset(SlotId::new(slot));
        prop_assert_eq!(offset, Ok(slot as usize * layout.slot_bytes()));
    }

    #[test]
    fn a_packed_image_is_tight_and_no_larger(case in any_case(), seeds in prop::collection::vec(0..100usize, 90)) {
        let Ok(layout) = SlotLayout::new(&case.shape(), case.options) else { return Ok(()) };
        let max_rank = layout.max_rank();
        let ranks: Vec<usize> = (0..layout.num_sites()).map(|site| seeds[site % 90] % (max_rank + 1)).collect();
        let packed = layout.packed(&ranks).unwrap();
        assert_placed(packed.spans(), layout.dtype(), packed.image_bytes())?;
        prop_assert!(packed.image_bytes() <= layout.slot_bytes());
        prop_assert_eq!(packed.spans().len(), layout.num_sites());
        for ((span, padded), &rank) in packed.spans().iter().zip(layout.spans()).zip(&ranks) {
            prop_assert_eq!((span.site, span.features, span.rank), (padded.site, padded.features, rank));
            prop_assert!(span.a_offset <= padded.a_offset && span.b_offset <= padded.b_offset);
        }
        let full = layout.packed(&vec![max_rank; layout.num_sites()]).unwrap();
        prop_assert_eq!(full.spans(), layout.spans());
        prop_assert_eq!(full.image_bytes(), layout.slot_bytes());
    }

    #[test]
    fn sizes_past_the_address_space_are_errors(
        in_bits in 3..64u32, out_bits in 3..64u32, rank_bits in 3..64u32, slot in any::<u32>(),
    ) {
        let [in_features, out_features, max_rank] = [in_bits, out_bits, rank_bits].map(|bits| usize::MAX >> bits);
        let layer = LayerShape::new().with(Module::QProj, features(in_features, out_features));
        let shape = ModelShape::uniform(1, 1, 3, layer).unwrap();
        let options = LayoutOptions { modules: ModuleSet::DENSE, max_rank, dtype: SlotDtype::F32 };
        // The exact size in wider numbers: 3 layers of an A and a B each, up to alignment.
        let matrix = |width: usize| (max_rank as u128 * width as u128 * 4).next_multiple_of(ALIGNMENT as u128);
        let slot_bytes = 3 * (matrix(in_features) + matrix(out_features));
        match SlotLayout::new(&shape, options) {
            Ok(layout) => {
                prop_assert_eq!(layout.slot_bytes() as u128, slot_bytes);
                let end = (u128::from(slot) + 1) * slot_bytes;
                let offset = layout.slot_base_offset(SlotId::new(slot));
                prop_assert_eq!(offset.is_ok(), end <= usize::MAX as u128);
            }
            Err(LayoutError::Overflow { rank, .. }) => {
                prop_assert_eq!(rank, max_rank);
                prop_assert!(slot_bytes > usize::MAX as u128);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

/// Embedding and head stand behind the layers, and nothing before them moves.
#[test]
fn embedding_and_head_stand_behind_the_layers() {
    let shape = hybrid_moe();
    let plain = SlotLayout::new(&shape, bf16(8)).unwrap();
    let modules = bf16(8).modules.with(Module::LmHead).with(Module::EmbedTokens);
    let layout = SlotLayout::new(&shape, LayoutOptions { modules, ..bf16(8) }).unwrap();
    let num_plain = plain.num_sites();
    assert_eq!(layout.spans()[..num_plain], *plain.spans());
    assert_ne!(layout.fingerprint(), plain.fingerprint());
    let mut end = plain.slot_bytes();
    for (index, module) in [Module::EmbedTokens, Module::LmHead].into_iter().enumerate() {
        let site = Site::Vocabulary { module };
        let span = layout.spans()[num_plain + index];
        let Features { in_features, out_features } = shape.features(site).unwrap();
        assert_eq!((span.site, span.features), (site, Features { in_features, out_features }));
        assert_eq!((span.a_offset, span.a_bytes, span.b_bytes), (end, 16 * in_features, 16 * out_features));
        assert_eq!(layout.site_index(site), Some(num_plain + index));
        assert_eq!(plain.site_index(site), None);
        end = (span.b_offset + span.b_bytes).next_multiple_of(64);
    }
    assert_eq!(layout.slot_bytes(), end);
}

#[test]
fn layouts_that_cannot_be() {
    let shape = hybrid_moe();
    assert_eq!(SlotLayout::new(&shape, bf16(0)), Err(LayoutError::ZeroRank));
    let dense = ModelShape::uniform(8, 9, 2, LayerShape::new().with(Module::QProj, features(8, 8))).unwrap();
    let modules = ModuleSet::EMPTY.with(Module::Router);
    let options = LayoutOptions { modules, ..bf16(1) };
    assert_eq!(SlotLayout::new(&dense, options), Err(LayoutError::NoSites { modules }));

    for module in Module::ALL.into_iter().filter(|module| module.part() == Part::Expert) {
        let options = LayoutOptions { modules: ModuleSet::DENSE.with(module), ..bf16(1) };
        assert_eq!(SlotLayout::new(&shape, options), Err(LayoutError::PartNotPlaced { module }));
    }

    let layout = SlotLayout::new(&dense, bf16(4)).unwrap();
    assert_eq!(layout.packed(&[1]), Err(LayoutError::RankCount { expected: 2, given: 1 }));
    let site = Site::layer(1, Module::QProj);
    assert_eq!(layout.packed(&[4, 5]), Err(LayoutError::RankTooLarge { site, rank: 5, max_rank: 4 }));
    assert_eq!(layout.packed(&[0; 2]).unwrap().image_bytes(), 0);
    assert_eq!(layout.slot_base_offset(SlotId::new(0)), Ok(0));
}

/// The last step of each computation, just past the end and just before it.
#[test]
fn sizes_at_the_end_of_the_address_space() {
    let layout = |in_features, out_features, max_rank| {
        let layer = LayerShape::new().with(Module::QProj, features(in_features, out_features));
        let shape = ModelShape::uniform(1, 1, 1, layer).unwrap();
        SlotLayout::new(&shape, LayoutOptions { modules: ModuleSet::DENSE, max_rank, dtype: SlotDtype::F32 })
    };
    let overflow = |rank| Err(LayoutError::Overflow { site: Site::layer(0, Module::QProj), rank });
    assert_eq!(layout(1 << 40, 1, 1 << 24), overflow(1 << 24), "elements of A");
    assert_eq!(layout(1 << 40, 1, 1 << 22), overflow(1 << 22), "bytes of A");
    assert_eq!(layout(1, 1 << 40, 1 << 22), overflow(1 << 22), "bytes of B");
    assert_eq!(layout(1 << 40, 1 << 40, 1 << 21), overflow(1 << 21), "A and B together");
    assert_eq!(layout((1 << 40) - 1, 1 << 39, 1 << 21).map(|layout| layout.num_sites()), Ok(1));

    let layout = layout(1 << 37, 1 << 37, 1).unwrap();
    let (last, past) = (SlotId::new((1 << 24) - 2), SlotId::new((1 << 24) - 1));
    assert_eq!(layout.slot_base_offset(last), Ok(usize::MAX - (1 << 41) + 1));
    let slot_overflow = LayoutError::SlotOverflow { slot: past, slot_bytes: 1 << 40 };
    assert_eq!(layout.slot_base_offset(past), Err(slot_overflow), "the slot's end lies past it");
}
