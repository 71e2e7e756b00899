"""Rejection and coupled drafts: exact laws by enumeration and through the real sampler, and controls that must fail."""

import itertools

import pytest
import torch

from specserve.models.sampling import sampler as sampler_module
from specserve.models.sampling.noise import Purpose, row_keys
from specserve.models.sampling.params import SamplingParams
from specserve.models.sampling.sampler import Sampler, SampleRow
from specserve.speculators.rejection import acceptance, residual
from specserve.speculators.verify import VerifyRow, verify
from specserve.speculators.vocabulary_mapping import VocabularyMapping

CPU = torch.device("cpu")
V, K = 4, 3


def laws(seed, sharpness=1.0):
    """A law for every history of up to K tokens of V."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for length in range(K + 1):
        for history in itertools.product(range(V), repeat=length):
            logits = torch.randn(V, generator=generator, dtype=torch.float64) * sharpness
            table[history] = logits.softmax(dim=0)
    return table


def emitted_law(p, drawn_from, claimed=None, is_submitted=lambda history, token: True):
    """History of emitted tokens -> probability, with drafts drawn from `drawn_from` and verified against `claimed`.

    Runs over all drafts; the chances of acceptance and of the residual are summed, not drawn.
    """
    claimed = claimed or drawn_from
    out = {}

    def add(history, probability):
        out[history] = out.get(history, 0.0) + probability

    for draft in itertools.product(range(V), repeat=K):
        probability, submitted = 1.0, []
        for index, token in enumerate(draft):
            probability *= float(drawn_from[draft[:index]][token])
        for index, token in enumerate(draft):
            if not is_submitted(draft[:index], token):
                break
            submitted.append(token)
        for index, token in enumerate(submitted):
            target, q = p[draft[:index]], claimed[draft[:index]]
            accept = float(acceptance(target[None], q[None], torch.tensor([token]))[0])
            rest = residual(target, q)
            for other in range(V):
                add((*draft[:index], other), probability * (1 - accept) * float(rest[other]))
            probability *= accept
        bonus = p[tuple(submitted)]
        for other in range(V):
            add((*submitted, other), probability * float(bonus[other]))
    return out


def total_variation(p, emitted):
    """Distance of the law of the first K + 1 tokens from the target's, when plain decoding fills up what is missing."""
    sequences = {}
    for history, probability in emitted.items():
        for rest in itertools.product(range(V), repeat=K + 1 - len(history)):
            whole, chance = (*history, *rest), probability
            for index in range(len(history), K + 1):
                chance *= float(p[whole[:index]][whole[index]])
            sequences[whole] = sequences.get(whole, 0.0) + chance
    distance = 0.0
    for whole in itertools.product(range(V), repeat=K + 1):
        expected = 1.0
        for index in range(K + 1):
            expected *= float(p[whole[:index]][whole[index]])
        distance += abs(expected - sequences.get(whole, 0.0)) / 2
    return distance


def sparse(table, seed):
    """The laws with some probabilities set to 0."""
    generator = torch.Generator().manual_seed(seed)
    cut = {}
    for history, law in table.items():
        law = law * (torch.rand(V, generator=generator) < 0.6)
        cut[history] = law / law.sum() if law.sum() > 0 else table[history]
    return cut


def permuted(table):
    return {history: law.roll(1) for history, law in table.items()}


def one_hot(table):
    return {history: torch.nn.functional.one_hot(law.argmax(), V).double() for history, law in table.items()}


