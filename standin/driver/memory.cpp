/* Memory: device allocations with guards, pinned host memory, copies and fills that are checked against both. */
#include <cstdlib>

#include "driver.h"

namespace standin {
namespace {

// The sanitizer has guards of its own, closer to the bytes.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t GUARD_BYTES = 0;
#else
constexpr size_t GUARD_BYTES = 256;
#endif
constexpr unsigned char GUARD = 0xa5;
constexpr size_t ALIGNMENT = 256;

Result allocate(uint64_t* address, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    Driver& d = driver();
    if (bytes > memory_limit() - std::min(memory_limit(), d.used_bytes)) return OUT_OF_MEMORY;
    void* block = nullptr;
    if (posix_memalign(&block, ALIGNMENT, bytes + 2 * GUARD_BYTES) != 0) return OUT_OF_MEMORY;
    auto* base = static_cast<unsigned char*>(block);
    std::memset(base, GUARD, GUARD_BYTES);
    // What was never written must not look like numbers.
    std::memset(base + GUARD_BYTES, 0xff, bytes);
    std::memset(base + GUARD_BYTES + bytes, GUARD, GUARD_BYTES);
    *address = reinterpret_cast<uint64_t>(base + GUARD_BYTES);
    d.device_memory[uintptr_t(*address)] = Allocation{bytes, base};
    d.used_bytes += bytes;
    return SUCCESS;
}

Result release(uint64_t address) {
    Driver& d = driver();
    auto found = d.device_memory.find(uintptr_t(address));
    if (found == d.device_memory.end()) {
        complain("free of %#llx, which is no allocation", (unsigned long long)address);
        return INVALID_VALUE;
    }
    bool whole = guards_hold("a free");
    d.used_bytes -= found->second.bytes;
    free(found->second.block);
    d.device_memory.erase(found);
    return whole ? SUCCESS : d.sticky = ILLEGAL_ADDRESS;
}

Result check_device(uint64_t address, size_t bytes, const char* what) {
    if (in_device(address, bytes)) return SUCCESS;
    complain("%s of %zu bytes at %#llx leaves every allocation", what, bytes, (unsigned long long)address);
    return INVALID_VALUE;
}

Result to_device(Stream* stream, uint64_t target, const void* source, size_t bytes) {
    if (Result bad = check_device(target, bytes, "copy to the device")) return bad;
    if (in_pinned(source, bytes)) {
        // The device reads pinned memory when the copy runs.
        return enqueue(stream, [=] {
            if (!in_pinned(source, bytes)) return ILLEGAL_ADDRESS;
            if (Result bad = check_device(target, bytes, "late copy to the device")) return bad;
            std::memcpy(reinterpret_cast<void*>(target), source, bytes);
            return SUCCESS;
        });
    }
    if (stream->capture != nullptr) return spoil_capture(stream, "copy from pageable memory");
    auto staged = std::make_shared<std::vector<unsigned char>>(static_cast<const unsigned char*>(source),
                                                               static_cast<const unsigned char*>(source) + bytes);
    return enqueue(stream, [=] {
        if (Result bad = check_device(target, bytes, "late copy to the device")) return bad;
        std::memcpy(reinterpret_cast<void*>(target), staged->data(), bytes);
        return SUCCESS;
    });
}

Result from_device(Stream* stream, void* target, uint64_t source, size_t bytes) {
    if (Result bad = check_device(source, bytes, "copy from the device")) return bad;
    bool pinned = in_pinned(target, bytes);
    if (!pinned && stream->capture != nullptr) return spoil_capture(stream, "copy to pageable memory");
    Result result = enqueue(stream, [=] {
        if (Result bad = check_device(source, bytes, "late copy from the device")) return bad;
        if (pinned && !in_pinned(target, bytes)) return ILLEGAL_ADDRESS;
        std::memcpy(target, reinterpret_cast<const void*>(source), bytes);
        return SUCCESS;
    });
    // The driver returns from a copy to pageable memory only once it is done.
    if (result == SUCCESS && !pinned) result = run_until(stream, stream->num_enqueued);
    return result;
}

Result within_device(Stream* stream, uint64_t target, uint64_t source, size_t bytes) {
    if (Result bad = check_device(target, bytes, "copy to the device")) return bad;
    if (Result bad = check_device(source, bytes, "copy from the device")) return bad;
    return enqueue(stream, [=] {
        if (Result bad = check_device(target, bytes, "late copy to the device")) return bad;
        if (Result bad = check_device(source, bytes, "late copy from the device")) return bad;
        std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
        return SUCCESS;
    });
}

Result fill(Stream* stream, uint64_t target, unsigned char value, size_t bytes) {
    if (Result bad = check_device(target, bytes, "fill")) return bad;
    return enqueue(stream, [=] {
        if (Result bad = check_device(target, bytes, "late fill")) return bad;
        std::memset(reinterpret_cast<void*>(target), value, bytes);
        return SUCCESS;
    });
}

Result wait_for(Stream* stream, Result result) {
    return result == SUCCESS ? run_until(stream, stream->num_enqueued) : result;
}

} // namespace

bool in_device(uint64_t address, size_t bytes) {
    auto& memory = driver().device_memory;
    auto after = memory.upper_bound(uintptr_t(address));
    if (after == memory.begin()) return false;
    auto found = std::prev(after);
    uintptr_t skipped = uintptr_t(address) - found->first;
    return skipped <= found->second.bytes && bytes <= found->second.bytes - skipped;
}

bool in_pinned(const void* address, size_t bytes) {
    auto& memory = driver().pinned_memory;
    auto after = memory.upper_bound(reinterpret_cast<uintptr_t>(address));
    if (after == memory.begin()) return false;
    auto found = std::prev(after);
    uintptr_t skipped = reinterpret_cast<uintptr_t>(address) - found->first;
    return skipped <= found->second && bytes <= found->second - skipped;
}

bool guards_hold(const char* after) {
    bool whole = true;
    for (auto& [address, allocation] : driver().device_memory) {
        for (size_t i = 0; i < 2 * GUARD_BYTES; i++) {
            unsigned char* byte = allocation.block + i + (i < GUARD_BYTES ? 0 : allocation.bytes);
            if (*byte == GUARD) continue;
            long offset = long(byte - allocation.block) - long(GUARD_BYTES);
            complain("after %s: byte %ld of an allocation of %zu bytes was written", after, offset, allocation.bytes);
            *byte = GUARD;
            whole = false;
            break;
        }
    }
    return whole;
}

} // namespace standin

