"""Drafts by script through a real server: every accept length, and every place where an answer can end in a draft."""

import asyncio
import concurrent.futures
import itertools
import shutil
import threading

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from specserve.router_client.client import Client
from specserve.server import launch
from specserve.server.config import (
    DraftLengthRule,
    ListenOptions,
    ModelOptions,
    SchedulerOptions,
    ServerConfig,
    SpeculatorOptions,
)
from specserve.server.grpc_server import GrpcServer
from specserve.speculators.base import Draft, NoSpeculator, Speculator

K = 4
PROMPTS = ["A robot may not injure", "1\n2\n3\n4", "🤗 안녕 👩‍👩‍👧 naïve", "def f(x):\n    return", "a", "The end"]
LENGTH = 40
LONG = {"max_new_tokens": LENGTH, "ignore_eos": True}
MAX_TOTAL_TOKENS = 96


class Scripted(Speculator):
    """Drafts a known answer: right in as many places as the script says, wrong in the one after."""

    num_parameters = 0

    def __init__(self, max_draft_tokens=K):
        self.max_draft_tokens = max_draft_tokens

    def play(self, answers, accepts):
        """Answers of the requests to come, told apart by their first token; right places of each step, in a cycle."""
        self.pending = {answer[0]: list(answer) for answer in answers}
        assert len(self.pending) == len(answers)
        self.accepts = accepts
        self.rows = {}  # slot -> (answer, place of the next last token, script)

    def propose(self, rows):
        rows.check()
        drafted = []
        for slot, last, longest in zip(rows.row_slots, rows.token_ids.tolist(), rows.max_lengths, strict=True):
            answer, place, script = self.rows.get(slot, ((), 0, ()))
            if place >= len(answer) or answer[place] != last:  # a new request: its first token says which
                over = ([last], 0, itertools.cycle([0]))  # or one that has just had its last token
                begun = last in self.pending
                answer, place, script = (self.pending.pop(last), 0, itertools.cycle(self.accepts)) if begun else over
            coming = answer[place + 1 : place + 1 + longest] + [0] * max(0, place + 1 + longest - len(answer))
            right = min(next(script), longest)
            drafted.append([t if i < right else (t + 1) % 1000 for i, t in enumerate(coming)])
            drafted[-1] += [0] * (self.max_draft_tokens - longest)
            self.rows[slot] = (answer, place + right + 1, script)
        return Draft(torch.tensor(drafted), list(rows.max_lengths))


def expected_steps(count, accepts):
    """(drafted, accepted) of each step after the first token of an answer of `count` tokens."""
    steps, emitted, script = [], 1, itertools.cycle(accepts)
    while emitted < count:
        drafted = min(K, count - emitted - 1)
        accepted = min(next(script), drafted) if drafted else 0
        steps.append((drafted, accepted))
        emitted += accepted + 1
    return steps


