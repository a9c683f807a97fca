"""On a device that is emulated (ELSEWHERE=1, as `make` sets it): PyTorch has it from then on, so in a process apart."""

import os

import pytest

if os.environ.get("ELSEWHERE") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def there():
    from elsewhere import device

    return device.device()
