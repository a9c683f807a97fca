"""Tiny data in the official layouts, generated."""

import pickle
import warnings

import numpy as np
import torch
from torch import nn

from madam_lab import pictures


def lay_cifar(root, rng, protocol=2):
    ten = root / "cifar-10-batches-py"
    ten.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels = [int(v) for v in rng.integers(0, 10, 9)]
        data = rng.integers(0, 256, (9, 3072), dtype=np.uint8)
        entries = {b"batch_label": name.encode(), b"labels": labels, b"data": data, b"filenames": [b"x.png"] * 9}
        (ten / name).write_bytes(pickle.dumps(entries, protocol=protocol if i else 4))
    hundred = root / "cifar-100-python"
    hundred.mkdir()
    for name, count in (("train", 40), ("test", 20)):
        entries = {
            b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            b"fine_labels": [int(v) for v in rng.integers(0, 100, count)],
            b"coarse_labels": [0] * count,
        }
        (hundred / name).write_bytes(pickle.dumps(entries, protocol=protocol))


def lay_wikitext(root, rng):
    folder = root / "wikitext-2"
    folder.mkdir(parents=True)
    words = [f"word{i}" for i in range(40)] + ["<unk>", "="]
    for split, lines in (("train", 60), ("valid", 30), ("test", 30)):
        text = ["" if i % 7 == 0 else " " + " ".join(rng.choice(words, 9)) + " " for i in range(lines)]
        (folder / f"{split}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")


def lay_inception(root):
    """A network with Inception's interface and eight features, with random weights."""
    folder = root / "inception"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(100, 99), nn.Flatten(), nn.Linear(27, 8), nn.Tanh())
    with warnings.catch_warnings():  # TorchScript is deprecated, and what the real one comes in
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(net, torch.zeros(2, 3, 299, 299)), str(folder / "fid_inception_2015_12_05.pt"))


def lay_photographs(root, rng):
    """Caches of ImageNet and Imagenette: pictures of any sizes, of three classes."""
    for name in ("imagenet", "imagenette"):
        splits = {}
        for split, count in (("train", 21), ("val", 10)):
            sizes = rng.integers(30, 60, (count, 2))
            drawn = [torch.from_numpy(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
            splits[split] = [(picture, i % 3) for i, picture in enumerate(drawn)]
        counts = {split: len(held) for split, held in splits.items()}
        classes = ["n01", "n02", "n03"]
        pictures.store(root / f"{name}-cache", classes, splits, counts, pictures.Tally(), say=lambda line: None)
