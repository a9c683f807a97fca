"""y = x W^T in Triton, with W as codes that are decoded in registers: for generation, where W is most of what is read.

A weight becomes a number where a tensor core wants it, in the thread that loaded its code. Sums do not mind in which
order columns are taken, so a thread takes 32 that lie side by side, a *group*: WIDTH words of a plane. Where signs are
stored, columns j and j + 16 are neighbours in a register: one shift brings both signs to their places. Tensors of
groups have the dimensions 4 x 8 x warps x rows / 8 x words: four groups of a row and eight rows are a warp, as in an
operand of mma.m16n8k16. Triton gives threads to dimensions in this order, from 3.7 on in the opposite one; so that we
turn the first four around if not UP. All ways are as correct, but with another weights would go from thread to thread.
"""

import triton
import triton.language as tl

from torchmadam.kernels.planes import fetch
from torchmadam.kernels.rungs import weights


@triton.jit
def along(AXIS: tl.constexpr, COUNT: tl.constexpr, UP: tl.constexpr):
    """0, 1, ... along one of the first four dimensions."""
    numbers = tl.arange(0, COUNT)
    PLACE: tl.constexpr = AXIS if UP else 3 - AXIS
    if PLACE == 0:
        numbers = numbers[:, None, None, None, None]
    elif PLACE == 1:
        numbers = numbers[None, :, None, None, None]
    elif PLACE == 2:
        numbers = numbers[None, None, :, None, None]
    else:
        numbers = numbers[None, None, None, :, None]
    return numbers


@triton.jit
def load_halves(at, start, group, mask, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """What a plane of so many bits a weight holds of columns 0 to 15 of groups, and of columns 16 to 31."""
    if WIDTH == 8:  # a load has at most 16 bytes
        word = at.to(tl.pointer_type(tl.uint32)) + start * 8 + tl.arange(0, 4)[None, None, None, None, :] + group * 8
        low, high = fetch(word, mask, EVEN), fetch(word + 4, mask, EVEN)
    else:
        # Of signs two words of 16 bits: a single word would be loaded together with those of other groups.
        TYPE: tl.constexpr = tl.uint32 if WIDTH > 1 else tl.uint16
        COUNT: tl.constexpr = WIDTH if WIDTH > 1 else 2
        word = start * COUNT + tl.arange(0, COUNT)[None, None, None, None, :] + group * COUNT
        words = fetch(at.to(tl.pointer_type(TYPE)) + word, mask, EVEN)
        words = tl.reshape(words, [words.shape[0], words.shape[1], words.shape[2], words.shape[3], 2, COUNT // 2])
        low, high = tl.split(tl.permute(words, (0, 1, 2, 3, 5, 4)))
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def load_inputs(at, start, group, mask, EVEN: tl.constexpr):
    """The same columns of x, in four parts, since a load has at most 16 bytes."""
    part = at + start * 32 + tl.arange(0, 8)[None, None, None, None, :] + group * 32
    first, second = fetch(part, mask, EVEN), fetch(part + 8, mask, EVEN)
    return first, second, fetch(part + 16, mask, EVEN), fetch(part + 24, mask, EVEN)


@triton.jit
def load_weights(
    plane0, plane1, signs, starts, group, mask, W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """A group a thread and row, of every plane; of a plane that is not there, words of the first."""
    low0, high0 = load_halves(plane0, starts, group, mask, W0, EVEN)
    low1, high1, negative = low0, high0, low0
    if W1 > 0:
        low1, high1 = load_halves(plane1, starts, group, mask, W1, EVEN)
    if SIGNS:
        low, high = load_halves(signs, starts, group, mask, 1, EVEN)
        negative = low | (high << 16)
    return low0, high0, low1, high1, negative


@triton.jit
def operand(
    low, high, PAIRS: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, UP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """S matrices of 8 ROWS x 128 from halves of groups, with columns where a tensor core wants what a thread has.

    PAIRS: columns j and j + 16 are neighbours in a register, else j and j + 1. Of 16 columns a thread has four: side
    by side if WIDE, as Triton has it up to 3.7; else two and two, as the instruction does.
    """
    both = tl.join(low, high)
    if not PAIRS:
        both = tl.permute(both, (0, 1, 2, 3, 5, 4))
    both = tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], both.shape[3], 8, 2, 2])
    if UP:
        both = tl.permute(both, (2, 3, 1, 0, 4, 5, 6))
    else:
        both = tl.permute(both, (1, 0, 2, 3, 4, 5, 6))
    if WIDE:
        both = tl.permute(both, (0, 1, 2, 4, 3, 5, 6))
    else:
        both = tl.permute(both, (0, 1, 2, 4, 5, 3, 6))
    return tl.reshape(both, [S, 8 * ROWS, 128])


@triton.jit
def joined(first, second):
    """Two parts of x, one after the other."""
    both = tl.permute(tl.join(first, second), (0, 1, 2, 3, 5, 4))
    return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], both.shape[3], 16])


