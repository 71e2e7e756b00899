"""Speculation from outside: whatever drafts, a request gets what it gets without."""

import json
from pathlib import Path

import grpc
import pytest
from mixed import CACHE, FIXED, LOCAL, PROMPTS, SMALL, answer_all, mixed_requests, outside, served

from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError

CASES = json.loads((Path(__file__).parent / "data" / "demo_greedy.json").read_text())
DEMO = {"vocab": 49152, "size": 576}
TINY = {"vocab": 49152, "size": 32}


@pytest.fixture(scope="module")
def demo_speculators(tmp_path_factory, speculators):
    folder = tmp_path_factory.mktemp("speculators")
    texts = [case["tokens"] for case in CASES]
    return {
        "bigram": speculators.write_bigram_mlp(folder / "bigram", texts, **DEMO, n=4),
        "random": speculators.write_random_mlp(folder / "random", **DEMO, n=2),
        "repeating": speculators.write_repeating_medusa(folder / "repeating", size=DEMO["size"], heads=3),
    }


def test_40_mixed_requests_of_the_demo_model_are_identical(demo, start_server, demo_speculators):
    """With none, mlp and medusa, several draft lengths, alone and many at once."""
    prompts = [case["prompt"] for case in CASES[:14]]
    jobs = mixed_requests(prompts, 40, 28)
    plain = [outside(answer) for answer in answer_all(demo, jobs, 8)]
    assert [outside(answer) for answer in answer_all(demo, jobs[:6], 1)] == plain[:6]
    runs = [
        ("mlp", "bigram", "4", "fixed"),
        ("mlp", "random", "2", "adaptive"),
        ("medusa", "repeating", "3", "fixed"),
    ]
    for kind, name, num_tokens, rule in runs:
        flags = ("--speculator", kind, "--speculator-id", str(demo_speculators[name]))
        server = start_server(
            "--model-id", "demo", *flags, "--num-speculative-tokens", num_tokens, "--draft-length", rule, *LOCAL
        )
        with served(server) as client:
            answers = answer_all(client, jobs, 12)
            for job, answer, expected in zip(jobs, answers, plain, strict=True):
                assert outside(answer) == expected, (kind, name, num_tokens, job)
            info = client.info().speculator
            assert (info.type, info.num_speculative_tokens) == (kind, int(num_tokens))
            assert info.drafted_tokens == sum(answer.summary.drafted_tokens for answer in answers) > 0
            assert info.accepted_tokens == sum(info.accepted_per_position)
            if name == "bigram":
                assert info.mean_acceptance_length > 1.15
                assert max(len(e.token_ids) for e in client.stream(prompts[0], max_new_tokens=60)) > 1


@pytest.mark.parametrize(("kind", "least"), [("mlp", 1.25), ("medusa", 1.15)])
def test_the_demo_model_has_speculators_of_its_own(kind, least, demo, start_server):
    """They are found without an id, change nothing, and are right often enough to be worth it."""
    prompts = [[{"role": "user", "content": f"What is {thing}?"}] for thing in ("a volcano", "jazz", "an atom", "tea")]
    jobs = [(prompt, {"max_new_tokens": 60, "seed": 1}) for prompt in prompts]
    plain = [outside(answer) for answer in answer_all(demo, jobs, 4)]
    server = start_server("--model-id", "demo", "--speculator", kind, "--draft-length", "fixed", *LOCAL)
    with served(server) as client:
        assert [outside(answer) for answer in answer_all(client, jobs, 1)] == plain
        assert client.info().speculator.mean_acceptance_length > least


@pytest.fixture(scope="module")
def tiny_speculators(tmp_path_factory, speculators, tiny_bigram, tiny_repeating):
    folder = tmp_path_factory.mktemp("tiny-speculators")
    return {
        "random": ("mlp", speculators.write_random_mlp(folder / "random", **TINY, n=5)),
        "broken": ("mlp", speculators.write_random_mlp(folder / "broken", **TINY, n=3, broken=True)),
        "eos": ("medusa", speculators.write_constant_medusa(folder / "eos", 2, size=TINY["size"], heads=4)),
        "bigram": ("mlp", tiny_bigram),
        "repeating": ("medusa", tiny_repeating),
    }


@pytest.fixture(scope="module")
def jobs_and_answers(plain_tiny_address):
    jobs = mixed_requests(PROMPTS, 60, 80)
    jobs += [(PROMPTS[0], {"max_new_tokens": n, "ignore_eos": True, "seed": 0}) for n in range(1, 8)]
    with Client(plain_tiny_address, timeout_s=120) as client:
        return jobs, [outside(answer) for answer in answer_all(client, jobs, 8)]


