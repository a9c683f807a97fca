"""The digits that ship with the package."""

import hashlib

import torch

from madam_lab.tasks import digits

# sha256 of sklearn.datasets.load_digits().data and .target as uint8 bytes
DATA = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
TARGET = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"


def test_the_digits_are_the_ones_scikit_learn_carries():
    data = digits.load(standardised=False)
    pixels = (torch.cat([data.test_x, data.train_x]) * 16).round().to(torch.uint8)
    labels = torch.cat([data.test_y, data.train_y]).to(torch.uint8)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    back, names = torch.empty_like(pixels), torch.empty_like(labels)
    back[order], names[order] = pixels, labels
    assert hashlib.sha256(back.numpy().tobytes()).hexdigest() == DATA
    assert hashlib.sha256(names.numpy().tobytes()).hexdigest() == TARGET


def test_digits_are_standardised_over_the_training_set():
    data = digits.load()
    assert data.train_x.shape == (1437, 64)
    assert data.test_x.shape == (360, 64)
    torch.testing.assert_close(data.train_x.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    spread = data.train_x.std(0)
    assert set(spread.round(decimals=3).unique().tolist()) == {0.0, 1.0}
