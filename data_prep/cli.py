"""What the command lines share: one form of error message and of exit status."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from data_prep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says nothing of a default where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, [], ()) else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """argparse with full option names only and errors in the project's form."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_Formatter,
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


def open_console() -> "Console":
    """For tables: as wide as the terminal, or 160 columns in a log, which has no edge."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    return console


def run(command: Callable[[], None]) -> int:
    """Call `command` and return the exit status: 0, 2 for the user's mistake, 130 for Ctrl-C.

    SIGTERM (a batch system's end of time) unwinds like an exception, so that partial files go. An exception's
    notes (what was kept, how to go on) are printed after it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        command()
    except (UserError, OSError) as error:  # OSError names its file: permission, disk full, missing
        print_error(str(error), error)
        return 2
    except KeyboardInterrupt as stop:
        kept = hasattr(stop, "__notes__")
        print_error("interrupted" if kept else "interrupted; nothing was left behind", stop)
        return 130
    except SystemExit as stop:
        _print_notes(stop)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def print_error(message: str, error: BaseException) -> None:
    """One line for what went wrong, and one for each note of the exception."""
    print(f"error: {message}", file=sys.stderr)
    _print_notes(error)


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(f"note: {note}", file=sys.stderr)
