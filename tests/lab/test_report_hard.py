"""The report on the GAN and on photographs: samples, FIDs, rows that say they are not ImageNet, speeds."""

import base64
import json
import re

import torch

from madam_lab import png, records, report
from madam_lab.report import gan, photographs
from madam_lab.report.numbers import Results
from madam_lab.report.page import page
from tiny_records import made


def test_fids_stand_beside_the_papers_with_what_is_missing(tmp_path):
    assert not gan.fid_table(Results(tmp_path)).has_results
    records.write(made("cgan_madam", 0, 19.5, 18.25), tmp_path)
    records.write(made("cgan_madam_signed8", 0, 25.0, 24.0), tmp_path)
    table = gan.fid_table(Results(tmp_path))
    assert table.has_results
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Madam"] == ("19 ±2", "18.25 (1 seed)", "19 ±2", "19.50 (1 seed)")
    assert rows["signed 8-bit Madam, no momentum, no decay"] == ("", "24.00 (1 seed)", "", "25.00 (1 seed)")
    assert rows["12-bit Madam"] == ("", "missing", "19.8 ±0.8", "missing")


def test_the_table_of_fids_says_how_long_one_takes(tmp_path):
    bench = {"device": "GPU", "fid": {"pictures": 10_000, "first": 61.2, "later": 29.6}}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "gpu-fid.json").write_text(json.dumps(bench))
    note = gan.fid_table(Results(tmp_path)).note
    assert "On one GPU that takes 30 s, 61 the first time (10,000 pictures, both splits)." in note
    bench["fid"] = {"pictures": 10, "first": 0.1, "later": 0.1}  # a trial
    (tmp_path / "bench" / "gpu-fid.json").write_text(json.dumps(bench))
    assert "takes" not in gan.fid_table(Results(tmp_path)).note


def test_the_page_holds_the_samples_themselves(tmp_path):
    records.write(made("cgan_madam", 0, 19.5, 18.25), tmp_path)
    assert "What the generators make" not in page(Results(tmp_path))
    blob = png.encoded(torch.randint(256, (8, 8, 3), dtype=torch.uint8))
    records.picture_of("cgan_madam", 0, tmp_path).write_bytes(blob)
    text = page(Results(tmp_path))
    (held,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(held) == blob
    assert "Madam, FID 19.50 (1 seed)" in text
    assert "FID against the test set" in text  # the convergence figure's note


def test_imagenette_has_a_table_of_its_own_that_says_what_it_is_not(tmp_path):
    assert not photographs.imagenette_table(Results(tmp_path)).has_results
    records.write(made("imagenette_sgd", 0, 12.5, 1.0), tmp_path)
    records.write(made("imagenette_madam_12bit", 0, 15.0, 2.0), tmp_path)
    lent = made("imagenette_madam_12bit", 0, 14.0, 2.0)
    lent |= {"recipe": "imagenette_madam_12bit+scales=0123456789abcdef", "overrides": {"scales": "0123456789abcdef"}}
    records.write(lent, tmp_path)
    table = photographs.imagenette_table(Results(tmp_path))
    assert [row[0] for row in table.rows] == [
        "SGD", "Adam", "Madam", "12-bit Madam", "12-bit Madam, scales of a trained model", "8-bit Madam",
    ]  # fmt: skip
    assert table.rows[4][2] == "14.00 (1 seed)"
    assert "not ImageNet" in table.title
    assert "not ImageNet" in re.sub(r"\s+", " ", table.note.replace("This is not ImageNet", "not ImageNet"))
    text = page(Results(tmp_path))
    assert "Imagenette, not ImageNet" in text
    assert "Convergence, Imagenette (not ImageNet)" in text
    main = next(row for row in report.TABLES["main"](Results(tmp_path)).rows if row[0].startswith("ImageNet"))
    assert main[-1] == "missing"  # nothing of Imagenette passes for ImageNet


def test_the_speed_of_full_size_training_comes_from_its_benchmark_and_leaves_the_other_tables_alone(tmp_path):
    assert not photographs.throughput_table(Results(tmp_path)).has_results
    about = {"device": "NVIDIA H200", "commit": "c" * 40, "dirty": False, "versions": {"torch": "2.11.0"}}
    rows = {"SGD momentum fused": 3000.0, "Madam 12-bit": 2910.0}
    (tmp_path / "bench").mkdir()
    path = tmp_path / "bench" / "nvidia-h200-imagenet.json"
    path.write_text(json.dumps({**about, "imagenet": {"batch": 256, "side": 224, "classes": 1000, "rows": rows}}))
    # Later in the folder, and none of this table's: smaller pictures, and no pictures.
    small = {"batch": 256, "side": 64, "classes": 1000, "rows": {"SGD momentum fused": 40_000.0}}
    path.with_name("x-imagenet.json").write_text(json.dumps({**about, "imagenet": small}))
    path.with_name("x.json").write_text(json.dumps(about))
    table = photographs.throughput_table(Results(tmp_path))
    assert table.rows == [("SGD momentum fused", "3,000", "1.00"), ("Madam 12-bit", "2,910", "0.97")]
    path.write_text(path.read_text().replace("SGD momentum fused", "Madam float32"))
    alone = photographs.throughput_table(Results(tmp_path))
    assert alone.rows == [("Madam float32", "3,000", ""), ("Madam 12-bit", "2,910", "")]
    assert "Batches of 256 generated pictures of 224 pixels and 1,000 classes" in table.note
    assert not report.TABLES["speed"](Results(tmp_path)).has_results


def test_marked_tables_of_all_kinds_are_filled_in(tmp_path):
    records.write(made("cgan_adam", 0, 24.0, 23.0), tmp_path / "r")
    path = tmp_path / "x.md"
    path.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in ("fid", "imagenette", "throughput")))
    report.write(tmp_path / "r", tmp_path / "page.html", [path])
    text = path.read_text()
    assert "| Adam | 23.1 ±0.8 | 23.00 (1 seed) | 23.9 ±0.9 | 24.00 (1 seed) |" in text
    assert "none of these numbers is in the paper" in text
