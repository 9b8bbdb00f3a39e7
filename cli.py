"""What every command line of the project shares: one-line errors and exit codes.

0 success, 1 a check failed, 2 bad input (one line on standard error), 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line that says where help is."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command's main and leave with its exit code; a user's mistake never becomes a traceback."""
    try:
        code = main()
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader left, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = 130
    sys.exit(code)
