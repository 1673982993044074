/* The emulation's runtime: kernels by name, blocks one after another, threads of a block in turns, barriers, async
   copies, and reports. Like fiber.cpp, built without -fsanitize=thread. One launch at a time: callers hold a lock. */
#include "simt.h"

#include <cstdarg>
#include <cstdlib>
#include <random>

#include "runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" {
// Ends of the section that holds static shared memory; absent where no kernel has any.
extern unsigned char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));
}

namespace simt {

Block block;

namespace {

std::string report;
std::mt19937_64 shuffler;
bool shuffled = false;
// What a block leaves behind until the blocks of its window are in order again: the thread sanitizer takes a fiber that
// comes after one that is gone for the same. The stacks stay for later blocks.
struct Place {
    std::vector<Fiber> fibers;
    void* dynamic_shared = nullptr;
};
std::vector<Place> places;
uint64_t launch_sync, end_sync;

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}

unsigned number_from(const char* variable, unsigned otherwise) {
    const char* text = getenv(variable);
    return text == nullptr ? otherwise : unsigned(strtoul(text, nullptr, 10));
}

void set_report(Fault fault, const std::string& text) {
    block.fault = fault;
    report = "simt: kernel " + std::string(block.launch->kernel->name) + ", block (" + std::to_string(blockIdx.x) + "," +
             std::to_string(blockIdx.y) + "," + std::to_string(blockIdx.z) + "), " + text;
    fprintf(stderr, "%s\n", report.c_str());
}

std::string threads_text(unsigned number) { return std::to_string(number) + (number == 1 ? " thread" : " threads"); }

const Thread& first_in(State state) {
    for (const Thread& thread : block.threads) {
        if (thread.state == state) return thread;
    }
    abort();
}

void thread_returned(Thread& thread) {
    Unseen unseen;
    thread.state = State::Exited;
    block.num_exited++;
    Warp& warp = block.warps[thread.linear / 32];
    warp.exited |= 1u << thread.linear % 32;
    if (block.num_waiting > 0) {
        const Thread& other = first_in(State::Barrier);
        fail(Fault::Exited, "returned, while %s at the barrier at %s:%d", (threads_text(block.num_waiting) + " wait").c_str(),
             other.file, other.line);
    }
    for (const Meeting& meeting : warp.meetings) {
        if (meeting.open && (meeting.mask & warp.exited) != 0) {
            fail(Fault::Lanes, "returned, while lanes 0x%08x wait for it in %s at %s:%d", meeting.arrived,
                 name_of(meeting.kind), meeting.file, meeting.line);
        }
    }
}

void thread_main() {
    fiber_arrived();
    Thread& thread = *block.current;
    tsan_acquire(&launch_sync);
    block.launch->kernel->call(block.launch->kernel->function, block.launch->arguments);
    tsan_release(&end_sync);
    thread_returned(thread);
    fiber_leave(thread.fiber, true);
    abort();
}

void start_threads(std::vector<Fiber>& fibers) {
    const dim3& size = block.launch->block;
    block.num_threads = size.x * size.y * size.z;
    block.threads.resize(block.num_threads);
    block.warps.assign((block.num_threads + 31) / 32, Warp{});
    block.num_exited = block.num_waiting = 0;
    block.barrier_generation = 0;
    if (fibers.size() < block.num_threads) fibers.resize(block.num_threads);
    std::vector<unsigned> all;
    for (unsigned i = 0; i < block.num_threads; i++) {
        Thread& thread = block.threads[i];
        thread.index = uint3{i % size.x, i / size.x % size.y, i / size.x / size.y};
        thread.linear = i;
        thread.fiber = fibers[i];
        thread.open_copies.clear();
        thread.groups.clear();
        fiber_prepare(thread.fiber, thread_main);
        all.push_back(i);
    }
    for (unsigned i = block.num_threads; i % 32 != 0; i++) block.warps.back().exited |= 1u << i % 32;
    block.ready.clear();
    make_ready(all);
}

void report_deadlock() {
    std::string text;
    if (block.num_waiting > 0) {
        const Thread& thread = first_in(State::Barrier);
        text += threads_text(block.num_waiting) + " at the barrier at " + thread.file + ":" + std::to_string(thread.line) +
                " (first: " + text_of(thread) + ")";
    }
    for (const Thread& thread : block.threads) {
        if (thread.state != State::Warp) continue;
        text += (text.empty() ? "" : ", ") + text_of(thread) + " in a warp collective at " + thread.file + ":" +
                std::to_string(thread.line);
        break;
    }
    set_report(Fault::Divergence, "deadlock: " + text + ", " + threads_text(block.num_exited) + " returned");
}

void run_block(Place& place) {
    if (__start_simt_shared != nullptr) poison(__start_simt_shared, size_t(__stop_simt_shared - __start_simt_shared));
    size_t bytes = block.launch->shared_bytes;
    if (bytes > 0 && posix_memalign(&place.dynamic_shared, 128, bytes) != 0) abort();
    poison(place.dynamic_shared, bytes);
    block.dynamic_shared = static_cast<unsigned char*>(place.dynamic_shared);
    start_threads(place.fibers);
    for (size_t next = 0; next < block.ready.size() && block.fault == Fault::None; next++) {
        Thread& thread = block.threads[block.ready[next]];
        thread.state = State::Ready;
        block.current = &thread;
        threadIdx = thread.index;
        fiber_enter(thread.fiber);
        if (next + 1 == block.ready.size()) continue;
        if (next > 4096) {
            block.ready.erase(block.ready.begin(), block.ready.begin() + long(next) + 1);
            next = size_t(-1);
        }
    }
    block.current = nullptr;
    if (block.fault == Fault::None && block.num_exited < block.num_threads) report_deadlock();
    for (unsigned i = 0; i < block.num_threads; i++) place.fibers[i] = block.threads[i].fiber;
}

// All that the blocks before did comes before what is next.
void close_window() {
    tsan_acquire(&end_sync);
    for (Place& place : places) {
        // After a fault fibers stand in the middle of things: the sanitizer gets other ones.
        for (Fiber& fiber : place.fibers) {
            if (block.fault != Fault::None) fiber.tsan = nullptr;
        }
        free(place.dynamic_shared);
        place.dynamic_shared = nullptr;
    }
    tsan_release(&launch_sync);
}

} // namespace

