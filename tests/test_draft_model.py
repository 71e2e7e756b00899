"""A draft model's rows: whatever happens to them, their logits are those of the whole text computed anew."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.speculators.base import ProposalInput, RowsRoom
from specserve.speculators.draft_model import DraftModel, FollowingDraftModel, Share, decode, encode

VOCAB = 61


@pytest.fixture(scope="module")
def model_and_oracle(model_helpers, tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    oracle = LlamaForCausalLM(config).eval()
    oracle.save_pretrained(path)
    return model_helpers.load(path), oracle


def make(model, *, num_blocks=200, block_size=4, max_rows=4, max_total_tokens=64, max_batch_tokens=512):
    draft = DraftModel(model, [model.head])
    draft.allocate(RowsRoom(num_blocks, block_size, max_rows, max_total_tokens, max_batch_tokens))
    return draft


@torch.inference_mode()
def assert_logits(oracle, logits_of_heads, rows):
    (logits,) = logits_of_heads.values()
    assert len(logits) == len(rows)
    for got, token_ids in zip(logits, rows, strict=True):
        torch.testing.assert_close(got, oracle(torch.tensor([token_ids])).logits[0, -1], atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_rows_grow_shrink_change_and_leave(model_and_oracle):
    """Random rows of random states, with prefixes in common, some in each step: always the oracle's logits."""
    model, oracle = model_and_oracle
    draft, rng = make(model), random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(13)]
    texts = {}
    for _ in range(120):
        slot = rng.randrange(4)
        if rng.random() < 0.15 and slot in texts:
            draft.release(slot)
            del texts[slot]
        for slot in range(4):
            if slot not in texts:
                texts[slot] = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
            elif rng.random() < 0.7:
                texts[slot] = texts[slot][: len(texts[slot]) - rng.randrange(4)]
                texts[slot] += [rng.randrange(VOCAB) for _ in range(rng.randrange(5))]
            if len(texts[slot]) > 50:
                texts[slot] = [*shared, 0]
                draft.release(slot)
        some = sorted(rng.sample(range(4), rng.randrange(1, 5)))
        for slot in some:
            draft.continue_as(slot, texts[slot])
        ready, logits = draft.catch_up(some, [3] * len(some), [max(0, len(texts[slot]) - 5) for slot in some])
        assert ready == list(range(len(some)))
        rows = [list(texts[slot]) for slot in some]
        assert_logits(oracle, logits, rows)
        for _ in range(rng.randrange(4)):
            drafted = [rng.randrange(VOCAB) for _ in some]
            rows = [[*row, token] for row, token in zip(rows, drafted, strict=True)]
            assert_logits(oracle, draft.append(some, drafted), rows)
            for slot in some:  # as if some drafts were right
                if rng.random() < 0.5 and len(texts[slot]) < len(rows[some.index(slot)]):
                    texts[slot] = rows[some.index(slot)][: len(texts[slot]) + 1]
        draft.check_integrity()


@torch.inference_mode()
def test_a_known_beginning_is_not_computed_again(model_and_oracle, monkeypatch):
    """Another row with the same beginning takes its blocks; a row that only went back computes what is new."""
    model, oracle = model_and_oracle
    draft, computed = make(model), []
    run = draft._run

    def count(shares):
        computed.append(sum(len(share.token_ids) for share in shares))
        return run(shares)

    monkeypatch.setattr(draft, "_run", count)
    text = [token % VOCAB for token in range(7, 27)]
    for slot in (0, 1):
        draft.continue_as(slot, text)
        _, logits = draft.catch_up([slot], [2], [18])
        assert_logits(oracle, logits, [text])
    draft.append([0], [5])
    draft.append([0], [6])
    draft.continue_as(0, [*text, 5, 9])
    _, logits = draft.catch_up([0], [0], [18])
    assert_logits(oracle, logits, [[*text, 5, 9]])
    assert computed == [20, 4, 1, 1, 1]


@torch.inference_mode()
def test_a_row_that_changes_what_others_share_leaves_it_to_them(model_and_oracle):
    model, oracle = model_and_oracle
    draft = make(model)
    text = [token % VOCAB for token in range(7, 27)]
    for slot in (0, 1):
        draft.continue_as(slot, text)
        draft.catch_up([slot], [1], [20])
    changed = [*text[:6], 3, 4, 5]
    draft.continue_as(0, changed)
    draft.continue_as(1, [*text, 8])
    _, logits = draft.catch_up([0, 1], [1, 1], [9, 21])
    assert_logits(oracle, logits, [changed, [*text, 8]])
    draft.continue_as(2, text)
    _, logits = draft.catch_up([2], [1], [20])
    assert_logits(oracle, logits, [text])
    draft.check_integrity()


