"""Tiny data in the official layouts, generated."""

import pickle

import numpy as np
import pytest


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with tiny versions of all data sets."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    lay_cifar(root, rng)
    lay_wikitext(root, rng)
    return root


@pytest.fixture(autouse=True)
def _tiny_is_whole(monkeypatch, request):
    """Tasks take the tiny data for the real."""
    if "tiny" in request.fixturenames:
        from madam_lab.tasks import TASKS
        from madam_lab.tasks.wikitext import read_words

        root = request.getfixturevalue("tiny")
        monkeypatch.setattr(TASKS["cifar10"], "sizes", (45, 9))
        monkeypatch.setattr(TASKS["cifar100"], "sizes", (40, 20))
        sizes = {name: len(words) for name, words in read_words(root)[0].items()}
        monkeypatch.setattr(TASKS["wikitext2"], "sizes", sizes)
