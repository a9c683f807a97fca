"""Tables and pictures, from a fixed set of records."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from madam_lab import recipes, records, report, studies
from madam_lab.recipes import crossing
from madam_lab.recipes.paper import LEARNING_RATES, PAPER
from madam_lab.report import effort, figures, tables, theory
from madam_lab.report.chart import Series, bars, line_chart
from madam_lab.report.controls import controls_table
from madam_lab.report.crossing import crossing_table, ours_table
from madam_lab.report.effort import effort_table
from madam_lab.report.numbers import Results, problems
from tiny_records import made

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).parent / "golden_tables.md"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture
def folder(tmp_path):
    """A few cells of the tables, in every state a cell can be in."""
    results = tmp_path / "results"
    for record in (
        made("cifar10_sgd", 0, 8.0, 0.01),
        made("cifar10_sgd", 1, 8.4, 0.01),
        made("cifar10_sgd", 2, 8.8, 0.03),
        made("cifar10_adam", 0, 6.66, 0.0),
        made("cifar10_madam", 0, 7.777, 0.02, dirty=True),
        made("cifar10_madam_12bit", 0, 7.1),
        made("cifar10_bound_1", 0, 9.0),
        made("wikitext2_madam", 0, 171.26, 120.0),
        made("wikitext2_sgd", 0, None, None, status="diverged"),
        *learning_rates("sgd", 3.0, 1.5, 6.0, 9.0, 40.0),
        *learning_rates("adam", None, 60.0, 5.0, 2.5, 2.75),
        *learning_rates("madam", 40.0, 3.0, 2.0, 4.0, 30.0),
        *learning_rates("madam_12bit", 40.0, 3.0, 2.5, 4.0, 30.0),
        *learning_rates("madam_signed8", 40.0, 3.0, 2.5, 4.0),  # not yet complete
    ):
        records.write(record, results)
    write_benchmark(results, "CPU")
    write_benchmark(results, "NVIDIA H200")
    return results


def learning_rates(kind, *errors):
    """Records of the first points of a kind's curve; None has diverged."""
    status = {None: "diverged"}
    return [
        made(f"digits_lr_{kind}_{lr:g}", 0, error, status=status.get(error, "finished"))
        for lr, error in zip(sorted(LEARNING_RATES, reverse=True), errors, strict=False)
    ]


def write_benchmark(results, device):
    peer = {"name": "torch AdamW fused, float32", "ours": False, "ms": 8.0, "bytes": 16.1}
    ours = {"name": "Madam 12-bit", "ours": True, "ms": 4.0, "bytes": 7.6, "floor_ms": 3.2, "captured_ms": 3.5}
    red = {"name": "Madam 8-bit", "ours": True, "missing": "wrong: codes of (7,) differ from the reference's"}
    small = [{**peer, "ms": 0.2}, {**ours, "ms": 0.15, "captured_ms": 0.06}, red]
    steps = {
        "gpt": {"weights": 907_000_000, "tensors": 163, "rows": [peer, ours, red]},
        "resnet18": {"weights": 11_164_362, "tensors": 22, "rows": small},
    }
    about = {"device": device, "commit": "c" * 40, "dirty": False, "versions": {"torch": "2.11.0"}, "copy": 4.28e12}
    about["threads"] = 2
    path = results / "bench" / f"{device.lower().replace(' ', '-')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**about, "steps": steps}))


def test_what_to_run_counts_recipes_and_records_and_tells_times_of_the_usual_device(tmp_path):
    for name, seconds, device in (
        ("cifar10_sgd", 200.0, "NVIDIA H200"),
        ("cifar10_madam", 100.0, "NVIDIA H200"),
        ("cifar10_madam_12bit", 120.0, "NVIDIA H200"),
        ("cifar10_adam", 9999.0, "CPU"),
        ("wikitext2_sgd", 60.0, "CPU"),
    ):
        records.write(made(name, 0, seconds=seconds, device=device), tmp_path)
        records.write(made(name, 1, seconds=1.0, device=device), tmp_path)  # the first seed stands for all
    rows = {row[0]: row[1:] for row in effort_table(Results(tmp_path)).rows}
    assert rows["the paper's tables: CIFAR-10"] == (
        "`cifar10_sgd cifar10_adam cifar10_madam 'cifar10_madam_*bit'`", "6", "4", "120 (100 to 200), NVIDIA H200",
    )  # fmt: skip
    assert rows["the paper's tables: WikiText-2"][2:] == ("1", "60, CPU")
    assert rows["the theory"][2:] == ("0", "")


