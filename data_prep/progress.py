"""What a long run shows on stderr: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from data_prep.encode import Progress

Report = Callable[[Progress], None]
"""Called often, with all that was done, earlier runs included."""

PLAIN_INTERVAL_S = 30.0


class _Rates:
    """Rates since the first report: what an earlier run had done does not count."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._start: float | None = None
        self._first = Progress()
        self.remaining_s: float | None = None

    def describe(self, done: Progress) -> str:
        """documents, MB/s, tokens/s, skipped."""
        now = time.monotonic()
        if self._start is None:
            self._start, self._first = now, done
        seconds = max(now - self._start, 1e-3)
        fresh = done - self._first
        if fresh.source_bytes:
            self.remaining_s = (self._total_bytes - done.source_bytes) * seconds / fresh.source_bytes
        return (
            f"{done.documents:,} documents, {fresh.text_bytes / seconds / 1e6:.1f} MB/s, "
            f"{fresh.tokens / seconds / 1e6:.2f} M tokens/s, {done.skipped:,} skipped"
        )


@contextmanager
def progress_display(total_bytes: int) -> Iterator[Report]:
    """Show reports of a run over `total_bytes` of its sources, on stderr."""
    rates = _Rates(total_bytes)
    if sys.stderr.isatty():
        yield from _bar(rates, total_bytes)
    else:
        yield from _lines(rates, total_bytes)


def _lines(rates: _Rates, total_bytes: int) -> Iterator[Report]:
    shown = time.monotonic()

    def report(done: Progress) -> None:
        nonlocal shown
        text = rates.describe(done)
        if time.monotonic() - shown < PLAIN_INTERVAL_S:
            return
        shown = time.monotonic()
        percent = 100 * done.source_bytes / max(total_bytes, 1)
        remaining = "unknown" if rates.remaining_s is None else duration(rates.remaining_s)
        print(f"{percent:.1f}%: {text}, remaining {remaining}", file=sys.stderr, flush=True)

    yield report


def _bar(rates: _Rates, total_bytes: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total_bytes)

        def report(done) -> None:
            text = rates.describe(done)
            if rates.remaining_s is not None:
                text += f", remaining {duration(rates.remaining_s)}"
            bar.update(task, completed=done.source_bytes, description=text)

        yield report


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
