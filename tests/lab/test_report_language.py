"""The tables of the language model, from real records of tiny runs."""

import json

import pytest
from examples.gpt.__main__ import main

from madam_lab.report import language
from madam_lab.report.numbers import Results

MODEL = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--device", "cpu"]


@pytest.fixture
def results(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("what was measured, and nothing else. " * 20)
    folder = tmp_path / "gpt"
    for name, method in (("a", ["madam-signed8", "--moment", "8bit", "--release"]), ("b", ["adamw", "--lr", "0.003"])):
        place = ["--out", str(folder / f"{name}.json"), "--checkpoint", str(tmp_path / f"{name}.pt")]
        assert main(["train", *MODEL, "--text", str(text), "--steps", "4", "--method", *method, *place]) == 0
    for name, method in (("c", ["madam-12bit", "--release"]), ("d", ["madam-12bit"])):
        more = ["--vocabulary", "32", "--method", *method, "--out", str(folder / f"{name}.json")]
        assert main(["memory", *MODEL, *more]) == 0
    largest = json.loads((folder / "c.json").read_text()) | {"kind": "largest", "dirty": True, "source": "unknown"}
    (folder / "e.json").write_text(json.dumps(largest))
    return Results(tmp_path)


def test_quality_has_a_row_a_run_peers_first_with_the_numbers_of_the_records(results):
    table = language.quality_table(results)
    adamw, madam = table.rows
    record = next(r for r in results.language if r["settings"]["method"]["name"] == "adamw" and r["kind"] == "train")
    assert adamw[0].startswith("AdamW, float32")
    assert adamw[1] == "0.003"
    assert adamw[3] == f"{record['curve'][-1]['valid']:.3f}"
    assert adamw[5] == "16.00"
    assert madam[0].startswith("Madam, signed 8-bit codes, 8-bit moment, gradients released")
    svg = language.loss_curves(results)
    assert "AdamW 0.003" in svg
    assert "signed 8 m8" in svg


def test_memory_puts_the_largest_last_and_marks_records_whose_code_is_in_no_commit(results):
    rows = language.memory_table(results).rows
    assert len(rows) == 3
    assert ["released" in row[1] for row in rows] == [False, True, True]
    assert rows[2][0].startswith("largest: ")
    assert rows[2][1].endswith("*")
    assert float(rows[0][2]) > float(rows[1][2])


def test_no_runs_make_no_tables_and_no_picture(tmp_path):
    empty = Results(tmp_path)
    assert language.quality_table(empty).rows == language.memory_table(empty).rows == []
    assert not language.memory_table(empty).has_results
    assert language.loss_curves(empty) is None
