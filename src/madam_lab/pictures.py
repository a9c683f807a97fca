"""Photographs in folders, one folder a class: listing, decoding, and a cache of decoded ones.

    ROOT/train/CLASS/*.jpg    ROOT/val/CLASS/*.jpg        as ImageNet is usually unpacked

Decoding needs Pillow (the extra ``imagenet``); a cache needs nothing, so a machine without Pillow can train from one.
A cache is a folder with index.json and parts of bytes, train-000.npy and so on, none above 42 MB: the pixels of one
picture after another, in rows of RGB.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmadam.files import write_atomically

ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
PART = 40 * 2**20  # bytes
LONGEST = 3.0  # sides of a picture, long over short; what is longer is cut at both ends
_SHOWN = 5


class TreeError(ValueError):
    """A folder of pictures that cannot be trained on, and what to do about it."""


@dataclass
class Tally:
    """What was found on the way, by kind: "broken" pictures, which are left out, and "grey" and "other" ones, which
    were not in RGB and are converted; and the first broken files, with what was wrong with them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(self, kind: str, count: int = 1) -> None:
        """So many more of a kind."""
        self.counts[kind] = self.counts.get(kind, 0) + count

    def note(self, path: Path, error: Exception) -> None:
        """A picture that cannot be read."""
        self.add("broken")
        if len(self.broken) < _SHOWN:
            self.broken.append(f"{path} ({error})")

    def merge(self, other: "Tally") -> None:
        """Everything of another one, too."""
        for kind, count in other.counts.items():
            self.add(kind, count)
        self.broken = (self.broken + other.broken)[:_SHOWN]


@dataclass(frozen=True)
class Tree:
    """Classes in order of their names; files and labels of both splits; how many files are no pictures.

    And a hash of the names and sizes of all pictures.
    """

    classes: list[str]
    files: dict[str, list[Path]]
    labels: dict[str, list[int]]
    ignored: int
    fingerprint: str


def listed(root: Path) -> Tree:
    """What lies in a tree. Raises a :class:`TreeError` for everything that would make a run worthless."""
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise TreeError(
                f"{root / split} is missing; pictures belong into {root}/train/CLASS/ and {root}/val/CLASS/, "
                f"docs/imagenet.md has the commands"
            )
    classes = _folders(root / "train")
    if not classes:
        raise TreeError(f"{root / 'train'} has no folders; every class needs one, with its pictures in it")
    strange, absent = set(_folders(root / "val")) ^ set(classes), set(classes) - set(_folders(root / "val"))
    if strange:
        which = "has no" if absent else "has the unknown"
        raise TreeError(
            f"{root / 'val'} {which} {'class' if len(strange) == 1 else 'classes'} {_some(absent or strange)}; "
            f"both splits need the same folders (the official validation pictures come in one folder, and have to be "
            f"sorted into classes first)"
        )
    files: dict[str, list[Path]] = {}
    labels: dict[str, list[int]] = {}
    ignored = 0
    digest = hashlib.sha256()
    for split in ("train", "val"):
        files[split], labels[split] = [], []
        empty = []
        for label, name in enumerate(classes):
            folder = root / split / name
            every = sorted(p for p in folder.rglob("*") if p.is_file())
            found = [p for p in every if p.suffix.lower() in ENDINGS and not _is_hidden(p.relative_to(folder))]
            ignored += len(every) - len(found)
            files[split] += found
            for path in found:
                digest.update(
                    f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode(errors="surrogateescape")
                )
            labels[split] += [label] * len(found)
            empty += [] if found else [name]
        if empty:
            raise TreeError(
                f"{root / split}: no pictures in the {'folder' if len(empty) == 1 else 'folders'} {_some(set(empty))}; "
                f"fill or remove them in both splits (pictures end in {', '.join(sorted(ENDINGS))})"
            )
    return Tree(classes, files, labels, ignored, digest.hexdigest()[:16])


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)  # such as a Mac's ._1.jpg


def _folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _some(names: set[str]) -> str:
    first = sorted(names)[:_SHOWN]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")


def decoded(path: Path, short: int, tally: Tally) -> Tensor | None:
    """A picture, height x width x 3 bytes, its shorter side scaled down to ``short``; None, and noted, if it is broken.

    Grey pictures and those in other colours than RGB are converted, and counted.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode = image.mode
            image.draft("RGB", (2 * short, 2 * short))  # a JPEG is decoded no larger than it needs to be
            deep: Any = np.asarray(image) // 257 if mode.startswith("I") else None  # 16 bits, which convert would clip
            picture: Any = (image if deep is None else Image.fromarray(deep.clip(0, 255).astype(np.uint8))).convert(
                "RGB"
            )
            width, height = picture.size
            scale = short / min(width, height)
            if scale < 1:
                size = max(short, round(width * scale)), max(short, round(height * scale))
                picture = picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
            pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
    except Exception as error:
        # Pillow raises whatever a damaged file makes of its decoders, from OSError to struct.error.
        tally.note(path, error)
        return None
    if mode != "RGB":
        tally.add("grey" if mode in ("L", "LA", "1") or mode.startswith("I") else "other")
    return shortened(pixels)


def shortened(pixels: Tensor) -> Tensor:
    """The middle of a picture that is more than three times as long as wide; any other as it is."""
    for dim in (0, 1):
        most = int(LONGEST * min(pixels.shape[:2]))
        if pixels.shape[dim] > most:
            pixels = pixels.narrow(dim, (pixels.shape[dim] - most) // 2, most)
    return pixels.contiguous()


def has_pillow() -> bool:
    """Whether pictures can be decoded here."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


# ---- the cache


