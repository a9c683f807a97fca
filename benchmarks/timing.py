"""Time on a device, in milliseconds. Steps follow each other without a pause, as in training."""

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(step: Callable[[], object], device: torch.device, seconds: float = 0.5) -> float:
    """The median of five stretches that together fill about so many seconds, after warming up."""
    _stretch(step, device, 3)
    # What is done only once, such as loading code, is not in all of these.
    once = min(_stretch(step, device, 2) for _ in range(3))
    repeats = max(1, min(100, round(seconds * 200 / max(once, 1e-6))))
    return statistics.median(_stretch(step, device, repeats) for _ in range(5))


def _stretch(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds a step, over so many of them."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        step()  # gives the device something to do, as backward does, while the first that is timed is prepared
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats
    begun = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1000 * (time.perf_counter() - begun) / repeats


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
