"""Time on a device, in milliseconds."""

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(step: Callable[[], object], device: torch.device, seconds: float = 0.5) -> float:
    """The median over repeats that fill about so many seconds, after warming up."""
    for _ in range(3):
        step()
    repeats = max(5, min(200, round(seconds / max(_once(step, device), 1e-6) * 1000)))
    return statistics.median(_once(step, device) for _ in range(repeats))


def _once(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    begun = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - begun)


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The step as a CUDA graph, which leaves out the time that Python takes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