@dataclass(frozen=True)
class Ragged:
    """Pictures of any sizes: their pixels one after another, where each begins, its height and width, its label."""

    pixels: Tensor  # n x 3 bytes
    begins: Tensor
    sizes: Tensor  # pictures x 2
    labels: Tensor

    def to(self, device: torch.device) -> "Ragged":
        """On a device."""
        moved = (t.to(device, non_blocking=True) for t in (self.pixels, self.begins, self.sizes, self.labels))
        return Ragged(*moved)

    @staticmethod
    def joined(parts: "Sequence[Ragged]") -> "Ragged":
        """One after another."""
        if len(parts) == 1:
            return parts[0]
        before = [0, *itertools.accumulate(len(part.pixels) for part in parts)]
        begins = torch.cat([part.begins + first for part, first in zip(parts, before, strict=False)])
        pixels, sizes, labels = (torch.cat([getattr(p, name) for p in parts]) for name in ("pixels", "sizes", "labels"))
        return Ragged(pixels, begins, sizes, labels)

    def at(self, rows: Tensor) -> "Ragged":
        """Some of the pictures; the pixels are shared."""
        return Ragged(self.pixels, self.begins[rows], self.sizes[rows], self.labels[rows])


Labelled = Iterator[tuple[Tensor, int]]


def write_cache(root: Path, target: Path, short: int, say: Callable[[str], None] = print) -> Tally:
    """Decode a tree into a cache. What is broken is left out; returns how much that was, which index.json says, too."""
    if not has_pillow():
        raise TreeError("decoding pictures needs Pillow; pip install 'torchmadam[imagenet]'")
    tree, tally = listed(root), Tally()
    tally.add("ignored", tree.ignored)

    def read(split: str) -> Labelled:
        for path, label in zip(tree.files[split], tree.labels[split], strict=True):
            picture = decoded(path, short, tally)
            if picture is not None:
                yield picture, label

    counts = {split: len(files) for split, files in tree.files.items()}
    splits = {split: read(split) for split in counts}
    store(target, tree.classes, splits, counts, tally, say, short, tree.fingerprint)
    return tally


def store(
    target: Path,
    classes: list[str],
    splits: Mapping[str, Labelled],
    counts: Mapping[str, int],
    tally: Tally,
    say: Callable[[str], None] = print,
    short: int | None = None,
    fingerprint: str | None = None,
) -> None:
    """Write a cache of pictures with labels; ``counts`` are those of the tree, broken pictures included.

    ``short`` is the shorter side that larger pictures were scaled down to, ``fingerprint`` the tree's.
    """
    target.mkdir(parents=True, exist_ok=True)
    about_tree = {"listed": dict(counts), "tree": fingerprint}
    index: dict[str, Any] = {"version": 1, "classes": classes, **about_tree, "short": short, "parts": {}}
    for split, pictures in splits.items():
        index["parts"][split] = []
        for number, part in enumerate(_in_parts(pictures)):
            blob = io.BytesIO()
            np.save(blob, torch.cat([picture.reshape(-1) for picture, _ in part]).numpy())
            about = {"file": f"{split}-{number:03d}.npy", "sha256": hashlib.sha256(blob.getbuffer()).hexdigest()}
            write_atomically(target / about["file"], [blob.getbuffer()])
            sizes, labels = [list(picture.shape[:2]) for picture, _ in part], [label for _, label in part]
            index["parts"][split].append({**about, "sizes": sizes, "labels": labels})
            say(f"{target / about['file']}: {len(part)} pictures")
        if not index["parts"][split]:
            raise TreeError(f"none of the {counts[split]} pictures of {split} can be read")
    write_atomically(target / "index.json", [json.dumps({**index, "found": tally.counts}).encode()])


def _in_parts(pictures: Labelled) -> Iterator[list[tuple[Tensor, int]]]:
    part: list[tuple[Tensor, int]] = []
    size = 0
    for picture, label in pictures:
        if part and size + picture.numel() > PART:
            yield part
            part, size = [], 0
        part.append((picture, label))
        size += picture.numel()
    if part:
        yield part


def read_cache(folder: Path, short: int = 0) -> tuple[list[str], dict[str, Ragged], dict[str, int], str]:
    """Classes, splits, how many pictures each split had when the cache was made, broken ones included; a fingerprint.

    That is the tree's, or, where nobody noted that, the cache's own. Refuses pictures that were scaled down to less
    than ``short``.
    """
    try:
        written = (folder / "index.json").read_bytes()
        index = json.loads(written)
        if index["version"] != 1:
            raise TreeError(f"{folder} is a cache of version {index['version']}, and this program reads 1")
        if (index.get("short") or short) < short:
            raise TreeError(
                f"the pictures of {folder} were scaled down to {index['short']} pixels, and {short} are wanted; "
                f"make it again with `madam cache`, or remove it"
            )
        splits = {split: _read_parts(folder, parts) for split, parts in index["parts"].items()}
        own = hashlib.sha256(written).hexdigest()[:16]
        return index["classes"], splits, index["listed"], index.get("tree") or own
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TreeError):
            raise
        raise TreeError(f"the cache {folder} cannot be read ({error}); make it again with `madam cache`") from error


def _read_parts(folder: Path, parts: list[dict[str, Any]]) -> Ragged:
    arrays, sizes, labels = [], [], []
    for part in parts:
        blob = (folder / part["file"]).read_bytes()
        if hashlib.sha256(blob).hexdigest() != part["sha256"]:
            raise ValueError(f"{part['file']} is damaged")
        arrays.append(torch.from_numpy(np.load(io.BytesIO(blob), allow_pickle=False)))
        sizes += part["sizes"]
        labels += part["labels"]
    table = torch.tensor(sizes)
    areas = table.prod(1)
    return Ragged(torch.cat(arrays).view(-1, 3), areas.cumsum(0) - areas, table, torch.tensor(labels))
