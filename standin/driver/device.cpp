/* Initialisation, the one device, its primary context, error names and modules. */
#include <cstdarg>
#include <cstdlib>

#include "driver.h"

namespace standin {

namespace {
thread_local void* current_context = nullptr;
int context_object;

struct Name {
    int code;
    const char *name, *text;
};
const Name NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
};

const Name* name_of(int code) {
    for (const Name& name : NAMES) {
        if (name.code == code) return &name;
    }
    return nullptr;
}
} // namespace

Driver& driver() {
    // Never destroyed: other libraries' destructors may still call in.
    static Driver& only = *new Driver;
    return only;
}

bool option(const char* variable) {
    const char* text = getenv(variable);
    return text != nullptr && *text != 0 && std::strcmp(text, "0") != 0;
}

void complain(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "standin: %s\n", text);
}

Call::Call(bool needs_context) : lock(driver().mutex), result(SUCCESS) {
    if (!driver().initialised) {
        result = NOT_INITIALIZED;
    } else if (needs_context && current_context == nullptr) {
        result = INVALID_CONTEXT;
    } else {
        result = driver().sticky;
    }
}

size_t memory_limit() {
    const char* text = getenv("STANDIN_MEMORY");
    return text == nullptr ? size_t(1) << 30 : size_t(strtoull(text, nullptr, 10));
}

} // namespace standin

using namespace standin;

