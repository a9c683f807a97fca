"""Pieces of the rule as Triton functions. Each mirrors a reference: noise.py, moment.py, update.py or ladder/format.py.

Codes must come out exactly as the reference makes them, given its moments, and exactly rounded division and square root
are slow. So a step of codes is first made with a fast reciprocal root; only blocks in which some weight came so close
to a rounding's threshold that the error could matter, one in fifty or so, are done again in the reference's own
arithmetic. Kernels that have to agree with it are launched with ``enable_fp_fusion=False``. One thing is their own: the
tanh of a signed ladder's decay, by which one code in some ten million goes another way in a step.
"""

import triton
import triton.language as tl

WHOLE = tl.constexpr(0x4B400000)  # the bits of 1.5 x 2^23, to which a whole number was added
DOUBTFUL = tl.constexpr(0x3EFFFFCD)  # the bits of .4999985: half, less what rounding and the bits left out can do


@triton.jit
def random_key(stream, step):
    """The two 32-bit halves of the key of a parameter's stream at a step (noise.random_bits)."""
    word = step.to(tl.int64).to(tl.uint64) * 0x9E3779B97F4A7C15 + stream.to(tl.uint64)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def mixed(position, low, high):
    """noise._mixed."""
    bits = position.to(tl.uint32) ^ low
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = bits ^ (bits >> 15) ^ high
    if position.dtype.primitive_bitwidth > 32:
        bits = bits ^ (position.to(tl.uint64) >> 32).to(tl.uint32)
    return bits


@triton.jit
def random_bits(position, low, high):
    """32 random bits for each position (noise.random_bits)."""
    bits = mixed(position, low, high) * 0xD35A2D97
    return bits ^ (bits >> 15)


@triton.jit
def shared_bits(eighth, neighbour, low, high):
    """noise.shared_bits, from an eighth of the position and what is left over."""
    return mixed(eighth, low, high) * (neighbour.to(tl.uint32) * 0xF6FD7916 + 0xA7E4D12D)


@triton.jit
def moment_of(grad, moment, beta, fresh, MOMENT: tl.constexpr):
    """The new second moment, and where the gradient was usable (update.direction_). ``fresh`` is 1 - beta."""
    square = grad * grad
    usable = square <= 8.507059173023462e37  # moment.LARGEST; false for infinity and NaN
    if MOMENT:
        moment = tl.where(usable, moment * beta + square * fresh, moment)
    return moment, usable


@triton.jit
def averaged(grad, mean, momentum, recent):
    """The new first moment (mean.Mean), before it is rounded. ``recent`` is 1 - momentum."""
    return mean * momentum + grad * recent


@triton.jit
def direction(grad, moment, correction, max_step, MOMENT: tl.constexpr, CORRECT: tl.constexpr):
    """U to the last bit (update.direction_), for gradients that are usable."""
    if MOMENT:
        if CORRECT:
            rms = tl.sqrt_rn(tl.div_rn(moment, correction))
        else:
            rms = tl.sqrt_rn(moment)
        u = tl.div_rn(grad, tl.where(rms > 0, rms, 1.0))
        u = tl.where((rms > 0) & (tl.abs(u) <= 3.4028234663852886e38), u, 0.0)
        u = tl.minimum(tl.maximum(u, -max_step), max_step)
    else:
        u = sign(grad)
    return u


@triton.jit
def fast_direction(grad, moment, inverse, max_step, MOMENT: tl.constexpr, CORRECT: tl.constexpr):
    """U to 21 bits; ``inverse`` is one over the correction.

    A GPU takes the smallest moments for zeros, of which the root is infinite: so none is as small as that.
    """
    if MOMENT:
        if CORRECT:
            u = grad * tl.rsqrt(moment * inverse + 1.1754943508222875e-38)
        else:
            u = grad * tl.rsqrt(moment + 1.1754943508222875e-38)
        u = tl.where(moment > 0, tl.minimum(tl.maximum(u, -max_step), max_step), 0.0)
    else:
        u = sign(grad)
    return u


@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def exp(a):
    """For sizes of steps, between -80 and 80: tl.exp would take care of tiny results, three instructions more."""
    return tl.exp2(a * 1.4426950408889634)


@triton.jit
def sinh(a):
    """Without the cancellation of exp(a) - exp(-a) near zero."""
    square = a * a
    near = a * (1 + square * 0.16666667 * (1 + square * 0.05 * (1 + square * 0.023809524)))
    far = 0.5 * (exp(a) - exp(-a))
    return tl.where(tl.abs(a) < 0.7, near, far)


@triton.jit
def moved(w, a, width):
    """One step of log-size a (update.moved); a width of zero is the paper's rule."""
    out = w * exp(tl.where(w < 0, a, -a))
    if width > 0:
        x = tl.abs(w) * (1 / tl.maximum(width, 1.2e-38))
        out = out - width / (tl.sqrt(1 + x * x) + x) * sinh(a)
    return out


