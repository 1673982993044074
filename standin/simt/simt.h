/* CUDA C++ for the host: what a `.cu` file compiled with SIMT_HOST sees in place of CUDA's own headers.

   A CUDA thread is a fiber; a block's fibers take turns on one OS thread and switch only where they wait: at barriers,
   warp collectives and their end. Nothing here is fast or parallel; what it is for is to be strict. Each rule that the
   device leaves undefined (a divergent barrier, a lane that is missing, a pointer that is not aligned) is an error here,
   with kernel, block and thread in its message.
   What it cannot show: the text of inline PTX, timing, coalescing, bank conflicts, blocks that wait for each other. */
#pragma once
#ifndef SIMT_HOST
#error "simt.h is for kernels compiled for the host: define SIMT_HOST"
#endif
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "types.h"
#include "half.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __constant__ static const
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#ifndef __restrict__
#define __restrict__ __restrict
#endif
/* One linker section for all static shared memory, so that the runtime can fill it with NaN bits before a block. */
#define __shared__ static __attribute__((section("simt_shared")))
#define DYN_SMEM(name) unsigned char* name = static_cast<unsigned char*>(simt::dynamic_shared())
#define SIMT_KERNEL(name) static const simt::Registration simt_registered_##name{simt::kernel_of(#name, &name)};

/* Where a call stands in the kernel's source, for messages. */
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

enum class Fault { None, Divergence, Exited, Lanes, Misaligned, Trap, Launch };

/* A kernel as the driver knows it: `call` gets cuLaunchKernel's array of pointers to arguments. */
struct Kernel {
    const char* name;
    void (*call)(const void* function, void** arguments);
    const void* function;
    const size_t* argument_bytes;
    size_t num_arguments;
};

struct Registration {
    explicit Registration(const Kernel& kernel);
};

template <class... A, size_t... I>
void call_with(const void* function, void** arguments, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(A...)>(const_cast<void*>(function))(*static_cast<A*>(arguments[I])...);
}

template <class... A>
Kernel kernel_of(const char* name, void (*function)(A...)) {
    static_assert((std::is_trivially_copyable<A>::value && ...), "kernel arguments are copied as bytes");
    static const size_t bytes[] = {sizeof(A)..., 0};
    return Kernel{name,
                  [](const void* f, void** arguments) {
                      call_with<A...>(f, arguments, std::index_sequence_for<A...>{});
                  },
                  reinterpret_cast<const void*>(function), bytes, sizeof...(A)};
}

/* Name of a kernel to what was registered; null where there is none. */
const Kernel* find_kernel(const char* name);

struct Launch {
    const Kernel* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    void** arguments;
};

/* Runs all blocks. Fault::None, or what went wrong, with the text in `last_report()`, which goes to stderr too. */
Fault run(const Launch& launch);
const char* last_report();

/* Ends the running thread's block with a report. */
[[noreturn]] void fail(Fault fault, const char* format, ...) __attribute__((format(printf, 2, 3)));

void* dynamic_shared();

enum class Collective : int { ShflIdx, ShflXor, ShflDown, ShflUp, Ballot, Any, All, ReduceAdd, SyncWarp, MmaBf16, MmaF16,
                              Ldmatrix, LdmatrixTrans };

/* What a lane brings to a collective and takes from it. */
struct Exchange {
    int number;              // lane, xor mask or delta; count of matrices
    int width;               // of a shuffle's group of lanes
    alignas(16) unsigned char value[16];
    uint32_t a[4], b[2];
    float c[4];
};
void warp_collective(Collective kind, uint32_t mask, Exchange& exchange, const char* file, int line);

enum class Vote : int { None, Or, And, Count };
int block_barrier(Vote vote, int predicate, const char* file, int line);

template <class T>
T shuffle(Collective kind, uint32_t mask, T value, int number, int width, const char* file, int line) {
    static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "");
    Exchange exchange;
    exchange.number = number;
    exchange.width = width;
    std::memcpy(exchange.value, &value, sizeof(T));
    warp_collective(kind, mask, exchange, file, line);
    std::memcpy(&value, exchange.value, sizeof(T));
    return value;
}

