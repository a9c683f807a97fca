"""docs/distributed.md: its tables are what the program computes, and its code runs."""

import re
from pathlib import Path

from tests.distributed import work

from ranks import on_ranks
from torchmadam.distributed import sizes

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")


def test_the_tables_are_those_that_the_program_writes():
    assert sizes.written(PAGE) == PAGE


def test_what_is_held_and_sent_is_the_bytes_a_weight_times_the_weights():
    found = sizes.measured(sizes.WAYS[0])  # AdamW in bfloat16: weight, gradient and two moments of 2 bytes each
    assert round(found.held, 2) == 8
    assert round(found.on_each(7, 8), 2) == 7
    assert found.sent_by_each(70, 1) == 0
    assert found.sent_by_each(1, 2) == 3  # half of what is gathered twice and reduced once


def test_the_page_s_code_runs_on_two_ranks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    on_ranks(2, work.runs_as_written, blocks, tmp_path)