@pytest.mark.parametrize("name", ["random", "broken", "eos", "bigram", "repeating"])
def test_drafts_of_any_quality_under_preemption_change_nothing(
    name, jobs_and_answers, tiny_model, start_server, tiny_speculators, wait_until_idle
):
    """Little KV, so that requests are preempted; drafts never right, not a number, always the end, or mostly right."""
    jobs, plain = jobs_and_answers
    kind, path = tiny_speculators[name]
    flags = ("--speculator", kind, "--speculator-id", str(path), *FIXED)
    server = start_server("--model-id", str(tiny_model), *flags, *SMALL, *CACHE, *LOCAL)
    with served(server) as client:
        for every in (1, 3):  # the second time over blocks that others left
            answers = answer_all(client, jobs[::every], 16)
            for job, answer, expected in zip(jobs[::every], answers, plain[::every], strict=True):
                assert outside(answer) == expected, job
        info = client.info()
        assert info.speculator.drafted_tokens > 100
        if name == "eos":
            assert info.speculator.accepted_tokens < info.speculator.num_drafts / 10
        if name == "bigram":
            assert info.speculator.mean_acceptance_length > 1.2
        wait_until_idle(client)


def test_ids_beyond_the_tokenizer_are_no_error(make_tiny_model, speculators, start_server, tmp_path):
    """A vocabulary padded to 49,280 for a tokenizer of 49,152: random tokens, of the padding too."""
    sizes = {"vocab": 49280, "size": TINY["size"]}
    model = make_tiny_model(tmp_path / "model", vocab_size=sizes["vocab"])
    path = speculators.write_random_mlp(tmp_path / "mlp", **sizes, n=3)
    jobs = [
        (PROMPTS[n % 5], {"max_new_tokens": 40, "temperature": 2.0, "seed": n, "stop": ["zzz"], "top_n_tokens": 5})
        for n in range(40)
    ]
    answers = []
    for flags in ((), ("--speculator", "mlp", "--speculator-id", str(path), *FIXED)):
        with served(start_server("--model-id", str(model), *flags, *SMALL, *LOCAL)) as client:
            answers.append([outside(answer) for answer in answer_all(client, jobs, 8)])
    assert answers[0] == answers[1]
    assert any(token >= 49152 for ids, *_ in answers[0] for token in ids)


def test_drafts_that_are_never_right_are_given_up(tiny_model, start_server, tiny_speculators, plain_tiny):
    """Nearly nothing is drafted in the end, and the answers are those without."""
    kind, path = tiny_speculators["random"]
    flags = ("--speculator", kind, "--speculator-id", str(path))
    server = start_server("--model-id", str(tiny_model), *flags, *SMALL, *LOCAL)
    options = {"max_new_tokens": 400, "ignore_eos": True}
    with served(server) as client:
        answers = [client.generate(prompt, **options) for prompt in PROMPTS[:3]]
        assert [a.token_ids for a in answers] == [plain_tiny.generate(p, **options).token_ids for p in PROMPTS[:3]]
        assert answers[-1].summary.drafted_tokens < 60


def test_draft_length_is_capped_by_the_request(tiny_model, start_server, tiny_speculators):
    kind, path = tiny_speculators["random"]
    flags = ("--speculator", kind, "--speculator-id", str(path), *FIXED)
    server = start_server("--model-id", str(tiny_model), *flags, *SMALL, *LOCAL)
    options = {"max_new_tokens": 20, "ignore_eos": True}
    with served(server) as client:
        drafted = {}
        for cap in (None, 0, 1, 3, 50):
            given = options if cap is None else {**options, "max_draft_tokens": cap}
            answer = client.generate(PROMPTS[0], **given)
            drafted[cap] = answer.summary.drafted_tokens
            assert len(answer.token_ids) == 20
            assert answer.summary.num_drafts == (0 if cap == 0 else pytest.approx(18, abs=3))
        assert drafted[0] == 0 and drafted[1] < drafted[3] < drafted[None] == drafted[50]
        # The context limit, and the answer that fills it.
        full = client.generate([9] * 500, max_new_tokens=12, ignore_eos=True)
        assert full.summary.generated_tokens == 12
        with pytest.raises(SpecserveError) as error:
            client.generate([9] * 500, max_new_tokens=13)
        assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculator mlp" in server.output and "drafting 5 tokens" in server.output


def test_speculators_that_do_not_fit_are_one_line_before_the_port_opens(
    tiny_model, start_server, demo_speculators, tiny_speculators
):
    cases = [
        (("mlp", demo_speculators["random"]), (), "emb_dim is 576, but the hidden size"),
        (("medusa", demo_speculators["random"]), (), "medusa_num_heads is missing"),
        (("mlp", "/no/such/folder"), (), "--speculator-id '/no/such/folder': there is no such file or directory"),
        (tiny_speculators["random"], ("--num-speculative-tokens", "6"), "--num-speculative-tokens is 6, but"),
    ]
    servers = []
    for (kind, path), more, _ in cases:
        flags = ("--speculator", kind, "--speculator-id", str(path), *more)
        servers.append(start_server("--model-id", str(tiny_model), *flags, *SMALL, *LOCAL))
    for server, (_, _, message) in zip(servers, cases, strict=True):
        assert server.wait_exit() == 1
        assert message in server.output and "Traceback" not in server.output
        assert "listening on" not in server.output and "is ready" not in server.output
