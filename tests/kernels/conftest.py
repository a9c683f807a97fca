"""Kernels run under Triton's interpreter on a CPU (TRITON_INTERPRET=1, as `make` sets it), or on a GPU with -m gpu."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    if not INTERPRETED:
        for item in items:
            if "tests/kernels" in item.path.as_posix():
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """The interpreter takes its time over blocks that are masked out; two are enough to load one ahead."""
    if INTERPRETED:
        from torchmadam.kernels import launch

        for name, blocks in {"SPAN": 2, "SMALL_CODED_SPAN": 1024, "CODED_SPAN": 3072}.items():
            monkeypatch.setattr(launch, name, blocks)
        monkeypatch.setattr(launch, "CODED_LINE", 512)
