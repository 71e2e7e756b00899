"""How many tokens to draft for each row: as many as bring the most tokens a second.

A step over B rows with d drafts in all brings B tokens and those drafts that turn out right, and takes f(B + d) seconds
to verify them plus c(B) for each round of drafting. Drafts are taken in the order of the chance that they are right
(they and all before them), up to where the expected tokens a second are the most (goodput, arXiv 2406.14066); that may
be none. f and c are medians of what recent steps took, and the chances follow from what became of each row's drafts;
what was not measured yet is taken to be cheap and right, and so gets tried. Nothing here looks at a drafted token, so
no rule of verification is touched.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Sequence

PROBE_INTERVAL = 48  # after so many steps a row drafts one token more, to see whether that pays by now; but later if
MAX_PROBE_SHARE = 0.01  # the time that a drafter needs to catch up there would be more than this of all time
MEASUREMENTS = 7  # kept of each kind; the median counts
DECAY = 0.96  # of what a row's earlier drafts say, per draft
PRIOR_WEIGHT = 6.0  # drafts that the average over all rows counts for in a row


class AcceptanceRate:
    """How often a row's first, second, … draft was right when all before it were; older ones count less."""

    def __init__(self) -> None:
        self.hits: list[float] = []
        self.trials: list[float] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one verified draft."""
        num_judged = min(num_drafted, num_accepted + 1)
        for values in (self.hits, self.trials):
            values += [0.0] * (num_judged - len(values))
        for position in range(num_judged):
            self.hits[position] = DECAY * self.hits[position] + (position < num_accepted)
            self.trials[position] = DECAY * self.trials[position] + 1

    def at(self, position: int) -> tuple[float, float]:
        """(Hits, trials) of a position."""
        return (self.hits[position], self.trials[position]) if position < len(self.trials) else (0.0, 0.0)


class DraftLength:
    """The policy of one engine."""

    def __init__(self, longest: int, *, adapts: bool = True) -> None:
        """longest: drafts of a row, at most; without `adapts` it is always that many, or the row's cap."""
        self.longest = longest
        self._adapts = adapts
        self._overall = AcceptanceRate()
        self._verify_seconds = _Medians()  # by query tokens
        self._draft_seconds = _Medians()  # a round, by rows
        self._catch_up_seconds = _Medians()
        self._steps_since_probe = self._num_probes = 0
        self.min_gain = 0.0  # tokens that a round of drafting must bring to pay, at what was chosen last

    def choose(self, rates: Sequence[AcceptanceRate], caps: Sequence[int]) -> list[int]:
        """Tokens to draft for each row, caps[b] at most, from what became of its drafts so far."""
        num_rows = len(rates)
        if not self._adapts or not any(caps):
            return list(caps)
        slots = sorted(
            (-chance, position, row)
            for row, (rate, cap) in enumerate(zip(rates, caps, strict=True))
            for position, chance in enumerate(self._chances(rate, cap))
        )
        lengths, best = [0] * num_rows, [0] * num_rows
        expected, rounds = float(num_rows), 0
        seconds_a_round = self._draft_seconds.at(num_rows) or 0.0
        best_speed = expected / (self._verify_seconds.at(num_rows) or 1.0)
        for count, (chance, position, row) in enumerate(slots, 1):
            lengths[row] = position + 1
            expected -= chance
            rounds = max(rounds, position + 1)
            speed = expected / ((self._verify_seconds.at(num_rows + count) or 1.0) + rounds * seconds_a_round)
            if speed > best_speed:
                best_speed, best = speed, list(lengths)
        self.min_gain = best_speed * seconds_a_round
        self._steps_since_probe += 1
        if self._steps_since_probe >= self._probe_interval(num_rows):
            self._steps_since_probe = 0
            self._num_probes += 1
            probed = self._num_probes % num_rows
            best[probed] = min(best[probed] + 1, caps[probed])
        return best

    def observe(self, rate: AcceptanceRate, num_drafted: int, num_accepted: int) -> None:
        """What became of a row's draft."""
        rate.add(num_drafted, num_accepted)
        self._overall.add(num_drafted, num_accepted)

    def measure(self, num_tokens: int, num_rows: int, rounds: int, seconds: float, draft_seconds: float) -> None:
        """A step without prompts took so long, of which draft_seconds went to so many rounds of drafting."""
        self._verify_seconds.add(num_tokens, seconds - draft_seconds)
        if rounds:
            self._draft_seconds.add(num_rows, draft_seconds / rounds)

    def measure_catch_up(self, seconds: float) -> None:
        """Drafting took so long in a step before which it had been left undone."""
        self._catch_up_seconds.add(0, seconds)

    def _probe_interval(self, num_rows: int) -> float:
        catching_up, step = self._catch_up_seconds.at(0), self._verify_seconds.at(num_rows)
        return max(PROBE_INTERVAL, catching_up / step / MAX_PROBE_SHARE if catching_up and step else 0.0)

    def _chances(self, rate: AcceptanceRate, cap: int) -> list[float]:
        """The chance that a draft and all before it are right, for each position below the cap."""
        chances, chance = [], 1.0
        for position in range(cap):
            hits, trials = self._overall.at(position)
            overall = hits / trials if trials else 1.0
            hits, trials = rate.at(position)
            chance *= (hits + PRIOR_WEIGHT * overall) / (trials + PRIOR_WEIGHT)
            chances.append(chance)
        return chances


class _Medians:
    """Of the latest measurements at each size; between sizes linear, beyond the last ones level."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # ascending

    def add(self, size: int, value: float) -> None:
        if size not in self._recent:
            self._recent[size] = deque(maxlen=MEASUREMENTS)
            bisect.insort(self._sizes, size)
        self._recent[size].append(value)
        self._medians[size] = statistics.median(self._recent[size])

    def at(self, size: int) -> float | None:
        """None as long as nothing is measured."""
        if not self._sizes:
            return None
        after = bisect.bisect_left(self._sizes, size)
        above, below = self._sizes[min(after, len(self._sizes) - 1)], self._sizes[max(after - 1, 0)]
        low, high = self._medians[below], self._medians[above]
        if above == below or size >= above or size <= below:
            return high if size >= above else low
        return low + (high - low) * (size - below) / (above - below)
