//! Packed images that stay in host memory when their generation leaves its slot: a load of the same contents is then one copy
//! and one row of the table, without files, parsing or packing.
//!
//! An image is found by the digest of its contents, never by a name. All images of a pool have one layout and one type.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lora_adapter::{AdapterVectors, PreparedAdapter};
use lora_math::{ContentDigest, PackedLayout};
use tracing::debug;

use crate::error::PoolError;
use crate::image::PackedImage;
use crate::landing::Staged;
use crate::memory::DeviceMemory;
use crate::pool::{LoraPool, checked_name};
use crate::state::{Existing, Loading};

/// A packed image with what stands beside it.
pub(crate) struct HostImage<M: DeviceMemory> {
    pub(crate) image: PackedImage<M::HostBuffer>,
    pub(crate) content: ContentDigest,
    pub(crate) vectors: Arc<AdapterVectors>,
}

impl<M: DeviceMemory> HostImage<M> {
    /// Bytes in host memory. Never 0, so that their number bounds the images too.
    fn num_bytes(&self) -> usize {
        size_of::<Self>() + self.image.size().image_bytes + self.vectors.num_bytes()
    }
}

/// The images, and how often they were asked for.
pub(crate) struct HostTier<M: DeviceMemory> {
    max_bytes: usize,
    kept: Mutex<Kept<M>>,
}

struct Kept<M: DeviceMemory> {
    images: HashMap<ContentDigest, Entry<M>>,
    num_bytes: usize,
    clock: u64,
    hits: u64,
    misses: u64,
}

struct Entry<M: DeviceMemory> {
    image: Arc<HostImage<M>>,
    last_use: u64,
}

/// The host tier of a pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTierSnapshot {
    /// Bytes that it may hold.
    pub max_bytes: usize,
    /// Bytes of the images that it holds, with what stands beside them.
    pub num_bytes: usize,
    /// Images that it holds.
    pub num_images: usize,
    /// Loads that found their image.
    pub hits: u64,
    /// Loads that had to pack theirs.
    pub misses: u64,
}

impl<M: DeviceMemory> HostTier<M> {
    pub(crate) fn new(max_bytes: usize) -> Self {
        let kept = Kept { images: HashMap::new(), num_bytes: 0, clock: 0, hits: 0, misses: 0 };
        HostTier { max_bytes, kept: Mutex::new(kept) }
    }

    /// The image of these contents, which is the most recently used one from now on.
    pub(crate) fn get(&self, content: ContentDigest) -> Option<Arc<HostImage<M>>> {
        let mut kept = self.kept();
        kept.clock += 1;
        let clock = kept.clock;
        let found = kept.images.get_mut(&content).map(|entry| {
            entry.last_use = clock;
            entry.image.clone()
        });
        match found {
            Some(_) => kept.hits += 1,
            None => kept.misses += 1,
        }
        found
    }

    /// Keeps an image, in place of those that were used longest ago where there is no room for all. One that is larger than
    /// the tier is not kept, and drives nothing out.
    pub(crate) fn keep(&self, image: &Arc<HostImage<M>>) {
        let num_bytes = image.num_bytes();
        if num_bytes > self.max_bytes {
            return;
        }
        let mut dropped = Vec::new();
        let mut kept = self.kept();
        kept.clock += 1;
        let entry = Entry { image: image.clone(), last_use: kept.clock };
        if let Some(before) = kept.images.insert(image.content, entry) {
            kept.num_bytes -= before.image.num_bytes();
            dropped.push(before.image);
        }
        kept.num_bytes += num_bytes;
        while kept.num_bytes > self.max_bytes {
            let oldest = kept.images.iter().min_by_key(|(_, entry)| entry.last_use).map(|(content, _)| *content);
            let Some(entry) = oldest.and_then(|content| kept.images.remove(&content)) else { break };
            kept.num_bytes -= entry.image.num_bytes();
            debug!(content = %entry.image.content, "image left the host tier");
            dropped.push(entry.image);
        }
        // Memory is given back when nobody waits for the lock.
        drop(kept);
        drop(dropped);
    }

