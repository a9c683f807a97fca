"""The GAN: FIDs beside the paper's, and what its generators make."""

import base64
from html import escape

from madam_lab.recipes import PAPER
from madam_lab.report.numbers import Results, paper_cell
from madam_lab.report.tables import Table

KINDS = {
    "cgan_sgd": "SGD",
    "cgan_adam": "Adam",
    "cgan_madam": "Madam",
    "cgan_madam_12bit": "12-bit Madam",
    "cgan_madam_10bit": "10-bit Madam",
    "cgan_madam_8bit": "8-bit Madam",
    "cgan_madam_signed8": "signed 8-bit Madam, no momentum, no decay",
    "cgan_madam_signed8_default": "signed 8-bit Madam, the default",
}


def fid_table(results: Results) -> Table:
    """FID against training and test pictures."""
    rows, ours = [], []
    for name, title in KINDS.items():
        paper = PAPER.get(name)
        cells = (paper_cell(paper, "train"), results.ours(name, "train"), paper_cell(paper), results.ours(name))
        rows.append((title, *cells))
        ours += results.of(name)
    note = "FID of 10,000 made pictures against 10,000 of CIFAR-10's; lower is better."
    for bench in results.benchmarks:
        if bench.get("fid", {}).get("pictures") == 10_000:  # and not in a trial of a few
            took = f"{bench['fid']['later']:.0f} s, {bench['fid']['first']:.0f} the first time"
            note += f" On one {bench['device']} that takes {took} ({bench['fid']['pictures']:,} pictures, both splits)."
    head = ("", "train, paper", "train, ours", "test, paper", "test, ours")
    return Table("The class-conditional GAN", note, head, rows, ours)


def sheets(results: Results) -> list[str]:
    """The sheets of samples that lie beside the records, as HTML that holds them."""
    drawn = []
    for name, title in KINDS.items():
        for record in results.of(name)[:1]:
            picture = results.picture(record)
            if picture is None:
                continue
            data = base64.b64encode(picture).decode()
            said = f"{title}, FID {results.ours(name)}"
            drawn.append(
                f'<img alt="{escape(said)}" src="data:image/png;base64,{data}"><figcaption>{escape(said)}</figcaption>'
            )
    return drawn


TABLES = {"fid": fid_table}
