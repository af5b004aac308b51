"""What the command lines share: one form of error message and of exit status."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from data_prep.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """argparse with full option names only and errors in the project's form."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def positive_int(text: str) -> int:
    """An argparse type: a whole number above zero (underscores allowed, 6_000_000)."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return value


def run(command: Callable[[], None]) -> int:
    """Call `command` and return the exit status: 0, 2 for the user's mistake, 130 for Ctrl-C.

    SIGTERM (a batch system's end of time) unwinds like an exception, so that partial files go."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        command()
    except (UserError, OSError) as error:  # OSError names its file: permission, disk full, missing
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
