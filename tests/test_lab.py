"""The lab's first pieces: the embedded digits, charts and the demo."""

import hashlib
import xml.etree.ElementTree as ET

import torch

from madam_lab import demo
from madam_lab.report.chart import Series, line_chart
from madam_lab.tasks import digits

DATA = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
TARGET = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"


def test_the_digits_are_the_ones_scikit_learn_carries():
    data = digits.load(standardised=False)
    pixels = (torch.cat([data.test_x, data.train_x]) * 16).round().to(torch.uint8)
    labels = torch.cat([data.test_y, data.train_y]).to(torch.uint8)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    back = torch.empty_like(pixels)
    back[order] = pixels
    names = torch.empty_like(labels)
    names[order] = labels
    # sha256 of load_digits().data and .target as uint8 bytes
    assert hashlib.sha256(back.numpy().tobytes()).hexdigest() == DATA
    assert hashlib.sha256(names.numpy().tobytes()).hexdigest() == TARGET


def test_digits_are_standardised_over_the_training_set():
    data = digits.load()
    assert data.train_x.shape == (1437, 64)
    assert data.test_x.shape == (360, 64)
    torch.testing.assert_close(data.train_x.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    spread = data.train_x.std(0)
    assert set(spread.round(decimals=3).unique().tolist()) == {0.0, 1.0}


def test_a_chart_is_well_formed_and_shows_every_finite_point():
    svg = line_chart(
        [
            Series("Madam", [(0.01, 1.0), (0.1, float("inf")), (1.0, 0.25)], frozenset({0})),
            Series("<new & odd>", [(0.01, 0.5)]),
        ],
        title="a < b",
        x_label="lr",
        y_label="error",
        x_log=True,
    )
    root = ET.fromstring(svg)
    tips = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert tips == ["Madam: 0.01, 1", "Madam: 1, 0.25", "<new & odd>: 0.01, 0.5"]
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path[@class='cross']")) == 1


def test_the_figure_marks_the_best_learning_rate_of_each_optimiser():
    errors = {"SGD": {1.0: 0.5, 0.1: 0.1}, "Madam": {1.0: 0.4, 0.1: 0.2, 0.01: 0.05}}
    root = ET.fromstring(demo.figure(errors))
    crosses = root.findall(".//{http://www.w3.org/2000/svg}path[@class='cross']")
    assert [c[0].text for c in crosses] == ["SGD: 0.1, 1", "Madam: 0.01, 1"]


def test_a_cell_of_the_demo_learns():
    assert demo.error_at("Madam", 0.1, seed=0, epochs=3) < 0.2