def test_what_to_run_names_what_the_tables_show(tmp_path):
    """Recipes that a table asks for, and finds, are all in a command."""
    named = {
        name
        for _, patterns in effort.SHOWN
        for name in recipes.matching(patterns.split(), [*recipes.names(), *studies.names()])
    }
    for task in ("cifar10_100e", "cifar100_100e", "wikitext2_20e"):
        assert {
            f"{task}_{variant}" for variant in (*crossing.OURS_NAMED.values(), "madam", "paper12", "paper8")
        } <= named
        assert not any(
            "no_first_moment" in name or name.endswith("_nearest") for name in named if name.startswith(task)
        )
    assert set(PAPER) <= named


def test_tables_are_the_golden_ones(folder):
    found = Results(folder)
    text = "\n".join(f"## {name}\n\n{make(found).markdown()}" for name, make in tables.TABLES.items())
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_cells_say_how_many_seeds_what_is_missing_and_what_was_dirty(folder):
    found = Results(folder)
    assert found.ours("cifar10_sgd") == "8.40 ±0.40 (3 seeds)"
    assert found.ours("cifar10_adam") == "6.66 (1 seed)"
    assert found.ours("cifar10_madam") == "7.78* (1 seed)"
    assert found.ours("wikitext2_madam") == "171.3 (1 seed)"
    assert found.ours("wikitext2_sgd") == "diverged (1 of 1)"
    assert found.ours("cifar100_sgd") == "missing"


def test_marked_tables_of_a_markdown_file_are_filled_in_and_nothing_else(folder, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        "before\n<!-- table: bits -->\nold\n<!-- end -->\nbetween\n<!-- table: main -->\n<!-- end -->\nafter\n"
    )
    for _ in range(2):
        tables.fill_in(path, Results(folder))
    text = path.read_text()
    assert text.startswith("before\n<!-- table: bits -->\n| ")
    assert "old" not in text
    assert "7 ±0.1 / 7.10 (1 seed)" in text
    assert text.count("| CIFAR-10, ResNet-18 |") == 2
    assert text.endswith("<!-- end -->\nafter\n")


def test_the_speed_table_says_where_it_was_measured_and_prints_no_time_of_a_red_test(folder, tmp_path):
    path = tmp_path / "README.md"
    path.write_text("<!-- table: speed -->\n<!-- end -->\n")
    for _ in range(2):
        tables.fill_in(path, Results(folder))
    text = path.read_text()
    assert text.count("NVIDIA H200, torch 2.11.0, commit ccccccc.") == 1
    assert "| Madam 12-bit | 4.00 | 1.25 | 0.50 | 0.150 | 0.060 | 7.6 |" in text
    assert "| Madam 8-bit | wrong: codes of (7,) differ from the reference's |  |  |  |  |  |" in text
    assert not tables.speed_table(Results(tmp_path)).has_results
    assert "2 threads, torch 2.11.0, commit ccccccc: ResNet-18's 11.2 million" in tables.cpu_table(Results(folder)).note
    assert not tables.cpu_table(Results(tmp_path)).has_results


def test_the_table_of_crossing_takes_the_best_point_of_a_grid_and_says_what_is_missing(tmp_path):
    assert not crossing_table(Results(tmp_path)).has_results
    for name, error in (
        ("cifar10_100e_adamw_0.001_0.1", 7.2), ("cifar10_100e_adamw_0.003_0.1", 7.9), ("cifar10_100e_crossing_1", 7.0),
        ("wikitext2_20e_madam", 171.0), ("cifar10_100e_crossing_1_affine", 7.1),
    ):  # fmt: skip
        records.write(made(name, 0, error), tmp_path)
    table = crossing_table(Results(tmp_path))
    assert table.has_results
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.note.endswith("No records yet: CIFAR-100, digits.")
    assert rows["AdamW, tuned"] == ("7.20 (1 seed) at lr 0.001, decay 0.1, 2 of 16 points", "missing")
    assert rows["crossing 1"] == ("7.00 (1 seed)", "missing")
    assert rows["madam"] == ("missing", "171.0 (1 seed)")
    assert rows["crossing 1 affine"] == ("7.10 (1 seed)", "")
    assert "crossing 3" not in rows  # of which nothing is known


