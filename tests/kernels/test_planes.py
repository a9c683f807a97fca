"""What kernels do with bytes, apart from a step."""

import pytest
import torch
import triton
import triton.language as tl

from torchmadam.kernels import launch
from torchmadam.kernels.planes import permuted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def permute_kernel(first, second, selectors, out, PTX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = permuted(tl.load(first + i), tl.load(second + i), tl.load(selectors + i), PTX)
    tl.store(out + i, words)


def test_any_byte_of_two_words_can_go_anywhere(device):
    generator = torch.Generator().manual_seed(0)
    bytes_of_pairs = torch.randint(0, 256, (512, 8), dtype=torch.uint8, generator=generator)
    chosen = torch.randint(0, 8, (512, 4), generator=generator)
    expected = bytes_of_pairs.gather(1, chosen).view(torch.int32)[:, 0]
    first, second = bytes_of_pairs.view(torch.int32).to(device).T.contiguous()
    selectors = (chosen << torch.tensor([0, 4, 8, 12])).sum(1).to(device, torch.int32)
    out = torch.empty_like(first)
    permute_kernel[(1,)](first, second, selectors, out, launch._takes_ptx(device), 512)
    assert torch.equal(out.cpu(), expected)
