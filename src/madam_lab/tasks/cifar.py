"""CIFAR-10 and CIFAR-100: pictures that live on the device, and are augmented there."""

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.data import DataError
from madam_lab.models.resnet import ResNet18
from madam_lab.tasks.task import Batch, Task, classification_sums, error_percent, generator

SIDE = 32
_EVALUATION_BATCH = 2000
_BATCHES_AT_ONCE = 8  # are augmented: many small operations would keep a GPU waiting


class ArraysOnly(pickle.Unpickler):
    """Reads the pickles that CIFAR comes in: containers, numbers, bytes and arrays of bytes, and nothing that can act.

    What a pickle may name are stand-ins of our own, made anew for every file: NumPy's own constructors believe whatever
    a file says about types and memory.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may name."""
        try:
            return self._known[module.replace("numpy.core", "numpy._core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays of bytes are read") from None


def _stand_ins() -> dict[tuple[str, str], Any]:
    class ByteType:
        """numpy.dtype, of which there is one."""

        def __init__(self, code: Any, *flags: Any) -> None:
            if code not in ("u1", "|u1", "uint8", b"u1", b"|u1"):
                raise pickle.UnpicklingError(f"an array of {code!r}, and only bytes are read")

        def __setstate__(self, state: Any) -> None:
            """Byte order and such: nothing that bytes have."""

    class Array:
        """numpy.ndarray, filled from bytes of the right number."""

        def fill(self, shape: Any, kind: Any, raw: Any) -> "Array":
            if not isinstance(kind, ByteType):
                raise pickle.UnpicklingError("an array without a type")
            self.value = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape([int(n) for n in shape])
            return self

        def __setstate__(self, state: Any) -> None:
            _, shape, kind, in_columns, raw = state
            if in_columns:
                raise pickle.UnpicklingError("an array in another order than rows")
            self.fill(shape, kind, raw)

    def from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> Array:
        if order not in ("C", b"C"):
            raise pickle.UnpicklingError("an array in another order than rows")
        return Array().fill(shape, kind, raw)

    def encode(text: str, encoding: Any) -> bytes:
        return text.encode("latin1")  # how protocol 2 writes bytes

    return {
        ("numpy", "dtype"): ByteType,
        ("numpy", "ndarray"): Array,
        ("numpy._core.multiarray", "_reconstruct"): lambda kind, shape, code: Array(),
        ("numpy._core.numeric", "_frombuffer"): from_buffer,
        ("_codecs", "encode"): encode,
    }


def read_batch(path: Path, label: bytes, dataset: str, classes: int) -> tuple[Tensor, Tensor]:
    """Pictures (n x 32 x 32 x 3, bytes) and labels of one file of the official distribution."""
    try:
        entries = ArraysOnly(io.BytesIO(path.read_bytes())).load()
        pixels, labels = entries[b"data"].value, entries[label]
        images = pixels.view(-1, 3, SIDE, SIDE).permute(0, 2, 3, 1).contiguous()
        targets = torch.tensor(labels, dtype=torch.int64)
        if len(images) != len(targets) or not all(0 <= t < classes for t in labels):
            raise ValueError(f"{len(images)} pictures, and {len(targets)} labels of {classes} classes")
    except FileNotFoundError:
        raise DataError(f"{path} is missing", dataset) from None
    except Exception as error:
        raise DataError(f"{path} cannot be read ({error})", dataset) from error
    return images, targets


class Cifar(Task):
    """Pictures, ResNet-18, random crops and flips (and rotations, where the paper has them), test error in per cent."""

    metric = "test error %"
    evaluations = 25  # of which 100 would take a tenth of the time of 100 epochs
    folder: ClassVar[str]
    files: ClassVar[tuple[list[str], list[str]]]
    label: ClassVar[bytes]
    classes: ClassVar[int]
    sizes: ClassVar[tuple[int, int]] = (50_000, 10_000)
    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    rotation: ClassVar[float] = 0.0  # degrees, either way

    def __init__(
        self,
        root: Path | None,
        device: torch.device,
        *,
        batch: int,
        seed: int,
        smoke: bool = False,
        width: int = 64,
        affine: bool = True,
    ) -> None:
        if root is None:
            raise DataError("no folder with data was given", self.name)
        self.device, self.seed, self.batch = device, seed, batch
        self.width, self.affine = (4, affine) if smoke else (width, affine)
        splits: list[tuple[Tensor, Tensor]] = []
        for names in self.files:
            parts = [read_batch(root / self.folder / name, self.label, self.name, self.classes) for name in names]
            images, labels = torch.cat([i for i, _ in parts]), torch.cat([t for _, t in parts])
            expected = self.sizes[len(splits)]
            if not smoke and len(images) != expected:
                raise DataError(f"{root / self.folder} has {len(images)} pictures instead of {expected}", self.name)
            keep = 3 * batch - 2 if smoke else len(images)
            splits.append((images[:keep].to(device), labels[:keep].to(device)))
        self.train, self.test = splits
        self.steps = -(-len(self.train[0]) // batch)
        self._scale = torch.tensor([1 / (255 * s) for s in self.std], device=device)
        self._shift = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)], device=device)

    def model(self) -> nn.Module:
        """ResNet-18, channels_last."""
        net: nn.Module = ResNet18(self.classes, self.width, self.affine)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Shuffled batches, each picture cropped, flipped and turned anew. The last batch may be smaller."""
        images, labels = self.train
        g = generator(self.seed, number)
        count = len(images)
        order = torch.randperm(count, generator=g)
        crop = torch.randint(0, 9, (count, 2), generator=g) - 4
        flip = torch.rand(count, generator=g) < 0.5
        angle = (torch.rand(count, generator=g) * 2 - 1) * (self.rotation * torch.pi / 180)
        order, crop, flip, angle = (t.to(self.device) for t in (order, crop, flip, angle))
        for first in range(start * self.batch, count, _BATCHES_AT_ONCE * self.batch):
            chunk = slice(first, first + _BATCHES_AT_ONCE * self.batch)
            rows = order[chunk]
            turn = angle[chunk] if self.rotation else None
            picked = augmented(images[rows], crop[chunk], flip[chunk], turn).split(self.batch)
            for pictures, answers in zip(picked, labels[rows].split(self.batch), strict=True):
                yield self.normalised(pictures), answers

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes, n x 32 x 32 x 3, to floats of mean 0 and variance 1, n x 3 x 32 x 32 in channels_last."""
        return (images * self._scale - self._shift).permute(0, 3, 1, 2)

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy, in float32."""
        x, y = batch
        logits = forward(x).float()
        loss = F.cross_entropy(logits, y)
        return loss, classification_sums(logits, y, loss)

    def batches(self, split: str) -> Iterator[Batch]:
        """The test pictures as they are."""
        images, labels = self.test
        size = min(_EVALUATION_BATCH, len(images))
        for first in range(0, len(images), size):
            yield self.normalised(images[first : first + size]), labels[first : first + size]

    def score(self, sums: Tensor) -> float:
        """Error in per cent."""
        return error_percent(sums)


def augmented(images: Tensor, crop: Tensor, flip: Tensor, angle: Tensor | None) -> Tensor:
    """Cut a window moved by ``crop`` pixels out of each picture, mirror it where ``flip``, turn it by ``angle``.

    Pictures are bytes, n x 32 x 32 x 3. What comes from outside of a picture is black. Turning takes the nearest pixel.
    """
    side = torch.arange(SIDE, device=images.device)
    y, x = side.view(1, SIDE, 1).expand(len(images), SIDE, SIDE), side.view(1, 1, SIDE).expand(len(images), SIDE, SIDE)
    inside = torch.ones((), dtype=torch.bool, device=images.device)
    if angle is not None:
        middle = (SIDE - 1) / 2
        sin, cos = torch.sin(angle).view(-1, 1, 1), torch.cos(angle).view(-1, 1, 1)
        dy, dx = y - middle, x - middle
        y = (sin * dx + cos * dy + middle).round().long()
        x = (cos * dx - sin * dy + middle).round().long()
        inside = (y >= 0) & (y < SIDE) & (x >= 0) & (x < SIDE)
    x = torch.where(flip.view(-1, 1, 1), SIDE - 1 - x, x) + crop[:, 1].view(-1, 1, 1)
    y = y + crop[:, 0].view(-1, 1, 1)
    inside = inside & (y >= 0) & (y < SIDE) & (x >= 0) & (x < SIDE)
    picture = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    picked = images[picture, y.clamp(0, SIDE - 1), x.clamp(0, SIDE - 1)]
    return picked * inside.unsqueeze(-1)


class Cifar10(Cifar):
    """50,000 training and 10,000 test pictures of ten classes (Krizhevsky 2009)."""

    name = "cifar10"
    folder = "cifar-10-batches-py"
    files = ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"])
    label = b"labels"
    classes = 10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Cifar100(Cifar):
    """As many pictures of a hundred classes, also turned by up to 15 degrees."""

    name = "cifar100"
    folder = "cifar-100-python"
    files = (["train"], ["test"])
    label = b"fine_labels"
    classes = 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    rotation = 15.0
