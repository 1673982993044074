/* What the parts of the runtime share: the block that runs, its threads, and how a thread waits. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"
#include "simt.h"

namespace simt {

struct AsyncCopy {
    void* shared;
    const void* global;
    int bytes, source_bytes;
};

enum class State { Ready, Barrier, Warp, Exited };

struct Thread {
    Fiber fiber;
    uint3 index;
    unsigned linear;
    State state;
    // Where it waits, for messages.
    const char* file;
    int line;
    int predicate;
    Exchange* exchange;
    std::vector<AsyncCopy> open_copies;
    std::vector<std::vector<AsyncCopy>> groups;
};

/* A collective of one warp that some lanes have come to. */
struct Meeting {
    bool open;
    Collective kind;
    uint32_t mask, arrived;
    const char* file;
    int line;
    void* sync;
};

struct Warp {
    // Lanes with disjoint masks may be in different collectives at once.
    std::vector<Meeting> meetings;
    uint32_t exited;
    unsigned generation;
    uint64_t sync[64];
};

struct Block {
    const Launch* launch;
    unsigned num_threads;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<unsigned> ready;
    unsigned num_exited, num_waiting;
    Vote vote;
    int vote_result;
    const char* barrier_file;
    int barrier_line;
    unsigned barrier_generation;
    uint64_t barrier_sync[4];
    unsigned char* dynamic_shared;
    Thread* current;
    Fault fault;
};

extern Block block;

/* The current thread waits until `ready` holds it again. */
void wait_as(State state);
/* Puts threads that waited back on the list; shuffled where a seed says so. */
void make_ready(const std::vector<unsigned>& threads);

/* Works out a collective that all lanes of its mask have come to. */
void complete(Collective kind, uint32_t mask, Exchange* const lanes[32]);
const char* name_of(Collective kind);

/* All bytes 0xff: a NaN in every float format, and nothing that the sanitizers see. */
void poison(void* memory, size_t bytes);

std::string text_of(const Thread& thread);

} // namespace simt
