"""The tables at the end of a run."""

from pathlib import Path

from data_prep.files import blend_path
from data_prep.manifest import DomainCounts, Manifest
from data_prep.parts import add_domains


def print_summary(manifests: dict[Path, Manifest], prefix: Path) -> None:
    """Print what was made of a run's inputs: by domain, by dataset where there are several, what was skipped."""
    from rich.console import Console
    from rich.table import Table

    domains: dict[str, DomainCounts] = {}
    for manifest in manifests.values():
        add_domains(domains, manifest.domains)
    first = next(iter(manifests.values()))
    title = f"{prefix}: {first.dtype}"
    if len(manifests) == 1:
        title += f", fingerprint {first.fingerprint[:16]}"
    console = Console()

    def table(kind: str, rows: dict[str, DomainCounts], *, title: str | None = None, ratio: bool = True) -> Table:
        table = Table(title=title)
        table.add_column(kind, overflow="fold")
        for heading in ("documents", "tokens", "bytes", "bytes/token")[: 4 if ratio else 3]:
            table.add_column(heading, justify="right")

        def add_row(name: str, counts: DomainCounts) -> None:
            values = [f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.bytes:,}"]
            table.add_row(name, *values, *([f"{counts.bytes / counts.tokens:.2f}"] if ratio else []))

        for name, counts in rows.items():
            add_row(name, counts)
        table.add_section()
        total: dict[str, DomainCounts] = {}
        for counts in rows.values():
            add_domains(total, {"total": counts})
        add_row("total", total["total"])
        return table

    console.print(table("domain", dict(sorted(domains.items())), title=title))
    if len(manifests) > 1:
        datasets = {
            each.name.removeprefix(prefix.name): DomainCounts(
                manifest.documents, manifest.tokens, manifest.text_bytes
            )
            for each, manifest in manifests.items()
        }
        # Without the ratio, and without what all names begin with, they fit into a line of 80 columns.
        console.print(table(f"{prefix.name}…", datasets, ratio=False))
    elif lengths := first.lengths:
        console.print(
            f"document length in tokens: {lengths.min:,} to {lengths.max:,}, mean {lengths.mean:,.1f}, "
            f"median {lengths.median:,.1f}"
        )
    for reason, count in first.skipped.items():
        console.print(f"skipped {count:,}: {reason}")
    if first.subset and first.subset.domain is not None and prefix not in manifests:
        console.print(f"{blend_path(prefix)}: their weights, for a recipe's data.blend", soft_wrap=True)