def test_the_table_of_ours_has_floats_and_codes_beside_tuned_baselines(tmp_path):
    assert not ours_table(Results(tmp_path)).has_results
    for name, error in (
        ("cifar10_100e_adamw_0.001_0.1", 7.2), ("cifar10_100e_crossing_1_bound_5_decay_0.2_momentum", 6.1),
        ("cifar10_100e_paper8", 12.0), ("wikitext2_20e_signed8_bound_5_decay_0.2_momentum", 150.0),
        ("cifar10_100e_adamw_0.001_1", 6.0), ("wikitext2_20e_adamw_0.001_0.1", 180.0),
        ("wikitext2_20e_adamw_0.001_1", 300.0), ("wikitext2_20e_adamw_0.0003_1", 160.0),
    ):  # fmt: skip
        records.write(made(name, 0, error), tmp_path)
    table = ours_table(Results(tmp_path))
    rows = {row[0]: row[1:] for row in table.rows}
    assert "crossing 1, bound 5, weight_decay 0.2, momentum 0.9" in table.note
    assert rows["AdamW, tuned"][0].startswith("6.00 (1 seed) at lr 0.001, decay 1")
    assert rows["AdamW, tuned"][2].startswith("160.0 (1 seed) at lr 0.0003, decay 1")
    one = rows["AdamW, one setting for all: lr 0.001, decay 0.1"]  # the best of two that both tasks have
    assert one == ("7.20 (1 seed)", "missing", "180.0 (1 seed)")
    assert rows["Madam, ours, float32"] == ("6.10 (1 seed)", "missing", "missing")
    assert rows["Madam, the paper's, 8 bits and a sign"][0] == "12.00 (1 seed)"
    assert rows["Madam, ours, 8 bits"][2] == "150.0 (1 seed)"


def test_a_point_with_a_seed_that_diverged_is_not_the_best_and_is_counted(tmp_path):
    for name, errors in (("0.001_0.1", [7.0]), ("0.003_0.1", [6.0, None, 6.0]), ("0.003_1", [None])):
        for seed, error in enumerate(errors):
            status = "finished" if error else "diverged"
            records.write(made(f"cifar10_100e_adamw_{name}", seed, error, 50.0, status=status), tmp_path)
    results = Results(tmp_path)
    rows = {row[0]: row[1:] for row in ours_table(results).rows}
    assert rows["AdamW, tuned"][0] == "7.00 (1 seed) at lr 0.001, decay 0.1, 3 of 16 points"
    assert results.ours("cifar10_100e_adamw_0.003_0.1", "train") == "diverged (1 of 3)"
    assert results.mean("cifar10_100e_adamw_0.003_0.1") == math.inf


def test_points_of_a_grid_are_compared_by_the_seed_that_all_of_them_have(tmp_path):
    for name, errors in (("0.001_0.1", [6.0, 7.0, 7.0]), ("0.003_0.1", [6.1])):
        for seed, error in enumerate(errors):
            records.write(made(f"cifar10_100e_adamw_{name}", seed, error), tmp_path)
    rows = {row[0]: row[1:] for row in ours_table(Results(tmp_path)).rows}
    assert rows["AdamW, tuned"][0].startswith("6.67 ±0.50 (3 seeds) at lr 0.001, decay 0.1")


def test_the_table_of_controls_shows_what_a_change_changed(tmp_path):
    records.write(made("cifar10_sgd", 0, 11.2), tmp_path)
    assert not controls_table(Results(tmp_path)).has_results  # a cell of the paper's is no control
    records.write(made("cifar100_100e_12bit_float32", 0, 30.5), tmp_path)
    table = controls_table(Results(tmp_path))
    assert table.has_results
    rows = {row[0]: row[2] for row in table.rows[:3]}
    assert rows == {
        "12-bit Madam, CIFAR-100, 100 epochs": "missing", "… float32": "30.50 (1 seed)", "… affine": "missing"
    }  # fmt: skip


