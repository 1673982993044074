/* Fibers for the emulation: a stack and a place to go on from, with what the sanitizers must be told about switches. */
#pragma once
#include <cstddef>

namespace simt {

struct Fiber {
    void* stack_pointer = nullptr; // hand-made switch
    void* context = nullptr;       // ucontext_t where there is no hand-made switch
    unsigned char* stack = nullptr;
    size_t stack_bytes = 0;
    void* fake_stack = nullptr; // address sanitizer
    void* tsan = nullptr;       // thread sanitizer's own fiber
};

/* Makes a fiber that runs `entry` when it is first switched to; `entry` never returns. Reuses its stack. */
void fiber_prepare(Fiber& fiber, void (*entry)());
/* From the scheduler to a fiber and back. `finished` says that the fiber does not come back. */
void fiber_enter(Fiber& fiber);
void fiber_leave(Fiber& fiber, bool finished);
/* First thing that a fiber's entry does. */
void fiber_arrived();

/* Edges of happens-before and accesses, told to the thread sanitizer; nothing without it.
   While an `Unseen` lives, the sanitizer looks away from the current fiber: the runtime's own memory is shared by all of
   them, and its allocations are seen even though its code is built without the sanitizer. */
#ifdef SIMT_TSAN
void tsan_release(void* address);
void tsan_acquire(void* address);
void tsan_write(const void* address, size_t bytes);
void tsan_read(const void* address, size_t bytes);
struct Unseen {
    Unseen();
    ~Unseen();
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;
};
#else
inline void tsan_release(void*) {}
inline void tsan_acquire(void*) {}
inline void tsan_write(const void*, size_t) {}
inline void tsan_read(const void*, size_t) {}
struct Unseen {
    Unseen() {}
    ~Unseen() {}
};
#endif

} // namespace simt
