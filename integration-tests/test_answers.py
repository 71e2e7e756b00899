"""What requests get from a real server on a tiny model: stops, seeds, details, limits, company."""

import concurrent.futures
import itertools
import json
import time
from pathlib import Path

import grpc
import pytest

from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError
from specserve.router_client.types import FinishReason

PROMPTS = json.loads((Path(__file__).parent / "data" / "tiny_prompts.json").read_text("utf-8"))


def stream(client, prompt, **options):
    """(events, ids, text) of a stream."""
    events = list(client.stream(prompt, **options))
    return events, [i for event in events for i in event.token_ids], "".join(event.text for event in events)


def together(client, jobs):
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(client.generate, prompt, **options) for prompt, options in jobs]
        return [future.result() for future in futures]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_stream_joined_is_the_unary_answer(tiny, prompt, options):
    options = {**options, "max_new_tokens": 40, "logprobs": True}
    whole = tiny.generate(prompt, **options)
    events, ids, text = stream(tiny, prompt, **options)
    assert (tuple(ids), text) == (whole.token_ids, whole.text)
    assert [event.generated_tokens for event in events] == list(itertools.accumulate(len(e.token_ids) for e in events))
    assert [event.summary is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].summary.generated_tokens == len(ids) == len(whole.details)
    details = [token for event in events for token in event.details]
    assert [token.id for token in details] == ids
    assert [(token.id, token.rank) for token in details] == [(token.id, token.rank) for token in whole.details]


def test_every_answer_is_the_same_alone_and_in_company(tiny):
    jobs = [(prompt, {"max_new_tokens": 24, "ignore_eos": True}) for prompt in PROMPTS]
    jobs += [(p, {"max_new_tokens": 24, "temperature": 1.0, "seed": n}) for n, p in enumerate(PROMPTS)]
    jobs += [
        (PROMPTS[0], {"max_new_tokens": 30, "repetition_penalty": 1.3, "ignore_eos": True}),
        (PROMPTS[0], {"max_new_tokens": 30, "frequency_penalty": 1.5, "ignore_eos": True}),
        (PROMPTS[1], {"max_new_tokens": 30, "temperature": 2.0, "seed": 42, "top_k": 50, "top_p": 0.9}),
        (PROMPTS[2], {"max_new_tokens": 30, "temperature": 0.9, "seed": 43, "typical_p": 0.7, "top_n_tokens": 3}),
        (PROMPTS[3], {"max_new_tokens": 9, "top_n_tokens": 5}),
        (PROMPTS[4], {"max_new_tokens": 30, "temperature": 1.0, "seed": 2**64 - 1, "min_p": 0.05}),
        (PROMPTS[5], {"max_new_tokens": 30, "presence_penalty": -2.0, "min_new_tokens": 20}),
    ]
    alone = [tiny.generate(prompt, **options) for prompt, options in jobs]
    for _ in range(3):
        for job, one, other in zip(jobs, alone, together(tiny, jobs), strict=True):
            assert one.token_ids == other.token_ids and one.text == other.text, job
            assert one.summary.finish_reason == other.summary.finish_reason
            assert [len(token.top) for token in one.details] == [len(token.top) for token in other.details]
            for token, same in zip(one.details, other.details, strict=True):
                assert token.logprob == pytest.approx(same.logprob, abs=1e-4) and token.rank == same.rank


