"""The notebook for newcomers runs from top to bottom, says what it promises, and is kept without outputs."""

import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason='needs pip install ".[notebook]"')
nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parent.parent / "examples" / "first.ipynb"
# Jupyter's own, about paths and event loops.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NOTEBOOK.parent.parent / "src"), before]))
    try:
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return notebook


def test_it_trains_shows_the_ladder_saves_and_reloads(executed):
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for line in ("decoded by hand is decoded by the library: True", "every code is the same: True"):
        assert line in text
    shares = [float(share) for share in re.findall(r"(?:floats|codes|accuracy): ([\d.]+)%", text)]
    assert len(shares) == 3
    assert min(shares) > 93
    pictures = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(pictures) == 2
    assert len(nbformat.writes(executed)) < 200_000
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
