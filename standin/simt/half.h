/* CUDA's 16-bit floats for kernels compiled for the host: storage, pairs and conversions, no arithmetic.
   Rounding is to nearest even; a NaN becomes the canonical one, as on the device. */
#pragma once
#include <cstdint>
#include <cstring>

namespace simt {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float bf16_to_f32(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

inline uint16_t f32_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0) {
        // A subnormal is fraction * 2^-24, which f32 holds exactly.
        float magnitude = float(fraction) * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

inline uint16_t f32_to_f16(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; // from 65520 on: infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 0.5 leaves the fraction in units of 2^-24, rounded by the addition itself.
        return sign | uint16_t(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u);
    }
    return sign | uint16_t((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

} // namespace simt

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(2) __half {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
    __half x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using half = __half;
using half2 = __half2;

inline float __bfloat162float(__nv_bfloat16 v) { return simt::bf16_to_f32(v.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {simt::f32_to_bf16(v)}; }
inline __nv_bfloat16 __float2bfloat16(float v) { return {simt::f32_to_bf16(v)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline float __half2float(__half v) { return simt::f16_to_f32(v.bits); }
inline __half __float2half_rn(float v) { return {simt::f32_to_f16(v)}; }
inline __half __float2half(float v) { return {simt::f32_to_f16(v)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return __half2float(v.x); }
inline float __high2float(__half2 v) { return __half2float(v.y); }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