@pytest.mark.parametrize("seed", range(5))
def test_rejection_keeps_the_law_exactly(seed):
    p, q = laws(seed, 1.5), laws(100 + seed, 1.5)
    for target in (p, sparse(p, seed)):
        for draft in (q, target, sparse(q, seed + 1), one_hot(q), permuted(q)):
            assert total_variation(target, emitted_law(target, draft)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_controls_that_break_the_law(seed):
    p, q = laws(seed, 1.5), laws(100 + seed, 1.5)
    rounded = {history: law.bfloat16().double() for history, law in q.items()}
    assert total_variation(p, emitted_law(p, q, claimed=permuted(q))) > 1e-2
    assert total_variation(p, emitted_law(p, q, claimed=rounded)) > 1e-5
    assert total_variation(p, emitted_law(p, one_hot(q), claimed=q)) > 1e-2
    by_itself = emitted_law(p, q, is_submitted=lambda history, token: float(q[history][token]) > 0.25)
    assert total_variation(p, by_itself) > 1e-3
    by_its_law = emitted_law(p, q, is_submitted=lambda history, token: float(q[history].max()) > 0.4)
    assert total_variation(p, by_its_law) < 1e-12


def restricted(table, mapping, order=None):
    """Laws over a draft vocabulary, cut to what it shares with the target's and scattered to its ids.

    `order` is that of the columns where it isn't the mapping's.
    """
    cut = {}
    for history, law in table.items():
        columns = law[mapping.draft_ids if order is None else order]
        cut[history] = torch.zeros(V, dtype=torch.float64)
        cut[history][mapping.target_ids] = columns / columns.sum()
    return cut


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_of_another_vocabulary_keeps_the_law_exactly(seed, monkeypatch):
    """Target 5, draft 6, of which 3 are shared; columns in another order than ids are scattered in must fail."""
    for name, value in {"V": 5, "K": 2}.items():
        monkeypatch.setitem(globals(), name, value)
    p = laws(seed, 1.5)
    monkeypatch.setitem(globals(), "V", 6)
    drafts = {history: law for history, law in laws(100 + seed, 1.5).items() if all(token < 5 for token in history)}
    monkeypatch.setitem(globals(), "V", 5)
    mapping = VocabularyMapping(torch.tensor([4, 0, 3]), torch.tensor([0, 2, 3]))
    q = restricted(drafts, mapping)
    assert all(float(law.sum()) == pytest.approx(1) and law[1] == law[4] == 0 for law in q.values())
    assert total_variation(p, emitted_law(p, q)) < 1e-12
    assert total_variation(sparse(p, seed), emitted_law(sparse(p, seed), q)) < 1e-12
    by_draft_id = restricted(drafts, mapping, mapping.draft_ids.sort().values)
    assert total_variation(p, emitted_law(p, q, claimed=by_draft_id)) > 1e-2


def test_equal_laws_and_impossible_tokens():
    law = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    other = torch.tensor([[0.0, 0.5, 0.25, 0.25]], dtype=torch.float64)
    assert torch.equal(residual(law, law), law)
    assert acceptance(law, law, torch.tensor([1])) == 1.0
    assert acceptance(law, other, torch.tensor([0])) == 0.0  # q(x) = 0: x can't have been drawn
    assert acceptance(law, other, torch.tensor([3])) == 0.0  # p(x) = 0
    assert residual(law, other)[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert acceptance(law * torch.nan, other, torch.tensor([1])) == 0.0


# ---- through the real sampler

TARGET, DRAFT = laws(1, 1.2), laws(2, 1.2)
NUM_ROUNDS = 160_000
ROWS = 4000


def draw_drafts(generator, table):
    """[ROWS, 2] drafts drawn from the laws of a table, with an ordinary generator."""
    first = torch.multinomial(table[()], ROWS, replacement=True, generator=generator)
    second = torch.empty_like(first)
    for token in range(V):
        where = first == token
        if where.any():
            second[where] = torch.multinomial(table[(token,)], int(where.sum()), replacement=True, generator=generator)
    return torch.stack([first, second], dim=1)


def given(drafted, claimed):
    """Drafts from outside, each row's with the law that it claims to be drawn from."""
    generator = torch.Generator().manual_seed(7)

    def propose(sampler):
        for first, second in draw_drafts(generator, drafted).tolist():
            law = None if claimed is None else torch.stack([claimed[()], claimed[(first,)]])
            yield (first, second), law

    return propose


def drawn_from_part(sampler):
    """Drafts that the sampler draws itself, from laws over three of the four tokens."""
    part = torch.tensor([0, 2, 3])
    rows = [SampleRow(row, 1, 0) for row in range(ROWS)]
    logits = torch.stack([DRAFT[()][part]] * ROWS).log().float()
    columns, first_laws = sampler.draw_drafts(logits, rows, part)
    firsts = part[columns].tolist()
    logits = torch.stack([DRAFT[(first,)][part] for first in firsts]).log().float()
    columns, second_laws = sampler.draw_drafts(logits, [SampleRow(row, 2, 0) for row in range(ROWS)], part)
    assert (first_laws[:, 1] == 0).all() and first_laws.sum(dim=1).allclose(torch.ones(ROWS, dtype=torch.float64))
    seconds = part[columns].tolist()
    yield from zip(zip(firsts, seconds, strict=True), torch.stack([first_laws, second_laws], dim=1), strict=True)


def bigram_counts(propose, num_rounds=NUM_ROUNDS):
    """Counts [V, V] of the first two tokens over so many rounds, each with a seed of its own."""
    counts = torch.zeros(V, V)
    for round_number in range(num_rounds // ROWS):
        sampler = Sampler(ROWS, V, CPU)
        for row in range(ROWS):
            sampler.admit(row, SamplingParams(temperature=1.0, seed=round_number * ROWS + row), [0], [])
        rows, logits = [], []
        for row, (draft_ids, law) in enumerate(propose(sampler)):
            rows.append(VerifyRow(row, 1, 0, draft_ids, law))
            logits += [TARGET[()], TARGET[draft_ids[:1]], TARGET[draft_ids]]
        again_rows, again_logits, begun = [], [], []
        for row, verified in enumerate(verify(torch.stack(logits).log().float(), sampler, rows)):
            tokens = [token.token_id for token in verified.tokens]
            if len(tokens) > 1:
                counts[tokens[0], tokens[1]] += 1
            else:
                again_rows.append(SampleRow(row, 2, 1))
                again_logits.append(TARGET[(tokens[0],)])
                begun.append(tokens[0])
        for first, token in zip(
            begun, sampler.sample(torch.stack(again_logits).log().float(), again_rows), strict=True
        ):
            counts[first, token.token_id] += 1
    return counts


def p_value(counts):
    expected = torch.stack([TARGET[()][a] * TARGET[(a,)] for a in range(V)]) * counts.sum()
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(
        torch.special.gammaincc(
            torch.tensor((V * V - 1) / 2.0, dtype=torch.float64), torch.tensor(statistic / 2.0, dtype=torch.float64)
        )
    )


def test_the_law_of_rejection_through_the_sampler():
    assert p_value(bigram_counts(given(DRAFT, DRAFT))) > 1e-9


def test_the_law_of_drafts_that_the_sampler_draws():
    """From a part of the vocabulary, with noise that is neither the target's nor that of acceptance."""
    assert p_value(bigram_counts(drawn_from_part)) > 1e-9


def test_drafts_drawn_with_the_noise_of_their_acceptance_break_the_law(monkeypatch):
    monkeypatch.setattr(sampler_module, "row_keys", lambda rows, purpose: row_keys(rows, Purpose.ACCEPT))
    assert p_value(bigram_counts(drawn_from_part, 40_000)) < 1e-9


def test_the_law_of_matched_drafts_through_the_sampler():
    assert p_value(bigram_counts(given(DRAFT, None))) > 1e-9


@pytest.mark.parametrize("control", ["permuted", "argmax against raw"])
def test_controls_through_the_sampler(control):
    drafted, claimed = (DRAFT, permuted(DRAFT)) if control == "permuted" else (one_hot(DRAFT), DRAFT)
    assert p_value(bigram_counts(given(drafted, claimed), 40_000)) < 1e-9


def test_coupled_drafts_are_the_tokens_of_the_target_where_the_laws_agree():
    """The same noise: with q = p every draft is accepted; with another q, more than with independent noise."""
    num_rows = 3000
    sampler = Sampler(num_rows, V, CPU)
    for row in range(num_rows):
        sampler.admit(row, SamplingParams(seed=row, temperature=0.8, top_p=0.95), [0], [])
    rows = [SampleRow(row, 5, 0) for row in range(num_rows)]
    p, q = (table[()].log().float().expand(num_rows, V) for table in (TARGET, DRAFT))
    target = [token.token_id for token in sampler.sample(p, rows)]
    assert sampler.choose_drafts(p, rows).tolist() == target
    matches = sum(a == b for a, b in zip(sampler.choose_drafts(q, rows).tolist(), target, strict=True)) / num_rows
    laws_p, laws_q = sampler.distribution(p, rows)[0], sampler.distribution(q, rows)[0]
    distance = float((laws_p - laws_q).abs().sum() / 2)
    assert matches >= (1 - distance) / (1 + distance) - 0.04  # the bound for shared Gumbel noise
    assert matches > float((laws_p * laws_q).sum()) + 0.05  # what independent draws would give
    # A part of the vocabulary: columns stand for ids, and the noise goes by the id.
    part = torch.tensor([1, 2, 3])
    chosen = part[sampler.choose_drafts(p[:, 1:], rows, part)]
    where = torch.tensor(target) > 0
    assert (chosen[where] == torch.tensor(target)[where]).float().mean() > 0.97


def test_the_distribution_is_the_law_of_the_draws():
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.3, top_p=0.6, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, min_new_tokens=3, suppressed_ids=(1,)),
    ]
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]]).expand(4, V).contiguous()
    sampler = Sampler(4, V, CPU)
    for row, item in enumerate(params):
        sampler.admit(row, item, [1], [])
    law = sampler.distribution(logits, [SampleRow(row, 1, 0) for row in range(4)])
    torch.testing.assert_close(law.sum(dim=1), torch.ones(4, dtype=torch.float64))
    assert law[0].tolist() == [0, 1, 0, 0] and law[1, 3] == 0 and law[3, 1] == 0
    counts = torch.zeros(4, V)
    for position in range(1, 4001):
        for row, token in enumerate(sampler.sample(logits, [SampleRow(row, position, 0) for row in range(4)])):
            counts[row, token.token_id] += 1
    assert ((counts / 4000 - law).abs() < 0.04).all()
    broken = logits.clone()
    broken[1, 0] = torch.nan
    assert sampler.distribution(broken, [SampleRow(row, 1, 0) for row in range(4)])[1].isnan().all()


