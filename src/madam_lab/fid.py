"""The Frechet Inception distance (Heusel et al. 2017): how far one set of pictures is from another.

Both sets go through the Inception network of 2015-12-05; the distance is that of the normal distributions with the
means and covariances of its 2,048 features:

    FID = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))

Features are float32, and everything after them is float64. Pictures are bytes, and they are enlarged as TensorFlow 1
did it: numbers from another resize, or from floats that were never rounded to bytes, compare with nobody's.
"""

import contextlib
import hashlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from madam_lab.data import DataError
from torchmadam.files import write_atomically

NETWORK = "inception/fid_inception_2015_12_05.pt"
# Of the TorchScript file: its weights, and what it expects (pictures of 299 x 299 from -1 to 1), belong to the number.
SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
SIDE = 299
_BATCH = {"cuda": 500, "cpu": 50}

Features = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of a set's features, float64."""

    mean: Tensor
    covariance: Tensor

    def to(self, device: torch.device) -> "Statistics":
        """On another device."""
        return Statistics(self.mean.to(device), self.covariance.to(device))

    def digest(self) -> str:
        """A hash of every byte, of numbers that are on the CPU."""
        both = torch.cat([self.mean, self.covariance.flatten()])
        return hashlib.sha256(both.numpy().tobytes()).hexdigest()


class Inception:
    """The feature network, from a TorchScript file, and its digest.

    Args:
        root: the folder of the data sets.
        device: where it computes.
        any_network: take whatever TorchScript is there; for tiny runs that only show that everything works.
    """

    def __init__(self, root: Path, device: torch.device, *, any_network: bool = False) -> None:
        path = root / NETWORK
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"{path} is missing, and FID is defined on that network", "inception") from None
        self.digest = hashlib.sha256(blob).hexdigest()
        if self.digest != SHA256 and not any_network:
            raise DataError(f"{path} is another network than the one FID is defined on", "inception")
        try:
            with warnings.catch_warnings():  # TorchScript is deprecated, and the form this network is published in
                warnings.filterwarnings("ignore", ".*torch.jit", category=DeprecationWarning)
                warnings.filterwarnings("ignore", ".*torch.jit", category=FutureWarning)  # from PyTorch 2.14 on
                self._network = torch.jit.load(io.BytesIO(blob), map_location=device).eval()
        except RuntimeError as error:
            raise DataError(f"{path} is no TorchScript file", "inception") from error
        self.device = device

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Tensor:
        """Pictures, n x height x width x 3 bytes, to features, n x 2048, float32."""
        found = []
        with _exact(self.device):
            for part in pictures.split(_BATCH.get(self.device.type, 50)):
                x = resized(part.to(self.device).permute(0, 3, 1, 2).float(), SIDE)
                found.append(self._network((x - 128) / 128).float())
        return torch.cat(found)


@contextlib.contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Whole float32, whatever the training around it computes in: no bfloat16, no TF32."""
    cudnn = torch.backends.cudnn
    kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    with cudnn.flags(**kept, allow_tf32=False), torch.autocast(device.type, enabled=False):
        yield


def resized(images: Tensor, side: int) -> Tensor:
    """Bilinear, as in TensorFlow 1 without aligned corners: pixel i of the result lies at i * old / new of the source.

    So the first pixels lie on one another, and the last ones take from the border. PyTorch's own modes put the
    *middles* of pixels on one another, or both first and last ones.
    """
    for dim in (3, 2):
        old = images.shape[dim]
        place = torch.arange(side, device=images.device, dtype=torch.float32) * torch.tensor(old / side)
        low = place.long()
        high = (low + 1).clamp(max=old - 1)
        share = (place - low).view([side if d == dim else 1 for d in range(4)])
        below, above = images.index_select(dim, low), images.index_select(dim, high)
        images = below + (above - below) * share
    return images


def statistics(features: Tensor) -> Statistics:
    """Of features, n x f; the covariance is the unbiased one."""
    wide = features.double()
    mean = wide.mean(0)
    centred = wide - mean
    return Statistics(mean, centred.t() @ centred / (len(features) - 1))


def distance(a: Statistics, b: Statistics) -> float:
    """The FID between two sets.

    tr (C1 C2)^(1/2) is the sum of the roots of the eigenvalues of C1^(1/2) C2 C1^(1/2), which is symmetric: what
    rounding makes of eigenvalues at zero cannot become complex.
    """
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.t()
    inner = root @ b.covariance @ root
    mixed = torch.linalg.eigvalsh((inner + inner.t()) / 2).clamp(min=0).sqrt().sum()
    apart = (a.mean - b.mean).square().sum()
    return float(apart + a.covariance.trace() + b.covariance.trace() - 2 * mixed)


def cached_statistics(network: Inception, pictures: Tensor, folder: Path) -> Statistics:
    """Statistics of real pictures, kept on disk under a hash of the network and of every byte of the pictures."""
    digest = hashlib.sha256(network.digest.encode())
    digest.update(str(tuple(pictures.shape)).encode())
    digest.update(pictures.cpu().contiguous().numpy().tobytes())
    path = folder / f"{digest.hexdigest()[:32]}.pt"
    with contextlib.suppress(Exception):  # torch's unpickler raises whatever damaged bytes make of it
        held = torch.load(path, weights_only=True)
        kept = Statistics(held["mean"], held["covariance"])
        if held["sha256"] == kept.digest():
            return kept.to(network.device)
    found = statistics(network(pictures))
    buffer = io.BytesIO()
    here = found.to(torch.device("cpu"))
    torch.save({"mean": here.mean, "covariance": here.covariance, "sha256": here.digest()}, buffer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [buffer.getbuffer()])
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error}), so the next run measures again", stacklevel=2)
    return found
