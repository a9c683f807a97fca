"""What a user can mend, and is told in a line: everything else is the program's own fault, and ends in a traceback."""

from madam_lab.data import DataError
from torchmadam import LadderFileError

EXPECTED = (DataError, KeyError, ValueError, OSError, LadderFileError)


def told(error: BaseException) -> str:
    """The message of one of these."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
