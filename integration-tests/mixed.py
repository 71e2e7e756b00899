"""Requests of all kinds, what they got (the same with any speculator), and flags of the servers that answer them."""

import concurrent.futures
import contextlib
import random

from specserve.router_client.client import Client

# Long drains are tested where they matter; servers should end quickly.
LOCAL = ("--hostname", "127.0.0.1", "--port", "0", "--drain-timeout", "5")
FIXED = ("--draft-length", "fixed")
SMALL = ("--max-batch-size", "4", "--max-batch-tokens", "32", "--max-total-tokens", "512", "--num-threads", "1")
# Few row slots and little KV, so that requests queue and are preempted: 256 bytes a token, 1,536 tokens.
CACHE = ("--kv-cache-memory", "384KiB", "--block-size", "4")
PROMPTS = ["A robot may not injure a human being", "1\n2\n3\n4", "🤗 안녕 👩‍👩‍👧 naïve", "def f(x):\n    return", "a"]


def mixed_requests(prompts, count, max_new_tokens):
    """Greedy and sampled requests with every option that changes or ends an answer."""
    rng = random.Random(5)
    options = [
        {},
        {"ignore_eos": True},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "typical_p": 0.8},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 1.1, "presence_penalty": 0.4},
        {"temperature": 0.8, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        {"stop": ["\n", " the"]},
        {"stop": ["e"], "include_stop": False, "temperature": 1.0},
        {"min_new_tokens": 20},
        {"min_new_tokens": 10, "temperature": 1.5, "stop": [" a"]},
        {"stop_token_ids": [30, 28]},
        {"logprobs": True, "top_n_tokens": 3},
        {"temperature": 1.0, "logprobs": True, "top_n_tokens": 2, "repetition_penalty": 1.2},
    ]
    jobs = []
    for number in range(count):
        chosen = {"seed": number, "max_new_tokens": rng.choice([1, 2, 3, 5, max_new_tokens]), **options[number % 17]}
        if chosen["max_new_tokens"] < chosen.get("min_new_tokens", 0):
            chosen["max_new_tokens"] = max_new_tokens
        jobs.append((prompts[number % len(prompts)], chosen))
    return jobs


def answer_all(client, jobs, num_at_once):
    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(lambda job: client.generate(job[0], **job[1]), jobs))


def outside(answer):
    """What a request got, without times and counts of drafts."""
    summary = answer.summary
    counts = (summary.prompt_tokens, summary.generated_tokens, summary.finish_reason, summary.seed)
    ends = (summary.stop_string, summary.stop_token_id)
    details = [(t.id, t.rank, t.logprob, [(o.id, o.logprob) for o in t.top]) for t in answer.details]
    return answer.token_ids, answer.text, counts, ends, details


@contextlib.contextmanager
def served(server):
    with Client(server.wait_ready(), timeout_s=120) as client:
        yield client
    server.end()