EXPORT int cuInit(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    if (option("STANDIN_NO_DEVICE")) return NO_DEVICE;
    std::unique_lock<std::recursive_mutex> lock(driver().mutex);
    driver().initialised = true;
    driver().streams.insert(&driver().thread_stream);
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

EXPORT int cuGetErrorName(int code, const char** text) {
    const Name* name = name_of(code);
    *text = name == nullptr ? nullptr : name->name;
    return name == nullptr ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuGetErrorString(int code, const char** text) {
    const Name* name = name_of(code);
    *text = name == nullptr ? nullptr : name->text;
    return name == nullptr ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuDeviceGetCount(int* count) {
    STANDIN_ENTER(false);
    *count = 1;
    return SUCCESS;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    STANDIN_ENTER(false);
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char* name, int bytes, int device) {
    STANDIN_ENTER(false);
    if (device != 0) return INVALID_DEVICE;
    snprintf(name, size_t(bytes), "stand-in device");
    return SUCCESS;
}

EXPORT int cuDeviceGetUuid_v2(void* uuid, int device) {
    if (device != 0) return INVALID_DEVICE;
    std::memcpy(uuid, "stand-in device", 16);
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    STANDIN_ENTER(false);
    if (device != 0) return INVALID_DEVICE;
    *bytes = memory_limit();
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    STANDIN_ENTER(false);
    if (device != 0) return INVALID_DEVICE;
    // Numbers are those of CUdevice_attribute.
    static const std::map<int, int> values = {
        {1, 1024},               // threads a block
        {2, 1024},               // block x, y, z
        {3, 1024},
        {4, 64},
        {5, 0x7fffffff},         // grid x, y, z
        {6, 65535},
        {7, 65535},
        {8, SHARED_DEFAULT},     // shared memory a block
        {9, 64 << 10},           // constant memory
        {10, 32},                // lanes a warp
        {12, 65536},             // registers a block
        {13, 1000000},           // clock, kHz
        {16, 2},                 // multiprocessors
        {18, 0},                 // integrated
        {31, 1},                 // concurrent kernels
        {36, 1000000},           // memory clock, kHz
        {37, 128},               // memory bus, bits
        {38, 4 << 20},           // level-2 cache
        {39, 1536},              // threads a multiprocessor
        {41, 1},                 // unified addressing
        {75, 8},                 // compute capability
        {76, 0},
        {81, SHARED_LIMIT + 1024}, // shared memory a multiprocessor
        {82, 65536},             // registers a multiprocessor
        {83, 0},                 // managed memory
        {97, SHARED_LIMIT},      // shared memory a block, when asked for
        {106, 32},               // blocks a multiprocessor
        {111, 1024},             // shared memory kept back a block
        {115, 1},                // memory pools
    };
    auto found = values.find(attribute);
    if (found == values.end()) {
        complain("device attribute %d is not known", attribute);
        return INVALID_VALUE;
    }
    *value = found->second;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
    STANDIN_ENTER(false);
    if (device != 0) return INVALID_DEVICE;
    driver().num_retained++;
    *context = &context_object;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    std::unique_lock<std::recursive_mutex> lock(driver().mutex);
    if (device != 0) return INVALID_DEVICE;
    if (driver().num_retained == 0) return INVALID_CONTEXT;
    // An error stays with its context: the last release ends both.
    if (--driver().num_retained == 0) driver().sticky = SUCCESS;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void* context) {
    STANDIN_ENTER(false);
    if (context != nullptr && context != &context_object) return INVALID_CONTEXT;
    current_context = context;
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void** context) {
    if (!driver().initialised) return NOT_INITIALIZED;
    *context = current_context;
    return SUCCESS;
}

EXPORT int cuCtxSetFlags(unsigned) { return SUCCESS; }

EXPORT int cuModuleLoadData(void** module, const void* image) {
    STANDIN_ENTER();
    if (Result refused = refuse_in_capture("cuModuleLoadData")) return refused;
    // An empty vector has a pointer too, which is no address.
    if (reinterpret_cast<uintptr_t>(image) < 4096) return INVALID_IMAGE;
    static const char* const marks[] = {"\x50\xed\x55\xba", "\x7f" "ELF", "STANDIN\n", ".version", "//"};
    for (const char* mark : marks) {
        if (strncmp(static_cast<const char*>(image), mark, strlen(mark)) == 0) {
            *module = new char;
            return SUCCESS;
        }
    }
    return INVALID_IMAGE;
}

EXPORT int cuModuleUnload(void* module) {
    STANDIN_ENTER();
    delete static_cast<char*>(module);
    return SUCCESS;
}

EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
    STANDIN_ENTER();
    std::unique_ptr<Function>& slot = driver().functions[name];
    if (slot == nullptr) {
        const simt::Kernel* kernel = simt::find_kernel(name);
        if (kernel == nullptr) {
            complain("no kernel is called %s", name);
            driver().functions.erase(name);
            return NOT_FOUND;
        }
        slot.reset(new Function{kernel});
    }
    *function = slot.get();
    return SUCCESS;
}

EXPORT int cuFuncSetAttribute(Function* function, int attribute, int value) {
    STANDIN_ENTER();
    if (attribute == 8) {
        if (value < 0 || size_t(value) > SHARED_LIMIT) return INVALID_VALUE;
        function->max_dynamic_shared = unsigned(value);
    }
    return SUCCESS;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    STANDIN_ENTER();
    switch (attribute) {
    case 0: *value = 1024; return SUCCESS;
    case 4: *value = 32; return SUCCESS;
    case 5:
    case 6: *value = 80; return SUCCESS;
    case 8: *value = int(function->max_dynamic_shared); return SUCCESS;
    default: *value = 0; return SUCCESS;
    }
}

EXPORT int cuFuncSetCacheConfig(Function*, int) { return SUCCESS; }

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function*, int threads, size_t shared, unsigned) {
    STANDIN_ENTER();
    if (threads < 1 || threads > 1024) return INVALID_VALUE;
    *blocks = int(std::min<size_t>(1536 / size_t(threads), (SHARED_LIMIT + 1024) / (shared + 1024)));
    return SUCCESS;
}

/* For tests: the last report of the emulation, and how many kernels have run. */
EXPORT const char* standin_last_report() { return simt::last_report(); }
EXPORT uint64_t standin_num_launches() { return driver().num_launches; }
EXPORT uint64_t standin_num_allocations() { return driver().device_memory.size(); }
