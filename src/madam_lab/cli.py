"""The command `madam`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from madam_lab import demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="madam", description="The paper's experiments, by command.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="the learning-rate figure on handwritten digits, in about a minute")
    shown.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    options = parser.parse_args(arguments)
    demo.run(options.out)
    return 0
