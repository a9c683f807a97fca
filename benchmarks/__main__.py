"""The runner: check, time, write. ``python -m benchmarks --help``"""

import argparse
import gc
import json
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import training, workloads
from benchmarks.registry import ENTRIES, Entry, Missing
from benchmarks.timing import captured, milliseconds
from madam_lab.records import provenance
from torchmadam import LadderFormat, to_ladder_
from torchmadam.files import write_atomically


def main() -> None:
    """Time everything on one device and write results/bench/<device>.json, from which the report makes its tables."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Steps, decoding and training, beside the peers.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each timing")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--only", default="", help="only entries whose name contains this")
    parser.add_argument(
        "--rounds", type=int, help="how often to time all steps, for medians (default: 5 on a CPU, where times wander)"
    )
    parser.add_argument("--parts", nargs="*", default=["steps", "decode", "training"])
    options = parser.parse_args()
    # Gradients that never change drive weights to their bounds, and Madam says so of every tensor.
    warnings.filterwarnings("ignore", message=r".* (its bound|the upper end of their ladder)")
    device = torch.device(options.device)
    entries = [e for e in ENTRIES if device.type in e.devices and options.only in e.name]
    result: dict[str, Any] = {
        "device": _name(device), "threads": torch.get_num_threads(), **provenance(),
        "copy": _bandwidth(device, options.seconds),
    }  # fmt: skip
    print(f"{result['device']}: a copy moves {result['copy'] / 1e12:.2f} TB/s, reading and writing counted")
    stem = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    path = options.out / f"{stem}.json"
    if "decode" in options.parts:
        result["decode"] = _decoding(device, options.seconds, result["copy"])
    if "training" in options.parts:
        steps = 30 if device.type == "cuda" else 2
        result["training"], result["monitor"] = {}, {}
        for name, recipe in training.kinds().items():
            run = training.Training(recipe, device)
            result["training"][name] = run.pictures_a_second(steps)
            if recipe.optimiser == "madam":
                result["monitor"][name] = run.monitor_share(steps)
            del run  # its network, before there is another
        print(json.dumps(result["training"]))
        print(f"a TrustMonitor every 100 steps, of training time: {json.dumps(result['monitor'])}", flush=True)
    if "steps" in options.parts:
        large = workloads.gpt() if device.type == "cuda" else workloads.small_gpt()
        lists = {"gpt": large, "resnet18": workloads.resnet18()}
        counts = {name: sum(torch.Size(shape).numel() for shape in shapes) for name, shapes in lists.items()}
        result["steps"] = {n: {"weights": counts[n], "tensors": len(lists[n]), "rows": []} for n in lists}
        broken = {entry.name: entry.check(device) if entry.ours else None for entry in entries}
        timed: dict[tuple[str, str], list[dict[str, Any]]] = {(n, e.name): [] for n in lists for e in entries}
        for _ in range(options.rounds or (1 if device.type == "cuda" else 5)):
            for entry in entries:
                for name, shapes in lists.items():
                    row = _time(entry, shapes, device, options.seconds, broken[entry.name], result["copy"])
                    timed[name, entry.name].append(row)
                    print(f"{name:<10}{entry.name:<44}{_told(row)}", flush=True)
                for name in lists:
                    rows = [timed[name, e.name] for e in entries]
                    result["steps"][name]["rows"] = [_median(each) for each in rows if each]
                _write(path, result)  # some peers compile for minutes
    _write(path, result)
    print(path)


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [(json.dumps(result, indent=1) + "\n").encode()])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 2**31 if device.type == "cuda" else 2**27
    source, target = torch.ones(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8).to(device)
    return 2 * size / milliseconds(lambda: target.copy_(source), device, seconds) * 1000


def _time(
    entry: Entry, shapes: workloads.Shapes, device: torch.device, seconds: float, broken: str | None, copy: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": entry.name, "ours": entry.ours}
    if broken is not None:
        row["missing"] = f"wrong: {broken}"
    else:
        before = _held(device)
        try:
            params = entry.parameters(shapes, device)
            step = entry.make(params, device)
            row["ms"] = milliseconds(step, device, seconds)
            count = sum(p.numel() for p in params)
            if device.type == "cuda":
                row["bytes"] = (_held(device) - before) / count
            if entry.traffic is not None:
                row["floor_ms"] = 1000 * entry.traffic * count / copy
            if entry.capturable and device.type == "cuda":
                row["captured_ms"] = milliseconds(captured(step), device, seconds)
        except Missing as error:
            row["missing"] = str(error)
        params = step = None  # type: ignore[assignment]
        gc.collect()
    return row


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds', with the median of their times, and all of them if there are several."""
    if len(rows) == 1 or "ms" not in rows[0]:
        return rows[0]
    each = [row["ms"] for row in rows]
    return {**rows[0], "ms": statistics.median(each), "each_ms": each}


def _told(row: dict[str, Any]) -> str:
    return row.get("missing") or " ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _decoding(device: torch.device, seconds: float, copy: float) -> list[dict[str, Any]]:
    """Decoding a square matrix to bfloat16."""
    rows = []
    side = 8192 if device.type == "cuda" else 1024
    for preset in ("paper12", "paper8", "signed8"):
        holder = torch.nn.Linear(side, side, bias=False, device=device)
        to_ladder_(holder, LadderFormat.preset(preset), dtype=torch.bfloat16)
        weight = holder.weight.detach()
        expected = weight.to("cpu").decode(torch.float32)
        if not torch.allclose(weight.decode(torch.float32).cpu(), expected, rtol=1e-5, atol=0):
            rows.append({"ladder": preset, "missing": "wrong: decoded weights differ from the reference's"})
            continue
        traffic = LadderFormat.preset(preset).stored_bits / 8 + 2
        row = {
            "ladder": preset,
            "ms": milliseconds(weight.decode, device, seconds),
            "floor_ms": 1000 * traffic * side * side / copy,
        }
        rows.append(row)
        print("decode", row, flush=True)
    return rows


if __name__ == "__main__":
    main()
