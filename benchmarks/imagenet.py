"""Pictures a second when ResNet-50 trains at full size, 224 pixels and 1,000 classes, on generated pictures.

    python -m benchmarks.imagenet

No loader takes part: this is what a GPU could do if it were fed. Writes results/bench/<device>-imagenet.json.
"""

import argparse
import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import _name, _write
from benchmarks.training import RandomPictures, Training
from madam_lab import recipes
from madam_lab.models.resnet50 import ResNet50
from madam_lab.recipes import Recipe
from madam_lab.records import provenance
from torchmadam import LadderFormat


def kinds() -> dict[str, Recipe]:
    """What is compared, the baseline first."""
    twelve = recipes.get("imagenette_madam_12bit")
    return {
        "SGD momentum fused": recipes.get("imagenet_sgd"),
        "Adam fused": recipes.get("imagenet_adam"),
        "Madam float32": recipes.get("imagenet_madam"),
        "Madam 12-bit": twelve,
        "Madam 8-bit": recipes.get("imagenet_madam_8bit"),
        "Madam signed 8-bit": replace(twelve, ladder=LadderFormat.preset("signed8"), conversion={}),
    }


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(prog="benchmarks.imagenet", description="ResNet-50 at full size.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20, help="in each of five stretches")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, Any] = {"batch": options.batch, "side": options.side, "classes": 1000, "rows": {}}
    result = {"device": _name(device), **provenance(), "imagenet": found}
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', result['device'].lower()).strip('-')}-imagenet.json"
    found["rows"] = _earlier(path, result)
    for name, recipe in kinds().items():
        if options.only in name:
            task = RandomPictures(device, options.batch, options.side, 1000, ResNet50)
            found["rows"][name] = Training(recipe, device, task).pictures_a_second(options.steps)
            gc.collect()  # its graph, which holds memory, before there is another
            print(f"{name:<24}{found['rows'][name]:>10.1f} pictures a second", flush=True)
            _write(path, result)
    print(path)


def _earlier(path: Path, result: dict[str, Any]) -> dict[str, float]:
    """The rows of a file that the same code wrote on the same device for the same batches."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    alike = {**before, "imagenet": {**before["imagenet"], "rows": {}}} == result
    return dict(before["imagenet"]["rows"]) if alike else {}


if __name__ == "__main__":
    main()
