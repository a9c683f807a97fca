"""Records: what a run found, with everything needed to trust it. Programs write them; nobody edits them."""

import functools
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmadam.files import write_atomically

SCHEMA = 1
RESULTS = Path("results")
# Folders of the benchmarks and of examples/gpt, whose records have a form of their own.
APART = ("bench", "gpt")
# Studies that programs of examples/ make.
OF_EXAMPLES = ("conversion_gpt2",)

# Name and type of every entry; a tuple lists the types that are allowed.
Entries = dict[str, type | tuple[type, ...]]
_COMMON: Entries = {
    "schema": int,
    "settings": dict,
    "overrides": dict,
    "seed": int,
    "seconds": (float, int),
    "started": str,
    "commit": str,
    "dirty": bool,
    "source": str,
    "versions": dict,
    "device": str,
}
# Of a training run. With a monitor it has "trust", too: what the monitor saw; and, where copies of a data set differ,
# "data": a hash of the names and sizes of its files.
_RUN: Entries = {
    **_COMMON,
    "recipe": str,
    "status": str,
    "metric": str,
    "test": (float, int, type(None)),
    "train": (float, int, type(None)),
    "curve": list,
    "weights": int,
    "bytes": dict,
    "codes": (list, type(None)),
}
# Of a study: flat objects of numbers and words, all with the same names.
_STUDY: Entries = {**_COMMON, "study": str, "points": list}


class RecordError(ValueError):
    """A record that cannot be trusted, and why."""


def path_of(recipe: str, seed: int, results: Path = RESULTS) -> Path:
    """Where the record of a run belongs."""
    return results / recipe / f"{seed}.json"


def picture_of(recipe: str, seed: int, results: Path = RESULTS) -> Path:
    """Where the picture of a run belongs, if its task draws one."""
    return results / recipe / f"{seed}.png"


def name_of(record: dict[str, Any]) -> str:
    """The recipe or the study that a record is of."""
    return str(record["study"] if "study" in record else record["recipe"])


def write(record: dict[str, Any], results: Path = RESULTS) -> Path:
    """Check a record and put it in its place, whole or not at all. A record that is there already is never replaced."""
    check(record)
    path = path_of(name_of(record), record["seed"], results)
    if path.exists():
        raise FileExistsError(f"{path} is there already, and records are written once; remove it to run again")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [(json.dumps(_writable(record), indent=1, sort_keys=True) + "\n").encode()])
    return path


