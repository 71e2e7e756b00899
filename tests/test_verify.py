"""Verification by sample and match: any drafts, the tokens of plain decoding."""

import itertools
import random

import pytest
import torch

from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.models.sampling.sampler import Sampler
from specserve.speculators.verify import VerifyRow, _match, verify

CPU = torch.device("cpu")
V = 12


def table_logits(history):
    """A fixed random language model; every token of the history counts."""
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**31)
    return torch.randn(V, generator=generator) * 2


def decode(params, prompts, num_tokens, draft):
    """All rows together, `draft(row, history)` tokens a step; the generated tokens and the accepted counts."""
    sampler = Sampler(len(params), V, CPU)
    histories = [list(prompt) for prompt in prompts]
    for slot, item in enumerate(params):
        sampler.admit(slot, item, prompts[slot], [])
    num_accepted = [0] * len(params)
    while any(len(h) - len(p) < num_tokens for h, p in zip(histories, prompts, strict=True)):
        rows, logits = [], []
        for slot, history in enumerate(histories):
            drafts = tuple(draft(slot, history))
            rows.append(VerifyRow(slot, len(history), len(history) - len(prompts[slot]), drafts))
            logits += [table_logits([*history, *drafts[:seen]]) for seen in range(len(drafts) + 1)]
        for slot, verified in enumerate(verify(torch.stack(logits), sampler, rows)):
            emitted = [token.token_id for token in verified.tokens]
            assert len(emitted) == verified.num_accepted + 1
            sampler.accept(slot, emitted)
            histories[slot] += emitted
            num_accepted[slot] += verified.num_accepted
    generated = [h[len(p) :][:num_tokens] for h, p in zip(histories, prompts, strict=True)]
    return generated, num_accepted


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.5, top_k=4, seed=12),
    SamplingParams(temperature=0.9, top_p=0.7, seed=13, repetition_penalty=1.4),
    SamplingParams(frequency_penalty=1.1, presence_penalty=0.3),
    SamplingParams(temperature=1.0, typical_p=0.6, min_p=0.02, seed=14),
    SamplingParams(temperature=1.0, seed=15, min_new_tokens=9, suppressed_ids=(0, 1, 2, 3, 4, 5)),
    SamplingParams(repetition_penalty=3.0, min_new_tokens=20, suppressed_ids=(7,)),
]
PROMPTS = [[n % V, (3 * n) % V, 5] for n in range(len(PARAMS))]


@pytest.fixture(scope="module")
def plain():
    return decode(PARAMS, PROMPTS, 24, lambda slot, history: [])[0]


def test_plain_decoding_needs_no_verification_but_all_its_processors(plain):
    assert len({tuple(row) for row in plain}) == len(PARAMS)
    assert not set(plain[6][:9]) & {0, 1, 2, 3, 4, 5} and set(plain[6][9:]) & {0, 1, 2, 3, 4, 5}
    assert 7 not in plain[7][:20]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_perfect_drafts_are_all_accepted(plain, k):
    def draft(slot, history):
        done = len(history) - len(PROMPTS[slot])
        return plain[slot][done : done + k]

    tokens, accepted = decode(PARAMS, PROMPTS, 24, draft)
    assert tokens == plain
    assert all(count >= 24 - 24 // (k + 1) - k for count in accepted)


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_drafts_change_nothing(plain, seed):
    rng = random.Random(seed)

    def draft(slot, history):
        done = len(history) - len(PROMPTS[slot])
        right = plain[slot][done : done + rng.randrange(6)]
        return [token if rng.random() < 0.7 else rng.randrange(V) for token in right]

    tokens, accepted = decode(PARAMS, PROMPTS, 24, draft)
    assert tokens == plain and sum(accepted) > 0


def test_wrong_drafts_are_all_rejected(plain):
    def draft(slot, history):
        done = len(history) - len(PROMPTS[slot])
        return [(plain[slot][done] + 1) % V, 3, 3] if done < 24 else []

    tokens, accepted = decode(PARAMS, PROMPTS, 24, draft)
    assert tokens == plain and accepted == [0] * len(PARAMS)


def test_non_finite_logits_end_the_row_there_and_leave_the_others():
    sampler = Sampler(2, V, CPU)
    logits = torch.stack([table_logits([n]) for n in range(6)])
    first = [int(logits[row].argmax()) for row in range(3)]
    for slot in range(2):
        sampler.admit(slot, SamplingParams(), [0], [])
    logits[1] = torch.nan
    rows = [VerifyRow(slot, 1, 0, (first[0], first[1])) for slot in range(2)]
    logits[3:5] = logits[torch.tensor([0, 2])]
    bad, good = verify(logits, sampler, rows)
    assert [token.token_id for token in bad.tokens] == [first[0], None] and bad.num_accepted == 1
    assert [token.token_id for token in good.tokens][:1] == first[:1]


def test_the_law_of_sample_and_match_by_exact_enumeration():
    """Vocabulary 4, three drafts: summed over what the target may draw, sequences have the target's law."""
    generator = torch.Generator().manual_seed(0)
    law = {
        history: torch.rand(4, generator=generator, dtype=torch.float64)
        for length in range(4)
        for history in itertools.product(range(4), repeat=length)
    }
    law = {history: weights / weights.sum() for history, weights in law.items()}
    drafts = (2, 0, 3)
    emitted: dict[tuple[int, ...], float] = {}
    for drawn in itertools.product(range(4), repeat=4):  # what each of the four rows draws
        probability = 1.0
        for row, token in enumerate(drawn):
            probability *= float(law[drafts[:row]][token])
        verified = _match([SampledToken(token) for token in drawn], drafts)
        seen = tuple(token.token_id for token in verified.tokens)
        emitted[seen] = emitted.get(seen, 0.0) + probability
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in emitted.items():
        expected = 1.0
        for index, token in enumerate(sequence):
            expected *= float(law[sequence[:index]][token])
        assert probability == pytest.approx(expected, abs=1e-12)
