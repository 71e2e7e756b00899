"""The load generator: its arithmetic on given moments, and its loops against a scripted server."""

import asyncio
import math
import statistics
import time

import grpc
import pytest

from specserve.router_client import load
from specserve.router_client.aio_client import AioClient
from specserve.router_client.bench import (
    RequestRecord,
    percentile,
    poisson_arrivals,
    read_prompts,
    report,
    synthetic_prompts,
)
from specserve.router_client.bench_run import BenchSettings, run_bench
from specserve.router_client.errors import SpecserveError
from specserve.router_client.messages import info_from
from specserve.router_client.types import FinishReason, Summary


def summary(generated: int, drafted: int = 0, accepted: int = 0) -> Summary:
    return Summary(FinishReason.LENGTH, 10, generated, 1, drafted_tokens=drafted, accepted_tokens=accepted)


def test_percentile_is_linear_between_neighbours():
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == pytest.approx([10, 25, 37, 40])
    assert percentile(list(range(101)), 99) == 99
    assert percentile([7.5], 90) == 7.5
    assert percentile([], 50) is None
    inclusive = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, p) for p in range(1, 100)] == pytest.approx(inclusive)
    with pytest.raises(ValueError, match="101"):
        percentile(values, 101)


def test_poisson_arrivals():
    arrivals = poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=1) != poisson_arrivals(4.0, 4000, seed=2)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.1)  # exponential: as wide as its mean
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="rate"):
            poisson_arrivals(rate, 3, seed=1)


def test_tokens_of_an_event_share_its_time():
    record = RequestRecord(10.0, [(10.5, 3), (10.9, 4), (11.0, 1)], 11.2, summary(8))
    assert record.time_to_first_token == pytest.approx(0.5)
    assert record.times_between_tokens() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    assert [tokens for _, tokens in record.times_between_events()] == [4, 1]
    assert record.latency == pytest.approx(1.2)
    assert RequestRecord(1.0).time_to_first_token is None and RequestRecord(1.0).times_between_tokens() == []


