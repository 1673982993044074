/* CUDA's vector types and dim3 with CUDA's sizes and alignments, for kernels compiled for the host. */
#pragma once
#include <cstdint>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define SIMT_VECTOR2(NAME, T, ALIGN)                                                                                  \
    struct alignas(ALIGN) NAME {                                                                                      \
        T x, y;                                                                                                       \
    };                                                                                                                \
    inline NAME make_##NAME(T x, T y) { return NAME{x, y}; }
#define SIMT_VECTOR3(NAME, T)                                                                                         \
    struct NAME {                                                                                                     \
        T x, y, z;                                                                                                    \
    };                                                                                                                \
    inline NAME make_##NAME(T x, T y, T z) { return NAME{x, y, z}; }
#define SIMT_VECTOR4(NAME, T, ALIGN)                                                                                  \
    struct alignas(ALIGN) NAME {                                                                                      \
        T x, y, z, w;                                                                                                 \
    };                                                                                                                \
    inline NAME make_##NAME(T x, T y, T z, T w) { return NAME{x, y, z, w}; }

SIMT_VECTOR2(char2, signed char, 2)
SIMT_VECTOR2(uchar2, unsigned char, 2)
SIMT_VECTOR2(short2, short, 4)
SIMT_VECTOR2(ushort2, unsigned short, 4)
SIMT_VECTOR2(int2, int, 8)
SIMT_VECTOR2(uint2, unsigned, 8)
SIMT_VECTOR2(float2, float, 8)
SIMT_VECTOR2(longlong2, long long, 16)
SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SIMT_VECTOR2(double2, double, 16)
SIMT_VECTOR3(int3, int)
SIMT_VECTOR3(uint3, unsigned)
SIMT_VECTOR3(float3, float)
SIMT_VECTOR4(char4, signed char, 4)
SIMT_VECTOR4(uchar4, unsigned char, 4)
SIMT_VECTOR4(short4, short, 8)
SIMT_VECTOR4(ushort4, unsigned short, 8)
SIMT_VECTOR4(int4, int, 16)
SIMT_VECTOR4(uint4, unsigned, 16)
SIMT_VECTOR4(float4, float, 16)

#undef SIMT_VECTOR2
#undef SIMT_VECTOR3
#undef SIMT_VECTOR4