def test_seeds_repeat_and_differ(tiny):
    options = {"max_new_tokens": 10, "temperature": 2.0}
    first = [tiny.generate(PROMPTS[0], seed=42, **options).token_ids for _ in range(5)]
    crowd = together(tiny, [(PROMPTS[0], {**options, "seed": 42})] * 5 + [(p, options) for p in PROMPTS[1:]])
    assert {*first, *(answer.token_ids for answer in crowd[:5])} == {first[0]}
    assert len({tiny.generate(PROMPTS[0], seed=seed, **options).token_ids for seed in range(10)}) == 10
    drawn = tiny.generate(PROMPTS[0], **options)
    assert tiny.generate(PROMPTS[0], seed=drawn.summary.seed, **options).token_ids == drawn.token_ids


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
def test_any_token_declared_a_stop_stops_there(tiny, kind):
    base = tiny.generate(PROMPTS[3], max_new_tokens=12, ignore_eos=True, logprobs=True)
    for index, token in enumerate(base.details):
        first = next(n for n, other in enumerate(base.details) if other.id == token.id)
        if first != index or not token.text.strip() or "\ufffd" in token.text:
            continue
        if kind == "stop_token_ids":
            answer = tiny.generate(PROMPTS[3], max_new_tokens=12, ignore_eos=True, stop_token_ids=[token.id])
            assert answer.token_ids == base.token_ids[: index + 1]
            assert answer.summary.finish_reason is FinishReason.STOP_TOKEN
            assert answer.summary.stop_token_id == token.id
        else:
            end = base.text.find(token.text) + len(token.text)
            options = {"max_new_tokens": 12, "ignore_eos": True, "stop": [token.text]}
            answer = tiny.generate(PROMPTS[3], **options)
            assert answer.text == base.text[:end] and answer.summary.stop_string == token.text
            assert tiny.generate(PROMPTS[3], **options, include_stop=False).text == base.text[: end - len(token.text)]
            events, _, text = stream(tiny, PROMPTS[3], **options, include_stop=False)
            assert text == base.text[: end - len(token.text)]
            assert events[-1].summary.generated_tokens == len(answer.token_ids) <= index + 1


def test_a_stop_string_that_spans_tokens_never_leaks_and_a_false_start_is_released(tiny):
    base = tiny.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
    middle = len(base.text) // 2
    stop = base.text[middle - 4 : middle + 4]
    where = base.text.index(stop)
    events, _, text = stream(tiny, PROMPTS[0], max_new_tokens=20, ignore_eos=True, stop=[stop], include_stop=False)
    assert text == base.text[:where]
    assert events[-1].summary.finish_reason is FinishReason.STOP_STRING
    false_start = base.text[-3:] + "\x00 never"
    answer = tiny.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True, stop=[false_start])
    assert answer.text == base.text and answer.summary.finish_reason is FinishReason.LENGTH


def test_long_stop_strings_delay_nothing_that_can_not_begin_them(tiny):
    base = tiny.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
    options = {"max_new_tokens": 20, "ignore_eos": True, "stop": ["\x00" + "y" * 999, "\x01" * 1000]}
    events, ids, text = stream(tiny, PROMPTS[0], **options)
    assert (tuple(ids), text) == (base.token_ids, base.text)
    plain, _, _ = stream(tiny, PROMPTS[0], max_new_tokens=20, ignore_eos=True)
    assert [event.text for event in events] == [event.text for event in plain] and events[0].text


def test_a_slow_reader_gets_every_token_once(tiny):
    options = {"max_new_tokens": 60, "ignore_eos": True}
    base = tiny.generate(PROMPTS[1], **options)
    ids, text, counts = [], "", []
    for event in tiny.stream(PROMPTS[1], **options):
        ids += event.token_ids
        text += event.text
        counts.append((event.generated_tokens, len(ids)))
        time.sleep(0.03)
    assert (tuple(ids), text) == (base.token_ids, base.text)
    assert all(said == got for said, got in counts)


def test_max_new_tokens_and_a_stop_at_the_same_token(tiny):
    base = tiny.generate(PROMPTS[0], max_new_tokens=10, ignore_eos=True)
    index = next(n for n in range(4, 10) if base.token_ids[n] not in base.token_ids[:n])
    for limit in range(index, index + 4):
        options = {"ignore_eos": True, "stop_token_ids": [base.token_ids[index]]}
        answer = tiny.generate(PROMPTS[0], max_new_tokens=limit, **options)
        stopped = limit > index
        assert answer.summary.finish_reason is (FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH)
        assert len(answer.token_ids) == (index + 1 if stopped else limit)


def test_min_new_tokens_holds_back_every_stop(tiny):
    base = tiny.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True)
    stops = list(dict.fromkeys(base.token_ids[:5]))
    answer = tiny.generate(PROMPTS[1], max_new_tokens=40, min_new_tokens=20, stop_token_ids=stops)
    assert len(answer.token_ids) >= 20 and not set(answer.token_ids[:20]) & {*stops, 2}