@triton.jit
def linear_kernel(
    out, x, bias, limit, plane0, plane1, signs, batch, rows, factor,
    W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    OFFSET: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, B: tl.constexpr, UP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """At most B rows of x with R rows of W, whose columns S warps share.

    A turn's weights are loaded while the ones before them are worked on. They are rounded to x's type; the limit, which
    they share, multiplies the sums. PLAIN: nothing but Triton, for its interpreter.
    """
    ROWS: tl.constexpr = R // 8
    INPUTS: tl.constexpr = B // 8
    EVEN: tl.constexpr = GROUPS % (4 * S) == 0
    row = tl.program_id(0) * R + along(1, 8, UP) + 8 * along(3, ROWS, UP)
    input = along(1, 8, UP) + 8 * along(3, INPUTS, UP)
    # Beyond the last row it is the last again; nothing of that is stored.
    starts = tl.minimum(row, rows - 1).to(tl.int64) * GROUPS
    columns = tl.minimum(input, batch - 1).to(tl.int64) * GROUPS
    # Volatile, or the compiler would move it to where it is used, at the end, and everything would wait for it there.
    size = tl.load(limit, volatile=True)
    # The bits of 2^23, and not as a constant: an instruction has room for one. A limit is never below zero.
    whole = tl.where(size < 0, 0, 0x4B000000)
    total = tl.zeros([S, R, B], tl.float32)
    own = 4 * along(2, S, UP) + along(0, 4, UP)
    held0, held_high0, held1, held_high1, held_negative = load_weights(
        plane0, plane1, signs, starts, tl.minimum(own, GROUPS - 1), own < GROUPS, W0, W1, SIGNS, EVEN
    )
    for at in tl.range(0, GROUPS, 4 * S, num_stages=1, loop_unroll_factor=2 if B == 8 else 1):
        group = at + own
        mask = group < GROUPS
        low0, high0, low1, high1, negative = held0, held_high0, held1, held_high1, held_negative
        after = group + 4 * S
        held0, held_high0, held1, held_high1, held_negative = load_weights(
            plane0, plane1, signs, starts, tl.minimum(after, GROUPS - 1), after < GROUPS, W0, W1, SIGNS, EVEN
        )
        x0, x1, x2, x3 = load_inputs(x, columns, group, mask, EVEN)
        low, high = weights(
            low0, high0, low1, high1, negative, whole, W0, W1, SIGNS, KIND, SCALE, OFFSET, P1, P2, PLAIN,
            x.dtype.element_ty,
        )  # fmt: skip
        w = operand(low, high, SIGNS, S, ROWS, UP, WIDE)
        inputs = operand(joined(x0, x1), joined(x2, x3), SIGNS, S, INPUTS, UP, WIDE)
        if PLAIN:  # the interpreter would multiply bfloat16 as integers
            w, inputs = w.to(tl.float32), inputs.to(tl.float32)
        total = tl.dot(w, tl.permute(inputs, (0, 2, 1)), total)
    y = tl.sum(total, 0) * (size * factor)
    row, input = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, B)
    if BIAS:
        y += tl.load(bias + row, row < rows, other=0).to(tl.float32)[:, None]
    place = input.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), (input < batch)[None, :] & (row < rows)[:, None])
