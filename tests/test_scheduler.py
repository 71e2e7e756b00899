"""Scheduler and block manager, on ints alone: random arrivals, aborts, preemptions, drafts."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.models.block_manager import BlockManager
from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.server.engine.engine import Engine
from specserve.server.engine.errors import NonFiniteLogitsError, RequestTooLargeError
from specserve.server.engine.scheduler import Scheduler
from specserve.server.engine.sequence import FinishReason
from specserve.speculators.draft_length import DraftLength


@pytest.fixture
def make_engine(table_executor):
    def make(num_blocks=16, block_size=4, max_batch_tokens=16, max_batch_size=4, drafts=0, prefix_caching=True):
        blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=max_batch_tokens,
            max_batch_size=max_batch_size,
            draft_length=DraftLength(drafts, adapts=False),
        )
        return Engine(scheduler, table_executor(num_blocks, block_size))

    return make


def run(engine, collected=None, until=lambda: False):
    """Step until idle; request id -> (tokens, summary)."""
    collected = {} if collected is None else collected
    for _ in range(5000):
        if not engine.has_work() or until():
            return collected
        for event in engine.step():
            tokens, ends = collected.setdefault(event.request_id, ([], []))
            tokens.extend(token.token_id for token in event.tokens)
            if event.is_terminal:
                ends.append(event)
        engine.scheduler.check_integrity()
    raise AssertionError("the engine never got done")


def test_one_request_gets_its_tokens_and_frees_everything(make_engine, make_request, table_answer):
    engine = make_engine()
    request_id = engine.add(make_request([1, 2, 3], 9))
    tokens, ends = run(engine)[request_id]
    assert tokens == table_answer([1, 2, 3], 9)
    assert [end.summary.finish_reason for end in ends] == [FinishReason.LENGTH]
    assert ends[0].summary.prompt_tokens == 3 and ends[0].summary.generated_tokens == 9
    assert engine.stats().free_blocks == 16 and engine.stats().num_running == 0


def test_a_long_prompt_is_chunked_and_does_not_stop_the_others(make_engine, make_request, table_answer):
    engine = make_engine(num_blocks=64, max_batch_tokens=8)
    short = engine.add(make_request([5], 30))
    results = {}
    run(engine, results, until=lambda: bool(results))
    long_prompt = list(range(40))
    long = engine.add(make_request(long_prompt, 2))
    run(engine, results)
    batches = engine.executor.batches
    assert results[short][0] == table_answer([5], 30)
    assert results[long][0] == table_answer(long_prompt, 2)
    chunked = [batch for batch in batches if any(not row.samples for row in batch.rows)]
    assert len(chunked) >= 5 and all(len(batch.rows) == 2 for batch in chunked)  # the short one in each
    assert all(sum(row.num_tokens for row in batch.rows) <= 8 for batch in batches)


def test_prefix_hit_leaves_one_token_to_compute(make_engine, make_request, table_answer):
    engine = make_engine()
    prompt = [7, 8, 9, 10, 11, 12, 13, 14]
    first, second = engine.add(make_request(prompt, 1)), None
    run(engine)
    second = engine.add(make_request(prompt, 5))
    results = run(engine)
    assert results[second][0] == table_answer(prompt, 5)
    assert results[second][1][0].summary.cached_prompt_tokens == 4  # of 8: the last block is computed again
    assert first != second


def test_prefix_blocks_are_shared_while_running_and_diverge(make_engine, make_request, table_answer):
    engine = make_engine(num_blocks=12)
    prompt = list(range(50, 62))
    ids = [engine.add(make_request(prompt, 1))]
    run(engine)
    ids = [engine.add(make_request([*prompt, tail], 6)) for tail in (1, 2, 3)]
    results = {}
    run(engine, results, until=lambda: bool(results))
    assert engine.stats().free_blocks == 12 - 3 - 3 * 1  # three shared blocks, and one for each tail
    run(engine, results)
    for tail, request_id in zip((1, 2, 3), ids, strict=True):
        assert results[request_id][0] == table_answer([*prompt, tail], 6)


def test_without_prefix_caching_nothing_is_reused(make_engine, make_request):
    engine = make_engine(prefix_caching=False)
    for _ in range(2):
        request_id = engine.add(make_request(list(range(9)), 2))
        assert run(engine)[request_id][1][0].summary.cached_prompt_tokens == 0


def test_preemption_changes_nothing_but_the_order(make_engine, make_request, table_answer):
    engine = make_engine(num_blocks=8, prefix_caching=False)
    prompts = [[n, n + 1, n + 2] for n in (1, 20, 30, 40)]
    ids = [engine.add(make_request(prompt, 20)) for prompt in prompts]
    results = run(engine)
    assert engine.stats().num_preemptions > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert results[request_id][0] == table_answer(prompt, 20)
        assert len(results[request_id][1]) == 1
    oldest_first = sorted(ids, key=lambda i: results[i][1][0].summary.queue_seconds)
    assert oldest_first[0] == ids[0]


def test_a_preempted_request_comes_back_before_those_that_still_wait(make_engine, make_request):
    engine = make_engine(num_blocks=6, max_batch_size=2, prefix_caching=False)
    first, second, third = (engine.add(make_request([n, n + 1, n + 2], 12)) for n in (1, 20, 30))
    while not engine.stats().num_preemptions:
        engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == [first]
    assert [seq.request_id for seq in engine.scheduler.waiting] == [second, third]
    run(engine)


def test_nothing_is_drafted_that_could_not_be_used(make_engine, make_request, table_answer):
    engine = make_engine(num_blocks=32, drafts=4)
    engine.executor.draft = table_answer
    engine.add(make_request([1, 2], 9))
    run(engine)
    rows = [row for batch in engine.executor.batches for row in batch.rows]
    # 1 token from the prompt, 5 from a step with 4 drafts, 3 from a step with 2 drafts: then at most 2 more, so 1 draft
    assert [(row.num_drafts, row.max_draft_tokens) for row in rows] == [(0, 4), (4, 4), (2, 1)]
    assert engine.stats().num_drafted_tokens == engine.stats().num_accepted_tokens == 6


def test_a_request_that_can_never_fit_is_refused_at_once(make_engine, make_request):
    engine = make_engine(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLargeError, match=r"17 tokens of KV cache, it holds 16.*--kv-cache-memory"):
        engine.add(make_request([1] * 10, 7))
    engine.add(make_request([1] * 10, 6))
    assert len(next(iter(run(engine).values()))[0]) == 6


def test_abort_in_every_state_frees_blocks_and_is_idempotent(make_engine, make_request, table_answer):
    engine = make_engine(num_blocks=16, max_batch_tokens=4, max_batch_size=2)
    ids = [engine.add(make_request(list(range(n, n + 10)), 8)) for n in (0, 100, 200)]
    engine.step()  # ids[0] in prefill, ids[1] and ids[2] waiting
    engine.abort(ids[2])
    engine.abort(ids[0])
    engine.abort(ids[0])
    engine.abort(12345)
    engine.scheduler.check_integrity()
    results = run(engine)
    engine.abort(ids[1])  # finished
    assert set(results) == {ids[1]}
    assert results[ids[1]][0] == table_answer(list(range(100, 110)), 8)
    assert engine.stats().free_blocks == 16


def test_non_finite_logits_end_one_request_alone(make_engine, make_request, table_answer):
    engine = make_engine()
    bad_prompt, good_prompt = [1, 2, 3], [4, 5, 6, 8]
    engine.executor.fail_token = table_answer(bad_prompt, 3)[2]
    assert engine.executor.fail_token not in table_answer(good_prompt, 12)  # else the test tests nothing
    bad, good = engine.add(make_request(bad_prompt, 12)), engine.add(make_request(good_prompt, 12))
    results = run(engine)
    assert results[bad][0] == table_answer(bad_prompt, 2)
    assert isinstance(results[bad][1][0].error, NonFiniteLogitsError)
    assert results[good][0] == table_answer(good_prompt, 12)
    assert engine.stats().free_blocks == 16


def test_an_exception_in_the_text_of_one_request_ends_it_alone(make_engine, make_request, table_answer):
    engine = make_engine()
    broken = make_request([1], 5)

    def push(token_id):
        raise KeyError(token_id)

    broken.text_stream.push = push
    bad, good = engine.add(broken), engine.add(make_request([2], 5))
    results = run(engine)
    assert isinstance(results[bad][1][0].error, KeyError)
    assert results[good][0] == table_answer([2], 5)
    assert engine.stats().free_blocks == 16


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("kind", ["self", "bad", "half"])
def test_drafts_of_any_quality_change_nothing(make_engine, make_request, table_answer, k, kind):
    for max_new in range(1, k + 6):
        engine = make_engine(num_blocks=32, drafts=k)

        def draft(history, limit):
            good = table_answer(history, limit)
            bad = [0] * limit
            return {"self": good, "bad": bad, "half": good[: limit // 2] + bad[limit // 2 :]}[kind]

        engine.executor.draft = draft
        prompts = [[3, 1], [9, 9, 9, 9, 9]]
        ids = [engine.add(make_request(prompt, max_new)) for prompt in prompts]
        results = run(engine)
        for prompt, request_id in zip(prompts, ids, strict=True):
            tokens, ends = results[request_id]
            assert tokens == table_answer(prompt, max_new)
            summary = ends[0].summary
            assert summary.generated_tokens == max_new
            if kind == "self":
                assert summary.accepted_tokens == summary.drafted_tokens
            if kind == "bad":
                assert summary.accepted_tokens == 0


def test_eos_inside_a_draft_cuts_there(make_engine, make_request, table_answer):
    prompt = [3, 1, 4]
    answer = table_answer(prompt, 12)
    for position in range(12):
        eos = answer[position]
        engine = make_engine(num_blocks=32, drafts=4)
        engine.executor.draft = table_answer
        request_id = engine.add(make_request(prompt, 12, eos=eos))
        tokens, ends = run(engine)[request_id]
        assert tokens == answer[: answer.index(eos) + 1]
        assert ends[0].summary.finish_reason is FinishReason.EOS_TOKEN
        assert ends[0].summary.generated_tokens == len(tokens)


def test_prompt_details_survive_chunks_and_skip_the_prefix_cache(make_engine, make_request):
    engine = make_engine(max_batch_tokens=4)
    prompt = list(range(10))
    execute = engine.executor.execute

    def scoring(batch):
        output = execute(batch)
        for row, result in zip(batch.rows, output.rows, strict=True):
            if row.prompt_logprobs:
                scored = range(row.start + 1, min(row.start + row.num_tokens, len(prompt) - 1) + 1)
                result.prompt = [SampledToken(prompt[position], logprob=-position) for position in scored]
        return output

    engine.executor.execute = scoring
    for _ in range(2):  # the second time the prefix is cached
        request = make_request(prompt, 3, sampling=SamplingParams(prompt_logprobs=True), prompt_details=True)
        engine.add(request)
        events = []
        while engine.has_work():
            events += engine.step()
        assert [token.token_id for token in events[0].prompt] == prompt
        assert [token.logprob for token in events[0].prompt] == [None, *range(-1, -10, -1)]
        assert all(event.prompt is None for event in events[1:])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_arrivals_aborts_and_preemptions(data, table_executor, make_request, table_answer):
    block_size = data.draw(st.integers(1, 5))
    num_blocks = data.draw(st.integers(-(-24 // block_size), 40))
    k = data.draw(st.integers(0, 3))
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, prefix_caching=data.draw(st.booleans())),
        max_batch_tokens=data.draw(st.integers(1, 20)),
        max_batch_size=data.draw(st.integers(1, 5)),
        draft_length=DraftLength(k, adapts=False),
    )
    engine = Engine(scheduler, table_executor(num_blocks, block_size))
    wrong = data.draw(st.integers(0, 3))
    engine.executor.draft = lambda history, limit: (table_answer(history, limit)[:wrong] + [0] * limit)[:limit]
    jobs, results, aborted = {}, {}, set()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "abort"]))
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
            count = data.draw(st.integers(1, 24 - len(prompt)))
            jobs[engine.add(make_request(prompt, count))] = (prompt, count)
        elif action == "abort" and jobs:
            victim = data.draw(st.sampled_from(sorted(jobs)))
            engine.abort(victim)
            aborted.add(victim)
        else:
            budget = iter([False, True])
            run(engine, results, until=lambda budget=budget: next(budget))
        scheduler.check_integrity()
    run(engine, results)
    for request_id, (prompt, count) in jobs.items():
        tokens, ends = results.get(request_id, ([], []))
        expected = table_answer(prompt, count)
        if request_id in aborted:
            assert tokens == expected[: len(tokens)] and len(ends) <= 1
        else:
            assert tokens == expected and len(ends) == 1
    assert engine.stats().free_blocks == num_blocks and not scheduler.running and not scheduler.waiting
