/* Fibers: the switch in assembly for x86-64, ucontext elsewhere, and the sanitizers' hooks.
   Built without -fsanitize=thread even where the kernels have it: a fiber that leaves a function elsewhere than it
   entered it would unbalance that sanitizer's shadow stack. SIMT_TSAN switches the calls to it on. */
#include "fiber.h"

#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif

#ifdef SIMT_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif
#ifdef SIMT_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace simt {
namespace {

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif

Fiber scheduler;
#ifdef SIMT_ASAN
const void* scheduler_bottom = nullptr;
size_t scheduler_bytes = 0;
#endif

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
// Saves what the System V ABI lets a callee keep, swaps stacks, and goes on where the other one stopped: by a jump, since a
// return to another place than the last call's is always mispredicted.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size simt_switch, .-simt_switch
)");

void switch_stacks(Fiber& from, Fiber& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

void make_stack(Fiber& fiber, void (*entry)()) {
    auto* top = reinterpret_cast<uintptr_t*>(fiber.stack + fiber.stack_bytes);
    // At the entry the stack must look as after a call: 16-byte aligned less the return address.
    *--top = 0;
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; i++) *--top = 0;
    fiber.stack_pointer = top;
}
#else
ucontext_t* context_of(Fiber& fiber) {
    if (fiber.context == nullptr) fiber.context = new ucontext_t;
    return static_cast<ucontext_t*>(fiber.context);
}

void switch_stacks(Fiber& from, Fiber& to) { swapcontext(context_of(from), context_of(to)); }

void make_stack(Fiber& fiber, void (*entry)()) {
    ucontext_t* context = context_of(fiber);
    getcontext(context);
    context->uc_stack.ss_sp = fiber.stack;
    context->uc_stack.ss_size = fiber.stack_bytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

} // namespace

void fiber_prepare(Fiber& fiber, void (*entry)()) {
    if (fiber.stack == nullptr) {
        // Stacks of one size would fall on the same cache sets: each starts a little further on.
        static size_t num_stacks = 0;
        size_t shift = (num_stacks++ % 32) * 256;
        size_t page = 4096, mapped = STACK_BYTES + 3 * page + 8192;
        void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        // What runs over the end of a stack meets this page.
        mprotect(memory, page, PROT_NONE);
        fiber.stack = static_cast<unsigned char*>(memory) + page;
        fiber.stack_bytes = STACK_BYTES + shift;
    }
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
    fiber.fake_stack = nullptr;
#endif
#ifdef SIMT_TSAN
    // Kept from block to block, for making one clears a megabyte: who runs on it again comes after all that ran before.
    if (fiber.tsan == nullptr) fiber.tsan = __tsan_create_fiber(0);
#endif
    make_stack(fiber, entry);
}

void fiber_enter(Fiber& fiber) {
#ifdef SIMT_ASAN
    __sanitizer_start_switch_fiber(&scheduler.fake_stack, fiber.stack, fiber.stack_bytes);
#endif
#ifdef SIMT_TSAN
    scheduler.tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber.tsan, 1); // 1: the switch itself orders nothing
#endif
    switch_stacks(scheduler, fiber);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(scheduler.fake_stack, nullptr, nullptr);
#endif
}

void fiber_leave(Fiber& fiber, bool finished) {
#ifdef SIMT_ASAN
    __sanitizer_start_switch_fiber(finished ? nullptr : &fiber.fake_stack, scheduler_bottom, scheduler_bytes);
#else
    (void)finished;
#endif
#ifdef SIMT_TSAN
    __tsan_switch_to_fiber(scheduler.tsan, 1);
#endif
    switch_stacks(fiber, scheduler);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_bottom, &scheduler_bytes);
#endif
}

void fiber_arrived() {
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_bytes);
#endif
}

#ifdef SIMT_TSAN
void tsan_release(void* address) { __tsan_release(address); }
void tsan_acquire(void* address) { __tsan_acquire(address); }
void tsan_write(const void* address, size_t bytes) { __tsan_write_range(const_cast<void*>(address), bytes); }
void tsan_read(const void* address, size_t bytes) { __tsan_read_range(const_cast<void*>(address), bytes); }
Unseen::Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unseen::~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#endif

} // namespace simt