def test_verify_finds_what_is_wrong(folder):
    assert problems(folder) == ([], 33)
    (folder / "gpt").mkdir()
    (folder / "gpt" / "124M_madam.json").write_text('{"kind": "train"}')  # of examples/gpt, and of another form
    assert problems(folder) == ([], 33)
    Results(folder)
    path = folder / "cifar10_adam" / "0.json"
    good = json.loads(path.read_text())
    for change, says in (
        (lambda r: r["settings"].update(batch=7), "the recipe has changed since, in batch"),
        (lambda r: r.update(test="x"), "test is 'x'"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        path.write_text(json.dumps(bad))
        found, count = problems(folder)
        assert count == 33
        assert len(found) == 1
        assert says in found[0]
    path.write_text("{")
    assert "cannot be read" in problems(folder)[0][0]


# ---- charts


def tips(svg):
    return [t.text for t in ET.fromstring(svg).iter(f"{SVG}title")]


def test_a_chart_is_well_formed_and_shows_every_finite_point_on_hover():
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
    assert tips(svg) == ["Madam: 0.01, 1", "Madam: 1, 0.25", "<new & odd>: 0.01, 0.5"]
    assert len(ET.fromstring(svg).findall(f".//{SVG}path[@class='cross']")) == 1


def test_lines_without_a_colour_of_their_own_get_one_that_no_other_has():
    lines = [Series(name, [(0.0, 0.0), (1.0, i)]) for i, name in enumerate(("a", "b", "c", "Madam", "12-bit Madam"))]
    svg = line_chart(lines, title="t", x_label="x", y_label="y")
    assert len(set(re.findall(r'<polyline class="line" stroke="([^"]+)"', svg))) == 5


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1.0)], [(0.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1, 1e-9), (2, 3e7)], [(float("nan"), 1.0)]]
)
@pytest.mark.parametrize("log", [False, True])
def test_charts_of_degenerate_data_still_draw(points, log):
    svg = line_chart([Series("a", points)], title="t", x_label="x", y_label="y", x_log=log, y_log=log)
    ET.fromstring(svg)
    assert "nan" not in svg


def test_bars_stack_their_parts():
    svg = bars([("Adam", [("weights", 4.0), ("optimiser state", 8.0)])], title="t", note="n", unit="bytes")
    assert tips(svg) == ["Adam, weights: 4 bytes", "Adam, optimiser state: 8 bytes"]


def test_the_learning_rate_figure_marks_the_best_and_puts_divergence_at_zero(folder):
    svg = figures.learning_rates(Results(folder), "digits")
    crosses = [c[0].text for c in ET.fromstring(svg).findall(f".//{SVG}path[@class='cross']")]
    assert crosses == [
        "SGD: 1.5 at 0.1",
        "Adam: 2.5 at 0.001",
        "Madam: 2 at 0.01",
        "12-bit Madam: 2.5 at 0.01",
    ]
    assert "Adam: diverged at 1" in tips(svg)
    assert "signed" not in svg  # whose best nobody knows yet
    assert figures.learning_rates(Results(folder), "cifar100") is None


def test_the_number_systems_figure_draws_every_bit_and_every_rung():
    root = ET.fromstring(figures.number_systems())
    assert len(root.findall(f".//{SVG}rect[@class='bit']")) == 16 + 13 + 9 + 8 + 5
    marks = {p[0].text: p.get("d").count("M") for p in root.findall(f".//{SVG}path[@class='rung']")}
    assert marks["8-bit ladder: 256 weights"] == 256
    assert marks["synapse: 26 weights"] == 26


# ---- the page


