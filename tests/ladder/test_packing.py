"""Codes and bytes."""

import numpy as np
import pytest
import torch

from torchmadam import LadderFormat
from torchmadam.ladder import packing
from torchmadam.ladder.layout import CodeLayout


@pytest.mark.parametrize("bits", range(1, 16))
@pytest.mark.parametrize("columns", [1, 7, 8, 37, 64])
def test_unpacking_gives_back_what_was_packed_in_as_few_bytes_as_promised(bits, columns):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (5, columns), generator=generator, dtype=torch.int32)
    widths = packing.plane_widths(bits)
    assert sum(widths) == bits
    planes = packing.pack(codes, widths)
    assert [tuple(p.shape) for p in planes] == [(5, -(-columns * w // 8)) for w in widths]
    assert all(p.dtype == torch.uint8 for p in planes)
    assert torch.equal(packing.unpack(planes, widths, columns), codes)


def test_planes_hold_the_high_bits_first_and_earlier_elements_in_lower_bits():
    codes = np.random.default_rng(0).integers(0, 2**13, (3, 19))
    high, low, sign = packing.pack(torch.from_numpy(codes), (8, 4, 1))
    assert np.array_equal(high.numpy(), codes >> 5)
    nibbles = np.pad((codes >> 1) & 15, ((0, 0), (0, 1)))
    assert np.array_equal(low.numpy(), nibbles[:, 0::2] | nibbles[:, 1::2] << 4)
    assert np.array_equal(sign.numpy(), np.packbits(codes & 1, axis=1, bitorder="little"))


@pytest.mark.parametrize("signs", ["plane", "positive", "seed"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_a_layout_packs_and_unpacks_whole_tensors_and_ranges_of_rows(signs, order):
    layout = CodeLayout(LadderFormat.paper(12), (6, 5, 3, 2), order, signs, sign_key=77)
    codes = torch.randint(0, 4096, (6, 30), dtype=torch.int32)
    if signs == "plane":
        codes |= torch.randint(0, 2, (6, 30), dtype=torch.int32) << 12
    planes = layout.pack(codes)
    assert [tuple(p.shape) for p in planes] == layout.plane_shapes
    assert len(planes) == (3 if signs == "plane" else 2)
    whole = layout.unpack(planes)
    assert torch.equal(whole & 4095, codes & 4095)
    assert torch.equal(layout.unpack([p[2:5] for p in planes], 2), whole[2:5])
    if signs == "plane":
        assert torch.equal(whole, codes)
    elif signs == "positive":
        assert whole.max() < 4096
    else:
        assert 0.2 < (whole >> 12).float().mean() < 0.8


def test_signs_from_a_seed_do_not_depend_on_the_memory_order():
    shape, ladder = (6, 5, 3, 2), LadderFormat.paper(12)
    found = []
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        layout = CodeLayout(ladder, shape, order, "seed", sign_key=5)
        matrix = layout.unpack(layout.pack(torch.zeros(6, 30, dtype=torch.int32))) >> 12
        back = torch.empty(shape, dtype=torch.int32)
        back.permute(order).copy_(matrix.view([shape[d] for d in order]))
        found.append(back)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("shape", "order"),
    [((4, 3), (0, 1)), ((4, 3, 2, 5), (0, 2, 3, 1)), ((), ()), ((7,), (0,)), ((2, 3, 4, 5, 6), (0, 2, 3, 4, 1))],
)
def test_strides_are_pytorchs(shape, order):
    layout = CodeLayout(LadderFormat.paper(8), shape, order)
    formats = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
    expected = torch.empty(shape).contiguous(memory_format=formats.get(order, torch.contiguous_format))
    assert layout.strides == expected.stride()
