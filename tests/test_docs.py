"""What the pages say is what the programs say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from examples import failures, pictures

from madam_lab import cli, report
from madam_lab.report import tables
from madam_lab.report.numbers import Results, problems

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def read(path):
    return path.read_text(encoding="utf-8")


def test_the_first_page_has_the_readmes_ten_lines():
    assert BLOCK.findall(read(DOCS / "index.md")) == BLOCK.findall(read(ROOT / "README.md"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_code_on_the_pages_is_python(page):
    for code in BLOCK.findall(read(page)):
        compile(code, str(page), "exec")


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param("zeros", {"steps": 101}, marks=pytest.mark.slow),
        ("signs", {"steps": 2, "seeds": 1}),
        ("spacing", {"steps": 2}),
        pytest.param("bound", {"steps": 100}, marks=pytest.mark.slow),
    ],
)
def test_the_library_still_says_what_the_migration_page_quotes(mode, options):
    _, runs = failures.MODES[mode](**options)
    (quoted,) = re.findall(rf"<!-- said: {mode} -->\n(.*?)<!-- end -->", read(DOCS / "migration.md"), re.DOTALL)

    def without_shares(text):
        return re.sub(r"\d+ %", "N %", text)  # which may differ by one between machines

    assert without_shares(failures.quoted(runs)) == without_shares(quoted)


def test_pictures_of_failures_are_drawn_and_warnings_filled_in(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- said: spacing -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(failures, "MODES", {"spacing": failures.spacing})
    failures.main(page, tmp_path / "pictures", steps=2)
    assert read(tmp_path / "pictures" / "spacing.svg").count("<polyline") == 2
    text = read(page)
    assert text.startswith("before\n<!-- said: spacing -->\n> `rounded to nearest`: lr=0.003 is at most half")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text


def test_tables_and_figures_are_what_the_records_say(tmp_path):
    pages = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if "<!-- table: " in read(page))]
    assert {page.stem for page in pages[1:]} == set(cli.PAGES)
    copies = [Path(shutil.copy(page, tmp_path)) for page in pages]
    made = report.write(
        ROOT / "results", tmp_path / "report.html", copies, tmp_path / "learning-rate.svg", tmp_path / "largest-lr.svg"
    )
    assert len(made) == len(pages) + 3
    originals = [DOCS / "report.html", *pages, DOCS / "learning-rate.svg", DOCS / "largest-lr.svg"]
    for copy, original in zip(made, originals, strict=True):
        assert read(copy) == read(original), f"run `madam report`: {original.name}"


def test_every_record_is_of_a_recipe_as_it_is_now():
    found, count = problems(ROOT / "results")
    assert (found[:3], len(found)) == ([], 0)
    assert count > 1000


def test_rows_that_the_readme_shows_of_the_benchmark_are_in_it():
    shown = tables.speed_brief_table(Results(ROOT / "results")).rows
    assert {row[0] for row in shown} == set(tables.BRIEF)


def test_pictures_without_training_are_what_the_library_says_now(tmp_path):
    pictures.main(tmp_path)
    for name in ("ladders.svg", "memory.svg"):
        assert read(tmp_path / name) == read(DOCS / name)


def test_modules_are_there_by_the_names_the_pages_call_them():
    command = "import torchmadam; print(torchmadam.theory.__name__, torchmadam.distributed.__name__)"
    said = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["torchmadam.theory", "torchmadam.distributed"]
