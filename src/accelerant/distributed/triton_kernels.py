"""Sums of small arrays over the GPUs of one host, and the merge of attention to two sets of keys.

peer_sum, of which latency is the cost:

    y = sum_s x_s, in float32, in the order of processes s; so every process has the same bits

Each process writes its array into the memory of every other one, a word of 4 bytes with the call's number beside it: 8
bytes arrive as one, so the word is there when its number is, and no barrier is needed. A program waits for its words of
the other processes. Words of odd and even calls have memory of their own: a process begins call n after it has all
words of call n - 1, which the others sent after they had read those of call n - 2.

A word that does not come within the time limit ends the process's work on the device: the program writes 1 + its source
into a word of the host's memory, which outlives that, and traps.

Layout: memory (4, processes, ROOM) of 8 bytes, the second half of linear_sum; numbers (programs,) int32, of the last
call of each program; addresses (processes + 2,) int64, of the memory of each process, of the host's word, and the limit
in ns.
Grid: a program per BLOCK words, a thread per word. Bounds: latency; twice the array's bytes go to each other process.

Source: NCCL's protocol LL.
"""

import triton
import triton.language as tl

from accelerant.ops.decode.triton_kernels import _products


@triton.jit
def _send(address, word, number):
    tl.inline_asm_elementwise(
        "{ .reg .b64 both; mov.b64 both, {$2, $3}; st.relaxed.sys.global.b64 [$1], both; mov.b32 $0, $2; }",
        "=r,l,r,r", [address, word, number], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _receive(address, number, source, missing, patience):
    return tl.inline_asm_elementwise(
        """{
        .reg .b64 both, start, now; .reg .b32 found; .reg .pred here, early;
        ld.relaxed.sys.global.b64 both, [$1];
        mov.b64 {$0, found}, both;
        setp.eq.b32 here, found, $2;
        @here bra done;
        mov.u64 start, %globaltimer;
        again: ld.relaxed.sys.global.b64 both, [$1];
        mov.b64 {$0, found}, both;
        setp.eq.b32 here, found, $2;
        @here bra done;
        mov.u64 now, %globaltimer;
        sub.u64 now, now, start;
        setp.lt.u64 early, now, $5;
        @early bra again;
        st.relaxed.sys.global.b32 [$4], $3;
        fence.acq_rel.sys;
        trap;
        done:
        }""",
        "=&r,l,r,r,l,l", [address, number, source, missing, patience], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _half(word, AT: tl.constexpr, like):
    """Return the half of each word that begins at bit AT, as float32."""
    return (word >> AT).to(tl.int16).to(like, bitcast=True).to(tl.float32)


@triton.jit
def peer_sum(
    x_ptr, addresses_ptr, numbers_ptr, words, ROOM: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum arrays of `words` words of 4 bytes in place; elements are float32 if WIDE, else of 2 bytes."""
    words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    number = tl.load(numbers_ptr + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    own = tl.load(words_ptr + at, mask=inside, other=0)
    numbers = tl.zeros([BLOCK], tl.int32) + number
    first = (number & 1) * SIZE
    for i in tl.static_range(1, SIZE):
        there = tl.load(addresses_ptr + (RANK + i) % SIZE)
        _send(there + ((first + RANK) * ROOM + at).to(tl.int64) * 8, own, numbers)
    low = tl.zeros([BLOCK], tl.float32)
    high = low
    here, missing, patience = (
        tl.load(addresses_ptr + RANK),
        tl.load(addresses_ptr + SIZE),
        tl.load(addresses_ptr + SIZE + 1),
    )
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = own
        else:
            there = here + ((first + source) * ROOM + at).to(tl.int64) * 8
            word = _receive(there, numbers, source + 1, missing, patience)
        if WIDE:
            low += word.to(tl.float32, bitcast=True)
        else:
            low += _half(word, 0, x_ptr.dtype.element_ty)
            high += _half(word, 16, x_ptr.dtype.element_ty)
    if WIDE:
        tl.store(x_ptr + at, low, mask=inside)
    else:
        left = low.to(x_ptr.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        right = high.to(x_ptr.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(words_ptr + at, left | right, mask=inside)
    tl.debug_barrier()  # all warps have read the number
    tl.store(numbers_ptr + program, number)


@triton.jit
def linear_sum(
    x_ptr, weight_ptr, residual_ptr, y_ptr, addresses_ptr, numbers_ptr, N, K,
    ROOM: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    SETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Multiply a row x by weight (N, K) transposed, sum over the processes in float32, and add the residual.

    Each output is a word, which its program sends and waits for as in peer_sum, in memory behind that of peer_sum.
    numbers (N,) are of each output, so that layers with other tilings follow each other. N is a multiple of a program's
    outputs. Programs wait in the order in which they start, so the first ones that wait are resident everywhere.
    """
    first = tl.program_id(0) * (SETS * BLOCK_N)
    z = _products(
        x_ptr, None, weight_ptr, None, 0, first, N, K, 0.0, False, False, SETS, BLOCK_N, BLOCK_K, UNROLL, False,
    )  # fmt: skip
    here = tl.load(addresses_ptr + RANK)
    missing = tl.load(addresses_ptr + SIZE)
    patience = tl.load(addresses_ptr + SIZE + 1)
    for r in tl.static_range(SETS):
        n = first + r * BLOCK_N + tl.arange(0, BLOCK_N)
        number = tl.load(numbers_ptr + n) + 1
        at = ((2 + (number & 1)) * SIZE + RANK) * ROOM + n
        for i in tl.static_range(1, SIZE):
            there = tl.load(addresses_ptr + (RANK + i) % SIZE)
            _send(there + at.to(tl.int64) * 8, z[r].to(tl.int32, bitcast=True), number)
    for r in tl.static_range(SETS):
        n = first + r * BLOCK_N + tl.arange(0, BLOCK_N)
        number = tl.load(numbers_ptr + n) + 1
        y = tl.zeros([BLOCK_N], tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                y += z[r]
            else:
                at = ((2 + (number & 1)) * SIZE + source) * ROOM + n
                word = _receive(here + at.to(tl.int64) * 8, number, source + 1, missing, patience)
                y += word.to(tl.float32, bitcast=True)
        y += tl.load(residual_ptr + n).to(tl.float32)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))
        tl.debug_barrier()  # all warps have read the number
        tl.store(numbers_ptr + n, number)


@triton.jit
def merge(
    o_ptr, lse_ptr, part_ptr, part_lse_ptr, rows, S, STRIDE, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Merge attention to other keys into o and lse, in place, as context_parallel.py says.

    Rows of part (heads, S, D) and part_lse (heads, S) are dense; those of o and lse begin a sequence's STRIDE apart.
    Grid: a program per BLOCK rows. Bound: memory, three times the part's bytes.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    there = row // S * STRIDE + row % S
    lse = tl.load(lse_ptr + there, mask=inside, other=0.0)
    part_lse = tl.load(part_lse_ptr + row, mask=inside, other=0.0)
    share = 1.0 / (1.0 + tl.exp(lse - part_lse))
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (d < D)
    o = tl.load(o_ptr + there[:, None] * D + d, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + row[:, None] * D + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(o_ptr + there[:, None] * D + d, (o + share[:, None] * (part - o)).to(o_ptr.dtype.element_ty), mask=mask)
    low, high = tl.minimum(lse, part_lse), tl.maximum(lse, part_lse)
    tl.debug_barrier()  # all warps have read lse
    tl.store(lse_ptr + there, high + tl.log(1.0 + tl.exp(low - high)), mask=inside)
