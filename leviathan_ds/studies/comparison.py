"""From a study's tables to what figures and page show: arms paired by size and seed, fits, verdicts.

The rule of most verdicts needs no distribution: a claim that one arm is better *holds* where it is in every pair
(same size, same seed), *fails* where it is in none, and is *undecided* otherwise. A candidate that diverged loses
its pair. The claim of an equivalent size goes by the fit's intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from leviathan_ds.studies import results
from leviathan_ds.studies.fits import MIN_SIZES, Equivalent, Fit, equivalent, fit_dense, tokens_to_reach
from leviathan_ds.studies.results import Row
from leviathan_ds.studies.study import TOLERANCE

TIED, UNTIED, LEVIATHAN = "dense_tied", "dense_untied", "leviathan"
NAMES = {TIED: "the tied table", UNTIED: "the untied table"}
Outcomes = dict[int, float | None]  # by seed; None where the candidate diverged
Value = Callable[[Row, Row], float]  # of the candidate's run and the base's
NOT_REPORTED = "not reported"


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, what it reports, what was found here."""

    claim: str
    paper: str
    here: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The tables of one study (results.collect); one of its arms with a generator is compared with the dense ones.

    The dense arms are found by their names, TIED and UNTIED.
    """

    planned: Sequence[Row]
    """A row a planned run, whatever became of it."""
    evaluations: Sequence[Row]
    frequency: Sequence[Row]
    candidate: str = LEVIATHAN

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """Raises UserError where a table is missing or not whole."""
        names = (results.RUNS, results.EVALUATIONS, results.FREQUENCY)
        planned, evaluations, frequency = (results.read_table(folder, name) for name in names)
        return cls(planned, evaluations, frequency)

    @cached_property
    def runs(self) -> list[Row]:
        """Those that were trained to their end."""
        return [row for row in self.planned if row["status"] == results.DONE]

    @cached_property
    def ended(self) -> list[Row]:
        """Also those that diverged."""
        return [row for row in self.planned if row["status"] != results.MISSING]

    def of(self, kind: str, arm: str | None = None, size: str | None = None, table: str = "runs") -> list[Row]:
        """Rows of one experiment."""
        return [
            row
            for row in getattr(self, table)
            if row["kind"] == kind and arm in (None, row["arm"]) and size in (None, row["size"])
        ]

    def sizes(self, kind: str, arm: str | None = None, table: str = "runs") -> list[str]:
        """In the order of their width, then depth."""
        rows = sorted(self.of(kind, arm, table=table), key=lambda row: (row["hidden_size"], row["num_layers"]))
        return list(dict.fromkeys(row["size"] for row in rows))

    def arms(self, *kinds: str) -> list[str]:
        """In the study's order."""
        return list(dict.fromkeys(row["arm"] for kind in kinds for row in self.of(kind)))

    @cached_property
    def candidates(self) -> list[Comparison]:
        """One comparison for each arm that has a generator."""
        found = dict.fromkeys(
            row["arm"]
            for kind in ("iso_body", "isoparametric")
            for row in self.of(kind, table="ended")
            if row["embedding"] == LEVIATHAN
        )
        # Itself where it can be: the fits are kept in the object that made them.
        return [self if arm == self.candidate else replace(self, candidate=arm) for arm in found]

    def pairs(self, size: str, base: str, kind: str = "iso_body") -> list[tuple[Row, Row]]:
        """The candidate's runs that have ended, each with the base's of the same body and seed.

        In `isoparametric` the base must have the same total, within the solver's tolerance.
        """
        bases = {row["seed"]: row for row in self.of("iso_body", base, size)}
        return [
            (row, bases[row["seed"]])
            for row in self.of(kind, self.candidate, size, "ended")
            if row["seed"] in bases
            and (kind == "iso_body" or abs(row["parameters"] / bases[row["seed"]]["parameters"] - 1) <= TOLERANCE)
        ]

    def outcomes(self, value: Value, size: str, base: str, kind: str = "iso_body") -> Outcomes:
        """A number of every pair, None where the candidate diverged."""
        return {
            row["seed"]: value(row, other) if row["status"] == results.DONE else None
            for row, other in self.pairs(size, base, kind)
        }

    def gains(self, size: str, base: str, kind: str = "iso_body") -> Outcomes:
        """By how much the candidate's perplexity is lower than the base's, as a share."""

        def gain(row: Row, other: Row) -> float:
            return 1 - math.exp(row["val_loss"] - other["val_loss"])

        return self.outcomes(gain, size, base, kind)

    def overheads(self, size: str, base: str = TIED) -> Outcomes:
        """How much more time than the base's runs the candidate's take for a token, as a share."""
        return self.outcomes(lambda row, other: other["tokens_per_s"] / row["tokens_per_s"] - 1, size, base)

    def savings(self, size: str, base: str = TIED) -> Outcomes:
        """The base's tokens over those at which the candidate reaches its final loss; 0 where it never does."""

        def saving(row: Row, other: Row) -> float:
            curve = [
                each
                for each in self.of("iso_body", self.candidate, size, "evaluations")
                if each["seed"] == row["seed"] and each["tokens"] > 0
            ]
            tokens = tokens_to_reach(
                [each["tokens"] for each in curve], [each["val_loss"] for each in curve], other["val_loss"]
            )
            return 0.0 if tokens is None else other["tokens"] / tokens

        return self.outcomes(saving, size, base)

    def frequency_losses(self, size: str, arm: str, decile: int) -> dict[int, float]:
        """By seed, the mean loss in nats over the tokens of one decile of frequency."""
        rows = self.of("iso_body", arm, size, "frequency")
        return {row["seed"]: row["loss"] for row in rows if row["decile"] == decile and row["loss"] is not None}

    def frequency_gains(
        self, size: str, decile: int, base: str = TIED, arm: str | None = None
    ) -> dict[int, float]:
        """As `gains`, over the tokens of one decile of frequency; of another arm too."""
        ours = self.frequency_losses(size, arm or self.candidate, decile)
        bases = self.frequency_losses(size, base, decile)
        return {seed: 1 - math.exp(ours[seed] - bases[seed]) for seed in ours if seed in bases}

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

    # ---- verdicts ----

    def verdicts(self) -> list[Verdict]:
        """The paper's claims that this study's runs can speak to, and the same against the untied table."""
        found = []
        for base in (TIED, UNTIED):
            found += [*self._better(base), *self._grows(base)]
        for base in (TIED, UNTIED):
            found += [*self._better(base, "isoparametric"), *self._multipliers(base)]
        for base in (TIED, UNTIED):
            found += [*self._sooner(base), *self._rare(base)]
        return [*found, *self._slower()]

    def _by_size(self, number: Callable[[str], Outcomes], kind: str = "iso_body") -> dict[str, Outcomes]:
        """For each size at which the candidate has ended, and has a partner."""
        sizes = self.sizes(kind, self.candidate, "ended")
        return {size: found for size in sizes if (found := number(size))}

    def _better(self, base: str, kind: str = "iso_body") -> Iterator[Verdict]:
        by_size = self._by_size(lambda size: self.gains(size, base, kind), kind)
        if not by_size:
            return
        claim = f"{'Iso-body' if kind == 'iso_body' else 'Equal parameters'}: lower perplexity than {NAMES[base]}"
        paper = "6.7% to 18.1% (v1)" if (base, kind) == (TIED, "iso_body") else NOT_REPORTED
        better = [gain is not None and gain > 0 for each in by_size.values() for gain in each.values()]
        yield Verdict(claim, paper, listed(by_size, percents), judged(better, "pairs"))

    def _grows(self, base: str) -> Iterator[Verdict]:
        """From the smallest to the largest size, seed by seed; a loss that shrinks is no gain that grows."""
        by_size = self._by_size(lambda size: self.gains(size, base))
        if len(by_size) < 2:
            return
        (_, small), *_, (_, large) = by_size.items()
        grown = []
        for seed in small.keys() & large.keys():
            before, after = small[seed], large[seed]
            grown.append(before is not None and after is not None and after > max(before, 0))
        if grown:
            paper = "2.1%, 5.6%, 9.2% (v2)" if base == TIED else NOT_REPORTED
            claim = f"The gain over {NAMES[base]} grows from the smallest to the largest size"
            yield Verdict(claim, paper, listed(by_size, percents), judged(grown, "seeds"))

    def _multipliers(self, base: str) -> Iterator[Verdict]:
        """By the intervals of the sizes that the fit supports; a size of which a run diverged holds nothing."""
        sizes = self.sizes("isoparametric", self.candidate, "ended")
        if not sizes or not self.of("iso_body", base):
            return
        found = self.equivalents("isoparametric", base)
        supported = {size: each for size, each in found.items() if each.supported}
        ended = self.of("isoparametric", self.candidate, table="ended")
        lost = {row["size"] for row in ended if row["status"] == results.DIVERGED}
        if base not in self.fits or len(self.fits[base].sizes) < MIN_SIZES:
            verdict = f"not supported: {len(self.sizes('iso_body', base))} dense sizes, a fit takes {MIN_SIZES}"
        elif not supported:
            verdict = "not supported: none of our sizes lies between the dense ones"
        else:
            holds = [each.interval[0] > 1 and size not in lost for size, each in supported.items()]
            fails = [each.interval[1] < 1 for each in supported.values()]
            none_lost = lost <= found.keys()  # a size of which no run is left has no interval
            verdict = "holds" if all(holds) and none_lost else "fails" if all(fails) else "undecided"
            verdict += f" at {', '.join(supported)}"
            beyond = [size for size in sizes if size not in supported]
            verdict += f"; the fit does not support {', '.join(beyond)}" if beyond else ""
        claim = f"Equal parameters: acts like a larger dense model (fit of {NAMES[base]})"
        here = "; ".join(f"{size} {multiplier(each)}" for size, each in found.items())
        yield Verdict(claim, "1.47 to 2.11 times (v1)", here or "no number", verdict)

    def _sooner(self, base: str) -> Iterator[Verdict]:
        by_size = self._by_size(lambda size: self.savings(size, base))
        if not by_size:
            return
        claim = f"Fewer tokens to the final loss of {NAMES[base]}"
        paper = "2.1 times fewer at 1.2B (v2)" if base == TIED else NOT_REPORTED
        sooner = [saving is not None and saving > 1 for each in by_size.values() for saving in each.values()]
        yield Verdict(claim, paper, listed(by_size, times), judged(sooner, "pairs"))

    def _rare(self, base: str) -> Iterator[Verdict]:
        """A gain in the rarest tenth of tokens that is larger than in the most frequent tenth."""
        better, here = [], []
        for size, gains in self._by_size(lambda size: self.gains(size, base)).items():
            rarest, most = (self.frequency_gains(size, decile, base) for decile in (10, 1))
            both = rarest.keys() & most.keys()
            better += [rarest[seed] > max(0, most[seed]) for seed in both]
            better += [False for gain in gains.values() if gain is None]
            if both:
                here.append(f"{size} rarest {percents(rarest.values())}, most frequent {percents(most.values())}")
        if here:
            claim = f"The gain over {NAMES[base]} is in rare tokens"
            paper = "−81% on rare tokens, near nought on frequent ones (v2)" if base == TIED else NOT_REPORTED
            yield Verdict(claim, paper, "; ".join(here), judged(better, "pairs"))

    def _slower(self) -> Iterator[Verdict]:
        if by_size := self._by_size(self.overheads):
            claim = f"Training time that the generator adds to that of {NAMES[TIED]}"
            paper = "23% to 51% overhead, shrinking with scale (v1)"
            yield Verdict(claim, paper, listed(by_size, percents), "measured")


