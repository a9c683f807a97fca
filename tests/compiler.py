"""Which tests can run PyTorch's own compiler, and which can compile C."""

import shutil

import pytest
import torch

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch.compile needs a C++ compiler, and cannot link where PyTorch's own path has a space in it",
)

needs_cc = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="compile=True needs a C compiler"
)
