/* What the seeded faults share: a case is a kernel with a fault, its correct twin, and a check of what they compute. */
#pragma once
#include <cstdio>
#include <memory>
#include <vector>

#include "simt.h"

struct Case {
    const char* name;
    // Launches NAME_fault or NAME_twin; whether what came out is right.
    bool (*run)(const char* kernel);
};

std::vector<Case>& cases();

struct CaseRegistration {
    CaseRegistration(const char* name, bool (*run)(const char* kernel)) { cases().push_back(Case{name, run}); }
};

#define FAULT_CASE(name)                                                                                              \
    SIMT_KERNEL(name##_fault)                                                                                         \
    SIMT_KERNEL(name##_twin)                                                                                          \
    static bool name##_run(const char* kernel);                                                                       \
    static const CaseRegistration name##_case{#name, name##_run};                                                     \
    static bool name##_run(const char* kernel)

/* An array of exactly its size on the heap, so that the sanitizer sees its ends. */
template <class T>
struct Buffer {
    std::unique_ptr<T[]> data;
    size_t size;
    explicit Buffer(size_t n, T value = T()) : data(new T[n]), size(n) {
        for (size_t i = 0; i < n; i++) data[i] = value;
    }
    T& operator[](size_t i) { return data[i]; }
    T* get() { return data.get(); }
};

/* A report of the emulation ends the program with 3. */
template <class... A>
void launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, A... arguments) {
    void* pointers[] = {&arguments..., nullptr};
    const simt::Kernel* found = simt::find_kernel(kernel);
    if (found == nullptr) {
        fprintf(stderr, "no kernel is called %s\n", kernel);
        exit(2);
    }
    if (simt::run(simt::Launch{found, grid, block, shared_bytes, pointers}) != simt::Fault::None) exit(3);
}

/* Not-a-number counts as wrong. */
inline bool near(float value, float expected) { return std::fabs(value - expected) <= 1e-4f * (1 + std::fabs(expected)); }
