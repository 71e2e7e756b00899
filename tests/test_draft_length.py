"""The policy of draft lengths in simulated worlds, where what is best is known."""

import random
import statistics

import pytest

from specserve.speculators.draft_length import PROBE_INTERVAL, AcceptanceRate, DraftLength


class World:
    """Steps take verify(tokens) + rounds * draft(rows) seconds, give or take noise; drafts are right so often."""

    def __init__(self, longest, verify, draft, noise=0.03, seed=0):
        self.policy = DraftLength(longest)
        self.longest, self.verify, self.draft, self.noise = longest, verify, draft, noise
        self.rng = random.Random(seed)
        self.seconds = self.tokens = 0.0

    def run(self, rights, num_steps, caps=None):
        """rights[b]: how often a draft of row b is right; the lengths of each step."""
        rates, caps = [AcceptanceRate() for _ in rights], caps or [self.longest] * len(rights)
        lengths, history = [0] * len(rights), []
        self.seconds = self.tokens = 0.0
        for _ in range(num_steps):
            coming = self.policy.choose(rates, caps)
            assert all(0 <= length <= cap for length, cap in zip(coming, caps, strict=True))
            num_tokens = sum(lengths) + len(rights)
            draft_seconds = max(coming) * self.draft(len(rights)) * self._noise()
            seconds = self.verify(num_tokens) * self._noise() + draft_seconds
            self.policy.measure(num_tokens, len(rights), max(coming), seconds, draft_seconds)
            self.seconds += seconds
            for rate, right, length in zip(rates, rights, lengths, strict=True):
                accepted = 0
                while accepted < length and self.rng.random() < right:
                    accepted += 1
                self.policy.observe(rate, length, accepted)
                self.tokens += accepted + 1
            lengths = coming
            history.append(coming)
        return history

    def _noise(self):
        return 1 + self.noise * self.rng.gauss(0, 1)

    def speed(self):
        return self.tokens / self.seconds


def flat(tokens):
    """Reading the weights is all that counts."""
    return 0.02


def steep(tokens):
    """Each row counts, as in a large batch."""
    return 0.002 + 0.01 * tokens


def mean(history):
    return statistics.mean(length for lengths in history[-400:] for length in lengths)


def test_everything_is_drafted_where_drafts_are_free_and_nothing_where_they_never_pay():
    assert mean(World(4, flat, lambda rows: 0.0).run([0.7], 500)) > 3.9
    assert mean(World(4, flat, lambda rows: 0.001).run([0.0], 500)) < 4 * 2 / PROBE_INTERVAL
    assert mean(World(4, steep, lambda rows: 0.0).run([0.5] * 8, 500)) < 0.2
    assert mean(World(4, flat, lambda rows: 0.02).run([0.5], 500)) < 0.2  # a draft that costs a step


@pytest.mark.parametrize("right", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.45])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(right, share):
    """share: what a round of drafting costs, in steps; each token verified costs 2 % more."""
    world = World(6, lambda tokens: 0.02 * (1 + 0.02 * tokens), lambda rows: 0.02 * share)
    world.run([right], 3000)
    speeds = []
    for length in range(7):
        tokens = sum(right**i for i in range(length + 1))
        speeds.append(tokens / (0.02 * (1 + 0.02 * (length + 1)) + length * 0.02 * share))
    assert world.speed() > 0.95 * max(speeds)
    assert world.speed() > 0.97 * speeds[0]


def test_rows_that_are_right_get_the_drafts():
    """Rows differ in acceptance; a token verified costs a fifth of a step."""
    world = World(4, lambda tokens: 0.02 + 0.004 * tokens, lambda rows: 0.0)
    history = world.run([0.95, 0.95, 0.1, 0.1], 600)[-300:]
    good, bad = (statistics.mean(lengths[b] for lengths in history for b in some) for some in ((0, 1), (2, 3)))
    assert good > 3 and bad < 1


def test_it_comes_back_when_drafts_begin_to_be_right():
    world = World(4, flat, lambda rows: 0.002)
    assert mean(world.run([0.02], 1000)) < 0.3
    assert mean(world.run([0.9], 1000)) > 3.5


def test_caps_hold_and_rows_without_drafts_are_none_of_its_business():
    world = World(4, flat, lambda rows: 0.0)
    assert {tuple(lengths) for lengths in world.run([0.9, 0.9, 0.9], 300, caps=[0, 2, 4])[50:]} == {(0, 2, 4)}
    assert world.policy.choose([AcceptanceRate()] * 2, [0, 0]) == [0, 0]
    assert world.policy.choose([], []) == []


def test_a_fixed_length_is_the_cap():
    policy = DraftLength(4, adapts=False)
    rate = AcceptanceRate()
    for _ in range(50):
        policy.observe(rate, 4, 0)
        policy.measure(5, 1, 4, 1.0, 0.9)
        assert policy.choose([rate], [3]) == [3]


def test_another_round_must_bring_what_its_time_could_bring_otherwise():
    """At 50 tokens a second without drafts, a round of 4 ms has to bring 0.2 tokens; where nothing is known, any."""
    policy, rate = DraftLength(3), AcceptanceRate()
    policy.choose([rate], [3])
    assert policy.min_gain == 0.0
    for _ in range(60):
        policy.observe(rate, 1, 0)
        policy.measure(1, 1, 1, 0.024, 0.004)
    for number in (2, 3, 4):
        policy.measure(number, 1, 0, 0.02, 0.0)
    assert policy.choose([rate], [3]) == [0]
    assert policy.min_gain == pytest.approx(0.2)
    assert DraftLength(3, adapts=False).min_gain == 0.0


def test_probes_of_a_drafter_that_has_to_catch_up_are_rare():
    """Drafts that never pay, steps of 20 ms: a probe in 48 steps; one in 500 where it takes 100 ms to catch up."""
    for catching_up, expected in ((None, 20), (0.1, 2)):
        policy, rate = DraftLength(2), AcceptanceRate()
        for _ in range(60):
            policy.observe(rate, 1, 0)
            policy.measure(1, 1, 1, 0.03, 0.01)
            if catching_up:
                policy.measure_catch_up(catching_up)
        probes = sum(sum(policy.choose([rate], [2])) for _ in range(PROBE_INTERVAL * 21))
        assert expected <= probes <= expected + 1
