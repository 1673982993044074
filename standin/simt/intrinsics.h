/* CUDA's device functions under their own names, on top of simt.h, which includes this file. */
#pragma once
#include <algorithm>

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min(a, unsigned(b)); }
inline unsigned max(unsigned a, int b) { return std::max(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return std::min(unsigned(a), b); }
inline unsigned max(int a, unsigned b) { return std::max(unsigned(a), b); }

inline void __syncthreads(SIMT_HERE) { simt::block_barrier(simt::Vote::None, 0, file, line); }
inline int __syncthreads_or(int p, SIMT_HERE) { return simt::block_barrier(simt::Vote::Or, p, file, line); }
inline int __syncthreads_and(int p, SIMT_HERE) { return simt::block_barrier(simt::Vote::And, p, file, line); }
inline int __syncthreads_count(int p, SIMT_HERE) { return simt::block_barrier(simt::Vote::Count, p, file, line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_HERE) {
    simt::vote(simt::Collective::SyncWarp, mask, 0, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SIMT_HERE) {
    return simt::shuffle(simt::Collective::ShflIdx, mask, value, lane, width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIMT_HERE) {
    return simt::shuffle(simt::Collective::ShflXor, mask, value, lane_mask, width, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    return simt::shuffle(simt::Collective::ShflDown, mask, value, int(delta), width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    return simt::shuffle(simt::Collective::ShflUp, mask, value, int(delta), width, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_HERE) {
    return simt::vote(simt::Collective::Ballot, mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, SIMT_HERE) {
    return int(simt::vote(simt::Collective::Any, mask, predicate != 0, file, line));
}
inline int __all_sync(unsigned mask, int predicate, SIMT_HERE) {
    return int(simt::vote(simt::Collective::All, mask, predicate != 0, file, line));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SIMT_HERE) {
    return simt::vote(simt::Collective::ReduceAdd, mask, value, file, line);
}
inline int __reduce_add_sync(unsigned mask, int value, SIMT_HERE) {
    return int(simt::vote(simt::Collective::ReduceAdd, mask, unsigned(value), file, line));
}

template <class T>
T __ldg(const T* p, SIMT_HERE) { return simt::load(p, file, line); }
template <class T>
T __ldca(const T* p, SIMT_HERE) { return simt::load(p, file, line); }
template <class T>
T __ldcg(const T* p, SIMT_HERE) { return simt::load(p, file, line); }
template <class T>
T __ldcs(const T* p, SIMT_HERE) { return simt::load(p, file, line); }
template <class T>
T __ldcv(const T* p, SIMT_HERE) { return simt::load(p, file, line); }
template <class T>
void __stcg(T* p, T value, SIMT_HERE) { simt::store(p, value, file, line); }
template <class T>
void __stcs(T* p, T value, SIMT_HERE) { simt::store(p, value, file, line); }
template <class T>
void __stwb(T* p, T value, SIMT_HERE) { simt::store(p, value, file, line); }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap(SIMT_HERE) { simt::fail(simt::Fault::Trap, "__trap() at %s:%d", file, line); }

/* Relaxed, as on the device: an atomic orders nothing else. */
template <class T>
T atomicAdd(T* p, std::common_type_t<T> v) {
    static_assert(std::is_integral<T>::value, "float atomics have no order");
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <class T>
T atomicSub(T* p, std::common_type_t<T> v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicOr(T* p, std::common_type_t<T> v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicAnd(T* p, std::common_type_t<T> v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicExch(T* p, std::common_type_t<T> v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> v) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> v) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll((unsigned long long)(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= ((v >> i) & 1u) << (31 - i);
    return reversed;
}
inline unsigned __float_as_uint(float v) { return simt::bits_of(v); }
inline int __float_as_int(float v) { return int(simt::bits_of(v)); }
inline float __uint_as_float(unsigned v) { return simt::float_of(v); }
inline float __int_as_float(int v) { return simt::float_of(unsigned(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __expf(float a) { return std::exp(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
