/* Blocks whose threads wait for each other (acl_barrier), on one thread of the CPU: compiled beside such a kernel.
 *
 * Each thread of the block has a stack of its own. All run in turn, each up to the next barrier or its end, until all have
 * ended; one that has ended no longer counts, as on NVIDIA's devices. A switch is a _longjmp, without a system call. A stack
 * begins with makecontext, once for all blocks: its thread then runs one block after the other.
 * Source: POSIX.1-2001, makecontext, _setjmp and _longjmp. */
#undef _FORTIFY_SOURCE /* its longjmp refuses to change the stack */
#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

/* A frame of the kernel has at most 64 KiB (compilation/host_c.py). The odd lines spread the stacks over the sets of a cache. */
#define STACK_BYTES (((size_t)256 << 10) + 17 * 64)

typedef struct {
    long long group, group_y;
    int local, local_y, size, size_y;
} acl_item;

__thread acl_item acl_here;

typedef struct {
    jmp_buf point; /* where the thread goes on */
    int begun, ended;
} acl_thread;

typedef struct {
    jmp_buf back;
    acl_thread *threads;
    char *stacks;
    int current;
    void (*call)(void *const *);
    void *const *arguments;
} acl_block;

static __thread acl_block *block_of;

void acl_host_barrier(void) {
    acl_block *block = block_of;
    if (!_setjmp(block->threads[block->current].point)) {
        _longjmp(block->back, 1);
    }
}

static void run_thread(void) {
    for (;;) {
        block_of->call(block_of->arguments);
        block_of->threads[block_of->current].ended = 1;
        acl_host_barrier(); /* returns for the next block */
    }
}

/* Returns when the thread is at a barrier or has ended. */
static __attribute__((noinline)) void go_on(acl_block *block, int thread) {
    acl_thread *own = &block->threads[thread];
    block->current = thread;
    if (_setjmp(block->back)) {
        return;
    }
    if (own->begun) {
        _longjmp(own->point, 1);
    }
    own->begun = 1;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = block->stacks + STACK_BYTES * (size_t)thread;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = NULL;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

/* Blocks [begin, end) of a grid of so many columns and rows; returns 0, or ENOMEM where nothing ran. */
int acl_run_blocks(void (*call)(void *const *), void *const *arguments, long long begin, long long end, long long grid,
                   long long rows, int width, int height, int threads) {
    size_t size = STACK_BYTES * (size_t)threads;
    acl_block block = {.call = call, .arguments = arguments};
    block.threads = calloc((size_t)threads, sizeof(acl_thread));
    block.stacks = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int failed = block.stacks == MAP_FAILED || !block.threads ? ENOMEM : 0;
    block_of = &block;
    for (long long group = begin; group < end && !failed; group++) {
        acl_here.group = group % grid;
        acl_here.group_y = group / grid % rows;
        acl_here.size = width;
        acl_here.size_y = height;
        for (int t = 0; t < threads; t++) {
            block.threads[t].ended = 0;
        }
        for (int left = threads; left;) {
            for (int t = 0; t < threads; t++) {
                if (!block.threads[t].ended) {
                    acl_here.local = t % width;
                    acl_here.local_y = t / width % height;
                    go_on(&block, t);
                    left -= block.threads[t].ended;
                }
            }
        }
    }
    free(block.threads);
    if (block.stacks != MAP_FAILED) {
        munmap(block.stacks, size);
    }
    return failed;
}
