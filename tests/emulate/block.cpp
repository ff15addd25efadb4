#include "block.h"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulate {

namespace {

// A place in the source.
struct Where {
    const char* file = "";
    int line = 0;
    bool operator==(const Where& other) const { return line == other.line && !std::strcmp(file, other.file); }
    bool operator!=(const Where& other) const { return !(*this == other); }
    std::string text() const {
        const char* name = std::strrchr(file, '/');
        return std::string(name ? name + 1 : file) + ":" + std::to_string(line);
    }
};

// Where threads wait for each other.
struct Gate {
    Where where;
    int wanted = 0, turn = 0;  // turn: how often all have come
    std::vector<int> waiting;  // the ranks of those who have come
};

struct Meeting : Gate {
    Said said[2];  // in turns: who is late still reads what was said while others say the next
};

struct Counter : Gate {  // an mbarrier; `turn` is its phase
    int left = 0, bytes = 0;
};

struct Bulk {
    const void* barrier;
    int bytes;
    std::function<void()> copy;
};

struct Copy {
    char* to;
    const char* from;
    int bytes, given, group;
    void run() const {
        if (given) std::memcpy(to, from, given);
        std::memset(to + given, 0, bytes - given);
    }
};

struct Thread {
    uint3 index;
    int number;
    Fiber* fiber = nullptr;  // null before it began
    const Gate* gate = nullptr;  // where it waits
    bool ended = false;
    std::vector<Copy> copies;  // on their way
    int groups = 0;            // closed
};

// Who waits for nothing.
class Ready {
public:
    void add(int i) { words[i / 64] |= uint64_t{1} << i % 64; }
    void remove(int i) { words[i / 64] &= ~(uint64_t{1} << i % 64); }
    int next(int from) const {  // the first from there on, and then from the beginning; -1: none
        uint64_t word = words[from / 64] & ~uint64_t{0} << from % 64;
        for (int i = 0; i <= 16; i++, word = words[(from / 64 + i) % 16])
            if (word) return (from / 64 + i) % 16 * 64 + __builtin_ctzll(word);
        return -1;
    }

private:
    uint64_t words[16] = {};
};

struct Block {
    const std::function<void()>* body;
    std::vector<Thread> threads;  // by rank: who comes first where several may go on
    Ready ready;
    std::map<int, Gate> barriers;
    std::map<const void*, Counter> counters;
    std::deque<Bulk> bulk;  // on its way
    std::vector<Meeting> warps;                            // of all lanes
    std::map<std::pair<int, uint32_t>, Meeting> meetings;  // of some, by warp and lanes
    std::vector<void*> known;  // shared memory that has been filled
    std::string error;
};

Block* block = nullptr;
Thread* me = nullptr;
char* memory = nullptr;
int order = 0;
std::vector<std::unique_ptr<Fiber>> all;  // kept from block to block
std::vector<Fiber*> idle;

[[noreturn]] void fail(const std::string& text) {  // the thread ends here, and with it the launch
    block->error = text;
    Fiber::leave();
    __builtin_trap();
}

void wait(Gate& gate) {
    if (static_cast<int>(gate.waiting.size()) + 1 == gate.wanted) {
        for (int rank : gate.waiting) block->ready.add(rank);
        gate.waiting.clear(), gate.turn++;
        return;
    }
    const int rank = static_cast<int>(me - block->threads.data());
    gate.waiting.push_back(rank), block->ready.remove(rank);
    me->gate = &gate;
    Fiber::leave();
}

void count(Counter& counter, int arrivals, int bytes) {
    counter.left -= arrivals, counter.bytes += bytes;
    if (counter.left || counter.bytes) return;
    for (int rank : counter.waiting) block->ready.add(rank);
    counter.waiting.clear(), counter.turn++, counter.left = counter.wanted;
}

void land() {  // the oldest
    const Bulk first = block->bulk.front();
    block->bulk.pop_front();
    first.copy();
    count(block->counters.at(first.barrier), 0, -first.bytes);
}

void work() {  // what a fiber does: one thread after another
    for (;;) {
        (*block->body)();
        me->ended = true;
        Fiber::leave();
    }
}

void resume(Thread& thread) {
    if (!thread.fiber) {
        if (idle.empty()) all.push_back(std::make_unique<Fiber>(&work)), idle.push_back(all.back().get());
        thread.fiber = idle.back(), idle.pop_back();
    }
    me = &thread, threadIdx = thread.index;
    thread.fiber->enter();
    if (!thread.ended) return;
    idle.push_back(thread.fiber);
    block->ready.remove(static_cast<int>(&thread - block->threads.data()));
}

std::string at_block() {
    return "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + "): ";
}

std::string stuck() {
    std::map<std::string, int> waiting;
    int ended = 0;
    for (const Thread& thread : block->threads) thread.ended ? ended++ : waiting[thread.gate->where.text()]++;
    std::string text = "threads wait for each other in vain: ";
    for (const auto& [where, count] : waiting) text += std::to_string(count) + " at " + where + ", ";
    return text + std::to_string(ended) + " have ended";
}

uint3 place_of(int64_t i, dim3 in) {
    return {static_cast<uint32_t>(i % in.x), static_cast<uint32_t>(i / in.x % in.y), static_cast<uint32_t>(i / in.x / in.y)};
}

// The numbers 0 to n - 1 in the order that is wanted.
std::vector<int64_t> ordered(int64_t n, std::mt19937& random) {
    std::vector<int64_t> found(n);
    for (int64_t i = 0; i < n; i++) found[i] = order == 1 ? n - 1 - i : i;
    for (int64_t i = n; order > 1 && i > 1; i--) std::swap(found[i - 1], found[random() % i]);
    return found;
}

