/* Warp collectives: who must come, who is missing, and what each lane gets.
   They order no memory except __syncwarp: that is what the device promises. */
#include "runtime.h"

namespace simt {

const char* name_of(Collective kind) {
    static const char* const names[] = {"__shfl_sync", "__shfl_xor_sync", "__shfl_down_sync", "__shfl_up_sync",
                                        "__ballot_sync", "__any_sync", "__all_sync", "__reduce_add_sync",
                                        "__syncwarp", "mma.m16n8k16.bf16", "mma.m16n8k16.f16", "ldmatrix",
                                        "ldmatrix.trans"};
    return names[int(kind)];
}

namespace {

uint32_t word_of(const Exchange& exchange) {
    uint32_t word;
    __builtin_memcpy(&word, exchange.value, 4);
    return word;
}

void set_word(Exchange& exchange, uint32_t word) { __builtin_memcpy(exchange.value, &word, 4); }

// The lane that a shuffle reads; its own where the other one falls outside the group.
int source_of(Collective kind, int lane, const Exchange& exchange) {
    int width = exchange.width, first = lane & ~(width - 1), source = lane;
    switch (kind) {
    case Collective::ShflIdx: return first + (exchange.number & (width - 1));
    case Collective::ShflXor: source = lane ^ exchange.number; return source < first + width ? source : lane;
    case Collective::ShflDown: source = lane + exchange.number; return source < first + width ? source : lane;
    default: source = lane - exchange.number; return source >= first ? source : lane;
    }
}

void shuffle_all(Collective kind, uint32_t mask, Exchange* const lanes[32]) {
    unsigned char sent[32][16];
    for (int lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) __builtin_memcpy(sent[lane], lanes[lane]->value, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        int source = source_of(kind, lane, *lanes[lane]);
        __builtin_memcpy(lanes[lane]->value, sent[source], 16);
    }
}

float part_of(Collective kind, uint32_t pair, int which) {
    uint16_t bits = uint16_t(pair >> (16 * which));
    return kind == Collective::MmaBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": group = lane / 4, t = lane % 4.
void multiply(Collective kind, Exchange* const lanes[32]) {
    double a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++) {
                a[group + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = part_of(kind, lanes[lane]->a[i], half);
            }
            for (int i = 0; i < 2; i++) b[2 * t + half + 8 * i][group] = part_of(kind, lanes[lane]->b[i], half);
        }
        for (int i = 0; i < 4; i++) d[group + 8 * (i / 2)][2 * t + i % 2] = lanes[lane]->c[i];
    }
    // Products of 16-bit floats are exact in f64; the device's own order within 16 is not documented.
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) lanes[lane]->c[i] = float(d[group + 8 * (i / 2)][2 * t + i % 2]);
    }
}

// Matrix i has its rows in lanes 8i to 8i+7; lane l gets elements 2(l % 4), 2(l % 4)+1 of row l / 4 (or of that column).
void load_matrices(bool transposed, Exchange* const lanes[32]) {
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < lanes[lane]->number; i++) {
            uint16_t pair[2];
            for (int half = 0; half < 2; half++) {
                int row = lane / 4, column = 2 * (lane % 4) + half;
                if (transposed) std::swap(row, column);
                __builtin_memcpy(&pair[half], lanes[8 * i + row]->value + 2 * column, 2);
            }
            lanes[lane]->a[i] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
        }
    }
}

std::string lanes_text(uint32_t mask) {
    std::string text;
    for (int lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) text += (text.empty() ? "" : ",") + std::to_string(lane);
    }
    return text;
}

} // namespace