class InProcess:
    """The real server with a speculator of ours, in a thread."""

    def __init__(self, model, speculator):
        self.speculator = speculator
        options = SchedulerOptions(max_batch_size=8, max_total_tokens=MAX_TOTAL_TOKENS)
        self.config = ServerConfig(
            ModelOptions(str(model)),
            scheduler=options,
            speculator=SpeculatorOptions(draft_length=DraftLengthRule.FIXED),
            server=ListenOptions("127.0.0.1", 0),
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = GrpcServer(self.config)

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def __enter__(self):
        serving = launch.build(self.config, self.speculator)

        async def start():
            await self.server.start()
            await serving.engine.start()
            await self.server.open(serving)

        async def stop():
            await self.server.begin_shutdown()
            await serving.engine.drain(5)
            await serving.engine.stop()
            await self.server.stop()

        self._call(start())
        self.stop = stop
        self.client = Client(self.server.address, timeout_s=60)
        return self

    def __exit__(self, *error):
        self.client.close()
        self._call(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


@pytest.fixture(scope="module")
def plain(tiny_model):
    with InProcess(tiny_model, NoSpeculator()) as server:
        yield server.client


@pytest.fixture(scope="module")
def scripted(tiny_model):
    with InProcess(tiny_model, Scripted()) as server:
        yield server


@pytest.fixture(scope="module")
def answers(plain):
    """Prompt -> its plain answer of LENGTH tokens."""
    return {prompt: plain.generate(prompt, **LONG) for prompt in PROMPTS}


def ended(answer):
    s = answer.summary
    return answer.token_ids, answer.text, s.finish_reason, s.generated_tokens, s.stop_string, s.stop_token_id


def details(answer):
    return [(t.id, t.logprob, t.rank, [(o.id, o.logprob) for o in t.top]) for t in answer.details]


@pytest.mark.parametrize("accepts", [[0], [1], [2], [3], [K], [0, 1, 2, 3, K], [K, 0], [3, K, 0, 0, 2]])
def test_each_accept_length_gives_the_plain_answer_and_is_counted_exactly(scripted, plain, answers, accepts):
    """[K] is a draft by the target itself: every draft of every step is accepted."""
    options = {**LONG, "logprobs": True, "top_n_tokens": 2}
    for prompt, answer in answers.items():
        scripted.speculator.play([answer.token_ids], accepts)
        events = list(scripted.client.stream(prompt, **options))
        scripted.speculator.play([answer.token_ids], accepts)
        unary = scripted.client.generate(prompt, **options)
        assert details(unary) == details(plain.generate(prompt, **options))
        assert tuple(t for event in events for t in event.token_ids) == unary.token_ids == answer.token_ids
        assert "".join(event.text for event in events) == unary.text == answer.text
        steps = expected_steps(LENGTH, accepts)
        assert [len(event.token_ids) for event in events] == [1, *(accepted + 1 for _, accepted in steps)]
        for summary in (unary.summary, events[-1].summary):
            assert summary.num_drafts == sum(drafted > 0 for drafted, _ in steps)
            assert summary.drafted_tokens == sum(drafted for drafted, _ in steps)
            assert summary.accepted_tokens == sum(accepted for _, accepted in steps)
            places = [sum(accepted > place for _, accepted in steps) for place in range(K)]
            assert [*summary.accepted_per_position, 0, 0, 0, 0][:K] == places
            assert summary.mean_acceptance_length == pytest.approx(1 + sum(places) / summary.num_drafts)


@pytest.mark.parametrize("accepts", [[K], [1, 3]])
def test_an_answer_ends_at_any_place_of_a_draft(scripted, plain, answers, accepts):
    """Each token of an answer in turn is a stop, by id or by its text, with limits around it."""
    prompt = PROMPTS[0]
    answer = answers[prompt]
    pieces = [token.text for token in plain.generate(prompt, **LONG, logprobs=True).details]
    reasons = set()
    for place in range(2 * K + 2):
        token, piece = answer.token_ids[place], pieces[place]
        for limit in sorted({max(1, place), place + 1, place + K + 2}):
            ends = [{"stop_token_ids": [token]}, {"stop_token_ids": [token], "min_new_tokens": min(place, limit)}]
            if piece.strip() and "\ufffd" not in piece:
                ends += [{"stop": [piece]}, {"stop": [piece[-1:] + "\x00", piece], "include_stop": False}]
                ends += [{"stop": [pieces[place - 1][-1:] + piece[:1]]}] if place else []
            for end in ends:
                options = {"max_new_tokens": limit, "seed": 3, "logprobs": True, **end}
                expected = plain.generate(prompt, **options)
                scripted.speculator.play([answer.token_ids], accepts)
                # The script knows the answer without stops; where min_new_tokens leads elsewhere it is soon wrong.
                if expected.token_ids != answer.token_ids[: len(expected.token_ids)]:
                    scripted.speculator.play([expected.token_ids], accepts)
                got = scripted.client.generate(prompt, **options)
                assert (ended(got), details(got)) == (ended(expected), details(expected)), (options, place)
                assert len(got.details) == got.summary.generated_tokens
                reasons.add(expected.summary.finish_reason)
    assert len(reasons) == 3  # length, stop string, stop token


@pytest.mark.parametrize("accepts", [[0], [K], [0, 1, 2, 3, K]])
def test_limits_cut_drafts(scripted, plain, answers, accepts):
    """max_new_tokens from 1 on, and the context limit from each distance."""
    prompt, answer = PROMPTS[1], answers[PROMPTS[1]]
    for count in range(1, 2 * K + 4):
        scripted.speculator.play([answer.token_ids], accepts)
        got = scripted.client.generate(prompt, max_new_tokens=count, ignore_eos=True)
        assert got.token_ids == answer.token_ids[:count]
        assert got.summary.generated_tokens == count
        assert got.summary.accepted_tokens == sum(accepted for _, accepted in expected_steps(count, accepts))
        for cap in range(K + 1):
            scripted.speculator.play([answer.token_ids], accepts)
            got = scripted.client.generate(prompt, max_new_tokens=count, ignore_eos=True, max_draft_tokens=cap)
            assert got.token_ids == answer.token_ids[:count] and got.summary.drafted_tokens <= cap * (count - 1)
        ids = [5 + i % 7 for i in range(MAX_TOTAL_TOKENS - count)]
        expected = plain.generate(ids, ignore_eos=True, max_new_tokens=count)
        scripted.speculator.play([expected.token_ids], accepts)
        assert ended(scripted.client.generate(ids, ignore_eos=True, max_new_tokens=count)) == ended(expected)


PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 1.4, "top_k": 12},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 1.1, "typical_p": 0.7},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"presence_penalty": -2.0, "temperature": 0.5},
    {"min_new_tokens": 12, "ignore_eos": False},
    {"temperature": 0.6, "repetition_penalty": 0.7, "frequency_penalty": -0.7, "top_k": 40, "top_p": 0.95},
]


