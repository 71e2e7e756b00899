"""The sampler: each processor against transformers', the law by chi-square, rows independent of each other."""

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch
from transformers import generation as hf

from specserve.models.sampling import processors, row_ops
from specserve.models.sampling.history import History
from specserve.models.sampling.params import SamplingParams
from specserve.models.sampling.processors import Truncation, truncate
from specserve.models.sampling.sampler import Sampler, SampleRow, score_tokens

CPU = torch.device("cpu")


@pytest.fixture(params=["C", "torch"])
def row_ops_form(request, monkeypatch):
    """Runs a test with both forms of the row operations."""
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "uses_kernels", lambda *tensors: False)


def make_sampler(params, vocab_size, prompts=None, outputs=None):
    sampler = Sampler(len(params), vocab_size, CPU)
    for slot, item in enumerate(params):
        sampler.admit(slot, item, (prompts or {}).get(slot, [0]), (outputs or {}).get(slot, []))
    return sampler


def sample(sampler, logits, position=10, num_outputs=0):
    rows = [SampleRow(slot, position, num_outputs) for slot in range(logits.shape[0])]
    return [token.token_id for token in sampler.sample(logits, rows)]


def survivors(logits, params):
    """[S, V] bool through truncate, in vocabulary order."""
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    rows_seen = []
    for rows, values, token_ids in truncate(logits, params):
        rows_seen += rows.tolist()
        for row, row_values, row_ids in zip(rows.tolist(), values, token_ids, strict=True):
            kept[row, row_ids[row_values > -torch.inf]] = True
            torch.testing.assert_close(
                row_values[row_values > -torch.inf], logits[row, row_ids[row_values > -torch.inf]]
            )
    assert sorted(rows_seen) == list(range(len(logits)))
    return kept


def hf_survivors(logits, top_k, top_p, min_p, typical_p):
    """Transformers' warpers in the order of `generate`."""
    warpers = []
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(hf.MinPLogitsWarper(min_p))
    if typical_p < 1:
        warpers.append(hf.TypicalLogitsWarper(typical_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits > -torch.inf


SETTINGS = [
    (0, 1.0, 0.0, 1.0),
    (1, 1.0, 0.0, 1.0),
    (7, 1.0, 0.0, 1.0),
    (63, 1.0, 0.0, 1.0),
    (64, 1.0, 0.0, 1.0),
    (65, 1.0, 0.0, 1.0),
    (299, 0.9, 0.0, 1.0),
    (0, 0.3, 0.0, 1.0),
    (0, 0.999, 0.0, 1.0),
    (0, 1e-6, 0.0, 1.0),
    (0, 1.0, 0.05, 1.0),
    (0, 1.0, 1.0, 1.0),
    (0, 1.0, 1e-4, 1.0),
    (0, 1.0, 0.0, 0.2),
    (0, 1.0, 0.0, 0.95),
    (40, 0.8, 0.02, 0.9),
    (200, 0.99, 0.001, 0.5),
]


def truncation(settings):
    columns = torch.tensor(settings, dtype=torch.float64).split(1, dim=1)
    return Truncation(columns[0].long(), *columns[1:])


@pytest.mark.parametrize("heads", [(16, 64), (64,), ()], ids=str)
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 40.0])
def test_truncation_keeps_what_transformers_keeps(monkeypatch, row_ops_form, heads, spread):
    monkeypatch.setattr(processors, "HEADS", heads)
    logits = torch.randn(len(SETTINGS), 300, generator=torch.Generator().manual_seed(int(spread * 100))) * spread
    logits[:, 17] = -torch.inf  # masked before
    kept = survivors(logits, truncation(SETTINGS))
    for row, setting in enumerate(SETTINGS):
        expected = hf_survivors(logits[row : row + 1], *setting)[0]
        assert torch.equal(kept[row], expected), (setting, kept[row].sum(), expected.sum())


def test_truncation_of_a_large_vocabulary_rarely_needs_more_than_its_head(monkeypatch):
    logits = torch.randn(len(SETTINGS), 20_000, generator=torch.Generator().manual_seed(9)) * 4
    sizes = []
    sorted_head = processors.sorted_head
    monkeypatch.setattr(processors, "sorted_head", lambda x, n: sizes.append((n, len(x))) or sorted_head(x, n))
    kept = survivors(logits, truncation(SETTINGS))
    for row, setting in enumerate(SETTINGS):
        assert torch.equal(kept[row], hf_survivors(logits[row : row + 1], *setting)[0]), setting
    assert [size for size, _ in sizes] == [256, 4096, 20_000]
    # The row without any truncation, and those that keep nearly everything.
    assert sizes[2][1] <= 3