def test_the_page_is_self_contained_and_holds_every_part(folder, tmp_path):
    target = tmp_path / "out" / "report.html"
    assert report.write(folder, target, [tmp_path / "nothing.md"]) == [target]
    html = target.read_text()
    for title in ("Which learning rate? Digits", "Convergence and weight clipping", "B-bit Madam", "Complete results",
                  "Number systems", "Bytes a weight", "Where the codes live: cifar10_madam_12bit"):  # fmt: skip
        assert title in html, title
    addresses = set(re.findall(r"""(?:https?:)?//[^\s"'<>)]+""", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address that is fetched
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\(", html)
    assert "prefers-color-scheme:dark" in html
    assert 'name="viewport"' in html


def test_a_page_without_records_of_the_paper_leaves_its_empty_tables_out(tmp_path):
    for record in learning_rates("madam", 40.0, 3.0, 2.0, 4.0, 30.0):
        records.write(record, tmp_path / "r")
    report.write(tmp_path / "r", tmp_path / "page.html", [])
    html = (tmp_path / "page.html").read_text()
    assert "B-bit Madam" not in html
    assert "Which learning rate? Digits" in html


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_chart_and_asks_for_nothing(folder, tmp_path):
    page = tmp_path / "report.html"
    report.write(folder, page, [])
    html = page.read_text()
    count = html.count("<svg")
    assert count >= 6
    # The probe is the test's, not the page's: it measures what was drawn and writes it where --dump-dom shows it.
    probe = """<script>addEventListener('load',()=>{const s=[...document.querySelectorAll('svg')];
    const drawn=s.filter(x=>x.getBoundingClientRect().width>200&&[...x.querySelectorAll('polyline,rect.bar,path.rung')]
    .some(y=>{const b=y.getBBox();return b.width+b.height>10}));
    document.body.dataset.drawn=drawn.length+' of '+s.length;
    document.body.dataset.wide=document.documentElement.scrollWidth>innerWidth;
    document.body.dataset.asked=performance.getEntriesByType('resource').map(r=>r.name).join(' ')})</script>"""
    probed = tmp_path / "probed.html"
    probed.write_text(html.replace("</body>", probe + "</body>"))
    shot = tmp_path / "report.png"
    flags = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
             f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    for size in ("1200,1600", "400,900"):
        dom = subprocess.run(
            [*flags, f"--window-size={size}", "--dump-dom", probed.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip
        assert f'data-drawn="{count} of {count}"' in dom
        assert 'data-wide="false"' in dom  # on a phone, too, nothing sticks out
        assert 'data-asked=""' in dom  # the page loaded nothing
    subprocess.run(
        [*flags, "--window-size=1200,3200", f"--screenshot={shot}", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert shot.stat().st_size > 50_000
    keep = os.environ.get("KEEP_SCREENSHOTS")
    if keep:
        shutil.copy(shot, keep)


# ---- the theory


def studied(name, points, seed=0, **changes):
    """A study's record, with these points."""
    study = studies.get(name)
    record = {
        "schema": 1, "study": name, "settings": study.settings(), "overrides": {}, "seed": seed, "points": points,
        "seconds": 1.0, "started": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "dirty": False, "source": "0" * 16,
        "versions": {}, "device": "CPU",
    }  # fmt: skip
    return {**record, **changes}


def watched(name, cosines, **codes):
    """A monitored run's record: the cosines of its layers, look by look."""
    looks = [
        {
            "step": 40 * i,
            "epoch": 2.0 * i,
            "lr": 0.01,
            "layers": {
                f"{j}.weight": {"cosine": c, "alignment": c, "relative_size": 0.004, "flips": 0.25, **codes}
                for j, c in enumerate(row)
            },
        }
        for i, row in enumerate(cosines)
    ]
    return made(name, 0, 2.0, trust=looks)


@pytest.fixture
def theory_folder(tmp_path):
    results = tmp_path / "theory"
    broken = [
        {"depth": depth, "direction": kind, "size": size, "worst": 2 * size * depth, "median": size, "trust": size}
        for depth in (2, 50)
        for kind in ("sign rule", "layer-wise", "random signs")
        for size in (0.001, 0.01)
    ]
    helped = [
        [
            {"depth": depth, "rule": rule, "lr": lr / depth, "bound": 0.1, "size": 0.1}
            for depth in (2, 50)
            for rule in ("sign rule", "layer-wise", "gradient descent")
        ]
        for lr in (1.0, 3.0, 40.0)
    ]
    for record in (
        studied("breakdown_tanh", broken),
        studied("breakdown_resnet18", [p for p in broken if p["depth"] == 50]),
        *(studied("largest_lr_tanh", points, seed) for seed, points in enumerate(helped)),
        watched("digits_trust", [[0.6, 0.5, 0.7], [0.4, float("nan"), 0.5]]),
        watched("digits_trust_12bit", [[0.6], [0.3]], upper=0.1, lower=0.02, rungs=3.5, moved=0.75),
    ):
        records.write(record, results)
    return results


def test_the_largest_lr_is_drawn_as_the_median_of_its_seeds_beside_a_dashed_bound(theory_folder):
    svg = theory.largest_lr(Results(theory_folder), "tanh")
    assert "sign rule: 1.5 with 2 layers (0.5 to 20)" in tips(svg)
    assert "sign rule: the bound is 0.1 with 50 layers (0.1 to 0.1)" in tips(svg)
    lines = ET.fromstring(svg).findall(f".//{SVG}polyline")
    assert [line.get("stroke-dasharray") is not None for line in lines] == [False, True] * 3
    texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count("sign rule") == 1  # one entry of the legend for both
    assert {"2", "5", "10", "20", "50"} <= set(texts)
    assert theory.largest_lr(Results(theory_folder), "leaky_relu") is None


def test_breakdown_is_drawn_over_the_product(theory_folder):
    found = Results(theory_folder)
    svg = theory.breakdown(found, "tanh", "sign rule")
    assert "2: 0.04 at steps of 0.01, where the product is 0.01" in tips(svg)
    assert "50 layers: 0.1 at steps of 0.001, where the product is 0.001" in tips(svg)
    assert "layer-wise: 1 at steps of 0.01, where the product is 0.01" in tips(theory.breakdown(found, "resnet18"))
    assert theory.breakdown(found, "leaky_relu", "sign rule") is None


def test_angles_are_drawn_against_those_of_gaussian_numbers_and_what_is_not_finite_is_left_out(theory_folder):
    found = Results(theory_folder)
    said = tips(theory.angles(found, "digits_trust"))
    assert "smallest layer: 0, 0.5" in said
    assert "median layer: 2, 0.45" in said
    assert "2/π: 2, 0.6366" in said
    assert theory.codes_moving(found, "digits_trust") is None
    said = tips(theory.codes_moving(found, "digits_trust_12bit"))
    assert {"move in a step: 0, 75", "change sign: 2, 25", "at upper end: 0, 10", "at lower end: 2, 2"} <= set(said)
    assert theory.angles(found, "cifar10_trust") is None


def test_the_theorys_tables_say_what_the_records_say(theory_folder, tmp_path):
    path = tmp_path / "theory.md"
    path.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in theory.TABLES))
    report.write(theory_folder, tmp_path / "page.html", [path], theory_picture=tmp_path / "lr.svg")
    text = path.read_text()
    assert "| tanh perceptron | 2 | 4 | 4 | 4 |" in text
    assert "| tanh perceptron | 50 | 0.06 / 0.1 (1 of 3) | 0.06 / 0.1 (1 of 3) | 0.06 / 0.1 (1 of 3) |" in text
    assert "| digits_trust | 0.60 | 0.53 | 0.45 | 0.40 | 0.4 | 25 % |  |" in text
    assert "| digits_trust_12bit | 0.60 | 0.45 | 0.30 | 0.30 | 0.4 | 25 % | 75 % |" in text
    ET.fromstring((tmp_path / "lr.svg").read_text())
    html = (tmp_path / "page.html").read_text()
    for title in ("When does a step help?", "The largest lr that helps: tanh", "cos gamma during training: digits",
                  "How codes move: digits_trust_12bit", "Does deep relative trust hold? narrow ResNet-18"):  # fmt: skip
        assert title in html, title
    assert "from 7 records" in html
    assert "digits_trust_12bit" not in tables.ladder_table(Results(theory_folder)).markdown()


def test_a_report_without_studies_has_no_section_on_theory(folder, tmp_path):
    written = report.write(folder, tmp_path / "page.html", [], theory_picture=tmp_path / "lr.svg")
    assert written == [tmp_path / "page.html"]
    assert "When does a step help?" not in (tmp_path / "page.html").read_text()


def test_a_plateau_is_as_wide_as_results_are_good():
    from madam_lab.report.plateau import plateau

    flat = dict.fromkeys((1e-4, 1e-3, 1e-2, 1e-1, 1.0), 7.0)
    assert plateau(flat) == (pytest.approx(4.0), True)
    peak = {1e-4: 800.0, 1e-3: 80.0, 1e-2: 8.0, 1e-1: 80.0, 1.0: 800.0}  # by a factor of 10 a decade
    assert plateau(peak, worse=10 ** (1 / 4)) == (pytest.approx(0.5), False)
    assert plateau({**peak, 1e-1: math.inf}, worse=10 ** (1 / 4)) == (pytest.approx(0.25), False)
    assert plateau({**peak, 1e-3: 8.0}, worse=10 ** (1 / 4)) == (pytest.approx(1.0 + 0.25 + 0.125), False)
    assert plateau({lr: lr for lr in flat}, worse=10.0) == (pytest.approx(1.0), True)


def test_the_plateau_table_has_the_best_rate_and_nothing_of_a_kind_that_never_finished(folder):
    from madam_lab.report.plateau import plateau_table

    for record in learning_rates("ours", *[None] * len(LEARNING_RATES)):
        records.write(record, folder)
    table = plateau_table(Results(folder))
    cells = dict(zip(table.head[1:], table.rows[0][1:], strict=True))
    best = {kind: cell.partition(", at ")[2] for kind, cell in cells.items() if cell != "missing"}
    assert best == {"SGD": "0.1", "Adam": "0.001", "Madam": "0.01", "12-bit Madam": "0.01"}
    assert "Madam, ours" not in figures.learning_rates(Results(folder), "digits")


@pytest.mark.parametrize(
    ("schedule", "how"), [("cosine", "Digits, cosine"), ("recent", "Digits, constant, weights averaged")]
)
def test_rates_that_fall_or_are_averaged_have_a_row_and_a_figure_of_their_own(schedule, how, folder):
    from madam_lab.report.plateau import plateau_table

    for record in learning_rates(f"ours_{schedule}", 60.0, 5.0, 2.5, 2.75, 30.0):
        records.write(record, folder)
    rows = {row[0]: row[1:] for row in plateau_table(Results(folder)).rows}
    assert list(rows) == ["Digits, constant", how]
    assert rows[how][-1].endswith(", at 0.01")
    assert set(rows[how][:-1]) == {"missing"}
    svg = figures.learning_rates(Results(folder), "digits", schedule)
    crosses = [c[0].text for c in ET.fromstring(svg).findall(f".//{SVG}path[@class='cross']")]
    assert crosses == ["Madam, ours: 2.5 at 0.01"]
    assert how in svg


def test_falling_rates_change_nothing_but_the_schedule_and_averages_nothing_at_all():
    for name in ("cifar10_lr_sgd_0.1", "digits_lr_ours_0.01", "wikitext2_lr_adam_0.001"):
        constant, rate = recipes.get(name), name.rpartition("_")[2]
        falling = recipes.get(name.removesuffix(rate) + "cosine_" + rate)
        assert (falling.schedule, falling.lr) == ("cosine", float(rate))
        like = {"schedule": constant.schedule, "lr": constant.lr, "name": constant.name, "paper": constant.paper}
        assert replace(falling, **like) == constant
        averaged = recipes.get(name.removesuffix(rate) + "recent_" + rate)
        assert averaged.settings() == {**constant.settings(), "recent": 0.05}


def test_tables_count_the_runs_whose_rule_the_library_no_longer_has(folder):
    earlier = {"versions": {"torchmadam": "0.1.0"}}
    for record in (
        made("digits_60e_crossing_1", 0, **earlier),
        made("digits_60e_crossing_1", 1),
        made("digits_60e_signed8", 0, **earlier),
        made("digits_60e_madam", 0, **earlier),  # the paper's rule is as it was
        made("digits_60e_paper8", 0, **earlier),
        made("digits_60e_adamw_0.001_0.1", 0, **earlier),
    ):
        records.write(record, folder)
    assert crossing_table(Results(folder)).note.endswith(" Runs by torchmadam 0.1, which clamped biases: 2.")
    (folder / "digits_60e_crossing_1" / "0.json").unlink()
    (folder / "digits_60e_signed8" / "0.json").unlink()
    assert "torchmadam 0.1" not in crossing_table(Results(folder)).note
