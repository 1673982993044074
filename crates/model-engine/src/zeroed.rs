//! Large buffers of zeros, or none where the machine has no room for them.

/// `len` zeros; none where they do not fit in the address space or the allocator refuses.
///
/// The room is asked for first and given back: a refusal then is a value and not the end of the process, and the
/// allocation that follows can leave its pages untouched until they are used.
pub(crate) fn zeroed(len: usize) -> Option<Vec<f32>> {
    let mut probe: Vec<f32> = Vec::new();
    probe.try_reserve_exact(len).ok()?;
    drop(probe);
    Some(vec![0.0; len])
}

#[cfg(test)]
mod tests {
    use super::zeroed;

    #[test]
    fn what_does_not_fit_is_none() {
        assert_eq!(zeroed(3), Some(vec![0.0; 3]));
        assert_eq!(zeroed(usize::MAX), None);
        assert_eq!(zeroed(1 << 58), None);
    }
}