@triton.jit
def round_half_even(x):
    """The nearest whole number, for |x| < 2^22: adding 1.5 x 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded(x, bits, STOCHASTIC: tl.constexpr):
    """X as a whole number (ladder.format.rounded)."""
    if STOCHASTIC:
        return tl.floor(x + (bits >> 8).to(tl.float32) * 5.9604644775390625e-08)
    else:
        return round_half_even(x)


@triton.jit
def fast_constants(inverse, rate, beta, fresh, max_step, HAS_MOMENT: tl.constexpr):
    """What :func:`fast_move` needs, factors of moments and of squares; and between what sizes it can be trusted.

    Those are the bits of the largest moment; the smallest moment; twice the bits of the smallest gradient, or the
    smallest exponent of a group of 8-bit moments: either says that no moment is smaller than it may be.
    """
    factor = tl.div_rn(inverse, rate * rate) * 1073741824.0  # rounded once: the error of fast_move has little room
    share = 1.0 / (max_step * max_step * inverse)
    most, smallest, least, exponent = inverse * 0 + 8.507059173023462e37, inverse * 0, inverse * 0, 1
    if HAS_MOMENT:  # the sum in fast_move is exact to 24 bits and finite; and gradients are usable
        most = tl.minimum(7.9e37, 7.9e37 / factor) / tl.maximum(share / fresh, 1.0)
        most = tl.minimum(most, fresh * 4.2e37)
        # By 2^40 and 2^-20, because small numbers may be taken for zero here.
        moment = tl.maximum(1.7347234759768071e-18 / factor, 6.5e-27 * tl.maximum(share, 1.0))
        # A moment is at least fresh times the square of the gradient; and beta times 2^(exponent - 127).
        least = tl.sqrt(moment / fresh) * 9.5367431640625e-07
        exponent = ((moment / beta).to(tl.int32, bitcast=True) >> 23) + (2 - 40)
        smallest = tl.maximum(moment * 9.094947017729282e-13, 2.4e-38)
    return factor, share, most.to(tl.uint32, bitcast=True), smallest, 2 * least.to(tl.uint32, bitcast=True), exponent


@triton.jit
def fast_move(grad, square, moment, factor, share, rate, HAS_MOMENT: tl.constexpr):
    """U times rate, times 2^-15, to 21 bits."""
    if HAS_MOMENT:
        # Where u would be above max_step, its square is what the moment is too small for.
        moment = tl.maximum(moment, square * share)
        return grad * tl.rsqrt(tl.fma(moment, factor, 1.1754943508222875e-38))
    else:
        return sign(grad) * (rate * 3.0517578125e-05)


@triton.jit
def fast_rounded(x, lost, bits, NEGATE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """What :func:`rounded` makes of 2^15 x or -2^15 x, plus WHOLE; and a doubt: above DOUBTFUL x is too inexact.

    X has the error of :func:`fast_move`, a number that was larger than x by up to ``lost``.
    """
    FACTOR: tl.constexpr = -32768.0 if NEGATE else 32768.0
    WHOLES: tl.constexpr = 12582907.0 if STOCHASTIC else 12582912.0
    if STOCHASTIC:
        # 21 of the bits as a number between 4.5 and 5.5, which 5 less makes of a rounding to nearest.
        y = tl.fma(x, FACTOR, ((bits >> 11) + 0x40900000).to(tl.float32, bitcast=True))
    else:
        y = x * FACTOR
    shifted = y + WHOLES
    doubt = tl.fma(tl.abs(x) + lost, 0.03125, tl.abs(y - (shifted - WHOLES)))
    return shifted.to(tl.int32, bitcast=True), doubt


@triton.jit
def nearest_bfloat16(w):
    """Float32 rounded to bfloat16, half to even, by integers: Triton's interpreter would cut the rest off."""
    raw = w.to(tl.int32, bitcast=True)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def widened(bits):
    """Float32 from the bits of bfloat16, as 16-bit integers: Triton's interpreter loses the smallest numbers."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper_bits(w, position, phase):
    """The inverse of :func:`widened`, rounded by a dither (mean.Mean)."""
    dither = (position.to(tl.uint32) * 0xC2B2AE35 + phase) >> 16
    return ((w.to(tl.int32, bitcast=True) + dither.to(tl.int32)) >> 16).to(tl.int16)


@triton.jit
def narrowed(w, bits, LOST: tl.constexpr):
    """Float32 with its LOST lowest mantissa bits rounded away stochastically (noise.round_stochastic)."""
    mask: tl.constexpr = (1 << LOST) - 1
    raw = w.to(tl.int32, bitcast=True) + (bits & mask).to(tl.int32)
    out = (raw & ~mask).to(tl.float32, bitcast=True)
    if LOST == 13:  # float16: below 2^-14 its spacing is fixed
        fraction = (bits & mask).to(tl.float32) * 0.0001220703125
        small = tl.floor(tl.abs(w) * 16777216.0 + fraction) * 5.9604644775390625e-08
        out = tl.where(tl.abs(w) < 6.103515625e-05, tl.where(w < 0, -small, small), out)
    return out
