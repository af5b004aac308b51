"""The tables at the end of a run."""

from pathlib import Path

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

    def table(kind: str, rows: dict[str, DomainCounts], title: str | None = None) -> Table:
        table = Table(title=title)
        table.add_column(kind, overflow="fold")
        for heading in ("documents", "tokens", "bytes", "bytes/token"):
            table.add_column(heading, justify="right")

        def add_row(name: str, counts: DomainCounts) -> None:
            per_token = f"{counts.bytes / counts.tokens:.2f}"
            table.add_row(name, f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.bytes:,}", per_token)

        for name, counts in rows.items():
            add_row(name, counts)
        table.add_section()
        total: dict[str, DomainCounts] = {}
        for counts in rows.values():
            add_domains(total, {"total": counts})
        add_row("total", total["total"])
        return table

    console.print(table("domain", dict(sorted(domains.items())), title))
    if len(manifests) > 1:
        datasets = {
            each.name: DomainCounts(manifest.documents, manifest.tokens, manifest.text_bytes)
            for each, manifest in manifests.items()
        }
        console.print(table("dataset", datasets))
    elif lengths := first.lengths:
        console.print(
            f"document length in tokens: {lengths.min:,} to {lengths.max:,}, mean {lengths.mean:,.1f}, "
            f"median {lengths.median:,.1f}"
        )
    for reason, count in first.skipped.items():
        console.print(f"skipped {count:,}: {reason}")