def read(path: Path) -> dict[str, Any]:
    """A record, checked."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read ({error})") from error
    try:
        check(record)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    if (name_of(record), f"{record['seed']}.json") != (path.parent.name, path.name):
        raise RecordError(f"{path} holds the record of {name_of(record)}, seed {record['seed']}; it was moved")
    return record  # type: ignore[no-any-return]


def read_all(results: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """All records of a folder, of runs and studies, in order of name and seed."""
    for path in sorted(results.glob("*/*.json")):
        if path.parent.name not in APART:
            yield read(path)


def check(record: Any) -> None:
    """Raise a RecordError unless this is a complete record."""
    if not isinstance(record, dict):
        raise RecordError("a record is an object")
    if record.get("schema") != SCHEMA:
        raise RecordError(f"its schema is {record.get('schema')!r}, and this program reads {SCHEMA}")
    settings = record.get("settings")
    watched = isinstance(settings, dict) and settings.get("monitor") is not None
    more: Entries = {**({"trust": list} if watched else {}), **({"data": str} if "data" in record else {})}
    entries = _STUDY if "study" in record else {**_RUN, **more}
    if record.keys() != entries.keys():
        missing, extra = sorted(entries.keys() - record.keys()), sorted(record.keys() - entries.keys())
        raise RecordError(f"entries are missing ({missing}) or unknown ({extra})")
    for name, kind in entries.items():
        value = record[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RecordError(f"{name} is {value!r}, which is not what it should be")
    if record["seconds"] < 0:
        raise RecordError("seconds are positive")
    if "study" in record:
        _check_study(record)
    else:
        _check_run(record)


def _check_study(record: dict[str, Any]) -> None:
    if not record["points"]:
        raise RecordError("a study has measured something, and there are no points")
    for point in record["points"]:
        if not isinstance(point, dict) or point.keys() != record["points"][0].keys():
            raise RecordError(f"{point!r} is no point like the first")
        _check_numbers("a point", {k: v for k, v in point.items() if not isinstance(v, str)}, set())


def _check_run(record: dict[str, Any]) -> None:
    if record["status"] not in ("finished", "diverged"):
        raise RecordError(f"status is {record['status']!r}; a run has finished or diverged")
    if record["status"] == "finished" and (record["test"] is None or not record["curve"]):
        raise RecordError("a finished run has a result and a curve")
    if record["weights"] <= 0:
        raise RecordError("weights are positive")
    _check_numbers("bytes", record["bytes"], {"weights", "optimiser", "float32"})
    for point in record["curve"]:
        _check_numbers("a point of the curve", point, {"epoch", "lr", "train"})
    last = record["curve"][-1] if record["curve"] else {}
    if record["status"] == "finished" and last.get("test", record["test"]) != record["test"]:
        raise RecordError(f"its result is {record['test']}, and its curve ends at {last['test']}")
    for snapshot in record["codes"] or []:
        if not isinstance(snapshot, dict) or not isinstance(snapshot.get("histogram"), list):
            raise RecordError(f"{snapshot!r} is no histogram of codes")
        _check_numbers("codes", {k: v for k, v in snapshot.items() if k != "histogram"}, {"epoch", "upper", "lower"})
        _check_numbers("codes", dict(enumerate(snapshot["histogram"])), set())
    for seen in record.get("trust", []):
        if not isinstance(seen, dict) or not isinstance(seen.get("layers"), dict):
            raise RecordError(f"{seen!r} is nothing that a monitor saw")
        _check_numbers("trust", {k: v for k, v in seen.items() if k != "layers"}, {"step", "epoch", "lr"})
        for name, layer in seen["layers"].items():
            _check_numbers(f"trust in {name}", layer, {"cosine", "alignment", "relative_size", "flips"})
    ladder = record["settings"].get("ladder")
    if ladder is not None:
        _check_numbers("the ladder", ladder, {"levels", "spacing", "crossing"})


def _check_numbers(what: str, entries: Any, names: set[str]) -> None:
    """An object whose values are numbers (null stands for one that is not finite), among them those named."""
    if not isinstance(entries, dict) or not names <= entries.keys():
        raise RecordError(f"{what} is {entries!r}, which is not what it should be")
    for name, value in entries.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise RecordError(f"{what} has {name}: {value!r}, which is no number")


def check_writable(path: Path) -> None:
    """Fail now, and not when a run is over, where its record could not be written."""
    tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())).close()


def provenance() -> dict[str, Any]:
    """Commit, whether the tree differs from it, a hash of the source, and versions."""
    import torch

    import torchmadam

    here = Path(__file__).resolve().parent
    commit, dirty = _commit()
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchmadam": torchmadam.__version__,
        "cuda": torch.version.cuda or "none",
    }
    return {"commit": commit, "dirty": dirty, "source": source_hash(here.parent), "versions": versions}


def source_hash(src: Path) -> str:
    """A hash of all code of the library and the lab, its C too: what ran, whatever version control says."""
    paths = [path for package in _PACKAGES for path in (src / package).rglob("*") if path.suffix in _CODE]
    return _hashed({path.relative_to(src).as_posix(): path.read_bytes() for path in paths})


@functools.lru_cache
def knows_commits() -> bool:
    """Whether this is a repository that has its commits: no installation, source archive or shallow clone."""
    try:
        _git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))  # not some repository around an installation
        return _git("rev-parse", "--is-shallow-repository").strip() == b"false"
    except (OSError, subprocess.CalledProcessError):
        return False


@functools.lru_cache
def commit_with(source: str) -> str | None:
    """The newest commit of this repository whose source has this hash: what a record of a changed tree really ran."""
    try:
        for commit in _git("rev-list", "HEAD").decode().split():
            with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "."))) as tar:
                ours = [m for m in tar if m.isfile() and m.name.endswith(_CODE) and m.name.startswith(_PACKAGES)]
                files = {m.name: tar.extractfile(m).read() for m in ours}  # type: ignore[union-attr]
            # The first records knew of Python only.
            if source in (_hashed(files), _hashed({k: v for k, v in files.items() if k.endswith(".py")})):
                return commit
    except (OSError, subprocess.CalledProcessError, tarfile.TarError):
        return None
    return None


_PACKAGES = ("torchmadam/", "madam_lab/")
_CODE = (".py", ".c", ".h")


def _hashed(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(files.items(), key=lambda item: Path(item[0])):
        digest.update(name.encode() + b"\0" + data + b"\0")
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> bytes:
    src = Path(__file__).resolve().parent.parent
    return subprocess.run(["git", *arguments], cwd=src, capture_output=True, check=True).stdout


def _commit() -> tuple[str, bool]:
    """From MADAM_COMMIT, "abc123" or "abc123-dirty", for a tree that was copied here; else from git."""
    given = os.environ.get("MADAM_COMMIT", "")
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    try:
        _git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))  # not some repository around an installation
        # Results do not change what a run computes.
        changed = _git("status", "--porcelain", "--", ":/", ":!/results")
        return _git("rev-parse", "HEAD").decode().strip(), bool(changed.strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _writable(value: Any) -> Any:
    """JSON has neither infinity nor NaN; both become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_writable(v) for v in value]
    return value
