// A stack of its own for each thread of a block, and the change from one to another.
#pragma once
#include <cstddef>

namespace emulate {

class Fiber {
public:
    explicit Fiber(void (*body)());  // which never returns
    ~Fiber();
    Fiber(const Fiber&) = delete;
    void enter();         // from the caller's stack into it, until it leaves
    static void leave();  // back to who entered

private:
    static void begin();
    static Fiber* current;
    char* stack;
    void* inside = nullptr;   // where its stack stands while it waits
    void* outside = nullptr;  // where the stack stands that it was entered from
    void (*body)();
    [[maybe_unused]] const void* outer = nullptr;  // for AddressSanitizer: the stack that it was entered from
    [[maybe_unused]] size_t outer_size = 0;
};

}  // namespace emulate
