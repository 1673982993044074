/* What kernels take from the device beyond C++: the two 16-bit element types, wide loads, tensor-core products, the
   ticket of a split sum. This is the one file that knows whether nvcc or the host's compiler reads it, and the one that
   holds PTX. */
#pragma once
#ifdef SIMT_HOST
#include "simt.h"
#else
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SIMT_KERNEL(name)
#endif
#include "abi.cuh"

#define DEVICE __device__ __forceinline__

/* Threads of every block here. */
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

#ifdef SIMT_HOST

DEVICE uint4 load_weights(const void* pointer) { return simt::load(static_cast<const uint4*>(pointer)); }
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    simt::mma_m16n8k16_bf16(d, a, b, d);
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    simt::mma_m16n8k16_f16(d, a, b, d);
}
DEVICE unsigned take_ticket(unsigned* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }

#else

/* 16 bytes of A or B: read once a launch by one block, so they leave L1 to x and h. */
DEVICE uint4 load_weights(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer));
    return v;
}

/* d += a b: a is 16 x 16, b 16 x 8. PTX ISA, mma.m16n8k16. */
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Counts up and gives the count before. What the block wrote before its barrier in front of this is seen by whoever takes
   a later ticket, behind that one's barrier. */
DEVICE unsigned take_ticket(unsigned* counter) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

#endif

/* The two element types: conversion to and from f32 (to nearest even), and products with sums in f32. */
struct Bf16 {
    using Element = __nv_bfloat16;
    static DEVICE float widen(Element v) { return __bfloat162float(v); }
    static DEVICE Element narrow(float v) { return __float2bfloat16_rn(v); }
    static DEVICE Element from_bits(uint16_t bits) { return __ushort_as_bfloat16(bits); }
    static DEVICE uint16_t to_bits(Element v) { return __bfloat16_as_ushort(v); }
    static DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16(d, a, b); }
};
struct F16 {
    using Element = __half;
    static DEVICE float widen(Element v) { return __half2float(v); }
    static DEVICE Element narrow(float v) { return __float2half_rn(v); }
    static DEVICE Element from_bits(uint16_t bits) { return __ushort_as_half(bits); }
    static DEVICE uint16_t to_bits(Element v) { return __half_as_ushort(v); }
    static DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16(d, a, b); }
};

/* Whether vectors of 8 elements can be read at `address` and at every multiple of `stride` elements behind it. */
DEVICE bool aligned_rows(uint64_t address, uint32_t stride) { return address % 16 == 0 && stride % 8 == 0; }

/* Eight 16-bit elements, of which the first `count` are read (0 or less: none) and the others are zero. ALIGNED promises
   16-byte alignment and a count of 0 or of 8 and more. */
template <bool ALIGNED, bool WEIGHTS>
DEVICE uint4 load_eight(const uint16_t* pointer, int count) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (ALIGNED) {
        if (count > 0) {
            if (WEIGHTS) v = load_weights(pointer);
            else v = __ldg(reinterpret_cast<const uint4*>(pointer));
        }
        return v;
    }
    uint32_t pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) pairs[i / 2] |= uint32_t(__ldg(pointer + i)) << (16 * (i % 2));
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/* d += a b over 32 columns of K. Each lane brings 8 consecutive elements of its two rows of a (lane / 4 and that plus 8)
   and of its row of b (lane / 4), those from column 8 * (lane % 4) on. The two products take K in an order of their own,
   the same on both sides, so no lane has to pass on what it has read. */
template <class T>
DEVICE void multiply_32(float (&d)[4], const uint4& low, const uint4& high, const uint4& row) {
    const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, b0[2] = {row.x, row.y};
    const uint32_t a1[4] = {low.z, high.z, low.w, high.w}, b1[2] = {row.z, row.w};
    T::mma(d, a0, b0);
    T::mma(d, a1, b1);
}

DEVICE SiteEntry table_entry(const TableView& table, uint32_t slot, uint32_t site) {
    return table.entries[size_t(slot) * table.num_sites + site];
}

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
