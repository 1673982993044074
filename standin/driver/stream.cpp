/* Streams that run late, events, kernel launches, and graphs: captured, instantiated, replayed.

   Work runs when something waits for it, and not before, so that a wait that is missing shows. STANDIN_EAGER=1 runs it
   at the call. The null stream does not wait for other streams: cudarc's are all of the kind that do not ask for it. */
#include <chrono>

#include "driver.h"

namespace standin {
namespace {

double now_milliseconds() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

Result run_one(Stream* stream) {
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->num_done++;
    if (driver().sticky != SUCCESS) return driver().sticky;
    Result result = operation();
    if (result != SUCCESS) driver().sticky = result;
    return result;
}

Result result_of(simt::Fault fault) {
    switch (fault) {
    case simt::Fault::None: return SUCCESS;
    case simt::Fault::Misaligned: return MISALIGNED_ADDRESS;
    case simt::Fault::Launch: return INVALID_VALUE;
    default: return LAUNCH_FAILED;
    }
}

struct KernelCall {
    const simt::Kernel* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    // One aligned cell an argument, as the caller's own variables are.
    std::vector<std::vector<std::max_align_t>> arguments;

    Result run() {
        std::vector<void*> pointers;
        for (auto& argument : arguments) pointers.push_back(argument.data());
        driver().num_launches++;
        Result result = result_of(simt::run(simt::Launch{kernel, grid, block, shared_bytes, pointers.data()}));
        if (result == SUCCESS && !guards_hold(kernel->name)) result = ILLEGAL_ADDRESS;
        return result;
    }
};

bool is_done(const Event* event) { return !event->recorded || event->stream->num_done >= event->position; }

} // namespace

Stream* stream_of(void* handle) {
    auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= 1) return &driver().null_stream;
    if (number == 2) return &driver().thread_stream;
    auto* stream = static_cast<Stream*>(handle);
    return driver().streams.count(stream) ? stream : nullptr;
}

Result enqueue(Stream* stream, Operation operation) {
    if (stream->capture != nullptr) {
        if (stream->capture->invalidated) return CAPTURE_INVALIDATED;
        stream->capture->operations.push_back(std::move(operation));
        return SUCCESS;
    }
    stream->queue.push_back(std::move(operation));
    stream->num_enqueued++;
    return option("STANDIN_EAGER") ? run_until(stream, stream->num_enqueued) : SUCCESS;
}

Result run_until(Stream* stream, uint64_t position) {
    Result result = driver().sticky;
    while (stream->num_done < position && !stream->queue.empty()) {
        Result one = run_one(stream);
        if (result == SUCCESS) result = one;
    }
    return result;
}

Result run_all() {
    Result result = run_until(&driver().null_stream, UINT64_MAX);
    for (Stream* stream : std::vector<Stream*>(driver().streams.begin(), driver().streams.end())) {
        if (Result one = run_until(stream, UINT64_MAX)) result = one;
    }
    return result;
}

Result spoil_capture(Stream* stream, const char* what) {
    complain("%s while a stream is captured", what);
    stream->capture->invalidated = true;
    return CAPTURE_UNSUPPORTED;
}

Result refuse_in_capture(const char* what) {
    Result result = SUCCESS;
    for (Stream* stream : driver().streams) {
        if (stream->capture == nullptr || stream->capture->mode == CaptureMode::Relaxed) continue;
        bool local = stream->capture->mode == CaptureMode::ThreadLocal;
        if (local && stream->capture->thread != std::this_thread::get_id()) continue;
        result = spoil_capture(stream, what);
    }
    return result;
}

} // namespace standin

using namespace standin;

#define STANDIN_STREAM(handle)                                                                                        \
    STANDIN_ENTER();                                                                                                  \
    Stream* stream = stream_of(handle);                                                                               \
    if (stream == nullptr) return INVALID_HANDLE

EXPORT int cuStreamCreate(void** handle, unsigned) {
    STANDIN_ENTER();
    auto* stream = new Stream;
    driver().streams.insert(stream);
    *handle = stream;
    return SUCCESS;
}

EXPORT int cuStreamCreateWithPriority(void** handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return SUCCESS;
}

EXPORT int cuStreamDestroy_v2(void* handle) {
    STANDIN_STREAM(handle);
    if (stream == &driver().null_stream || stream == &driver().thread_stream) return INVALID_HANDLE;
    // What is queued still runs, and events that point here are done then.
    Result result = run_until(stream, UINT64_MAX);
    for (Event* event : driver().events) {
        if (event->stream == stream) event->recorded = false, event->stream = nullptr;
    }
    driver().streams.erase(stream);
    delete stream;
    return result;
}

