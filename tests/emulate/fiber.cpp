#include "fiber.h"

#include <sys/mman.h>

#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef __x86_64__
// The registers that a called function keeps lie on the stack that is left; `ret` goes on where the other stack was left.
extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.text
.local emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#else
#include <ucontext.h>
#endif

namespace emulate {

namespace {
constexpr size_t STACK = 1 << 18;
}

Fiber* Fiber::current = nullptr;

Fiber::Fiber(void (*body)()) : body(body) {
    void* place = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::bad_alloc();
    stack = static_cast<char*>(place);
    mprotect(stack, 4096, PROT_NONE);  // a stack that is too small ends the process, and changes no other
#ifdef __x86_64__
    void** top = reinterpret_cast<void**>(stack + STACK) - 2;  // as if `begin` had been called
    *top = reinterpret_cast<void*>(&Fiber::begin);
    inside = top - 6;
#else
    auto* context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = stack, context->uc_stack.ss_size = STACK, context->uc_link = nullptr;
    makecontext(context, &Fiber::begin, 0);
    inside = context, outside = new ucontext_t;
#endif
}

Fiber::~Fiber() {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack + 4096, STACK - 4096);  // of a thread that was given up
#endif
    munmap(stack, STACK);
#ifndef __x86_64__
    delete static_cast<ucontext_t*>(inside), delete static_cast<ucontext_t*>(outside);
#endif
}

void Fiber::enter() {
    current = this;
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack, STACK);
#endif
#ifdef __x86_64__
    emulate_switch(&outside, inside);
#else
    swapcontext(static_cast<ucontext_t*>(outside), static_cast<ucontext_t*>(inside));
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fiber::leave() {
    Fiber* const me = current;
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, me->outer, me->outer_size);
#endif
#ifdef __x86_64__
    emulate_switch(&me->inside, me->outside);
#else
    swapcontext(static_cast<ucontext_t*>(me->inside), static_cast<ucontext_t*>(me->outside));
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &me->outer, &me->outer_size);
#endif
}

void Fiber::begin() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &current->outer, &current->outer_size);
#endif
    current->body();
    __builtin_trap();
}

}  // namespace emulate
