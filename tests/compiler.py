"""Which tests can run PyTorch's own compiler."""

import shutil

import pytest
import torch

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch.compile needs a C++ compiler, and cannot link where PyTorch's own path has a space in it",
)