void complete(Collective kind, uint32_t mask, Exchange* const lanes[32]) {
    switch (kind) {
    case Collective::ShflIdx:
    case Collective::ShflXor:
    case Collective::ShflDown:
    case Collective::ShflUp: shuffle_all(kind, mask, lanes); return;
    case Collective::MmaBf16:
    case Collective::MmaF16: multiply(kind, lanes); return;
    case Collective::Ldmatrix: load_matrices(false, lanes); return;
    case Collective::LdmatrixTrans: load_matrices(true, lanes); return;
    case Collective::SyncWarp: return;
    default: break;
    }
    uint32_t ballot = 0, sum = 0;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint32_t word = word_of(*lanes[lane]);
        sum += word;
        if (word != 0) ballot |= 1u << lane;
    }
    uint32_t result = kind == Collective::Ballot ? ballot
                      : kind == Collective::Any  ? ballot != 0
                      : kind == Collective::All  ? ballot == mask
                                                 : sum;
    for (int lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) set_word(*lanes[lane], result);
    }
}

void warp_collective(Collective kind, uint32_t mask, Exchange& exchange, const char* file, int line) {
    Unseen unseen;
    Thread& thread = *block.current;
    Warp& warp = block.warps[thread.linear / 32];
    int lane = int(thread.linear % 32);
    if (!(mask >> lane & 1)) {
        fail(Fault::Lanes, "%s at %s:%d: lane %d is not in its own mask 0x%08x", name_of(kind), file, line, lane, mask);
    }
    if (int(kind) <= int(Collective::ShflUp)) {
        int width = exchange.width;
        if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
            fail(Fault::Lanes, "%s at %s:%d: width %d is no power of two up to 32", name_of(kind), file, line, width);
        }
        int source = source_of(kind, lane, exchange);
        if (source < 0 || source > 31 || !(mask >> source & 1)) {
            fail(Fault::Lanes, "%s at %s:%d: lane %d reads lane %d, which is not in mask 0x%08x", name_of(kind), file, line,
                 lane, source, mask);
        }
    }
    if (uint32_t gone = mask & warp.exited) {
        fail(Fault::Lanes, "%s at %s:%d: lanes %s of mask 0x%08x have returned or do not exist", name_of(kind), file,
             line, lanes_text(gone).c_str(), mask);
    }
    Meeting* meeting = nullptr;
    for (Meeting& candidate : warp.meetings) {
        if (!candidate.open || (candidate.mask & mask) == 0) continue;
        if (candidate.mask != mask || candidate.kind != kind || candidate.line != line ||
            (candidate.file != file && __builtin_strcmp(candidate.file, file) != 0)) {
            fail(Fault::Lanes, "%s at %s:%d with mask 0x%08x, while lanes %s wait in %s at %s:%d with mask 0x%08x",
                 name_of(kind), file, line, mask, lanes_text(candidate.arrived).c_str(), name_of(candidate.kind),
                 candidate.file, candidate.line, candidate.mask);
        }
        meeting = &candidate;
    }
    if (meeting == nullptr) {
        for (Meeting& candidate : warp.meetings) {
            if (!candidate.open) meeting = &candidate;
        }
        if (meeting == nullptr) {
            warp.meetings.emplace_back();
            meeting = &warp.meetings.back();
        }
        *meeting = Meeting{true, kind, mask, 0, file, line, &warp.sync[warp.generation++ % 64]};
    }
    meeting->arrived |= 1u << lane;
    void* sync = meeting->sync;
    thread.exchange = &exchange;
    thread.file = file;
    thread.line = line;
    if (kind == Collective::SyncWarp) tsan_release(sync);
    if (meeting->arrived == mask) {
        meeting->open = false;
        Exchange* lanes[32] = {};
        static std::vector<unsigned> others;
        others.clear();
        unsigned first = thread.linear - unsigned(lane);
        for (unsigned other = 0; other < 32; other++) {
            if (!(mask >> other & 1)) continue;
            lanes[other] = block.threads[first + other].exchange;
            if (int(other) != lane) others.push_back(first + other);
        }
        complete(kind, mask, lanes);
        make_ready(others);
    } else {
        wait_as(State::Warp);
    }
    if (kind == Collective::SyncWarp) tsan_acquire(sync);
}

} // namespace simt