@pytest.mark.parametrize("accepts", [[0], [1], [K], [2, 0, K, 1]])
def test_every_option_at_every_accept_length(scripted, plain, accepts):
    """Where drafts are right, later places see the drafts before them: their counts, masks and noise."""
    for number, changes in enumerate(SAMPLED):
        options = {**LONG, "max_new_tokens": 20, "logprobs": True, "top_n_tokens": 3, "seed": number, **changes}
        has_effect = not PENALTIES & changes.keys()
        for prompt in PROMPTS[:3]:
            expected = plain.generate(prompt, **options)
            without = plain.generate(prompt, **{**options, **dict.fromkeys(PENALTIES & changes.keys())})
            has_effect |= expected.text != without.text
            scripted.speculator.play([expected.token_ids], accepts)
            got = scripted.client.generate(prompt, **options)
            assert (ended(got), details(got)) == (ended(expected), details(expected)), (changes, prompt)
        assert has_effect, changes


def test_rows_with_different_accept_lengths_in_one_batch(scripted, plain, answers):
    """All prompts at once, each with other options, three times over."""
    jobs = [(prompt, {**LONG, "seed": n, **SAMPLED[n]}) for n, prompt in enumerate(PROMPTS)]
    expected = [plain.generate(prompt, **options) for prompt, options in jobs]
    firsts = [answer.token_ids[0] for answer in expected]
    chosen = [i for i, first in enumerate(firsts) if first not in firsts[:i]]
    assert len(chosen) >= 4
    for accepts in ([3, 0, 1, K, 2], [K], [0, K, K]):
        scripted.speculator.play([expected[i].token_ids for i in chosen], accepts)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda i: scripted.client.generate(jobs[i][0], **jobs[i][1]), chosen))
        assert [ended(answer) for answer in got] == [ended(expected[i]) for i in chosen]


def test_seeds_differ_and_repeat(scripted, plain):
    """A robot, ten seeds: several answers, each the same with right drafts, with wrong ones and without."""
    texts = set()
    for seed in range(10):
        options = {"max_new_tokens": 10, "temperature": 2.0, "seed": seed, "ignore_eos": True}
        expected = plain.generate(PROMPTS[0], **options)
        for accepts in ([K], [0], [K]):
            scripted.speculator.play([expected.token_ids], accepts)
            assert ended(scripted.client.generate(PROMPTS[0], **options)) == ended(expected)
        texts.add(expected.text)
    assert len(texts) >= 9


@pytest.mark.parametrize("k", [1, 8, 48])
def test_penalties_under_drafts_of_any_length(k, plain, tiny_model):
    """Rejected drafts leave no trace in the counts, accepted ones leave theirs once."""
    # The tiny model hardly repeats itself, so these make it.
    penalties = [{}, {"presence_penalty": -2.0}, {"frequency_penalty": -1.0}, {"repetition_penalty": 0.7}]
    with InProcess(tiny_model, Scripted(k)) as server:
        texts = set()
        for penalty in penalties:
            options = {**LONG, **penalty}
            expected = plain.generate(PROMPTS[1], **options)
            texts.add(expected.text)
            for accepts in ([0], [k], [0, 1, k, k // 2]):
                server.speculator.play([expected.token_ids], accepts)
                got = server.client.generate(PROMPTS[1], **options)
                assert ended(got) == ended(expected), (penalty, accepts)
                assert got.summary.accepted_tokens == 0 or accepts != [0]
        assert len(texts) == len(penalties)


def test_a_row_at_the_context_limit_beside_others(scripted, plain, answers):
    """It drafts less and less, then nothing, while the others go on."""
    ids = [5 + i % 7 for i in range(MAX_TOTAL_TOKENS - 12)]
    jobs = [(ids, {"ignore_eos": True, "max_new_tokens": 12}), *((prompt, LONG) for prompt in PROMPTS[:3])]
    expected = [plain.generate(prompt, **options) for prompt, options in jobs]
    assert len({answer.token_ids[0] for answer in expected}) == len(jobs)
    for accepts in ([K], [0, 2]):
        scripted.speculator.play([answer.token_ids for answer in expected], accepts)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda job: scripted.client.generate(job[0], **job[1]), jobs))
        assert [ended(answer) for answer in got] == [ended(answer) for answer in expected]


def test_drafts_within_and_past_a_sliding_window(tiny_model, tmp_path):
    """Rejected drafts write keys that the window of later tokens must not show."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, tmp_path / name)
    torch.manual_seed(4)
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.4,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with InProcess(tmp_path, NoSpeculator()) as server:
        prompts = ["a", "A robot may not injure a human being, or let one come to harm: what does that mean to us?"]
        expected = [server.client.generate(prompt, **LONG) for prompt in prompts]
    with InProcess(tmp_path, Scripted()) as server:
        for accepts in ([0], [K], [1, K, 0, 2]):
            for prompt, answer in zip(prompts, expected, strict=True):
                assert len(set(answer.token_ids)) > 5
                server.speculator.play([answer.token_ids], accepts)
                got = server.client.generate(prompt, **LONG)
                assert ended(got) == ended(answer), accepts
                steps = expected_steps(LENGTH, accepts)
                assert got.summary.accepted_tokens == sum(accepted for _, accepted in steps)
