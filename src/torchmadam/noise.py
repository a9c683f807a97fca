"""Random bits that depend on place and time only, and rounding with them.

There is no generator and no generator state. The 32 bits that one weight sees at one step are a pure function of

    (seed, the parameter's index, the step, the element's position in memory)

so a resumed run, a sharded tensor and a GPU kernel all see the same bits.
"""

import functools
import hashlib
import struct

import torch
from torch import Tensor

# Mixers: SplitMix64's finaliser (Steele et al. 2014) for the key, a two-multiply 32-bit one (C. Wellons, "lowbias32"
# family) for the elements. 32-bit multiplies are cheap on a GPU; 64-bit ones are not. Written as signed integers,
# because torch multiplies int32 and int64 modulo 2^32 and 2^64.
_MIX64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX32 = (0x21F0AAAD, 0xD35A2D97 - 2**32)
_WEYL64 = 0x9E3779B97F4A7C15 - 2**64
# Odd multipliers of eight neighbours, first and difference. For every two of them (a, b) the points (a x, b x) modulo
# 2^32 make a lattice whose shortest vector is above 63,000; the best there are have one of 70,400.
_NEIGHBOUR = (0xA7E4D12D - 2**32, 0xF6FD7916 - 2**32)


@functools.lru_cache(maxsize=2**16)
def stream(seed: int, index: int) -> int:
    """The 64-bit key, as a signed integer, of parameter number ``index`` under ``seed``."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(shape: torch.Size, key: int, step: Tensor, first: int = 0) -> Tensor:
    """32 random bits for each element of a tensor of this shape, as int32, on the device of ``step``.

    ``key`` is the parameter's :func:`stream`; ``step`` a 0-d tensor, read on its device without a synchronisation;
    ``first`` the position in the parameter of the tensor's first element.
    """
    low, high = halves(key, step)
    return _finished(_mixed(_positions(shape, step, first), low, high) * _MIX32[1]).view(shape)


def shared_bits(shape: torch.Size, key: int, step: Tensor, first: int = 0) -> Tensor:
    """:func:`random_bits` for kernels, where eight neighbours multiply one random word by numbers of their own.

    The upper bits are what to use: each element's are uniform, and any two elements' uncorrelated; three neighbours'
    are not, since the numbers are evenly spaced.
    """
    low, high = halves(key, step)
    position = _positions(shape, step, first)
    begin, each = _NEIGHBOUR
    return (_mixed(position >> 3, low, high) * ((position & 7).to(torch.int32) * each + begin)).view(shape)


def _positions(shape: torch.Size, beside: Tensor, first: int) -> Tensor:
    end = first + shape.numel()
    dtype = torch.int32 if end < 2**31 else torch.int64
    return torch.arange(first, end, dtype=dtype, device=beside.device)


def halves(key: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit halves of the key of a parameter's stream at a step."""
    word = step.to(torch.int64) * _WEYL64 + key
    for shift, multiplier in zip((30, 27), _MIX64, strict=True):
        word = (word ^ _shift_right(word, shift, 64)) * multiplier
    word = word ^ _shift_right(word, 31, 64)
    return word.to(torch.int32), _shift_right(word, 32, 64).to(torch.int32)


def key_halves(key: int, step: int) -> tuple[int, int]:
    """:func:`halves` of numbers, as unsigned ones."""
    word = (step * _WEYL64 + key) % 2**64
    for shift, multiplier in zip((30, 27), _MIX64, strict=True):
        word = (word ^ word >> shift) * multiplier % 2**64
    word ^= word >> 31
    return word & 0xFFFFFFFF, word >> 32


def _mixed(position: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A random word for each position and the halves of a key, but for its last multiplication."""
    if position.dtype == torch.int64:
        high = high ^ _shift_right(position, 32, 64).to(torch.int32)
    bits = position.to(torch.int32) ^ low
    bits = (bits ^ _shift_right(bits, 16, 32)) * _MIX32[0]
    # The second half of the key enters between the multiplies; entering only at the front, it would merely shift the
    # sequence, and two steps would share one.
    return bits ^ _shift_right(bits, 15, 32) ^ high


def _finished(bits: Tensor) -> Tensor:
    """A product whose low bits are random, too."""
    return bits ^ _shift_right(bits, 15, 32)


def random_bits_like(tensor: Tensor, key: int, step: Tensor, first: int = 0) -> Tensor:
    """:func:`random_bits` for each element of a tensor, by its position in memory (row-major, if memory has gaps)."""
    low, high = halves(key, step)
    return _finished(_mixed(positions_like(tensor, first), low, high) * _MIX32[1])


def positions_like(tensor: Tensor, first: int = 0) -> Tensor:
    """The position in memory of each element of a tensor, counted from ``first`` (row-major, if memory has gaps)."""
    place = _positions(tensor.shape, tensor, first)
    order = memory_order(tensor)
    in_memory = tensor.permute(order)
    if not in_memory.is_contiguous():
        return place.view(tensor.shape)
    return place.view(in_memory.shape).permute(sorted(range(tensor.dim()), key=order.__getitem__))


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor, from the slowest in memory to the fastest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor, as it lies in memory."""
    return tensor.permute(memory_order(tensor)).view(-1)


def _shift_right(x: Tensor, by: int, width: int) -> Tensor:
    """A logical shift of signed integers ``width`` bits wide; torch's ``>>`` copies the sign bit."""
    return (x >> by) & ((1 << (width - by)) - 1)


def round_stochastic(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 ``values`` to bfloat16 or float16, up with a probability equal to the fraction cut off.

    The result is unbiased, so that relative steps far below the spacing of ``dtype`` survive on average.
    """
    lost = {torch.bfloat16: 16, torch.float16: 13}[dtype]  # mantissa bits of float32 that dtype does not have
    mask = (1 << lost) - 1
    rounded = ((values.view(torch.int32) + (bits & mask)) & ~mask).view(torch.float32)
    if dtype == torch.float16:
        # Below 2^-14 float16 has a fixed spacing of 2^-24.
        quanta = (values.abs() * 2.0**24 + (bits & mask) * 2.0**-lost).floor()
        subnormal = torch.copysign(quanta * 2.0**-24, values)
        rounded = torch.where(values.abs() < 2.0**-14, subnormal, rounded)
    return rounded.to(dtype)


def largest_below(limit: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of ``dtype`` that is not above the positive float32 ``limit``, as float32."""
    nearest = limit.to(dtype)
    below = (nearest.view(torch.int16) - 1).view(dtype)
    return torch.where(nearest.float() > limit, below, nearest).float()
