#include "block.h"

#include <cstring>
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

// Where threads wait for each other: `turn` counts how often all have come.
struct Gate {
    Where where;
    int come = 0, turn = 0, wanted = 0;
};

struct Meeting : Gate {
    uint32_t lanes = 0, here = 0;
    int bytes = 0;
    char said[2][32][64];  // in turns: who is late still reads what was said while others say the next
};

struct Copy {
    char* to;
    const char* from;
    int bytes, given;
    void run() const {
        if (given) std::memcpy(to, from, given);
        std::memset(to + given, 0, bytes - given);
    }
};

struct Thread {
    uint3 index;
    int number;
    Fiber* fiber = nullptr;  // null before it began
    const Gate* gate = nullptr;  // what it waits at, since `turn`
    int turn = 0;
    bool ended = false;
    std::vector<std::vector<Copy>> copies{1};  // groups, the open one last
    bool ready() const { return !ended && (!gate || gate->turn != turn); }
};

struct Block {
    const std::function<void()>* body;
    std::vector<Thread> threads;
    std::map<int, Gate> barriers;
    std::map<std::pair<int, uint32_t>, Meeting> meetings;  // by warp and lanes
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
    if (++gate.come == gate.wanted) {
        gate.come = 0, gate.turn++;
        return;
    }
    me->gate = &gate, me->turn = gate.turn;
    Fiber::leave();
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
    thread.gate = nullptr;
    me = &thread, threadIdx = thread.index;
    thread.fiber->enter();
    if (thread.ended) idle.push_back(thread.fiber);
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

// The numbers 0 to n - 1 as they shall have their turns.
class Turns {
public:
    explicit Turns(int64_t n) : n(n) {
        if (order > 1)
            for (int64_t i = 0; i < n; i++) drawn.push_back(i);
    }
    void again(std::mt19937& random) {
        for (size_t i = drawn.size(); i > 1; i--) std::swap(drawn[i - 1], drawn[random() % i]);
    }
    int64_t at(int64_t i) const { return order == 0 ? i : order == 1 ? n - 1 - i : drawn[i]; }

private:
    int64_t n;
    std::vector<int64_t> drawn;
};

void run_block(const std::function<void()>& body, std::mt19937& random) {
    const int n = static_cast<int>(blockDim.count());
    Block here;
    here.body = &body;
    here.threads.resize(n);
    for (int i = 0; i < n; i++) {
        here.threads[i].number = i;
        here.threads[i].index = place_of(i, blockDim);
    }
    block = &here;
    Turns turns(n);
    for (int left = n; left && here.error.empty();) {
        bool moved = false;
        turns.again(random);
        for (int i = 0; i < n && here.error.empty(); i++) {
            Thread& thread = here.threads[turns.at(i)];
            if (!thread.ready()) continue;
            moved = true;
            resume(thread);
            left -= thread.ended;
        }
        if (!moved && here.error.empty()) here.error = stuck();
    }
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
    Turns turns(grid.count());
    turns.again(random);
    for (int64_t i = 0; i < grid.count(); i++) {
        blockIdx = place_of(turns.at(i), grid);
        std::memset(memory, 255, shared);
        run_block(thread, random);
    }
}

void barrier(int number, int threads, const char* file, int line) {
    Gate& gate = block->barriers[number];
    const Where where{file, line};
    if (gate.come && gate.where != where) fail("threads wait for each other at " + gate.where.text() + " and at " + where.text());
    if (gate.come && gate.wanted != threads) fail(where.text() + ": a barrier of several numbers of threads");
    gate.where = where, gate.wanted = threads;
    wait(gate);
}

void exchange(const void* mine, int bytes, void* all, uint32_t lanes, const char* file, int line) {
    const Where where{file, line};
    const int lane = me->number % 32;
    Meeting& meeting = block->meetings[{me->number / 32, lanes}];
    if (!(lanes >> lane & 1)) fail(where.text() + ": a lane that is not one of those it wants to meet");
    if (bytes > 64) fail(where.text() + ": more than 64 bytes");
    if (meeting.come && meeting.where != where) fail("lanes of a warp meet at " + meeting.where.text() + " and at " + where.text());
    meeting.where = where, meeting.wanted = __builtin_popcount(lanes);
    const int turn = meeting.turn % 2;
    if (!meeting.come) std::memset(meeting.said[turn], 255, sizeof meeting.said[turn]);  // what a lane says that does not meet
    std::memcpy(meeting.said[turn][lane], mine, bytes);
    wait(meeting);
    for (int i = 0; i < 32; i++) std::memcpy(static_cast<char*>(all) + i * bytes, meeting.said[turn][i], bytes);
}

void copy_async(void* to, const void* from, int bytes, int given) {
    const Copy copy{static_cast<char*>(to), static_cast<const char*>(from), bytes, given};
    if (order == 1) copy.run();
    else me->copies.back().push_back(copy);
}
void commit_async() { me->copies.emplace_back(); }
void wait_async(int newer) {
    auto& groups = me->copies;
    while (static_cast<int>(groups.size()) - 1 > newer) {
        for (const Copy& copy : groups.front()) copy.run();
        groups.erase(groups.begin());
    }
}

void* dynamic_memory() { return memory; }

void fresh(void* place, size_t bytes) {
    for (void* one : block->known)
        if (one == place) return;
    block->known.push_back(place);
    std::memset(place, 255, bytes);
}

}  // namespace emulate
