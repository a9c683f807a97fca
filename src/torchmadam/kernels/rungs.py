"""From the words of codes that linear.py loads to weights, in Triton and in PTX, with as few instructions as there are.

Tensors have linear.py's dimensions, the last of them words; of weights 16 instead of words, half a group.
"""

import triton
import triton.language as tl


@triton.jit
def halves(parts):
    """Half a group's weights, or what they will be of, from tensors with one more dimension."""
    return tl.reshape(parts, [parts.shape[0], parts.shape[1], parts.shape[2], parts.shape[3], 16])


@triton.jit
def repeated(words, TIMES: tl.constexpr):
    """Every word so many times, one after the other."""
    shape: tl.constexpr = [words.shape[0], words.shape[1], words.shape[2], words.shape[3], words.shape[4], TIMES]
    return halves(tl.broadcast_to(words[:, :, :, :, :, None], shape))


@triton.jit
def spread(words, WIDTH: tl.constexpr):
    """The 16 integers in the words of half a group."""
    COUNT: tl.constexpr = WIDTH // 2 if WIDTH > 1 else 1
    shift = WIDTH * tl.arange(0, 16 // COUNT)[None, None, None, None, None, :]
    return halves((words[:, :, :, :, :, None] >> shift) & ((1 << WIDTH) - 1))


@triton.jit
def bytes_of(words0, words1, W1: tl.constexpr):
    """Of planes of 8 and W1 bits, the bits of k 2^(8 - W1) in integers, with others beside them if W1 > 0.

    A byte with the weight's W1 bits on top, after one of the 8 / W1 shifts, goes below the weight's byte of the first.
    """
    i = tl.arange(0, 16)[None, None, None, None, :]
    word0 = repeated(words0, 4)
    if W1 == 0:  # and 2^23 above it
        raw = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x4B000000, $2;", "=r,r,r", [word0, 0x7540 + i % 4], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        EACH: tl.constexpr = 8 // W1
        COUNT: tl.constexpr = W1 // 2 if W1 > 1 else 1
        word1 = repeated(words1, 16 // COUNT) << (8 - W1 - W1 * (i % EACH))
        raw = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word0, word1, 0x4404 + (i % 4) * 16 + i // EACH % 4],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return raw


@triton.jit
def power_of_2(z):
    """2^z to 1e-4 without the unit for powers, which is slow: a polynomial between -1/2 and 1/2, and the exponent."""
    nearest = z + 12582912.0  # 3/2 of 2^23: the integer is in its last bits
    f = z - (nearest - 12582912.0)
    p = ((0.05517177 * f + 0.2426111) * f + 0.693261) * f + 0.9999281
    return (p.to(tl.int32, bitcast=True) + (nearest.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def rungs(
    words0, words1, whole, W0: tl.constexpr, W1: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    OFFSET: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Float32 weights without sign or limit, less a factor that all of them share (launch_linear.arithmetic).

    Conversions are slow, but the bits of an integer below those of 2^23 are those of 2^23 + it: here it is k, or
    k 2^(8 - W1). KIND 0: the paper's, 2^z with z = raw SCALE + OFFSET; of every P1 weights one leaves the unit for
    powers to the others. 1: sinh, as z ((z^2 + P1)^2 + P2). 2: sinh, as a difference of powers, 2^(z + P1) -
    2^(P1 - z) with z = (raw + OFFSET) SCALE.
    """
    if PLAIN or W0 < 8:
        raw = spread(words0, W0)
        if W1 > 0:
            raw = (raw << 8) | (spread(words1, W1) << (8 - W1))
        raw = raw | whole
    else:
        raw = bytes_of(words0, words1, W1)
        if W1 > 0:
            raw = (raw & (0x10000 - (1 << (8 - W1)))) | whole
    raw = raw.to(tl.float32, bitcast=True)
    if KIND == 0:
        if PLAIN:  # without a fused multiply-add
            z = (raw - 8388608.0) * SCALE + (OFFSET + 8388608.0 * SCALE)
        else:
            z = tl.fma(raw, SCALE, OFFSET)
        w = tl.exp2(z)
        if P1 > 0:
            w = tl.where(tl.arange(0, 16)[None, None, None, None, :] % P1 == 0, power_of_2(z), w)
    elif KIND == 1:
        z = raw * SCALE + OFFSET
        square = z * z + P1
        w = z * (square * square + P2)
    else:
        k = raw + OFFSET
        w = tl.exp2(k * SCALE + P1) - tl.exp2(k * -SCALE + P1)
    return w


@triton.jit
def sinh_of_bytes(words, zero, added):
    """KIND 3: z (z^2 + added) with z = k / 128 - zero, in float16, two weights an instruction; as bfloat16.

    A byte below 0x64 is 1024 + k, and zero is larger by 8 for it. Constants are twice in a word. Float16's errors and
    the cubic's, 6e-4, are lost in those of rounding to bfloat16, 1.7e-3 before and after.
    """
    a, b, c, d = tl.inline_asm_elementwise(
        "{ .reg .b32 u, v, s, t; .reg .b16 l, h, m, n; .reg .f32 f, g, i, j; "
        "prmt.b32 u, $4, 0x64646464, 0x4140; prmt.b32 v, $4, 0x64646464, 0x4342; "
        "fma.rn.f16x2 u, u, $5, $6; fma.rn.f16x2 v, v, $5, $6; "
        "fma.rn.f16x2 s, u, u, $7; fma.rn.f16x2 t, v, v, $7; "
        "mul.rn.f16x2 u, u, s; mul.rn.f16x2 v, v, t; "
        "mov.b32 {l, h}, u; cvt.f32.f16 f, l; cvt.f32.f16 g, h; cvt.rn.bf16x2.f32 u, g, f; "
        "mov.b32 {m, n}, v; cvt.f32.f16 i, m; cvt.f32.f16 j, n; cvt.rn.bf16x2.f32 v, j, i; "
        "mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v; }",
        "=h,=h,=h,=h,r,r,r,r", [words, 0x20002000, zero, added],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return halves(tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 1, 2, 3, 4, 6, 5)))


@triton.jit
def with_signs(low, high, negative, PLAIN: tl.constexpr, TYPE: tl.constexpr):
    """Two halves of groups with the signs of both, whose bits are in a word, rounded."""
    j = tl.arange(0, 16)[None, None, None, None, :]
    if PLAIN:
        low = low.to(tl.int32, bitcast=True) ^ ((negative >> j) << 31)
        high = high.to(tl.int32, bitcast=True) ^ ((negative >> (16 + j)) << 31)
        low, high = low.to(tl.float32, bitcast=True).to(TYPE), high.to(tl.float32, bitcast=True).to(TYPE)
    elif TYPE == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; lop3.b32 both, both, $4, 0x80008000, 0x78; "
            "mov.b32 {$0, $1}, both; }",
            "=h,=h,r,r,r", [low, high, negative << (15 - j)], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.f16x2.f32 both, $3, $2; lop3.b32 both, both, $4, 0x80008000, 0x78; "
            "mov.b32 {$0, $1}, both; }",
            "=h,=h,r,r,r", [low, high, negative << (15 - j)], dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def weights(
    low0, high0, low1, high1, negative, whole, W0: tl.constexpr, W1: tl.constexpr, SIGNS: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    PLAIN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Weights of both halves of groups, rounded to the type of x."""
    if KIND == 3:
        low = sinh_of_bytes(low0, OFFSET, P1)
        high = sinh_of_bytes(high0, OFFSET, P1)
    else:
        low = rungs(low0, low1, whole, W0, W1, KIND, SCALE, OFFSET, P1, P2, PLAIN)
        high = rungs(high0, high1, whole, W0, W1, KIND, SCALE, OFFSET, P1, P2, PLAIN)
        if SIGNS:
            low, high = with_signs(low, high, negative, PLAIN, TYPE)
        else:
            low, high = low.to(TYPE), high.to(TYPE)
    return low, high