def test_ties_at_the_kth_stay():
    kept = survivors(torch.tensor([[5.0, 3.0, 3.0, 3.0, 1.0]]), truncation([(2, 1.0, 0.0, 1.0)]))
    assert kept.tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("heads", [(4,), ()], ids=str)
def test_of_tied_tokens_top_p_keeps_the_lowest_ids(monkeypatch, row_ops_form, heads):
    monkeypatch.setattr(processors, "HEADS", heads)
    logits = torch.zeros(3, 10)
    logits[1, [7, 3]] = 2.0
    logits[2] = -torch.inf
    logits[2, 9] = 1.0
    kept = survivors(logits, truncation([(0, 0.25, 0.0, 1.0), (0, 0.2, 0.0, 1.0), (0, 0.5, 0.1, 0.5)]))
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[0, 1, 2], [3], [9]]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 3
    prompt, output = [3, 7, 7], [7, 20, 3, 49]
    sampler = make_sampler([SamplingParams(repetition_penalty=penalty)], 50, {0: prompt}, {0: output})
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    assert sample(sampler, logits) == [int(expected.argmax())]
    row = logits.clone()
    sampler._process(row, [SampleRow(0, 10, 4)])
    torch.testing.assert_close(row, expected)


def test_frequency_and_presence_count_generated_tokens_only():
    logits = torch.zeros(1, 6)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    sampler = make_sampler([params], 6, {0: [0, 0, 1]}, {0: [2, 3]})
    sampler.accept(0, [3, 4])
    sampler._process(logits, [SampleRow(0, 10, 4, (5, 5, 5))])
    assert logits.tolist() == [[0, 0, -0.75, -1.25, -0.75, -1.75]]
    again = torch.zeros(1, 6)
    sampler._process(again, [SampleRow(0, 10, 4)])
    assert again.tolist() == [[0, 0, -0.75, -1.25, -0.75, 0]]  # drafts left no trace


def test_a_released_row_slot_leaves_nothing_to_its_successor():
    sampler = make_sampler([SamplingParams(repetition_penalty=2.0, min_new_tokens=9, suppressed_ids=(1,))], 6, {0: [2]})
    sampler.accept(0, [3])
    sampler.release(0)
    sampler.admit(0, SamplingParams(presence_penalty=1.0), [0], [])
    logits = torch.tensor([[0.0, 2.0, 1.9, 1.8, 0.0, 0.0]])
    assert sample(sampler, logits) == [1]
    row = logits.clone()
    sampler._process(row, [SampleRow(0, 10, 0)])
    assert torch.equal(row, logits)


def test_history_counts_like_a_recount():
    rng = random.Random(5)
    prompt, output = [rng.randrange(40) for _ in range(30)], [rng.randrange(60) for _ in range(20)]
    history = History(prompt, output[:3])
    for first in range(3, 20, 4):
        history.add(output[first : first + 4])
    for prefix in ((), (99,), (99, 99, output[0], prompt[0], 98)):
        token_ids, counts = history.seen(prefix)
        recount = Counter([*output, *prefix])
        assert len(token_ids) == len(set(token_ids)) and set(token_ids) == {*prompt, *output, *prefix}
        assert counts.tolist() == [recount[token_id] for token_id in token_ids]


def test_penalties_of_a_row_do_not_reach_its_neighbours():
    params = [SamplingParams(frequency_penalty=2.0, repetition_penalty=1.7), SamplingParams(), SamplingParams()]
    sampler = make_sampler([*params, SamplingParams(presence_penalty=2.0)], 6, {0: [1]}, {0: [2, 2], 3: [0]})
    logits = torch.ones(4, 6)
    sampler._process(logits, [SampleRow(slot, 9, 2) for slot in range(4)])
    torch.testing.assert_close(logits[0], torch.tensor([1, 1 / 1.7, 1 / 1.7 - 4, 1, 1, 1]))
    assert torch.equal(logits[1:3], torch.ones(2, 6)) and logits[3].tolist() == [-1, 1, 1, 1, 1, 1]


def test_suppressed_ids_beyond_the_vocabulary_do_no_harm():
    sampler = make_sampler([SamplingParams(min_new_tokens=3, suppressed_ids=(4, 6, 128009))], 6)
    assert sample(sampler, torch.tensor([[0.0, 1.0, 0.0, 0.0, 9.0, 0.0]])) == [1]


