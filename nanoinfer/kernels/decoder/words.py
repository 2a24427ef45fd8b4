"""How the programs of one kernel hand vectors to each other, while all of them run.

A word is a number whose low byte says which turn it belongs to. Programs store words one by one, and others wait for
them: so the message is its own flag, and no barrier, counter or fence takes time beside it. A place must be written in
each turn, by which all programs have read what the turn before has left there.

The number is float32, less its last eight bits: it keeps numbers of 16 bits as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TURNS = tl.constexpr(256)


@triton.jit
def publish(ptrs, x, turn):
    """Store numbers, float32, as the words of a turn, below TURNS."""
    words = (x.to(tl.int32, bitcast=True) & -TURNS) | turn
    if INTERPRETED:
        tl.store(ptrs, words)
    else:  # a store of Triton's would first bring the numbers to other threads
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [ptrs, words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def publish_some(ptrs, x, turn, mask):
    """Store those where the mask, of x's shape, is True."""
    words = (x.to(tl.int32, bitcast=True) & -TURNS) | turn
    if INTERPRETED:
        tl.store(ptrs, words, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [ptrs, words, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def receive(ptrs, turn):
    """Wait until one to three tensors of pointers, a tuple, of one shape, show words of this turn.

    Returns their numbers, float32, in a tuple. Each thread waits for its own words.
    """
    numbers = ()
    if INTERPRETED:
        for i in tl.static_range(len(ptrs)):
            words = tl.load(ptrs[i], volatile=True)
            while tl.max(tl.ravel(words ^ turn) & (TURNS - 1)) != 0:
                words = tl.load(ptrs[i], volatile=True)
            numbers += (_number(words),)
    else:
        PACK: tl.constexpr = _pack(ptrs[0].numel, tl.extra.cuda.num_threads())
        COUNT: tl.constexpr = len(ptrs) * PACK
        # A loop that runs once. Without it, Triton would wait again for each layout that the numbers are wanted in.
        waits = turn >= 0
        words0 = tl.zeros(ptrs[0].shape, tl.int32)
        words1 = words0
        words2 = words0
        if len(ptrs) == 1:
            while waits:
                words0 = tl.inline_asm_elementwise(
                    _wait(COUNT), _operands(COUNT, PACK), [ptrs[0], turn], dtype=tl.int32, is_pure=False, pack=PACK
                )
                waits = False
            numbers = (_number(words0),)
        elif len(ptrs) == 2:
            while waits:
                words0, words1 = tl.inline_asm_elementwise(
                    _wait(COUNT),
                    _operands(COUNT, PACK),
                    [ptrs[0], ptrs[1], turn],
                    dtype=(tl.int32, tl.int32),
                    is_pure=False,
                    pack=PACK,
                )
                waits = False
            numbers = (_number(words0), _number(words1))
        else:
            tl.static_assert(len(ptrs) == 3)
            while waits:
                words0, words1, words2 = tl.inline_asm_elementwise(
                    _wait(COUNT),
                    _operands(COUNT, PACK),
                    [ptrs[0], ptrs[1], ptrs[2], turn],
                    dtype=(tl.int32, tl.int32, tl.int32),
                    is_pure=False,
                    pack=PACK,
                )
                waits = False
            numbers = (_number(words0), _number(words1), _number(words2))
    return numbers


@triton.jit
def settled(x, turn):
    """Return 16-bit numbers as they are, so that Triton computes them once, not in each layout that they are wanted in.

    turn: any number that is not negative
    """
    if INTERPRETED:
        return x
    else:
        y = tl.zeros(x.shape, x.dtype)
        waits = turn >= 0
        while waits:
            y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
            waits = False
        return y


@triton.jit
def _number(words):
    return (words & -TURNS).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _pack(numbers: int, threads: int) -> int:
    """Return how many of the numbers a thread has."""
    return max(numbers // threads, 1)


@triton.constexpr_function
def _wait(count: int) -> str:
    """Return the code that loads so many words until all have the turn's byte."""
    words, turn = range(count), 2 * count
    loads = "".join(f"ld.relaxed.gpu.global.b32 w{i}, [${count + i}]; " for i in words)
    differences = "".join(f"xor.b32 t, w{i}, ${turn}; or.b32 d, d, t; " for i in words)
    results = "".join(f"mov.b32 ${i}, w{i}; " for i in words)
    return (
        f"{{ .reg .pred p; .reg .b32 t, d, w<{count}>; again: {loads} mov.b32 d, 0; {differences}"
        f" and.b32 d, d, 255; setp.ne.b32 p, d, 0; @p bra again; {results} }}"
    )


@triton.constexpr_function
def _operands(count: int, pack: int) -> str:
    """Return the operands of _wait: the words, their addresses, and the turn, once for each number of a thread."""
    return ",".join(["=r"] * count + ["l"] * count + ["r"] * pack)