@torch.inference_mode()
def test_rows_far_behind_take_several_calls_and_those_without_room_none(model_and_oracle):
    model, oracle = model_and_oracle
    draft = make(model, num_blocks=10, max_batch_tokens=8)
    long, short = [token % VOCAB for token in range(17)], [1, 2, 3]
    for slot, text in enumerate((long, short)):
        draft.continue_as(slot, text)
    assert [draft.catch_up([0, 1], [1, 1], [0, 0])[0] for _ in range(2)] == [[], []]
    ready, logits = draft.catch_up([0, 1], [1, 1], [0, 0])
    assert ready == [0, 1]
    assert_logits(oracle, logits, [long, short])
    draft.continue_as(2, [*range(20)])  # 10 blocks hold 40 tokens
    assert draft.catch_up([2], [0], [0])[0] == []
    draft.continue_as(1, [1] * 62)  # the model was made for 64
    assert draft.catch_up([1], [3], [0])[0] == []
    draft.release(0)
    assert [draft.catch_up([2], [0], [0])[0] for _ in range(3)] == [[], [], [0]]
    draft.check_integrity()


@torch.inference_mode()
def test_a_quantized_draft_model_is_nearly_the_same(model_and_oracle, model_helpers, tmp_path):
    """Under the kernels, where small forwards are replayed, and without them."""
    _, oracle = model_and_oracle
    oracle.save_pretrained(tmp_path)
    rows = [[token % VOCAB for token in range(start, start + 9)] for start in (1, 30)]
    for attention in ("cpu", "torch"):
        model = model_helpers.load(tmp_path, attention=attention)
        model.quantize()
        draft = make(model)
        for slot, row in enumerate(rows):
            draft.continue_as(slot, row[:-1])
        draft.catch_up([0, 1], [1, 1], [0, 0])
        logits = draft.append([0, 1], [row[-1] for row in rows])[0]
        for got, row in zip(logits, rows, strict=True):
            wanted = oracle(torch.tensor([row])).logits[0, -1]
            assert torch.nn.functional.cosine_similarity(got, wanted, dim=0) > 0.995
            assert not torch.allclose(got, wanted, atol=1e-4)  # it is quantized


class Wire:
    """Two ends of a link, one after the other."""

    group = "some"

    def __init__(self):
        self.messages = deque()

    def share(self, values):
        if values is None:
            return self.messages.popleft()
        self.messages.append(np.array(values, dtype=np.int64))
        return self.messages[-1]


@torch.inference_mode()
def test_a_rank_that_follows_computes_the_same(model_and_oracle):
    """Rows that grow, change, leave and share prefixes: the KV caches are equal after every step."""
    model, _ = model_and_oracle
    drafts, wire, rng = [make(model, num_blocks=40) for _ in range(2)], Wire(), random.Random(1)
    for draft in drafts:
        draft._link = wire
    leader, follower = drafts
    following = FollowingDraftModel(follower, 7)
    shared = [rng.randrange(VOCAB) for _ in range(9)]
    num_messages = 0
    for step in range(40):
        slots = sorted(rng.sample(range(4), rng.randrange(1, 5)))
        for slot in slots:
            if rng.random() < 0.3:
                leader.release(slot)
            leader.continue_as(slot, shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(12))])
        ready, _ = leader.catch_up(slots, [2] * len(slots), [9] * len(slots))
        for _ in range(2):
            leader.append([slots[index] for index in ready], [rng.randrange(VOCAB) for _ in ready])
        leader.end()
        num_messages += len(wire.messages)
        tokens = torch.zeros(len(slots), dtype=torch.int64)
        rows = ProposalInput(slots, tokens, torch.zeros(len(slots), 32), [2] * len(slots), None)
        assert following.propose(rows).rows() == [[] for _ in slots] and not wire.messages
        for own, others in zip(
            (*leader._cache.keys, *leader._cache.values), (*follower._cache.keys, *follower._cache.values), strict=True
        ):
            assert torch.equal(own, others), step
    assert num_messages == 160


def test_shares_travel_as_ints():
    shares = [
        Share(3, 70_000, [5], [], 9, 1, 1),
        Share(0, 0, [1, 2, 3], [8, 4], 0, 0, 0),
        Share(1, 4, [0], [7], 2, 1, 0),
    ]
    assert decode(encode(shares)) == shares
    assert encode(shares[:1]).nbytes < 100