def test_non_finite_logits_end_a_rejected_draft_where_they_are():
    sampler = Sampler(1, V, CPU)
    sampler.admit(0, SamplingParams(temperature=1.0, seed=3), [0], [])
    logits = torch.zeros(3, V)
    logits[1] = torch.nan
    q = torch.full((2, V), 1 / V)  # the first draft is accepted for sure
    (verified,) = verify(logits, sampler, [VerifyRow(0, 1, 0, (2, 1), q)])
    assert [token.token_id for token in verified.tokens] == [2, None] and verified.num_accepted == 1


@pytest.mark.parametrize("which", ["target", "draft", "both"])
def test_nothing_but_non_finite_logits_in_a_step_fails_no_other_request(which):
    """Not a number from the target ends the request; from the drafter it is a draft that is rejected."""
    sampler = Sampler(1, V, CPU)
    sampler.admit(0, SamplingParams(temperature=1.0, seed=3, is_seeded=False), [0], [])
    nan = torch.full((1, V), torch.nan)
    columns, law = sampler.draw_drafts(nan if which != "target" else torch.zeros(1, V), [SampleRow(0, 1, 0)])
    assert law.isnan().all() == (which != "target") and 0 <= int(columns[0]) < V
    logits = nan.expand(2, V) if which != "draft" else torch.tensor([[0.0, -9.0, -9.0, 20.0]] * 2)
    (verified,) = verify(logits, sampler, [VerifyRow(0, 1, 0, (int(columns[0]),), law)])
    assert [token.token_id for token in verified.tokens] == [None if which != "draft" else 3]
    assert verified.num_accepted == 0


def test_rows_with_and_without_a_law_in_one_batch():
    """A greedy row, a matched one and a rejected one side by side are what they are alone."""
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=8), SamplingParams(temperature=1.0, seed=9)]
    law = torch.stack([DRAFT[()], DRAFT[(1,)]])
    rows = [VerifyRow(0, 1, 0, (0, 2)), VerifyRow(1, 1, 0, (3,)), VerifyRow(2, 1, 0, (1, 3), law)]
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(3, V, CPU)
    for row, item in enumerate(params):
        sampler.admit(row, item, [0], [])
    together = verify(logits, sampler, rows)
    parts = torch.split(logits, [3, 2, 3])
    assert together == [verify(part, sampler, [row])[0] for part, row in zip(parts, rows, strict=True)]