void run_block(const std::function<void()>& body, std::mt19937& random) {
    const int n = static_cast<int>(blockDim.count());
    Block here;
    here.body = &body;
    here.threads.resize(n), here.warps.resize((n + 31) / 32);
    block = &here;
    for (int rank = 0; rank < n; rank++) {
        Thread& thread = here.threads[rank];
        thread.number = order == 1 ? n - 1 - rank : rank, thread.index = place_of(thread.number, blockDim);
        here.ready.add(rank);
    }
    // The first that may goes on until it waits: in orders 0 and 1 one warp runs ahead of the others as far as it is let.
    for (int left = n; left && here.error.empty();) {
        const int rank = here.ready.next(order > 1 ? static_cast<int>(random() % n) : 0);
        if (rank < 0 && !here.bulk.empty()) {
            land();
        } else if (rank < 0) {
            here.error = stuck();
        } else {
            resume(here.threads[rank]);
            left -= here.threads[rank].ended;
        }
    }
    if (here.error.empty() && !here.bulk.empty()) here.error = "tiles are on their way to a block that has ended";
    block = nullptr, me = nullptr;
    if (!here.error.empty()) {
        idle.clear(), all.clear();  // with what the threads held: no kernel holds anything but numbers
        throw std::runtime_error(at_block() + here.error);
    }
}

}  // namespace

extern "C" void emulate_order(int wanted) { order = wanted; }

void run(dim3 grid, dim3 size, size_t shared, const std::function<void()>& thread) {
    std::mt19937 random(order);
    const auto place = new (std::align_val_t{16}) char[shared];  // exactly, so that its end is seen
    const std::unique_ptr<char, void (*)(char*)> held(place, [](char* p) { operator delete[](p, std::align_val_t{16}); });
    gridDim = grid, blockDim = size, memory = place;
    for (int64_t i : ordered(grid.count(), random)) {
        blockIdx = place_of(i, grid);
        std::memset(memory, 255, shared);
        run_block(thread, random);
    }
}

void barrier(int number, int threads, const char* file, int line) {
    Gate& gate = block->barriers[number];
    const Where where{file, line};
    if (!gate.waiting.empty() && gate.where != where)
        fail("threads wait for each other at " + gate.where.text() + " and at " + where.text());
    if (!gate.waiting.empty() && gate.wanted != threads) fail(where.text() + ": a barrier of several numbers of threads");
    gate.where = where, gate.wanted = threads;
    wait(gate);
}

const Said& exchange(const void* mine, int bytes, uint32_t lanes, const char* file, int line) {
    const Where where{file, line};
    const int lane = me->number % 32, warp = me->number / 32;
    Meeting& meeting = lanes == WHOLE ? block->warps[warp] : block->meetings[{warp, lanes}];
    if (!(lanes >> lane & 1)) fail(where.text() + ": a lane that is not one of those it wants to meet");
    if (bytes > static_cast<int>(sizeof(Said::lane[0]))) fail(where.text() + ": more than 64 bytes");
    if (!meeting.waiting.empty() && meeting.where != where)
        fail("lanes of a warp meet at " + meeting.where.text() + " and at " + where.text());
    Said& said = meeting.said[meeting.turn % 2];
    if (meeting.waiting.empty()) {
        meeting.where = where, meeting.wanted = __builtin_popcount(lanes);
        if (lanes != WHOLE) std::memset(&said, 255, sizeof said);  // what those say that do not come
    }
    if (bytes) std::memcpy(said.lane[lane], mine, bytes);
    wait(meeting);
    return said;
}

void exchange(const void* mine, int bytes, void* all, const char* file, int line) {
    const Said& said = exchange(mine, bytes, WHOLE, file, line);
    for (int i = 0; i < 32; i++) std::memcpy(static_cast<char*>(all) + i * bytes, said.lane[i], bytes);
}

void copy_async(void* to, const void* from, int bytes, int given) {
    const Copy copy{static_cast<char*>(to), static_cast<const char*>(from), bytes, given, me->groups};
    if (order == 1) copy.run();
    else me->copies.push_back(copy);
}
void commit_async() { me->groups++; }
void wait_async(int newer) {
    auto& copies = me->copies;
    size_t done = 0;
    while (done < copies.size() && copies[done].group < me->groups - newer) copies[done++].run();
    copies.erase(copies.begin(), copies.begin() + done);
}

void count_begin(const void* barrier, int arrivals) {
    Counter& counter = block->counters[barrier];
    counter.wanted = counter.left = arrivals;
}
void count_arrive(const void* barrier, int bytes, const char* file, int line) {
    const auto found = block->counters.find(barrier);
    if (found == block->counters.end()) fail(Where{file, line}.text() + ": a barrier that nobody has begun");
    if (!found->second.left) fail(Where{file, line}.text() + ": more arrivals than a phase has");
    count(found->second, 1, bytes);
}
void count_wait(const void* barrier, uint32_t parity, const char* file, int line) {
    const auto found = block->counters.find(barrier);
    if (found == block->counters.end()) fail(Where{file, line}.text() + ": a barrier that nobody has begun");
    Counter& counter = found->second;
    if (counter.turn % 2 != static_cast<int>(parity)) return;
    const int rank = static_cast<int>(me - block->threads.data());
    counter.where = {file, line};
    counter.waiting.push_back(rank), block->ready.remove(rank);
    me->gate = &counter;
    Fiber::leave();
}
void copy_bulk(const void* barrier, int bytes, std::function<void()> copy) {
    block->bulk.push_back({barrier, bytes, std::move(copy)});
    if (order == 1) land();
}

void* dynamic_memory() { return memory; }

void fresh(void* place, size_t bytes) {
    for (void* one : block->known)
        if (one == place) return;
    block->known.push_back(place);
    std::memset(place, 255, bytes);
}

}  // namespace emulate
