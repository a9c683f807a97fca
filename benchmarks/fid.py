"""How long a FID takes: 10,000 pictures made by an untrained generator, against training and test pictures of CIFAR-10.

    python -m benchmarks.fid --data DATA

Once with the real pictures' statistics to measure, and then, as every later evaluation, with what was kept of them.
Writes results/bench/<device>-fid.json.
"""

import argparse
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import _name, _write
from madam_lab import data
from madam_lab.records import provenance
from madam_lab.stepping import settle
from madam_lab.tasks.gan import ConditionalGan


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(prog="benchmarks.fid", description="Seconds of a FID.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 and the Inception network")
    parser.add_argument("--smoke", action="store_true", help="ten pictures, by any network")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    device = torch.device(options.device)
    settle(device)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as kept:
        for name in ("first", "later"):
            task = ConditionalGan(
                data.root(options.data), device, batch=6 if options.smoke else 256, seed=0, smoke=options.smoke,
                statistics=Path(kept),
            )  # fmt: skip
            torch.manual_seed(0)
            model = task.model().to(device).eval()
            begun = time.perf_counter()
            task.scores(model, task.evaluated)  # numbers of Python's: nothing is left to wait for
            seconds[name] = time.perf_counter() - begun
            print(f"{name}: {seconds[name]:.1f} s", flush=True)
    result: dict[str, Any] = {"device": _name(device), **provenance()}
    result["fid"] = {"pictures": task.samples, **seconds}
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    path = options.out / f"{name}-fid{'-smoke' if options.smoke else ''}.json"
    _write(path, result)
    print(path)


if __name__ == "__main__":
    main()