Registration::Registration(const Kernel& kernel) { kernels().push_back(kernel); }

const Kernel* find_kernel(const char* name) {
    for (const Kernel& kernel : kernels()) {
        if (std::strcmp(kernel.name, name) == 0) return &kernel;
    }
    return nullptr;
}

const char* last_report() { return report.c_str(); }

std::string text_of(const Thread& thread) {
    return "thread (" + std::to_string(thread.index.x) + "," + std::to_string(thread.index.y) + "," +
           std::to_string(thread.index.z) + ")";
}

void fail(Fault fault, const char* format, ...) {
    Unseen unseen;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (block.current == nullptr) {
        fprintf(stderr, "simt: outside a kernel: %s\n", text);
        abort();
    }
    set_report(fault, text_of(*block.current) + ": " + text);
    fiber_leave(block.current->fiber, true);
    abort();
}

Fault run(const Launch& launch) {
    Unseen unseen;
    unsigned num_threads = launch.block.x * launch.block.y * launch.block.z;
    block.launch = &launch;
    block.fault = Fault::None;
    report.clear();
    blockIdx = uint3{0, 0, 0};
    if (num_threads == 0 || num_threads > 1024) {
        set_report(Fault::Launch, std::to_string(num_threads) + " threads a block");
        return block.fault;
    }
    blockDim = launch.block;
    gridDim = launch.grid;
    shuffled = getenv("SIMT_SEED") != nullptr;
    shuffler.seed(number_from("SIMT_SEED", 0));
    unsigned window = std::max(1u, number_from("SIMT_TSAN_BLOCKS", 1));
    if (places.size() < window) places.resize(window);
    size_t num_blocks = size_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    std::vector<size_t> order(num_blocks);
    for (size_t i = 0; i < num_blocks; i++) order[i] = i;
    if (shuffled) std::shuffle(order.begin(), order.end(), shuffler);
    tsan_release(&launch_sync);
    for (size_t i = 0; i < num_blocks && block.fault == Fault::None; i++) {
        size_t x = order[i] % launch.grid.x, rest = order[i] / launch.grid.x;
        blockIdx = uint3{unsigned(x), unsigned(rest % launch.grid.y), unsigned(rest / launch.grid.y)};
        run_block(places[i % window]);
        if ((i + 1) % window == 0) close_window();
    }
    close_window();
    return block.fault;
}

void wait_as(State state) {
    Thread& thread = *block.current;
    thread.state = state;
    fiber_leave(thread.fiber, false);
}