using namespace standin;

EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    STANDIN_ENTER();
    if (Result refused = refuse_in_capture("cuMemAlloc")) return refused;
    return allocate(address, bytes);
}

EXPORT int cuMemAllocAsync(uint64_t* address, size_t bytes, void* stream) {
    STANDIN_ENTER();
    if (stream_of(stream) == nullptr) return INVALID_HANDLE;
    // A graph can own memory on the device; here a capture must not allocate.
    if (Result refused = refuse_in_capture("cuMemAllocAsync")) return refused;
    return allocate(address, bytes);
}

EXPORT int cuMemFree_v2(uint64_t address) {
    STANDIN_ENTER();
    if (Result refused = refuse_in_capture("cuMemFree")) return refused;
    if (Result result = run_all()) return result;
    return release(address);
}

EXPORT int cuMemFreeAsync(uint64_t address, void* handle) {
    STANDIN_ENTER();
    Stream* stream = stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (Result refused = refuse_in_capture("cuMemFreeAsync")) return refused;
    return enqueue(stream, [=] { return release(address); });
}

EXPORT int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    STANDIN_ENTER();
    *total_bytes = memory_limit();
    *free_bytes = memory_limit() - std::min(memory_limit(), driver().used_bytes);
    return SUCCESS;
}

EXPORT int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    STANDIN_ENTER();
    if (Result refused = refuse_in_capture("cuMemHostAlloc")) return refused;
    if (bytes == 0 || posix_memalign(address, 4096, bytes) != 0) return INVALID_VALUE;
    std::memset(*address, 0xff, bytes);
    driver().pinned_memory[reinterpret_cast<uintptr_t>(*address)] = bytes;
    return SUCCESS;
}

EXPORT int cuMemFreeHost(void* address) {
    STANDIN_ENTER();
    if (driver().pinned_memory.count(reinterpret_cast<uintptr_t>(address)) == 0) return INVALID_VALUE;
    if (Result result = run_all()) return result;
    driver().pinned_memory.erase(reinterpret_cast<uintptr_t>(address));
    free(address);
    return SUCCESS;
}

#define STANDIN_STREAM(handle)                                                                                        \
    STANDIN_ENTER();                                                                                                  \
    Stream* stream = stream_of(handle);                                                                               \
    if (stream == nullptr) return INVALID_HANDLE

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void* handle) {
    STANDIN_STREAM(handle);
    return to_device(stream, target, source, bytes);
}
EXPORT int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t bytes, void* handle) {
    STANDIN_STREAM(handle);
    return from_device(stream, target, source, bytes);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void* handle) {
    STANDIN_STREAM(handle);
    return within_device(stream, target, source, bytes);
}
EXPORT int cuMemsetD8Async(uint64_t target, unsigned char value, size_t bytes, void* handle) {
    STANDIN_STREAM(handle);
    return fill(stream, target, value, bytes);
}
EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t bytes) {
    STANDIN_STREAM(nullptr);
    if (Result refused = refuse_in_capture("cuMemcpyHtoD")) return refused;
    return wait_for(stream, to_device(stream, target, source, bytes));
}
EXPORT int cuMemcpyDtoH_v2(void* target, uint64_t source, size_t bytes) {
    STANDIN_STREAM(nullptr);
    if (Result refused = refuse_in_capture("cuMemcpyDtoH")) return refused;
    return wait_for(stream, from_device(stream, target, source, bytes));
}
EXPORT int cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t bytes) {
    STANDIN_STREAM(nullptr);
    if (Result refused = refuse_in_capture("cuMemcpyDtoD")) return refused;
    return within_device(stream, target, source, bytes);
}
EXPORT int cuMemsetD8_v2(uint64_t target, unsigned char value, size_t bytes) {
    STANDIN_STREAM(nullptr);
    if (Result refused = refuse_in_capture("cuMemsetD8")) return refused;
    return fill(stream, target, value, bytes);
}

EXPORT int cuDeviceGetDefaultMemPool(void** pool, int) {
    *pool = &driver();
    return SUCCESS;
}
EXPORT int cuDeviceGetMemPool(void** pool, int) {
    *pool = &driver();
    return SUCCESS;
}
EXPORT int cuMemPoolSetAttribute(void*, int, void*) { return SUCCESS; }
EXPORT int cuMemPoolTrimTo(void*, size_t) { return SUCCESS; }