EXPORT int cuStreamSynchronize(void* handle) {
    STANDIN_STREAM(handle);
    if (stream->capture != nullptr) return spoil_capture(stream, "cuStreamSynchronize");
    return run_until(stream, UINT64_MAX);
}

EXPORT int cuStreamQuery(void* handle) {
    STANDIN_STREAM(handle);
    if (stream->capture != nullptr) return spoil_capture(stream, "cuStreamQuery");
    if (stream->queue.empty()) return SUCCESS;
    // Each question brings the stream on by one, so that a loop that asks comes to an end.
    Result result = run_one(stream);
    return result == SUCCESS ? NOT_READY : result;
}

EXPORT int cuCtxSynchronize() {
    STANDIN_ENTER();
    if (Result refused = refuse_in_capture("cuCtxSynchronize")) return refused;
    return run_all();
}

EXPORT int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    STANDIN_STREAM(handle);
    return enqueue(stream, [=] {
        function(data);
        return SUCCESS;
    });
}

EXPORT int cuEventCreate(void** handle, unsigned flags) {
    STANDIN_ENTER();
    auto* event = new Event;
    event->has_timing = (flags & 2) == 0;
    driver().events.insert(event);
    *handle = event;
    return SUCCESS;
}

EXPORT int cuEventDestroy_v2(Event* event) {
    STANDIN_ENTER();
    if (driver().events.erase(event) == 0) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}

EXPORT int cuEventRecord(Event* event, void* handle) {
    STANDIN_STREAM(handle);
    if (driver().events.count(event) == 0) return INVALID_HANDLE;
    event->stream = stream;
    event->capture = stream->capture;
    if (stream->capture != nullptr) return SUCCESS;
    uint64_t record = ++event->record;
    event->recorded = true;
    event->position = stream->num_enqueued + 1;
    return enqueue(stream, [=] {
        if (driver().events.count(event) != 0 && event->record == record) event->milliseconds = now_milliseconds();
        return SUCCESS;
    });
}

EXPORT int cuEventQuery(Event* event) {
    STANDIN_ENTER();
    if (driver().events.count(event) == 0) return INVALID_HANDLE;
    if (is_done(event)) return SUCCESS;
    Result result = run_one(event->stream);
    return result == SUCCESS ? NOT_READY : result;
}

EXPORT int cuEventSynchronize(Event* event) {
    STANDIN_ENTER();
    if (driver().events.count(event) == 0) return INVALID_HANDLE;
    if (event->capture != nullptr) return CAPTURE_UNSUPPORTED;
    return event->recorded ? run_until(event->stream, event->position) : SUCCESS;
}

EXPORT int cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
    STANDIN_ENTER();
    if (driver().events.count(start) == 0 || driver().events.count(end) == 0) return INVALID_HANDLE;
    if (!start->has_timing || !end->has_timing || start->record == 0 || end->record == 0) return INVALID_HANDLE;
    if (!is_done(start) || !is_done(end)) return NOT_READY;
    *milliseconds = float(end->milliseconds - start->milliseconds);
    return SUCCESS;
}

EXPORT int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

EXPORT int cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    STANDIN_STREAM(handle);
    if (driver().events.count(event) == 0) return INVALID_HANDLE;
    if (event->capture != nullptr) {
        // Work of a captured stream: whoever waits for it is captured too. Order of issue serves as the graph's order.
        if (stream->capture == nullptr) {
            stream->capture = event->capture;
            event->capture->forked.insert(stream);
        } else if (stream == event->capture->origin) {
            event->capture->forked.erase(event->stream);
        }
        return SUCCESS;
    }
    if (stream->capture != nullptr) {
        if (!event->recorded) return SUCCESS;
        complain("a captured stream waits for an event that was recorded outside the capture");
        stream->capture->invalidated = true;
        return CAPTURE_ISOLATION;
    }
    if (!event->recorded) return SUCCESS;
    Stream* other = event->stream;
    uint64_t position = event->position;
    return enqueue(stream, [=] {
        bool exists = other == &driver().null_stream || driver().streams.count(other) != 0;
        return exists ? run_until(other, position) : SUCCESS;
    });
}