void make_ready(const std::vector<unsigned>& threads) {
    size_t first = block.ready.size();
    block.ready.insert(block.ready.end(), threads.begin(), threads.end());
    if (shuffled) std::shuffle(block.ready.begin() + long(first), block.ready.end(), shuffler);
}

int block_barrier(Vote vote, int predicate, const char* file, int line) {
    Unseen unseen;
    Thread& thread = *block.current;
    thread.file = file;
    thread.line = line;
    if (block.num_exited > 0) {
        fail(Fault::Exited, "at the barrier at %s:%d, to which %s will not come: returned", file, line,
             threads_text(block.num_exited).c_str());
    }
    if (block.num_waiting == 0) {
        block.vote = vote;
        block.vote_result = vote == Vote::And;
        block.barrier_file = file;
        block.barrier_line = line;
    } else if (block.barrier_line != line || block.vote != vote ||
               (block.barrier_file != file && std::strcmp(block.barrier_file, file) != 0)) {
        fail(Fault::Divergence, "divergent barrier: at %s:%d, while %s at the one at %s:%d", file, line,
             (threads_text(block.num_waiting) + " wait").c_str(), block.barrier_file, block.barrier_line);
    }
    if (vote == Vote::And) block.vote_result = block.vote_result && predicate != 0;
    if (vote == Vote::Or) block.vote_result = block.vote_result || predicate != 0;
    if (vote == Vote::Count) block.vote_result += predicate != 0;
    // Two generations can be in use at once: those who left this barrier may reach the next before all have left.
    void* sync = &block.barrier_sync[block.barrier_generation % 4];
    tsan_release(sync);
    block.num_waiting++;
    if (block.num_waiting == block.num_threads) {
        block.num_waiting = 0;
        block.barrier_generation++;
        static std::vector<unsigned> others;
        others.clear();
        for (unsigned i = 0; i < block.num_threads; i++) {
            block.threads[i].predicate = block.vote_result;
            if (i != thread.linear) others.push_back(i);
        }
        make_ready(others);
    } else {
        wait_as(State::Barrier);
    }
    tsan_acquire(sync);
    return thread.predicate;
}

void* dynamic_shared() { return block.dynamic_shared; }

void copy_async(void* shared, const void* global, int bytes, int source_bytes, const char* file, int line) {
    check_aligned(shared, size_t(bytes), "cp.async target", file, line);
    check_aligned(global, size_t(bytes), "cp.async source", file, line);
    if (source_bytes < 0 || source_bytes > bytes) {
        fail(Fault::Misaligned, "cp.async at %s:%d takes %d of %d bytes", file, line, source_bytes, bytes);
    }
    tsan_write(shared, size_t(bytes));
    poison(shared, size_t(bytes));
    Unseen unseen;
    block.current->open_copies.push_back(AsyncCopy{shared, global, bytes, source_bytes});
}

void copy_async_commit() {
    Unseen unseen;
    Thread& thread = *block.current;
    thread.groups.push_back(std::move(thread.open_copies));
    thread.open_copies.clear();
}

void copy_async_wait(int may_stay_pending) {
    std::vector<std::vector<AsyncCopy>>& groups = block.current->groups;
    while (groups.size() > size_t(may_stay_pending)) {
        for (const AsyncCopy& copy : groups.front()) {
            tsan_read(copy.global, size_t(copy.source_bytes));
            tsan_write(copy.shared, size_t(copy.bytes));
            Unseen unseen;
            std::memcpy(copy.shared, copy.global, size_t(copy.source_bytes));
            std::memset(static_cast<char*>(copy.shared) + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
        }
        Unseen unseen;
        groups.erase(groups.begin());
    }
}

// Volatile, so that no library call takes its place, which a sanitizer would see.
__attribute__((no_sanitize("address", "undefined"))) void poison(void* memory, size_t bytes) {
    auto* at = static_cast<volatile unsigned char*>(memory);
    size_t i = 0;
    for (; i < bytes && (reinterpret_cast<uintptr_t>(memory) + i) % 8 != 0; i++) at[i] = 0xff;
    for (; i + 8 <= bytes; i += 8) {
        auto* words = static_cast<volatile uint64_t*>(static_cast<volatile void*>(at + i));
        *words = ~uint64_t(0);
    }
    for (; i < bytes; i++) at[i] = 0xff;
}

} // namespace simt
