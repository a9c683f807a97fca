"""How much memory training takes: one model, or the largest that fits."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import torchmadam
from examples.gpt import record
from examples.gpt.methods import Method, build, training_step
from examples.gpt.model import Shape
from madam_lab.records import provenance

# What a probe of --largest exits with when its model does not fit; any other failure is an error.
TOO_LARGE = 3
_ROOT = Path(__file__).resolve().parents[2]
_TIMED = 3  # steps, after one that makes the optimiser's state and compiles kernels


def measure(shape: Shape, method: Method, device: torch.device, *, batch: int, compiled: bool) -> dict[str, Any]:
    """Train all parameters of a model for a few steps on random tokens, activations checkpointed."""
    found = provenance()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model, optimiser = build(shape, method, device, seed=0, checkpointing=True, compiled=compiled)
    tokens = torch.randint(shape.vocabulary, (batch, shape.length), device=device)
    times = []
    for _ in range(1 + _TIMED):
        begun = time.perf_counter()
        loss = float(training_step(model, optimiser, method, tokens, tokens.roll(-1, 1)))
        times.append(time.perf_counter() - begun)
    held, peak = torchmadam.memory(model, optimiser), record.peak_bytes(device)
    seconds = sorted(times[1:])[_TIMED // 2]
    print(f"{shape}\n{method}\n{held}")
    print(f"peak       {peak:,}  {peak / held.weights:.3f} a weight")
    print(f"tokens a second {tokens.numel() / seconds:,.0f}, loss {loss:.3f}", flush=True)
    return {
        "kind": "memory",
        "settings": {"shape": asdict(shape), "method": asdict(method), "batch": batch, "compiled": compiled},
        "parameters": held.weights,
        "bytes": record.bytes_by_kind(model, optimiser),
        "peak": peak,
        "capacity": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "loss": loss,
        "tokens": tokens.numel(),
        "seconds": seconds,
        "device": record.name_of(device),
        **found,
    }


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory ran out, in PyTorch's words, the driver's or cuBLAS's."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "alloc_failed" in said


def largest(arguments: list[str], width: int | None) -> dict[str, Any]:
    """The record of the deepest model that fits, each probe in a process of its own.

    Without a width, models grow in both directions, 128 wide for each layer, as GPT-3's larger ones do.
    """
    fitted: dict[int, dict[str, Any]] = {}
    probes: list[dict[str, Any]] = []
    most: int | None = None  # fewest layers that did not fit
    layers = 8
    while layers and layers not in fitted:
        found = _probe(arguments, layers, width or 128 * layers)
        probes.append({"layers": layers, "width": width or 128 * layers, "fits": found is not None})
        told = f"{found['parameters']:,} parameters, peak {found['peak']:,}" if found else "too large"
        print(f"{layers} layers, {width or 128 * layers} wide: {told}", flush=True)
        if found:
            fitted[layers] = found
        else:
            most = layers
        layers = _next(fitted, most, width)
    if not fitted:
        raise RuntimeError("not even a model of one layer fits; use a smaller --width, --vocabulary or --length")
    return {**fitted[max(fitted)], "kind": "largest", "probes": probes}


def _next(fitted: dict[int, dict[str, Any]], most: int | None, width: int | None) -> int:
    """How many layers to try: as many as should just fit, if peaks go on to grow with parameters as they did so far."""
    least = max(fitted, default=0)
    if len(fitted) < 2:
        guess = 2 * least if most is None else (least + most) // 2
    else:
        smaller, larger = (fitted[layers] for layers in sorted(fitted)[-2:])
        each = (larger["peak"] - smaller["peak"]) / (larger["parameters"] - smaller["parameters"])
        room = 0.99 * larger["capacity"] - larger["peak"]
        growth = 1 + max(room, 0) / max(each, 1e-3) / larger["parameters"]
        guess = int(least * growth ** (1 if width else 1 / 3))
    guess = max(guess, least + 1)
    return guess if most is None else max(min(guess, most - 1), least)


def _probe(arguments: list[str], layers: int, width: int) -> dict[str, Any] | None:
    """The record of one model, or None where it did not fit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "probe.json"
        sizes = {"--layers": layers, "--width": width, "--heads": max(width // 128, 1), "--out": out}
        command = [sys.executable, "-m", "examples.gpt", "memory", *arguments]
        command += [str(part) for pair in sizes.items() for part in pair]
        # Segments that grow: otherwise gaps between blocks of fixed size decide what fits.
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
        done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True)
        if done.returncode == TOO_LARGE:
            return None
        if done.returncode:
            raise RuntimeError(f"the probe of {layers} layers failed for another reason than memory:\n{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
