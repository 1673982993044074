/* The stand-in for CUDA's driver library: its state and the declarations that its parts share.

   Only the calls that cudarc's safe layer makes for what this project does are here; the rest is missing, and cudarc
   says so at the first use. Written from the driver API's documented behaviour; where the device is lenient by luck,
   this is strict. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "simt.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace standin {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
};

using Operation = std::function<Result()>;

/* As CUDA numbers them: whose calls that wait or allocate a capture takes for errors. Everybody's, those of the thread that
   began it, nobody's. */
enum class CaptureMode { Global, ThreadLocal, Relaxed };

struct Graph {
    std::vector<Operation> operations;
    CaptureMode mode = CaptureMode::Global;
    std::thread::id thread;
    struct Stream* origin = nullptr;
    std::set<struct Stream*> forked; // streams that joined the capture and have not come back
    bool invalidated = false;
};

struct Stream {
    std::deque<Operation> queue;
    uint64_t num_enqueued = 0, num_done = 0;
    Graph* capture = nullptr;
};

struct Event {
    bool has_timing = true;
    bool recorded = false;
    Stream* stream = nullptr;
    uint64_t position = 0; // done once the stream has done this many
    Graph* capture = nullptr;
    double milliseconds = 0;
    uint64_t record = 0; // counts records: a late one must not stamp a newer one's time
};

struct Function {
    const simt::Kernel* kernel;
    unsigned max_dynamic_shared = 48 << 10;
};

struct Allocation {
    size_t bytes;
    unsigned char* block; // what the heap gave: the guards stand in it
};

struct Driver {
    // Recursive: a host function that a stream runs may call back.
    std::recursive_mutex mutex;
    bool initialised = false;
    int num_retained = 0;
    Result sticky = SUCCESS;
    std::map<uintptr_t, Allocation> device_memory;
    std::map<uintptr_t, size_t> pinned_memory;
    size_t used_bytes = 0;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Graph*> graphs;
    std::map<std::string, std::unique_ptr<Function>> functions;
    Stream null_stream, thread_stream;
    uint64_t num_launches = 0;
};

Driver& driver();
bool option(const char* variable);
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

/* Every call but the first few: a lock, a context of this thread, and no error that stays. */
struct Call {
    std::unique_lock<std::recursive_mutex> lock;
    Result result;
    explicit Call(bool needs_context = true);
};

constexpr size_t SHARED_LIMIT = 99 << 10; // of the smallest device that the kernels are for
constexpr size_t SHARED_DEFAULT = 48 << 10;
size_t memory_limit();

Stream* stream_of(void* handle);
/* Adds to a stream, or to the graph that it records. */
Result enqueue(Stream* stream, Operation operation);
Result run_until(Stream* stream, uint64_t position);
Result run_all();
/* What a stream that is captured cannot do spoils the capture. */
Result spoil_capture(Stream* stream, const char* what);
/* In a capture, calls that would wait or allocate are errors and spoil it, as its mode has it. */
Result refuse_in_capture(const char* what);

/* Whether the bytes lie in one allocation of device memory. */
bool in_device(uint64_t address, size_t bytes);
bool in_pinned(const void* address, size_t bytes);
/* Whether the bytes around every allocation are as they were; says which are not. */
bool guards_hold(const char* after);

} // namespace standin

#define STANDIN_ENTER(...)                                                                                            \
    standin::Call call{__VA_ARGS__};                                                                                  \
    if (call.result != standin::SUCCESS) return call.result
