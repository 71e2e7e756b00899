"""Answers of models by several ranks: `torchrun … sharded_worker.py CASES OUTPUT`; also called with one rank."""

import json
import sys
from pathlib import Path

from specserve.models.sampling.params import SamplingParams
from specserve.models.shared_memory import SharedMemory
from specserve.server.config import (
    CacheOptions,
    DraftLengthRule,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerConfig,
    SpeculatorDType,
    SpeculatorOptions,
    Verification,
)
from specserve.server.engine.sequence import FinishReason, Request, TextPiece
from specserve.server.launch import build, build_runner
from specserve.server.place import rank_place
from specserve.server.process import leave
from specserve.server.worker.executor import follow
from specserve.server.worker.ranks import Ranks
from specserve.speculators.base import SpeculatorType, UsdMethod

LENGTH = 12
OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.8},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.1, "presence_penalty": 0.4},
    {"temperature": 0.8, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
    {"min_new_tokens": 8, "suppressed_ids": (2, 7, 9)},
    {"logprobs": True, "top_n_tokens": 3},
    {"temperature": 1.0, "logprobs": True, "repetition_penalty": 1.2},
    {"prompt_logprobs": True},
    {"temperature": 1.5, "is_seeded": False},
]


class Stream:
    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def push(self, token_id: int) -> TextPiece:
        self.token_ids.append(token_id)
        return TextPiece("", "", FinishReason.LENGTH if len(self.token_ids) == LENGTH else None)


def configure(case: dict) -> ServerConfig:
    speculator = SpeculatorOptions(
        type=SpeculatorType(case.get("kind", "none")),
        id=case.get("id"),
        draft_length=DraftLengthRule.FIXED,
        dtype=SpeculatorDType.FLOAT32 if case.get("kind") == "usd" else SpeculatorDType.AUTO,
        usd_method=UsdMethod(case.get("method", "auto")),
        num_shard=case.get("shards"),
        verification=Verification.REJECTION if case.get("rejects") else Verification.MATCH,
    )
    return ServerConfig(
        ModelOptions(case["model"]),
        # Few row slots and little KV, so that requests queue, share prefixes and are preempted.
        cache=CacheOptions(kv_cache_memory=case["kv_bytes"], block_size=4),
        scheduler=SchedulerOptions(max_batch_size=5, max_batch_tokens=24, max_total_tokens=48),
        speculator=speculator,
        parallel=ParallelOptions(1, 1),
    )


def answers(case: dict, ranks: Ranks) -> dict:
    """What rank 0 gets for requests of all kinds, and how it got there."""
    serving = build(configure(case), ranks=ranks)
    engine = serving.engine.engine
    streams = []
    for number in range(2 * len(OPTIONS)):
        sampling = SamplingParams(**{"seed": 2**63 + number, **OPTIONS[number % len(OPTIONS)]})
        prompt = [1, *((7 * number + 11 * place * place) % 300 for place in range(3 + number % 17))]
        streams.append(Stream())
        engine.add(Request(prompt, sampling, streams[-1], LENGTH, prompt_details=sampling.prompt_logprobs))
    scores: dict[int, list] = {}
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens = [*(event.prompt or ()), *event.tokens]
            scores.setdefault(event.request_id, []).extend(
                [t.token_id, t.rank, round(t.logprob, 3), [token_id for token_id, _ in t.top]]
                for t in tokens
                if t.logprob is not None
            )
    stats = engine.stats()
    return {
        "tokens": [stream.token_ids for stream in streams],
        "scores": {str(key): value for key, value in sorted(scores.items())},
        "preemptions": stats.num_preemptions,
        "accepted": stats.num_accepted_tokens,
        "bytes": ranks.parallel.link.num_bytes,
        "messages": ranks.parallel.link.num_messages,
        "shares": ranks.parallel.shared is not None,
    }


def main() -> None:
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if "--no-shared-memory" in sys.argv:
        SharedMemory.join = classmethod(lambda *_: None)
    place = rank_place()
    assert place is not None
    ranks = Ranks.connect(place, 60.0)
    results = []
    for case in cases:
        if place.rank == 0:
            results.append(answers(case, ranks))
            ranks.parallel.link.share(())
        else:
            follow(build_runner(configure(case), ranks).runner, ranks.parallel.link, ranks.monitor)
    if place.rank == 0:
        output.write_text(json.dumps(results))
        ranks.end("")
    leave(0)


if __name__ == "__main__":
    main()
