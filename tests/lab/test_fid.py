"""FID: the distance, the resize, the cache, and a published number."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import fid as benchmark

from madam_lab import fid
from madam_lab.data import DataError
from madam_lab.tasks import TASKS

CPU = torch.device("cpu")
DATA = Path(os.environ.get("MADAM_DATA", "data"))


def normal(mean, covariance):
    return fid.Statistics(torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64))


def test_the_distance_of_independent_normals_is_the_textbooks():
    a, b = normal([1.0, 2.0], [[4.0, 0.0], [0.0, 9.0]]), normal([0.0, 4.0], [[1.0, 0.0], [0.0, 16.0]])
    # |m|^2 = 1 + 4; (2 - 1)^2 + (3 - 4)^2 = 2
    assert fid.distance(a, b) == pytest.approx(7.0)
    assert fid.distance(b, a) == pytest.approx(7.0)
    assert fid.distance(a, a) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("count", [500, 12])
def test_the_root_of_a_product_is_that_of_its_eigenvalues_even_where_covariances_are_singular(count):
    torch.manual_seed(0)
    mix = torch.randn(20, 20)
    a, b = (fid.statistics(torch.randn(count, 20) @ mix + i) for i in range(2))
    product = (a.covariance @ b.covariance).numpy()
    roots = np.sqrt(np.maximum(np.linalg.eigvals(product).real, 0)).sum()
    expected = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * roots
    assert fid.distance(a, b) == pytest.approx(float(expected), rel=1e-6)


def test_statistics_are_float64_and_unbiased():
    features = torch.randn(30, 4)
    found = fid.statistics(features)
    np.testing.assert_allclose(found.covariance, np.cov(features.double().numpy(), rowvar=False))
    np.testing.assert_allclose(found.mean, features.double().mean(0))


@pytest.mark.parametrize(("old", "new"), [(32, 299), (7, 5), (4, 4)])
def test_pictures_are_resized_as_tensorflow_1_did(old, new):
    torch.manual_seed(0)
    image = torch.rand(1, 2, old, old) * 255
    expected = np.zeros((2, new, new))
    source, scale = image[0].double().numpy(), old / new
    for i in range(new):
        for j in range(new):
            y, x = i * scale, j * scale
            top, left = int(y), int(x)
            bottom, right = min(top + 1, old - 1), min(left + 1, old - 1)
            dy, dx = y - top, x - left
            upper = source[:, top, left] * (1 - dx) + source[:, top, right] * dx
            lower = source[:, bottom, left] * (1 - dx) + source[:, bottom, right] * dx
            expected[:, i, j] = upper * (1 - dy) + lower * dy
    np.testing.assert_allclose(fid.resized(image, new)[0].numpy(), expected, atol=2e-3)


def test_features_do_not_depend_on_autocast_or_on_the_size_of_batches(tiny, monkeypatch):
    network = fid.Inception(tiny, CPU, any_network=True)
    pictures = torch.randint(256, (7, 32, 32, 3), dtype=torch.uint8)
    plain = network(pictures)
    monkeypatch.setitem(fid._BATCH, "cpu", 3)
    with torch.autocast("cpu", torch.bfloat16):
        again = network(pictures)
    assert again.dtype == torch.float32
    assert torch.backends.cudnn.allow_tf32  # as it was
    torch.testing.assert_close(plain, again)


class Counting:
    """The network, and how often it was asked."""

    def __init__(self, network):
        self.digest, self.device, self._network, self.calls = network.digest, network.device, network, 0

    def __call__(self, pictures):
        self.calls += 1
        return self._network(pictures)


def test_statistics_of_real_pictures_are_measured_once_for_a_network_and_a_set(tiny, tmp_path):
    network = Counting(fid.Inception(tiny, CPU, any_network=True))
    pictures = torch.randint(256, (9, 32, 32, 3), dtype=torch.uint8)
    first = fid.cached_statistics(network, pictures, tmp_path / "cache")
    second = fid.cached_statistics(network, pictures, tmp_path / "cache")
    assert network.calls == 1
    assert torch.equal(first.covariance, second.covariance)
    assert torch.equal(first.mean, second.mean)
    other = pictures.clone()
    other[8, 31, 31, 2] ^= 1
    fid.cached_statistics(network, other, tmp_path / "cache")
    assert network.calls == 2
    network.digest = "another"
    fid.cached_statistics(network, pictures, tmp_path / "cache")
    assert network.calls == 3
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(b"PK damaged")
    fid.cached_statistics(network, pictures, tmp_path / "cache")
    assert network.calls == 4


def test_no_damage_to_a_cache_ends_a_run_or_changes_a_distance(tiny, tmp_path):
    network = Counting(fid.Inception(tiny, CPU, any_network=True))
    pictures = torch.randint(256, (9, 32, 32, 3), dtype=torch.uint8)
    expected = fid.cached_statistics(network, pictures, tmp_path)
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    for seed in range(60):
        blob = bytearray(sound)
        place = int(torch.randint(len(blob), (), generator=torch.Generator().manual_seed(seed)))
        blob[place : place + 4] = b"\xff\x00\xff\xfe"
        path.write_bytes(blob)
        found = fid.cached_statistics(network, pictures, tmp_path)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.covariance, expected.covariance)
    assert network.calls > 20


def test_a_cache_that_cannot_be_written_is_said(tiny, tmp_path):
    network = fid.Inception(tiny, CPU, any_network=True)
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.warns(UserWarning, match="the next run measures again"):
        fid.cached_statistics(network, torch.zeros(3, 32, 32, 3, dtype=torch.uint8), tmp_path / "cache")


def test_a_fid_is_timed_and_keeps_its_statistics_apart_from_the_data(tiny, tmp_path, monkeypatch):
    before = sorted(tiny.rglob("*"))
    arguments = ["--smoke", "--device", "cpu", "--data", str(tiny), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fid", *arguments])
    benchmark.main()
    found = json.loads((tmp_path / "cpu-fid-smoke.json").read_text())["fid"]
    assert found["pictures"] == 10
    assert found["first"] > 0 < found["later"]
    assert sorted(tiny.rglob("*")) == before


def test_a_missing_a_foreign_and_a_damaged_network_say_which_command_mends_it(tiny, tmp_path):
    with pytest.raises(DataError, match=r"is missing.*`madam data inception`"):
        fid.Inception(tmp_path, CPU)
    with pytest.raises(DataError, match="another network than the one FID is defined on"):
        fid.Inception(tiny, CPU)
    (tmp_path / "inception").mkdir()
    (tmp_path / fid.NETWORK).write_bytes(b"nothing")
    with pytest.raises(DataError, match="no TorchScript"):
        fid.Inception(tmp_path, CPU, any_network=True)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / fid.NETWORK).exists(), reason="needs the Inception network and CIFAR-10 in MADAM_DATA")
def test_five_thousand_pictures_of_either_split_are_as_far_apart_as_torch_fidelity_says():
    """10.32333: its own test of itself, on pictures drawn with NumPy's RandomState(2020)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cifar = TASKS["cifar10"](DATA, CPU, batch=1, seed=0)
    network = fid.Inception(DATA, device)
    found = []
    for images, _ in (cifar.train, cifar.test):
        rows = np.random.RandomState(2020).choice(len(images), 5000, replace=False)
        found.append(fid.statistics(network(images[torch.from_numpy(rows)])))
    assert fid.distance(*found) == pytest.approx(10.3233274, abs=1e-3)
