"""ImageNet, and ten classes of it called Imagenette: photographs, ResNet-50, top-1 error.

Workers decode pictures and scale them down; cropping, flipping and scaling to the network's size happen on the device,
where a batch is one row of pixels of any sizes. Pictures from a cache live on the device and need no workers.
"""

import atexit
import itertools
import multiprocessing.util  # whose end of a process must not come before ours
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from madam_lab import pictures
from madam_lab.models.resnet50 import ResNet50
from madam_lab.pictures import Ragged, Tally, TreeError
from madam_lab.tasks.task import Batch, Task, classification_sums, error_percent, generator

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AREAS, _ASPECTS = (0.1, 1.0), (0.8, 1.25)  # of a random crop, the paper's
_EVALUATION_BATCH = 500
# Pictures that a worker decodes at a time, a part of a batch: 40 MB, of which four a worker wait in shared memory.
_PART = 100
_WORKERS: WeakSet[multiprocessing.Process] = WeakSet()


class _Decoding(Dataset[Any]):
    """Decodes a part of a batch; an item is a list of numbers of pictures."""

    def __init__(self, files: list[Path], labels: list[int], short: int) -> None:
        self.files, self.labels, self.short = files, labels, short

    def __getitem__(self, rows: list[int]) -> tuple[list[Tensor], Tally]:
        """Those pictures that can be read, and what was found."""
        tally = Tally()
        read = [(pictures.decoded(self.files[row], self.short, tally), self.labels[row]) for row in rows]
        good = [(picture, label) for picture, label in read if picture is not None]
        sizes = torch.tensor([picture.shape[:2] for picture, _ in good], dtype=torch.int64).view(-1, 2)
        areas = sizes.prod(1)
        pixels = torch.cat([torch.empty(0, 3, dtype=torch.uint8), *(picture.reshape(-1, 3) for picture, _ in good)])
        labels = torch.tensor([label for _, label in good], dtype=torch.int64)
        return [pixels, areas.cumsum(0) - areas, sizes, labels], tally