def test_min_new_tokens_masks_every_stop_until_then_and_counts_drafts():
    params = SamplingParams(min_new_tokens=3, suppressed_ids=(4, 5))
    sampler = make_sampler([params], 6)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 9.0, 8.0]])

    def chosen(num_outputs, prefix):
        return sampler.sample(logits, [SampleRow(0, 10, num_outputs, prefix)])[0].token_id

    assert [chosen(0, ()), chosen(2, ()), chosen(0, (1, 1))] == [1, 1, 1]
    assert [chosen(3, ()), chosen(1, (1, 1)), chosen(2, (1,))] == [4, 4, 4]


@pytest.mark.parametrize("temperature", [1e-38, 1e-8, 1e-4])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.randn(8, 200, generator=torch.Generator().manual_seed(2)) * 5
    sampler = make_sampler([SamplingParams(temperature=temperature, seed=n) for n in range(8)], 200)
    assert sample(sampler, logits) == logits.argmax(dim=1).tolist()
    top_p = make_sampler([SamplingParams(temperature=1.0, top_p=1e-6, seed=n) for n in range(8)], 200)
    assert sample(top_p, logits) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("top_k", [200, 201, 9_999_999, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k):
    logits = torch.randn(16, 200, generator=torch.Generator().manual_seed(2))
    off = sample(make_sampler([SamplingParams(temperature=1.0, seed=n) for n in range(16)], 200), logits)
    on = sample(make_sampler([SamplingParams(temperature=1.0, top_k=top_k, seed=n) for n in range(16)], 200), logits)
    assert on == off and len(set(off)) > 8


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.9, "typical_p": 0.9}], ids=str)
def test_non_finite_rows_fail_alone(row_ops_form, params):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(4))
    logits[6, 7] = -torch.inf  # masked, which is no error
    params = [SamplingParams(temperature=n % 2, seed=n, logprobs=True, **params) for n in range(8)]
    expected = sample(make_sampler(params, 50), logits.clone())
    logits[1, 3], logits[2, 0], logits[3, 49] = torch.nan, torch.inf, torch.nan
    logits[4] = torch.nan
    logits[5, :5], logits[5, 5:] = torch.inf, -torch.inf
    actual = sample(make_sampler(params, 50), logits)
    assert actual[1:6] == [None] * 5
    assert [actual[row] for row in (0, 6, 7)] == [expected[row] for row in (0, 6, 7)] and None not in expected


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_batch_of_nothing_but_non_finite_rows(row_ops_form, params):
    sampler = make_sampler([SamplingParams(temperature=1.0, seed=n, **params) for n in range(2)], 50)
    logits = torch.full((2, 50), torch.nan)
    assert sample(sampler, logits) == [None, None]
    rows = [SampleRow(row, 3, 0) for row in range(2)]
    assert sampler.choose_drafts(logits, rows).tolist() == [0, 0]


def test_extreme_logits_never_overflow(row_ops_form):
    logits = torch.tensor([[3e38, 2e38, -3e38], [-3e38, -3e38, -3e38], [1e30, 1e30, 0.0]])
    for params in ({}, {"top_p": 0.9}, {"typical_p": 0.5}, {"min_p": 0.5}, {"top_k": 1}):
        for temperature in (1.1e-5, 1.0, 2.0):
            sampler = make_sampler([SamplingParams(temperature=temperature, seed=n, **params) for n in range(3)], 3)
            first, second, third = sample(sampler, logits)
            assert first == 0 and second in (0, 1, 2) and third in (0, 1)


def test_greedy_takes_the_lowest_of_tied_ids(row_ops_form):
    logits = torch.zeros(3, 2000)
    logits[1, [1700, 300, 900]] = 1.0
    logits[2, 5:] = -0.0
    assert sample(make_sampler([SamplingParams()] * 3, 2000), logits) == [0, 300, 0]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=5, seed=2, logprobs=True),
    SamplingParams(temperature=1.3, top_p=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, min_p=0.1, seed=4, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, typical_p=0.8, seed=5),
    SamplingParams(presence_penalty=1.5, top_n_tokens=3),
    SamplingParams(temperature=2.0, seed=7, min_new_tokens=5, suppressed_ids=(0, 1, 2)),
]


def test_a_row_is_the_same_alone_and_in_company(row_ops_form):
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(6)) * 2
    prompts = {slot: [slot, slot + 1] for slot in range(8)}
    together = make_sampler(MIXED, 700, prompts).sample(logits, [SampleRow(slot, 20, 2) for slot in range(8)])
    for slot in range(8):
        sampler = make_sampler(MIXED, 700, prompts)
        alone = sampler.sample(logits[slot : slot + 1], [SampleRow(slot, 20, 2)])[0]
        assert alone == together[slot]