def judged(better: Sequence[bool], unit: str) -> str:
    """holds, fails or undecided: whether all, none or some are better; and how many are."""
    verdict = "holds" if all(better) else "undecided" if any(better) else "fails"
    return f"{verdict} ({sum(better)} of {len(better)} {unit})"


def listed(by_size: Mapping[str, Outcomes], told: Callable[[Iterable[float | None]], str]) -> str:
    return "; ".join(f"{size} {told(found.values())}" for size, found in by_size.items())


def percents(shares: Iterable[float | None]) -> str:
    """Mean and range of shares over seeds, in percent."""
    values = list(shares)
    known = [100 * each for each in values if each is not None]
    if not known:
        return "diverged"
    spread = f" [{min(known):+.1f}, {max(known):+.1f}]" if len(known) > 1 else ""
    lost = f", {len(values) - len(known)} diverged" if len(known) < len(values) else ""
    return f"{sum(known) / len(known):+.1f}%{spread}{lost}"


def times(ratios: Iterable[float | None]) -> str:
    return ", ".join("diverged" if each is None else f"{each:.2f} ×" if each else "not reached" for each in ratios)


def multiplier(found: Equivalent) -> str:
    """A multiplier with its interval."""
    value = f"{found.multiplier:.2f}" if math.isfinite(found.multiplier) else "∞"
    return f"{value} × [{found.interval[0]:.2f}, {found.interval[1]:.2f}]"