EXPORT int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** arguments,
                          void** extra) {
    STANDIN_STREAM(handle);
    if (function == nullptr) return INVALID_HANDLE;
    const char* name = function->kernel->name;
    uint64_t threads = uint64_t(block_x) * block_y * block_z;
    bool fits = grid_x > 0 && grid_y > 0 && grid_z > 0 && grid_x <= 0x7fffffff && grid_y <= 65535 && grid_z <= 65535 &&
                threads > 0 && threads <= 1024 && block_z <= 64;
    if (!fits) {
        complain("%s: grid (%u,%u,%u) of blocks (%u,%u,%u)", name, grid_x, grid_y, grid_z, block_x, block_y, block_z);
        return INVALID_VALUE;
    }
    if (shared_bytes > function->max_dynamic_shared) {
        complain("%s: %u bytes of shared memory, %u are allowed", name, shared_bytes, function->max_dynamic_shared);
        return INVALID_VALUE;
    }
    if (extra != nullptr) return INVALID_VALUE;
    auto kernel_call = std::make_shared<KernelCall>();
    kernel_call->kernel = function->kernel;
    kernel_call->grid = dim3(grid_x, grid_y, grid_z);
    kernel_call->block = dim3(block_x, block_y, block_z);
    kernel_call->shared_bytes = shared_bytes;
    for (size_t i = 0; i < function->kernel->num_arguments; i++) {
        if (arguments == nullptr || arguments[i] == nullptr) return INVALID_VALUE;
        size_t bytes = function->kernel->argument_bytes[i];
        std::vector<std::max_align_t> cell((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
        std::memcpy(cell.data(), arguments[i], bytes);
        kernel_call->arguments.push_back(std::move(cell));
    }
    return enqueue(stream, [=] { return kernel_call->run(); });
}

EXPORT int cuStreamBeginCapture_v2(void* handle, int mode) {
    STANDIN_STREAM(handle);
    if (mode < 0 || mode > int(CaptureMode::Relaxed)) return INVALID_VALUE;
    if (stream == &driver().null_stream) return CAPTURE_UNSUPPORTED;
    if (stream->capture != nullptr) return INVALID_VALUE;
    stream->capture = new Graph;
    stream->capture->origin = stream;
    stream->capture->mode = CaptureMode(mode);
    stream->capture->thread = std::this_thread::get_id();
    return SUCCESS;
}

EXPORT int cuStreamIsCapturing(void* handle, int* status) {
    STANDIN_STREAM(handle);
    *status = stream->capture == nullptr ? 0 : stream->capture->invalidated ? 2 : 1;
    return SUCCESS;
}

EXPORT int cuStreamEndCapture(void* handle, Graph** graph) {
    STANDIN_STREAM(handle);
    *graph = nullptr;
    Graph* captured = stream->capture;
    if (captured == nullptr || captured->origin != stream) return INVALID_VALUE;
    Result result = captured->invalidated          ? CAPTURE_INVALIDATED
                    : captured->forked.size() != 0 ? CAPTURE_UNJOINED
                                                   : SUCCESS;
    for (Stream* other : driver().streams) {
        if (other->capture == captured) other->capture = nullptr;
    }
    stream->capture = nullptr;
    for (Event* event : driver().events) {
        if (event->capture == captured) event->capture = nullptr, event->recorded = false;
    }
    if (result != SUCCESS) {
        delete captured;
        return result;
    }
    driver().graphs.insert(captured);
    *graph = captured;
    return SUCCESS;
}

EXPORT int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
    STANDIN_ENTER();
    if (driver().graphs.count(graph) == 0) return INVALID_HANDLE;
    *executable = new Graph(*graph);
    driver().graphs.insert(*executable);
    return SUCCESS;
}

/* How many there are; the nodes themselves are nobody's to look at. */
EXPORT int cuGraphGetNodes(Graph* graph, void** nodes, size_t* num_nodes) {
    STANDIN_ENTER();
    if (driver().graphs.count(graph) == 0) return INVALID_HANDLE;
    if (nodes != nullptr) return INVALID_VALUE;
    *num_nodes = graph->operations.size();
    return SUCCESS;
}

EXPORT int cuGraphUpload(Graph* executable, void*) {
    STANDIN_ENTER();
    return driver().graphs.count(executable) ? SUCCESS : INVALID_HANDLE;
}

EXPORT int cuGraphLaunch(Graph* executable, void* handle) {
    STANDIN_STREAM(handle);
    if (driver().graphs.count(executable) == 0) return INVALID_HANDLE;
    // A copy: the executable may be destroyed while its launch still waits.
    return enqueue(stream, [operations = executable->operations] {
        for (const Operation& operation : operations) {
            if (Result result = operation()) return result;
        }
        return SUCCESS;
    });
}

static int destroy_graph(Graph* graph) {
    STANDIN_ENTER();
    if (driver().graphs.erase(graph) == 0) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
EXPORT int cuGraphDestroy(Graph* graph) { return destroy_graph(graph); }
EXPORT int cuGraphExecDestroy(Graph* executable) { return destroy_graph(executable); }
