"""Linear layers with coded weights, as in generation, beside bfloat16's: a few rows of x, weights that no cache holds.

    python -m benchmarks.linear
    python -m benchmarks.linear --sweep --ladders signed8 --batches 1

A turn goes through so many copies of the weight that together they are larger than the L2 cache, in one CUDA graph.
Writes results/bench/<device>-linear.json; with --sweep only prints what every setting of the kernels takes.
"""

import argparse
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.__main__ import _bandwidth, _name, _write
from benchmarks.timing import captured, milliseconds
from madam_lab.records import provenance
from torchmadam import LadderFormat, LadderTensor, to_ladder_

SHAPES = ["4096x4096", "4096x16384", "16384x4096"]
LADDERS = ["paper8", "paper10", "paper12", "signed8", "signed12"]
COLD = 2**28  # bytes; the L2 cache of an H200 has 50 million
# What --sweep tries: kernels/launch_linear.py's PLANS.
SPACE: dict[str, list[Any]] = {
    "rows": [16, 32],
    "warps": [2, 4, 8, 16],
}


def weights(shape: tuple[int, int], ladder: str, device: torch.device) -> tuple[LadderTensor, Tensor]:
    """A coded matrix, and its floats."""
    holder = nn.Module()
    generator = torch.Generator(device).manual_seed(0)
    holder.weight = nn.Parameter(0.02 * torch.randn(shape, generator=generator, device=device))
    to_ladder_(holder, LadderFormat.preset(ladder), dtype=torch.bfloat16)
    coded = cast(LadderTensor, next(holder.parameters()).detach())
    return coded, coded.decode()


def check(x: Tensor, coded: LadderTensor) -> str | None:
    """What is wrong with a product; None if nothing. The weights' rounding to bfloat16 is allowed for."""
    exact, dense = x.double(), coded.decode(torch.float32).double()
    found, expected = functional.linear(x, coded).double(), exact @ dense.T
    bound = 2**-7 * expected.abs() + 2**-8 * (exact.abs() @ dense.abs().T)
    return None if bool(((found - expected).abs() <= bound).all()) else "wrong: differs from the decoded product"


def cold_ms(x: Tensor, weight: Tensor, size: float, device: torch.device, seconds: float) -> float:
    """Milliseconds a product, of turns through enough copies of a weight of this many bytes."""
    count = max(2, -(-COLD // int(size))) if device.type == "cuda" else 1
    copies = [weight.clone() for _ in range(count)]

    def turn() -> None:
        for copy in copies:
            functional.linear(x, copy)

    step: Callable[[], object] = captured(turn) if device.type == "cuda" else turn
    return milliseconds(step, device, seconds) / count


def measured(
    shape: tuple[int, int], batch: int, ladders: list[str], device: torch.device, seconds: float, copy: float
) -> list[dict[str, Any]]:
    """Rows of the table for one shape and batch: bfloat16's, and every ladder's beside it."""
    count = shape[0] * shape[1]
    x = torch.randn(batch, shape[1], device=device).bfloat16()
    dense_ms = cold_ms(x, weights(shape, "signed8", device)[1], 2.0 * count, device, seconds)
    rows: list[dict[str, Any]] = [{"weights": "bfloat16", "ms": dense_ms, "floor_ms": 2000 * count / copy}]
    for ladder in ladders:
        coded, _ = weights(shape, ladder, device)
        size = LadderFormat.preset(ladder).stored_bits / 8 * count
        wrong = check(x, coded)
        row: dict[str, Any] = {"weights": ladder, "floor_ms": 1000 * size / copy}
        if wrong is None:
            row["ms"] = cold_ms(x, coded, size, device, seconds)
            row["times_faster"] = dense_ms / row["ms"]
        else:
            row["missing"] = wrong
        rows.append(row)
    return rows


def sweep(shape: tuple[int, int], batch: int, ladder: str, device: torch.device, seconds: float) -> None:
    """Print what every plan takes, the fastest last."""
    from torchmadam.kernels import launch_linear

    coded, _ = weights(shape, ladder, device)
    size = LadderFormat.preset(ladder).stored_bits / 8 * coded.numel()
    x = torch.randn(batch, shape[1], device=device).bfloat16()
    found = []
    before = launch_linear.PLANS
    most = next(most for most in launch_linear.PLANS if batch <= most)
    try:
        for plan in itertools.product(*SPACE.values()):
            launch_linear.PLANS, launch_linear.FITTED = {most: plan}, False
            launch_linear.prepared.cache_clear()
            try:
                wrong = check(x, coded)
                ms = float("inf") if wrong else cold_ms(x, coded, size, device, seconds)
            except Exception as error:  # too many warps, too much shared memory: no plan for this device
                wrong, ms = f"{type(error).__name__}: {str(error)[:80]}", float("inf")
            found.append((ms, wrong or "", plan))
    finally:
        launch_linear.PLANS, launch_linear.FITTED = before, True
        launch_linear.prepared.cache_clear()
    for ms, wrong, plan in sorted(found, key=lambda each: -each[0]):
        told = dict(zip(SPACE, plan, strict=True))
        print(f"{shape[0]}x{shape[1]} batch {batch} {ladder:<9}{1000 * ms:>9.2f} us  {told} {wrong}", flush=True)


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(prog="benchmarks.linear", description="Linear layers with coded weights.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x columns of the weight")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ladders", nargs="*", default=LADDERS)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each timing")
    parser.add_argument("--sweep", action="store_true", help="try the settings of the kernels, and write nothing")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [cast(tuple[int, int], tuple(map(int, shape.split("x")))) for shape in options.shapes]
    with torch.no_grad():
        if options.sweep:
            for shape, batch, ladder in itertools.product(shapes, options.batches, options.ladders):
                sweep(shape, batch, ladder, device, options.seconds)
            return
        result: dict[str, Any] = {"device": _name(device), **provenance(), "linear": []}
        result["copy"] = _bandwidth(device, options.seconds)
        path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', result['device'].lower()).strip('-')}-linear.json"
        for shape, batch in itertools.product(shapes, options.batches):
            rows = measured(shape, batch, options.ladders, device, options.seconds, result["copy"])
            result["linear"].append({"shape": list(shape), "batch": batch, "rows": rows})
            for row in rows:
                told = " ".join(f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))
                print(
                    f"{shape[0]}x{shape[1]} batch {batch:<4}{row['weights']:<10}{row.get('missing', told)}", flush=True
                )
            _write(path, result)
        print(path)


if __name__ == "__main__":
    main()