class ImageNet(Task):
    """1,281,167 photographs of 1,000 classes, 50,000 more for validation; from DATA/imagenet, or DATA/imagenet-cache.

    ``rank`` and ``ranks`` are set by whoever trains on several devices: every batch is then that rank's share of one.
    """

    name = "imagenet"
    metric = "top-1 error %"
    saves_epochs = True
    takes_slices = True
    crop: ClassVar[int] = 224
    resize: ClassVar[int] = 256  # for evaluation: the shorter side, of which the middle is cut out
    short: ClassVar[int] = 320  # the shorter side of what training crops from
    sizes: ClassVar[tuple[int, int]] = (1_281_167, 50_000)

    def __init__(
        self,
        root: Path | None,
        device: torch.device,
        *,
        batch: int,
        seed: int,
        smoke: bool = False,
        affine: bool = True,
        zeros: float | None = None,
        complete: bool = True,
    ) -> None:
        """``zeros``: tensors that are all zeros begin with normal weights of this standard deviation instead.

        ``complete``: refuse another number of pictures than the data set has.
        """
        if root is None:
            raise TreeError("no folder with data was given; use --data or MADAM_DATA")
        self.device, self.seed, self.batch = device, seed, batch
        self.affine, self.zeros, self.smoke = affine, zeros, smoke
        self._side, self._resize, self._short = (32, 36, 40) if smoke else (self.crop, self.resize, self.short)
        self._held: dict[str, Ragged] = {}
        self._files: dict[str, tuple[list[Path], list[int]]] = {}
        self._tally, self._told = Tally(), set[str]()
        listed = self._open_cache(root) if (root / f"{self.name}-cache").is_dir() else self._open_tree(root)
        if complete and not smoke and listed != self.sizes:
            raise TreeError(
                f"{root / self.name} has {listed[0]} pictures for training and {listed[1]} for validation, and "
                f"{self.name} has {self.sizes[0]} and {self.sizes[1]}; --set model.complete=False trains on what is "
                f"there, under a name that says so"
            )
        self._rows = {}
        for split in ("train", "test"):
            count = len(self._held[split].labels if split in self._held else self._files[split][0])
            self._rows[split] = _spread(count, 3 * batch - 2 if smoke else count)
        self.steps = len(self._rows["train"]) // batch  # whole ones
        if not self.steps:
            raise TreeError(f"{listed[0]} pictures do not fill a batch of {batch}; lower it with --set batch=")
        self._scale = torch.tensor([1 / (255 * s) for s in _STD], device=device)
        self._shift = torch.tensor([m / s for m, s in zip(_MEAN, _STD, strict=True)], device=device)

    def _open_cache(self, root: Path) -> tuple[int, int]:
        self.classes, splits, listed, self._fingerprint = pictures.read_cache(root / f"{self.name}-cache", self._short)
        for name, held in (("train", splits["train"]), ("test", splits["val"])):
            self._held[name] = held.to(self.device)
        return listed["train"], listed["val"]

    def _open_tree(self, root: Path) -> tuple[int, int]:
        if not pictures.has_pillow():
            raise TreeError(
                f"{root / f'{self.name}-cache'} is missing, and decoding {root / self.name} needs Pillow: "
                f"pip install 'torchmadam[imagenet]', or make the cache elsewhere with `madam cache {self.name}`"
            )
        tree = pictures.listed(root / self.name)
        self.classes, self._fingerprint = tree.classes, tree.fingerprint
        for name, split in (("train", "train"), ("test", "val")):
            self._files[name] = tree.files[split], tree.labels[split]
            if all(pictures.decoded(path, self._short, Tally()) is None for path in tree.files[split]):
                raise TreeError(
                    f"none of the {len(tree.files[split])} pictures in {root / self.name / split} can be read"
                )
        return len(tree.files["train"]), len(tree.files["val"])

    def model(self) -> nn.Module:
        """ResNet-50, channels_last."""
        tiny = {"width": 2, "stages": (1, 1, 1, 1)} if self.smoke else {}
        net = ResNet50(len(self.classes), self.affine, **tiny)  # type: ignore[arg-type]
        if self.zeros is not None:
            for p in net.parameters():
                if not bool(p.any()):
                    nn.init.normal_(p, std=self.zeros)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Shuffled whole batches, each picture cropped, scaled and flipped anew."""
        self._tally = Tally()
        rows = self._rows["train"]
        g = generator(self.seed, number)
        order = rows[torch.randperm(len(rows), generator=g)]
        draws = torch.rand(len(rows), 5, generator=g)
        first, last = (self.batch * (self.rank + i) // self.ranks for i in range(2))
        if first == last:
            raise TreeError(f"a batch of {self.batch} is too small for {self.ranks} processes")
        mine = [slice(i * self.batch + first, i * self.batch + last) for i in range(start, self.steps)]
        found = self._pictures("train", [order[part] for part in mine], self._short, whole=True)
        for part, ragged in zip(mine, found, strict=True):
            chance = draws[part].to(self.device)
            boxes = random_boxes(ragged.sizes, chance[:, :4])
            yield self.normalised(ragged, boxes, chance[:, 4] < 0.5), ragged.labels

    def batches(self, split: str) -> Iterator[Batch]:
        """The validation pictures: their middle, once the shorter side is 256. Broken ones are left out, and noted."""
        parts = list(self._rows[split][self.rank :: self.ranks].split(_EVALUATION_BATCH))
        for ragged in self._pictures(split, parts, self._resize, whole=False):
            if not len(ragged.labels):
                continue
            boxes = middle_boxes(ragged.sizes, self._side, self._resize)
            yield self.normalised(ragged, boxes, torch.zeros_like(ragged.labels, dtype=torch.bool)), ragged.labels

    def _pictures(self, split: str, parts: list[Tensor], short: int, *, whole: bool) -> Iterator[Ragged]:
        if split in self._held:
            for rows in parts:
                yield self._held[split].at(rows.to(self.device))
            return
        files, labels = self._files[split]
        shares = [rows.split(_PART) for rows in parts]
        workers = 0 if self.smoke else workers_here()
        loader: Any = DataLoader(
            _Decoding(files, labels, short),
            batch_size=None,
            sampler=[rows.tolist() for share in shares for rows in share],
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_work_on,
        )
        decoded = iter(loader)
        _WORKERS.update(decoded._workers if workers else ())
        for rows, share in zip(parts, shares, strict=True):
            found = []
            for tensors, tally in itertools.islice(decoded, len(share)):
                self._note(tally)
                found.append(Ragged(*tensors).to(self.device))
            batch = Ragged.joined(found)
            if whole and not len(batch.labels):
                raise TreeError(f"no picture of a whole batch can be read, such as {files[int(rows[0])]}")
            if whole and len(batch.labels) < len(rows):  # others of the batch stand in
                batch = batch.at(torch.arange(len(rows), device=self.device) % len(batch.labels))
            yield batch

    def _note(self, tally: Tally) -> None:
        self._tally.merge(tally)
        new = [line for line in tally.broken if line not in self._told]
        if new:
            self._told.update(new)
            warnings.warn(f"left out what cannot be read: {'; '.join(new)}", stacklevel=2)

    def fingerprint(self) -> str:
        """Of the names and sizes of all files: copies of a data set differ."""
        return self._fingerprint

    def notes(self) -> dict[str, float]:
        """How many pictures of this epoch were broken, grey or in other colours, where there were any."""
        return dict(self._tally.counts)

    def normalised(self, ragged: Ragged, boxes: Tensor, flip: Tensor) -> Tensor:
        """Boxes of pictures as floats of mean 0 and variance 1, n x 3 x side x side in channels_last."""
        cut = cropped(ragged, boxes, flip, self._side)
        return (cut * self._scale - self._shift).permute(0, 3, 1, 2)

    def loss(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy, in float32."""
        x, y = batch
        logits = forward(x).float()
        loss = F.cross_entropy(logits, y)
        return loss, classification_sums(logits, y, loss)

    def score(self, sums: Tensor) -> float:
        """Error in per cent."""
        return error_percent(sums)


