"""The README's own code runs as it stands, and the map of the source is one of this source."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_ten_lines_train_save_and_load_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(code, names)
    loss = torch.nn.functional.mse_loss(names["model"](names["x"]), names["y"]).item()
    assert loss < 0.2 * names["y"].var().item()
    assert (tmp_path / "model.safetensors").stat().st_size < 3000  # 385 weights, and some 2,000 bytes of header


@pytest.mark.parametrize("line", [line for line in MAP.split("\n") if re.match(r"^  [\w/*{}.]+\.py\b", line)])
def test_files_that_the_map_names_are_there(line):
    root = ROOT / "src"
    pattern = line.split()[0]
    assert list((root / "torchmadam").glob(pattern)) or list((root / "madam_lab").glob(pattern)), pattern