def test_both_forms_of_the_row_operations_sample_the_same(monkeypatch):
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(12)) * 3
    params = [dataclasses.replace(MIXED[slot % 8], seed=slot, logprobs=False, top_n_tokens=0) for slot in range(200)]
    in_c = sample(make_sampler(params, 3000), logits)
    monkeypatch.setattr(row_ops, "uses_kernels", lambda *tensors: False)
    monkeypatch.setattr(row_ops, "DRAWN_AT_ONCE", 7 * 3000)
    assert sample(make_sampler(params, 3000), logits) == in_c


def test_raw_logits_stay_as_they_were():
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(6))
    before = logits.clone()
    make_sampler(MIXED, 700).sample(logits, [SampleRow(slot, 20, 2) for slot in range(8)])
    assert torch.equal(logits, before)


def test_seeds_positions_and_nothing_else_decide():
    logits = torch.zeros(1, 1000)

    def draw(seed, position):
        return sample(make_sampler([SamplingParams(temperature=1.0, seed=seed)], 1000), logits, position)[0]

    assert draw(1, 5) == draw(1, 5)
    assert len({draw(seed, 5) for seed in range(20)}) > 15
    assert len({draw(1, position) for position in range(20)}) > 15


def test_logprobs_are_those_of_the_raw_logits_and_rows_keep_their_own_counts():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8))
    params = [
        SamplingParams(temperature=3.0, seed=1, logprobs=True, repetition_penalty=5.0),
        SamplingParams(top_n_tokens=5),
        SamplingParams(),
    ]
    tokens = make_sampler(params, 40).sample(logits, [SampleRow(slot, 9, 0) for slot in range(3)])
    log_p = logits.log_softmax(dim=1)
    for row in range(2):
        assert tokens[row].logprob == pytest.approx(float(log_p[row, tokens[row].token_id]), abs=1e-5)
        assert tokens[row].rank == int((logits[row] > logits[row, tokens[row].token_id]).sum()) + 1
    assert [len(token.top) for token in tokens] == [0, 5, 0]
    assert [pair[0] for pair in tokens[1].top] == logits[1].topk(5).indices.tolist()
    assert tokens[1].rank == 1 and tokens[1].top[0] == (tokens[1].token_id, tokens[1].logprob)
    assert tokens[2].logprob is None and tokens[2].rank is None


def test_top_n_orders_ties_by_id_and_may_ask_for_everything(row_ops_form):
    token = score_tokens(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [3], 5)[0]
    assert [pair[0] for pair in token.top] == [1, 2, 3, 0, 4] and token.rank == 1
    many = score_tokens(torch.zeros(2, 3000), [7, 2999], 6)
    assert [pair[0] for pair in many[0].top] == [0, 1, 2, 3, 4, 5] and many[1].rank == 1
    assert len(score_tokens(torch.zeros(1, 5), [3], 1_000_000)[0].top) == 5
    assert score_tokens(torch.zeros(0, 5), [], 3) == []


def chi_square(logits, params_of, expected, num_positions=160, num_seeds=1000):
    """160,000 draws through the real sampler against the law `expected` [V]."""
    vocab_size = len(expected)
    sampler = make_sampler([params_of(seed) for seed in range(num_seeds)], vocab_size)
    some_logits = logits.expand(num_seeds, -1).contiguous()
    drawn = [sample(sampler, some_logits, position) for position in range(num_positions)]
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=vocab_size).float()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * num_seeds * num_positions
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


def limit(degrees):
    return degrees + 6 * math.sqrt(2 * degrees) + 12  # about 1e-9


LAW_LOGITS = torch.tensor([0.3, -1.0, 2.0, 1.2, -3.0, 0.0, 0.9, 1.9])


def test_the_law_of_whole_distributions():
    value, degrees = chi_square(
        LAW_LOGITS, lambda n: SamplingParams(temperature=0.8, seed=n), (LAW_LOGITS / 0.8).softmax(0)
    )
    assert value < limit(degrees)
    wrong, degrees = chi_square(
        LAW_LOGITS, lambda n: SamplingParams(temperature=0.8, seed=n), (LAW_LOGITS / 0.84).softmax(0)
    )
    assert wrong > limit(degrees)  # the test can tell a temperature from another


def test_the_law_of_truncated_distributions():
    masked = torch.where(LAW_LOGITS.topk(4).values[-1] <= LAW_LOGITS, LAW_LOGITS, -torch.inf)
    value, degrees = chi_square(
        LAW_LOGITS, lambda n: SamplingParams(temperature=1.0, top_k=4, seed=n), masked.softmax(0)
    )
    assert value < limit(degrees) and degrees == 3