class Imagenette(ImageNet):
    """Ten easy classes of ImageNet, 9,469 + 3,925 photographs, half as large. It is not ImageNet."""

    name = "imagenette"
    metric = "top-1 error % (Imagenette, not ImageNet)"
    crop, resize, short = 112, 128, 128
    saves_epochs = False  # which take a second or so
    sizes = (9469, 3925)


def workers_here() -> int:
    """How many processes decode for this one: MADAM_WORKERS, or its share of the cores, at most 16 on a machine."""
    given = os.environ.get("MADAM_WORKERS")
    if given is not None:
        return int(given)
    return max(1, min(16, os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _work_on(_: int) -> None:
    """A signal to the whole group is for the run, which saves itself with the batches that workers still bring."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Before Python asks them to end, which they ignore, and waits. They are here if an error keeps its loop alive."""
    for worker in _WORKERS:
        worker.kill()


def _spread(count: int, kept: int) -> Tensor:
    """So many numbers below ``count``, from all over."""
    kept = min(count, kept)
    return torch.arange(kept) * count // max(kept, 1)


def random_boxes(sizes: Tensor, chance: Tensor) -> Tensor:
    """Boxes (top, left, height, width) of random area and aspect at random places, from four numbers of 0 .. 1 each.

    A box that does not fit is shrunk until it does, where torchvision draws again.
    """
    height, width = sizes[:, 0].float(), sizes[:, 1].float()
    area = (_AREAS[0] + (_AREAS[1] - _AREAS[0]) * chance[:, 0]) * height * width
    low, high = (torch.tensor(a).log().item() for a in _ASPECTS)
    aspect = (low + (high - low) * chance[:, 1]).exp()
    wide, tall = (area * aspect).sqrt(), (area / aspect).sqrt()
    fitting = torch.minimum(width / wide, height / tall).clamp(max=1.0)
    wide, tall = wide * fitting, tall * fitting
    return torch.stack([chance[:, 2] * (height - tall), chance[:, 3] * (width - wide), tall, wide], 1)


def middle_boxes(sizes: Tensor, crop: int, resize: int) -> Tensor:
    """The middle of each picture, so large that it has ``crop`` pixels where the shorter side has ``resize``."""
    side = sizes.min(1).values.float() * crop / resize
    corner = ((sizes.float() - side.unsqueeze(1)) / 2).round()
    return torch.cat([corner, side.unsqueeze(1).expand(-1, 2)], 1)


def cropped(ragged: Ragged, boxes: Tensor, flip: Tensor, side: int) -> Tensor:
    """Boxes of pictures, mirrored where ``flip``, scaled bilinearly to side x side; n x side x side x 3 floats."""
    along = (torch.arange(side, device=boxes.device) + 0.5) / side
    across = torch.where(flip.unsqueeze(1), along.flip(0), along)
    height, width = ragged.sizes[:, 0:1], ragged.sizes[:, 1:2]
    top, bottom, dy = _between(boxes[:, 0:1] + along * boxes[:, 2:3] - 0.5, height)
    left, right, dx = _between(boxes[:, 1:2] + across * boxes[:, 3:4] - 0.5, width)

    def at(y: Tensor, x: Tensor) -> Tensor:
        place = ragged.begins.view(-1, 1, 1) + (y * width).unsqueeze(2) + x.unsqueeze(1)
        return ragged.pixels[place].float()

    dx, dy = dx.view(-1, 1, side, 1), dy.view(-1, side, 1, 1)
    upper, lower = (torch.lerp(at(y, left), at(y, right), dx) for y in (top, bottom))
    return torch.lerp(upper, lower, dy)


def _between(place: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels on either side of a place, within the picture, and how far it is from the first to the second."""
    place = torch.minimum(place.clamp(min=0), (length - 1).float())
    first = place.long()
    return first, torch.minimum(first + 1, length - 1), place - first
