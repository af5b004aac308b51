"""From a study's tables to what figures and page show: arms paired by size and seed, fits, verdicts.

The rule of a verdict needs no distribution: a claim that one arm is better *holds* where it is in every pair (same
size, same seed), *fails* where it is in none, and is *undecided* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from leviathan_ds.studies.fits import Equivalent, Fit, equivalent, fit_dense, tokens_to_reach
from leviathan_ds.studies.results import Row

TIED, UNTIED, LEVIATHAN = "dense_tied", "dense_untied", "leviathan"


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, what it reports, what was found here."""

    claim: str
    paper: str
    here: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The tables of one study (results.collect)."""

    runs: Sequence[Row]
    evaluations: Sequence[Row]
    frequency: Sequence[Row]

    def of(self, kind: str, arm: str | None = None, size: str | None = None, table: str = "runs") -> list[Row]:
        """Rows of one experiment."""
        return [
            row
            for row in getattr(self, table)
            if row["kind"] == kind and arm in (None, row["arm"]) and size in (None, row["size"])
        ]

    def sizes(self, kind: str, arm: str | None = None) -> list[str]:
        """In the order of their width, then depth."""
        rows = sorted(self.of(kind, arm), key=lambda row: (row["hidden_size"], row["num_layers"]))
        return list(dict.fromkeys(row["size"] for row in rows))

    def arms(self, kind: str) -> list[str]:
        """In the study's order."""
        return list(dict.fromkeys(row["arm"] for row in self.of(kind)))

    def pairs(self, size: str, base: str, kind: str = "iso_body") -> list[tuple[Row, Row]]:
        """Leviathan's run and the base's of the same body and seed; of an isoparametric run too."""
        bases = {row["seed"]: row for row in self.of("iso_body", base, size)}
        return [(row, bases[row["seed"]]) for row in self.of(kind, LEVIATHAN, size) if row["seed"] in bases]

    def gains(self, size: str, base: str, kind: str = "iso_body") -> list[float]:
        """By how much Leviathan's perplexity is lower than the base's, as a share, for each seed."""
        return [1 - math.exp(row["val_loss"] - other["val_loss"]) for row, other in self.pairs(size, base, kind)]

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """L(N) over the iso-body runs of each dense arm that has three sizes."""
        found = {}
        for arm in (TIED, UNTIED):
            rows = self.of("iso_body", arm)
            if len({row["parameters"] for row in rows}) >= 3:
                found[arm] = fit_dense([row["parameters"] for row in rows], [row["val_loss"] for row in rows])
        return found

    def equivalents(self, kind: str, arm: str = TIED) -> dict[str, Equivalent]:
        """For each size the dense model with Leviathan's loss, by the fit of a dense arm."""
        if arm not in self.fits:
            return {}
        found = {}
        for size in self.sizes(kind, LEVIATHAN):
            rows = self.of(kind, LEVIATHAN, size)
            found[size] = equivalent(self.fits[arm], rows[0]["parameters"], [row["val_loss"] for row in rows])
        return found

    def savings(self, size: str, base: str = TIED) -> list[float | None]:
        """By seed, the base's tokens over those at which Leviathan reaches the base's final loss; None: never."""
        found = []
        for row, other in self.pairs(size, base):
            curve = [
                each
                for each in self.of("iso_body", LEVIATHAN, size, "evaluations")
                if each["seed"] == row["seed"] and each["tokens"] > 0
            ]
            tokens = tokens_to_reach(
                [each["tokens"] for each in curve], [each["val_loss"] for each in curve], other["val_loss"]
            )
            found.append(None if tokens is None else other["tokens"] / tokens)
        return found

    def frequency_gains(self, size: str, decile: int, base: str = TIED, arm: str = LEVIATHAN) -> list[float]:
        """As `gains`, over the tokens of one decile of training frequency."""

        def losses(of: str) -> dict[int, float]:
            rows = self.of("iso_body", of, size, "frequency")
            return {
                row["seed"]: row["loss"] for row in rows if row["decile"] == decile and row["loss"] is not None
            }

        ours, bases = losses(arm), losses(base)
        return [1 - math.exp(ours[seed] - bases[seed]) for seed in ours if seed in bases]

    def overheads(self, size: str, base: str = TIED) -> list[float]:
        """How much more time than the base's runs Leviathan's take for a token, as a share."""
        return [other["tokens_per_s"] / row["tokens_per_s"] - 1 for row, other in self.pairs(size, base)]

    # ---- verdicts ----

    def verdicts(self) -> list[Verdict]:
        """The paper's claims that this study's runs can speak to."""
        sizes = self.sizes("iso_body", LEVIATHAN)
        if not sizes:
            return []
        found = [
            self._better("Iso-body, against the tied table: lower perplexity", "6.7% to 18.1% (v1)", TIED),
            self._better("Iso-body, against the untied table (what tying confounds)", "not reported", UNTIED),
            self._grows(sizes),
            *self._multiplier(),
            self._sooner(sizes),
            *self._rare(sizes),
            self._slower(sizes),
        ]
        return [each for each in found if each is not None]

    def _better(self, claim: str, paper: str, base: str) -> Verdict | None:
        by_size = {size: self.gains(size, base) for size in self.sizes("iso_body", LEVIATHAN)}
        gains = [gain for each in by_size.values() for gain in each]
        here = "; ".join(f"{size} {percents(each)}" for size, each in by_size.items() if each)
        return Verdict(claim, paper, here, judged(gains, lambda gain: gain > 0)) if gains else None

    def _grows(self, sizes: list[str]) -> Verdict | None:
        first, last = self.gains(sizes[0], TIED), self.gains(sizes[-1], TIED)
        if len(sizes) < 2 or not first or not last:
            return None
        steps = [large - small for small in first for large in last]
        here = f"{sizes[0]} {percents(first)}, {sizes[-1]} {percents(last)}"
        return Verdict(
            "The gain grows with size", "2.1%, 5.6%, 9.2% (v2)", here, judged(steps, lambda step: step > 0)
        )

    def _multiplier(self) -> Iterable[Verdict]:
        for base in (TIED, UNTIED):
            found = self.equivalents("isoparametric", base)
            if not found:
                continue
            here = "; ".join(f"{size} {multiplier(each)}" for size, each in found.items())
            relied_on = [each for each in found.values() if not each.warnings]
            warnings = list(dict.fromkeys(warning for each in found.values() for warning in each.warnings))
            lows = [each.interval[0] > 1 for each in relied_on]
            highs = [each.interval[1] < 1 for each in relied_on]
            verdict = "holds" if all(lows) else "fails" if all(highs) else "undecided"
            if warnings:
                verdict = verdict + " where the fit supports it" if relied_on else "not supported by the fit"
                verdict += f" ({'; '.join(warnings)})"
            claim = f"Isoparametric: acts like a larger dense model ({base.replace('_', ' ')} fit)"
            yield Verdict(claim, "1.47 to 2.11 times (v1)", here, verdict)

    def _sooner(self, sizes: list[str]) -> Verdict | None:
        by_size = {size: self.savings(size) for size in sizes}
        savings = [each for values in by_size.values() for each in values]
        here = "; ".join(f"{size} {times(each)}" for size, each in by_size.items() if each)
        claim = "Fewer tokens to the tied baseline's final loss"
        verdict = judged(savings, lambda saving: saving is not None and saving > 1)
        return Verdict(claim, "2.1 times fewer at 1.2B (v2)", here, verdict) if savings else None

    def _rare(self, sizes: list[str]) -> Iterable[Verdict]:
        rarest, most = self.frequency_gains(sizes[-1], 10), self.frequency_gains(sizes[-1], 1)
        if not rarest or not most:
            return
        differences = [rare - common for rare, common in zip(rarest, most, strict=True)]
        here = f"{sizes[-1]}: rarest tenth of tokens {percents(rarest)}, most frequent {percents(most)}"
        claim = "The gain over the tied table is in rare tokens"
        paper = "perplexity −81% on rare tokens, near nought on the most frequent (v2)"
        positive = judged(rarest, lambda gain: gain > 0)
        verdict = positive if positive != "holds" else judged(differences, lambda difference: difference > 0)
        yield Verdict(claim, paper, here, verdict)

    def _slower(self, sizes: list[str]) -> Verdict | None:
        by_size = {size: self.overheads(size) for size in sizes}
        here = "; ".join(f"{size} {percents(each)}" for size, each in by_size.items() if each)
        claim = "Training time that the generator adds to the tied table's"
        return Verdict(claim, "23% to 51% overhead, shrinking with scale (v1)", here, "measured") if here else None


def judged(values: Sequence, better: Callable[..., bool]) -> str:
    """holds, fails or undecided: whether all, none or some of the values are better."""
    results = [better(each) for each in values]
    return "holds" if all(results) else "undecided" if any(results) else "fails"


def percents(shares: Sequence[float]) -> str:
    """Mean and range of shares over seeds, in percent."""
    mean = sum(shares) / len(shares)
    spread = f" [{100 * min(shares):+.1f}, {100 * max(shares):+.1f}]" if len(shares) > 1 else ""
    return f"{100 * mean:+.1f}%{spread}"


def times(ratios: Sequence[float | None]) -> str:
    return ", ".join("not reached" if each is None else f"{each:.2f} ×" for each in ratios)


def multiplier(found: Equivalent) -> str:
    """A multiplier with its interval."""
    value = f"{found.multiplier:.2f}" if math.isfinite(found.multiplier) else "∞"
    return f"{value} × [{found.interval[0]:.2f}, {found.interval[1]:.2f}]"