def test_report():
    records = [
        RequestRecord(100.0, [(100.2, 1), (100.4, 1)], 100.5, summary(2, drafted=6, accepted=2)),
        RequestRecord(101.0, [(101.6, 2), (102.6, 2)], 103.0, summary(4, drafted=4, accepted=3)),
        RequestRecord(101.0, [(101.1, 1)], 104.0, None, "UNAVAILABLE"),
        RequestRecord(99.0, [], 99.5, None, "RESOURCE_EXHAUSTED"),
        RequestRecord(101.0, [], 101.5, None, "UNAVAILABLE"),
    ]
    result = report(records)
    assert (result["requests"], result["completed"]) == (5, 2)
    assert result["errors"] == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 2}
    assert result["finish_reasons"] == {"length": 2}
    assert result["duration_seconds"] == pytest.approx(5.0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (20, 6)
    assert result["output_tokens_per_second"] == pytest.approx(1.2)
    assert result["requests_per_second"] == pytest.approx(0.4)
    assert result["time_to_first_token_seconds"] == pytest.approx({"mean": 0.4, "p50": 0.4, "p90": 0.56, "p99": 0.596})
    assert result["time_between_tokens_seconds"]["mean"] == pytest.approx((0.2 + 0.5 + 0.5) / 3)
    assert result["time_between_events_seconds"]["mean"] == pytest.approx((0.2 + 1.0) / 2)
    assert result["latency_seconds"]["p50"] == pytest.approx((0.5 + 2.0) / 2)
    assert (result["drafted_tokens"], result["accepted_tokens"]) == (10, 5)
    assert result["acceptance_rate"] == pytest.approx(0.5)


def test_report_of_nothing_has_no_numbers():
    result = report([RequestRecord(1.0, [], 1.0, None, "INTERNAL")])
    assert result["acceptance_rate"] is None and result["output_tokens_per_second"] is None
    assert result["latency_seconds"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert report([])["requests"] == 0


@pytest.fixture
def info(fake_server):
    return info_from(fake_server().info)  # 1000 ids, EOS 2 and 7, 512 input tokens


def test_synthetic_prompts(info):
    prompts = synthetic_prompts(info, 5, 998, seed=3)
    assert prompts == synthetic_prompts(info, 5, 998, seed=3) != synthetic_prompts(info, 5, 998, seed=4)
    assert {len(prompt) for prompt in prompts} == {5}
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(1000)) - {2, 7}
    assert len({prompt[0] for prompt in prompts}) == 998
    assert len(synthetic_prompts(info, 1, 2000, seed=3)) == 2000
    for input_tokens in (0, 513):
        with pytest.raises(ValueError, match=f"input_tokens is {input_tokens}"):
            synthetic_prompts(info, input_tokens, 1, seed=3)


def test_prompts_of_text_files(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes('first "line"\r\n\n  ²³ ½ \x85 \u2028 one line\nlast'.encode())
    assert read_prompts(path) == ['first "line"', "  ²³ ½ \x85 \u2028 one line", "last"]


def test_prompts_of_json_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = '{"chat": [{"role": "user", "content": "é"}]}'
    path.write_text(f'{{"text": "a\\nb"}}\n\n{{"token_ids": [1, 2]}}\n{chat}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\nb", [1, 2], [{"role": "user", "content": "é"}]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "line 2: not JSON"),
        ('"text"', "line 2: must be an object"),
        ('{"text": 5}', "line 2: must be an object"),
        ('{"text": "x", "chat": []}', "line 2: must be an object"),
        ('{"prompt": "x"}', "line 2: must be an object"),
    ],
)
def test_bad_prompt_lines(tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=reason):
        read_prompts(path)


def test_bad_prompt_files(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    for name, reason in (("empty.txt", "no prompts"), ("latin.txt", "decode"), ("none.txt", "No such file")):
        with pytest.raises(ValueError, match=reason):
            read_prompts(tmp_path / name)


# The loops


async def test_closed_loop_keeps_the_concurrency(monkeypatch):
    running, most = 0, 0

    async def run_request(client, request, *, due_at=None):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return RequestRecord(request[0])

    monkeypatch.setattr(load, "run_request", run_request)
    done = []
    records = await load.closed_loop(None, [(i, {}) for i in range(20)], 3, done.append)
    assert [record.started_at for record in records] == list(range(20))
    assert most == 3 and len(done) == 20


async def test_open_loop_sends_when_due_whatever_still_runs(monkeypatch):
    release = asyncio.Event()
    due: list[float] = []

    async def run_request(client, request, *, due_at=None):
        due.append(due_at)
        if len(due) == 5:
            release.set()
        await release.wait()
        return RequestRecord(due_at)

    monkeypatch.setattr(load, "run_request", run_request)
    arrivals = [0.0, 0.01, 0.02, 0.03, 0.05]
    records = await asyncio.wait_for(load.open_loop(None, [("x", {})] * 5, arrivals), 10)
    starts = [record.started_at - records[0].started_at for record in records]
    assert starts == pytest.approx(arrivals)


async def test_a_late_start_counts_from_when_it_was_due(fake_server):
    async with AioClient(fake_server().target) as client:
        now = time.perf_counter()
        record = await load.run_request(client, ("x", {}), due_at=now - 7.0)
    assert record.started_at == now - 7.0
    assert 7.0 < record.time_to_first_token <= record.latency


async def test_a_record_of_a_stream(fake_server):
    server = fake_server()
    server.events[1].ClearField("token_ids")  # an event that only brings held-back text
    async with AioClient(server.target) as client:
        record = await load.run_request(client, ("x", {"max_new_tokens": 8}))
    assert [tokens for _, tokens in record.token_events] == [2, 2, 2]
    assert record.summary is not None and record.error is None
    moments = [record.started_at, *(moment for moment, _ in record.token_events), record.ended_at]
    assert moments == sorted(moments)


async def test_run_bench(fake_server):
    server = fake_server()
    settings = BenchSettings(concurrency=2, num_requests=5, warmup=2, input_tokens=3, seed=40)
    seen = []
    result = await run_bench(settings, {"max_new_tokens": 8}, targets=[server.target], progress=seen.append)
    assert (result["requests"], result["completed"], result["output_tokens"], len(seen)) == (5, 5, 40, 5)
    assert (result["drafted_tokens"], result["acceptance_rate"]) == (40, 0.75)
    assert result["server"]["model_id"] == "fake" and result["settings"]["concurrency"] == 2
    requests = [request for request in server.requests if hasattr(request, "sampling")]
    assert {len(request.token_ids.ids) for request in requests} == {3}
    assert len({request.token_ids.ids[0] for request in requests}) == 7
    assert {request.sampling.seed for request in requests} == set(range(40, 47))
    assert {request.stopping.max_new_tokens for request in requests} == {8}


async def test_run_bench_counts_refusals_and_retries_nothing(fake_server, tmp_path):
    server = fake_server()
    async with AioClient(server.target) as client:
        await client.wait_until_ready(10)
    path = tmp_path / "two.txt"
    path.write_text("one\ntwo")
    settings = BenchSettings(rate=1000.0, num_requests=4, warmup=0, prompt_file=path)
    server.failure = (0, grpc.StatusCode.RESOURCE_EXHAUSTED)
    result = await run_bench(settings, {}, targets=[server.target])
    assert (result["completed"], result["errors"]) == (0, {"RESOURCE_EXHAUSTED": 4})
    server.failure = (1, grpc.StatusCode.UNAVAILABLE)
    result = await run_bench(settings, {}, targets=[server.target])
    assert result["errors"] == {"UNAVAILABLE": 4} and result["output_tokens"] == 0
    server.failure = (4, grpc.StatusCode.INTERNAL)  # after the summary
    result = await run_bench(settings, {}, targets=[server.target])
    assert (result["completed"], result["errors"]) == (0, {"INTERNAL": 4})
    texts = [request.text for request in server.requests if hasattr(request, "text")]
    assert sorted(texts) == ["one"] * 6 + ["two"] * 6
    server.num_unavailable = 1
    with pytest.raises(SpecserveError, match="not now"):
        await run_bench(settings, {}, targets=[server.target])


async def test_a_prompt_that_cannot_be_sent_ends_the_run(fake_server, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"token_ids": [-1]}\n{"text": "fine"}')
    settings = BenchSettings(rate=1000.0, num_requests=4, warmup=0, prompt_file=path)
    with pytest.raises(ValueError, match=r"prompt\[0\] is -1"):
        await run_bench(settings, {}, targets=[fake_server().target])


@pytest.mark.parametrize("fields", [{"concurrency": 2, "rate": 1.0}, {"prompt_file": "x", "input_tokens": 3}])
def test_settings_that_exclude_each_other(fields):
    with pytest.raises(ValueError, match="exclude each other"):
        BenchSettings(**fields)