def test_prompt_details_score_the_prompt_whole_in_chunks_and_in_company(tiny):
    for prompt in (PROMPTS[4], "a", PROMPTS[2]):
        options = {"max_new_tokens": 2, "logprobs": True, "top_n_tokens": 2, "prompt_details": True}
        answers = [tiny.generate(prompt, **options), *together(tiny, [(prompt, options)] * 3)]
        ids = tiny.tokenize(prompt).token_ids
        for answer in answers:
            assert tuple(token.id for token in answer.prompt) == ids
            assert answer.prompt[0].logprob is None and len(ids) == answer.summary.prompt_tokens
            for token, same in zip(answer.prompt[1:], answers[0].prompt[1:], strict=True):
                assert token.logprob == pytest.approx(same.logprob, abs=1e-4) and len(token.top) == 2
        bare = tiny.generate(prompt, max_new_tokens=1, prompt_details=True)
        assert tuple(token.id for token in bare.prompt) == ids and bare.prompt[-1].logprob is None


def test_truncate_keeps_the_last_tokens(tiny):
    text = "word " * 5000
    answer = tiny.generate(text, truncate=20, max_new_tokens=1, prompt_details=True)
    assert tuple(token.id for token in answer.prompt) == tiny.tokenize(text).token_ids[-20:]
    short = tiny.generate("a b c", truncate=400, max_new_tokens=3)
    assert short.token_ids == tiny.generate("a b c", max_new_tokens=3).token_ids


def test_the_total_limit_is_reached_exactly_and_not_passed(tiny):
    info = tiny.info()
    for room in range(1, 5):
        prompt = [n % 1000 + 300 for n in range(info.max_total_tokens - room)]
        answer = tiny.generate(prompt, max_new_tokens=room, ignore_eos=True)
        assert len(answer.token_ids) == room
        assert len(tiny.generate(prompt, ignore_eos=True).token_ids) == room  # the default is what is left
    with pytest.raises(SpecserveError, match="max_new_tokens") as error:
        tiny.generate([5] * 500, max_new_tokens=13)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_special_text_in_a_prompt_is_parsed_and_ends_nothing(tiny):
    ids = tiny.tokenize("a<|im_end|>b").token_ids
    assert 2 in ids
    answer = tiny.generate("a<|im_end|>b", max_new_tokens=5, ignore_eos=True, stop=["a<"])
    assert len(answer.token_ids) == 5 and answer.summary.prompt_tokens == len(ids)
    assert len(tiny.generate("<|im_start|><|im_end|>", max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"top_n_tokens": 10**6}, "response.top_n_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 10_000] * 1000}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"truncate": 0}, "truncate"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "sampling.frequency_penalty"),
    ],
)
def test_bad_options_are_named(tiny, options, names):
    for call in (lambda: tiny.generate("x", **options), lambda: list(tiny.stream("x", **options))):
        with pytest.raises(SpecserveError, match=names) as error:
            call()
        assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(tiny.generate("x", max_new_tokens=1).token_ids) == 1


@pytest.mark.parametrize("top_k", [49152, 49153, 9_999_999, 2**31 - 1])
def test_top_k_beyond_the_vocabulary_is_off(tiny, top_k):
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    assert tiny.generate("x", top_k=top_k, **options).token_ids == tiny.generate("x", **options).token_ids


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-38}, {"temperature": 1e-8}, {"temperature": 1.0, "top_p": 1e-6}]
)
def test_tiny_temperature_and_top_p_are_greedy(tiny, options):
    greedy = tiny.generate("x y z", max_new_tokens=12)
    assert tiny.generate("x y z", max_new_tokens=12, seed=3, **options).token_ids == greedy.token_ids


def test_an_empty_prompt_is_refused(tiny):
    for prompt in ("", []):
        with pytest.raises((SpecserveError, ValueError), match=r"empty|at least"):
            tiny.generate(prompt)


def test_a_request_that_can_never_fit_the_cache_is_refused_at_once(start_server, tiny_model):
    flags = ("--model-id", str(tiny_model), "--hostname", "127.0.0.1", "--port", "0", "--num-threads", "1")
    server = start_server(*flags, "--kv-cache-memory", "64KiB", "--max-batch-size", "4")  # 256 tokens
    with Client(server.wait_ready(), timeout_s=30) as client:
        assert client.info().max_total_tokens == 256
        for prompt, new in ((300, 1), (100, 300)):
            with pytest.raises(SpecserveError) as error:
                client.generate([7] * prompt, max_new_tokens=new)
            assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(client.generate([7] * 200, max_new_tokens=56, ignore_eos=True).token_ids) == 56