    pub(crate) fn snapshot(&self) -> HostTierSnapshot {
        let kept = self.kept();
        HostTierSnapshot {
            max_bytes: self.max_bytes,
            num_bytes: kept.num_bytes,
            num_images: kept.images.len(),
            hits: kept.hits,
            misses: kept.misses,
        }
    }

    /// No step of the above can leave it half changed, so a panic elsewhere does not spoil it.
    fn kept(&self) -> MutexGuard<'_, Kept<M>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: DeviceMemory> fmt::Debug for HostTier<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.snapshot().fmt(f)
    }
}

impl<M: DeviceMemory> LoraPool<M> {
    /// [`stage`](Self::stage) of contents whose image the host tier still holds, for a caller that knows their digest and need
    /// not read their files; none where the tier does not hold them.
    ///
    /// # Errors
    /// Those of [`stage`](Self::stage), without those of the adapter, which was checked when it was packed.
    pub fn stage_kept(self: &Arc<Self>, name: &str, content: ContentDigest) -> Result<Option<Staged<M>>, PoolError> {
        let name = checked_name(name)?;
        let Some(image) = self.host_tier().get(content) else { return Ok(None) };
        let reserved = self.state().reserve(&name, content, Loading::Staged, Existing::Keep)?;
        self.land(name, reserved, Existing::Keep, || Ok(image)).map(Some)
    }

    /// What the host tier holds now.
    pub fn host_tier_snapshot(&self) -> HostTierSnapshot {
        self.host_tier().snapshot()
    }

    /// The image of an adapter: the host tier's, or a fresh one, which the tier keeps.
    pub(crate) fn image_of(
        &self,
        prepared: &PreparedAdapter,
        packed: PackedLayout,
    ) -> Result<Arc<HostImage<M>>, PoolError> {
        if let Some(image) = self.host_tier().get(prepared.content()) {
            return Ok(image);
        }
        let image = PackedImage::pack(prepared, packed, self.layout().dtype(), self.memory())?;
        let (content, vectors) = (prepared.content(), prepared.vectors().clone());
        let image = Arc::new(HostImage { image, content, vectors });
        self.host_tier().keep(&image);
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use lora_adapter::{Adapter, LoraPair, Matrix, prepare};
    use lora_math::scaling::ScalingRule;
    use lora_math::shape::MlpSize;
    use lora_math::{LayerShape, ModelShape, Module, Site};

    use crate::{LoraPool, PoolOptions};

    /// Two loads of the same contents under two names may pack at the same time, and both keep their image.
    #[test]
    fn contents_that_are_kept_twice_count_once() {
        let mlp = MlpSize { hidden_size: 4, intermediate_size: 8 };
        let shape = ModelShape::uniform(4, 8, 1, LayerShape::new().with_mlp(mlp)).unwrap();
        let pool = LoraPool::open(&shape, PoolOptions { host_bytes: 1 << 20, ..PoolOptions::default() }).unwrap();
        let (a, b) = (Matrix::from_f32(1, 4, &[1.0; 4]).unwrap(), Matrix::from_f32(8, 1, &[1.0; 8]).unwrap());
        let pair = LoraPair::new(a, b, 1.0, ScalingRule::Standard).unwrap();
        let adapter = Adapter::from_pairs([(Site::layer(0, Module::UpProj), pair)]).unwrap();
        let prepared = prepare(adapter, &shape).unwrap();
        pool.load("a", &prepared).unwrap();
        let before = pool.host_tier_snapshot();
        let image = pool.host_tier().get(prepared.content()).unwrap();
        pool.host_tier().keep(&image);
        let after = pool.host_tier_snapshot();
        assert_eq!((after.num_bytes, after.num_images), (before.num_bytes, 1));
    }
}