inline uint32_t vote(Collective kind, uint32_t mask, uint32_t value, const char* file, int line) {
    Exchange exchange;
    std::memcpy(exchange.value, &value, 4);
    warp_collective(kind, mask, exchange, file, line);
    std::memcpy(&value, exchange.value, 4);
    return value;
}

inline void check_aligned(const void* pointer, size_t alignment, const char* what, const char* file, int line) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
        fail(Fault::Misaligned, "%s of %zu bytes at %p, which is not aligned to that (%s:%d)", what, alignment, pointer,
             file, line);
    }
}

/* Loads and stores whose alignment is checked in every mode. */
template <class T>
T load(const T* pointer, SIMT_HERE) {
    check_aligned(pointer, sizeof(T), "load", file, line);
    return *pointer;
}
template <class T>
void store(T* pointer, T value, SIMT_HERE) {
    check_aligned(pointer, sizeof(T), "store", file, line);
    *pointer = value;
}

/* cp.async: the target holds garbage from here on and the bytes from the wait on. */
void copy_async(void* shared, const void* global, int bytes, int source_bytes, const char* file, int line);
void copy_async_commit();
void copy_async_wait(int may_stay_pending);

template <int BYTES>
void cp_async(void* shared, const void* global, SIMT_HERE) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "");
    copy_async(shared, global, BYTES, BYTES, file, line);
}
template <int BYTES>
void cp_async_zfill(void* shared, const void* global, int source_bytes, SIMT_HERE) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "");
    copy_async(shared, global, BYTES, source_bytes, file, line);
}
inline void cp_async_commit() { copy_async_commit(); }
template <int N>
void cp_async_wait() {
    copy_async_wait(N);
}
/* Those that are not committed too. */
inline void cp_async_wait_all() {
    copy_async_commit();
    copy_async_wait(0);
}

/* d = a * b + c for mma.sync.aligned.m16n8k16.row.col, fragments as the PTX ISA lays them out over the warp. */
inline void mma(Collective kind, float* d, const uint32_t* a, const uint32_t* b, const float* c, const char* file,
                int line) {
    Exchange exchange;
    for (int i = 0; i < 4; i++) exchange.a[i] = a[i], exchange.c[i] = c[i];
    for (int i = 0; i < 2; i++) exchange.b[i] = b[i];
    warp_collective(kind, 0xffffffffu, exchange, file, line);
    for (int i = 0; i < 4; i++) d[i] = exchange.c[i];
}
inline void mma_m16n8k16_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c, SIMT_HERE) {
    mma(Collective::MmaBf16, d, a, b, c, file, line);
}
inline void mma_m16n8k16_f16(float* d, const uint32_t* a, const uint32_t* b, const float* c, SIMT_HERE) {
    mma(Collective::MmaF16, d, a, b, c, file, line);
}

/* ldmatrix: `row` is the address that this lane gives. */
inline void ldmatrix(Collective kind, int num_matrices, uint32_t* r, const void* row, const char* file, int line) {
    Exchange exchange;
    exchange.number = num_matrices;
    int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
    if (lane < 8 * num_matrices) {
        check_aligned(row, 16, "ldmatrix row", file, line);
        std::memcpy(exchange.value, row, 16);
    }
    warp_collective(kind, 0xffffffffu, exchange, file, line);
    for (int i = 0; i < num_matrices; i++) r[i] = exchange.a[i];
}
inline void ldmatrix_x4(uint32_t* r, const void* row, SIMT_HERE) { ldmatrix(Collective::Ldmatrix, 4, r, row, file, line); }
inline void ldmatrix_x2(uint32_t* r, const void* row, SIMT_HERE) { ldmatrix(Collective::Ldmatrix, 2, r, row, file, line); }
inline void ldmatrix_x4_trans(uint32_t* r, const void* row, SIMT_HERE) {
    ldmatrix(Collective::LdmatrixTrans, 4, r, row, file, line);
}
inline void ldmatrix_x2_trans(uint32_t* r, const void* row, SIMT_HERE) {
    ldmatrix(Collective::LdmatrixTrans, 2, r, row, file, line);
}

inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}

} // namespace simt

#include "intrinsics.h"
