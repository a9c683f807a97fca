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
def _spans(monkeypatch):
    """Programs of several blocks, which these tensors are too small for; of few, because the interpreter is slow."""
    from torchmadam.kernels import launch

    monkeypatch.setattr(launch, "PROGRAMS", 1)
    monkeypatch.setattr(launch, "FLOAT_PROGRAMS", 1)
    monkeypatch.setattr(launch, "EIGHT_PROGRAMS", 1)
    if INTERPRETED:
        for name, size in {"SPAN": 2, "CODED_SPAN": 2048, "CODED_LINE": 512}.items():
            monkeypatch.setattr(launch, name, size)


@pytest.fixture(autouse=True)
def _fast_arithmetic(monkeypatch):
    if INTERPRETED:
        import rough

        rough.install(monkeypatch)
