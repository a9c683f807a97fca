"""`python -m madam_lab` is the command `madam`."""

import sys

from madam_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
