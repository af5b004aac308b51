"""From a study's tables to what figures and page show: arms paired by size and seed, fits, verdicts.

The rule of a verdict needs no distribution: a claim that one arm is better *holds* where it is in every pair (same
size, same seed), *fails* where it is in none, and is *undecided* otherwise. A run of Leviathan that diverged loses
its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from leviathan_ds.studies import results
from leviathan_ds.studies.fits import Equivalent, Fit, equivalent, fit_dense, tokens_to_reach
from leviathan_ds.studies.results import Row

TIED, UNTIED, LEVIATHAN = "dense_tied", "dense_untied", "leviathan"
NAMES = {TIED: "the tied table", UNTIED: "the untied table"}


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, what it reports, what was found here."""

    claim: str
    paper: str
    here: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The tables of one study (results.collect); one of its Leviathan arms is compared with the dense ones."""

    runs: Sequence[Row]
    evaluations: Sequence[Row]
    frequency: Sequence[Row]
    missing: Sequence[Row] = ()
    candidate: str = LEVIATHAN

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """Raises UserError where there is no table of runs."""
        names = (results.RUNS, results.EVALUATIONS, results.FREQUENCY, results.MISSING)
        runs, evaluations, frequency, missing = (results.read_table(folder, name) for name in names)
        return cls(runs, evaluations, frequency, missing)

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

    @cached_property
    def candidates(self) -> list[Comparison]:
        """One comparison for each arm that has a generator and was trained at the dense arms' bodies."""
        found = dict.fromkeys(row["arm"] for row in self.of("iso_body") if row["embedding"] == LEVIATHAN)
        # Itself where it can be: the fits are kept in the object that made them.
        return [self if arm == self.candidate else replace(self, candidate=arm) for arm in found]

    def pairs(self, size: str, base: str, kind: str = "iso_body") -> list[tuple[Row, Row]]:
        """The candidate's run and the base's of the same size and seed; in `isoparametric`, of the same total."""
        bases = {row["seed"]: row for row in self.of("iso_body", base, size)}
        return [(row, bases[row["seed"]]) for row in self.of(kind, self.candidate, size) if row["seed"] in bases]

    def gains(self, size: str, base: str, kind: str = "iso_body") -> list[float]:
        """By how much the candidate's perplexity is lower than the base's, as a share, for each seed."""
        return [1 - math.exp(row["val_loss"] - other["val_loss"]) for row, other in self.pairs(size, base, kind)]

    def lost(self, kind: str, base: str) -> int:
        """Pairs without a number because the candidate's run diverged."""
        bases = {(row["size"], row["seed"]) for row in self.of("iso_body", base)}
        return sum(
            row["reason"].startswith("diverged") and (row["size"], row["seed"]) in bases
            for row in self.of(kind, self.candidate, table="missing")
        )

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
        """For each size the dense model with the candidate's loss, by the fit of a dense arm."""
        if arm not in self.fits:
            return {}
        found = {}
        for size in self.sizes(kind, self.candidate):
            rows = self.of(kind, self.candidate, size)
            found[size] = equivalent(self.fits[arm], rows[0]["parameters"], [row["val_loss"] for row in rows])
        return found

    def savings(self, size: str, base: str = TIED) -> list[float | None]:
        """By seed, the base's tokens over those at which the candidate reaches its final loss; None: never."""
        found = []
        for row, other in self.pairs(size, base):
            curve = [
                each
                for each in self.of("iso_body", self.candidate, size, "evaluations")
                if each["seed"] == row["seed"] and each["tokens"] > 0
            ]
            tokens = tokens_to_reach(
                [each["tokens"] for each in curve], [each["val_loss"] for each in curve], other["val_loss"]
            )
            found.append(None if tokens is None else other["tokens"] / tokens)
        return found

    def frequency_losses(self, size: str, arm: str, decile: int) -> dict[int, float]:
        """By seed, the mean loss in nats over the tokens of one decile of frequency."""
        rows = self.of("iso_body", arm, size, "frequency")
        return {row["seed"]: row["loss"] for row in rows if row["decile"] == decile and row["loss"] is not None}

    def frequency_gains(self, size: str, decile: int, base: str = TIED, arm: str | None = None) -> list[float]:
        """As `gains`, over the tokens of one decile of frequency; of another arm too."""
        ours = self.frequency_losses(size, arm or self.candidate, decile)
        bases = self.frequency_losses(size, base, decile)
        return [1 - math.exp(ours[seed] - bases[seed]) for seed in ours if seed in bases]

    def overheads(self, size: str, base: str = TIED) -> list[float]:
        """How much more time than the base's runs the candidate's take for a token, as a share."""
        return [other["tokens_per_s"] / row["tokens_per_s"] - 1 for row, other in self.pairs(size, base)]

    # ---- verdicts ----

    def verdicts(self) -> list[Verdict]:
        """The paper's claims that this study's runs can speak to, and the same against the untied table."""
        sizes = self.sizes("iso_body", self.candidate)
        found = []
        for base in (TIED, UNTIED):
            if self.of("iso_body", base):
                found += [*self._better(base), *self._grows(sizes, base)]
        found += [*self._better(UNTIED, "isoparametric"), *self._multipliers()]
        for base in (TIED, UNTIED):
            if self.of("iso_body", base):
                found += [*self._sooner(sizes, base), *self._rare(sizes, base)]
        return [*found, *self._slower(sizes)]

    def _better(self, base: str, kind: str = "iso_body") -> Iterator[Verdict]:
        by_size = {size: self.gains(size, base, kind) for size in self.sizes(kind, self.candidate)}
        gains = [gain for each in by_size.values() for gain in each]
        if not gains:
            return
        claim = f"{'Iso-body' if kind == 'iso_body' else 'Equal parameters'}: lower perplexity than {NAMES[base]}"
        paper = "6.7% to 18.1% (v1)" if base == TIED else "not reported"
        here = "; ".join(f"{size} {percents(each)}" for size, each in by_size.items() if each)
        yield Verdict(claim, paper, here, judged([gain > 0 for gain in gains], self.lost(kind, base)))

    def _grows(self, sizes: list[str], base: str) -> Iterator[Verdict]:
        """From the smallest to the largest size; a loss that shrinks is no gain that grows."""
        ends = [self.gains(size, base) for size in (sizes[:1] + sizes[-1:])]
        if len(sizes) < 2 or not all(ends):
            return
        claim = f"The gain over {NAMES[base]} grows with size"
        paper = "2.1%, 5.6%, 9.2% (v2)" if base == TIED else "not reported"
        here = f"{sizes[0]} {percents(ends[0])}, {sizes[-1]} {percents(ends[1])}"
        steps = [large > max(small, 0) for small in ends[0] for large in ends[1]]
        yield Verdict(claim, paper, here, judged(steps))

    def _multipliers(self) -> Iterator[Verdict]:
        for base in (TIED, UNTIED):
            if not self.of("isoparametric", self.candidate) or not self.of("iso_body", base):
                continue
            claim = f"Equal parameters: acts like a larger dense model (fit of {NAMES[base]})"
            found = self.equivalents("isoparametric", base)
            supported = [each for each in found.values() if each.supported]
            here = "; ".join(f"{size} {multiplier(each)}" for size, each in found.items()) or "no fit"
            if supported:
                lows, highs = (
                    [each.interval[0] > 1 for each in supported],
                    [each.interval[1] < 1 for each in supported],
                )
                verdict = "holds" if all(lows) else "fails" if all(highs) else "undecided"
                verdict += f" ({len(supported)} of {len(found)} sizes, which the fit supports)"
            else:
                dense = len(self.sizes("iso_body", base))
                verdict = f"not supported: {dense} dense sizes; it takes four, and ours between them"
            yield Verdict(claim, "1.47 to 2.11 times (v1)", here, verdict)

    def _sooner(self, sizes: list[str], base: str) -> Iterator[Verdict]:
        by_size = {size: self.savings(size, base) for size in sizes}
        savings = [each for values in by_size.values() for each in values]
        if not savings:
            return
        here = "; ".join(f"{size} {times(each)}" for size, each in by_size.items() if each)
        claim = f"Fewer tokens to the final loss of {NAMES[base]}"
        paper = "2.1 times fewer at 1.2B (v2)" if base == TIED else "not reported"
        sooner = [saving is not None and saving > 1 for saving in savings]
        yield Verdict(claim, paper, here, judged(sooner, self.lost("iso_body", base)))

    def _rare(self, sizes: list[str], base: str) -> Iterator[Verdict]:
        """A gain in the rarest tenth of tokens that is larger than in the most frequent tenth."""
        by_size = {
            size: (self.frequency_gains(size, 10, base), self.frequency_gains(size, 1, base)) for size in sizes
        }
        better = [rare > max(0, common) for both in by_size.values() for rare, common in zip(*both, strict=True)]
        if not better:
            return
        here = "; ".join(
            f"{size} rarest {percents(rarest)}, most frequent {percents(most)}"
            for size, (rarest, most) in by_size.items()
            if rarest
        )
        claim = f"The gain over {NAMES[base]} is in rare tokens"
        paper = (
            "perplexity −81% on rare tokens, near nought on frequent ones (v2)" if base == TIED else "not reported"
        )
        yield Verdict(claim, paper, here, judged(better, self.lost("iso_body", base)))

    def _slower(self, sizes: list[str]) -> Iterator[Verdict]:
        by_size = {size: self.overheads(size) for size in sizes}
        here = "; ".join(f"{size} {percents(each)}" for size, each in by_size.items() if each)
        claim = f"Training time that the generator adds to that of {NAMES[TIED]}"
        if here:
            yield Verdict(claim, "23% to 51% overhead, shrinking with scale (v1)", here, "measured")


def judged(better: Sequence[bool], lost: int = 0) -> str:
    """holds, fails or undecided: whether all, none or some of the pairs are better; and how many are."""
    results = [*better, *[False] * lost]
    verdict = "holds" if all(results) else "undecided" if any(results) else "fails"
    return f"{verdict} ({sum(results)} of {len(results)} pairs)"


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
