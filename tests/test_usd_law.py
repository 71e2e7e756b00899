"""Rejection with a real draft model of another tokenizer, end to end through the engine: the law of the answers."""

import json

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.models.sampling.params import SamplingParams
from specserve.models.sampling.sampler import Sampler
from specserve.server.config import (
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
from specserve.server.launch import build
from specserve.speculators.base import SpeculatorType, UsdMethod

SIZE = 276  # tokens of the target
TOP_K = 5
LENGTH = 4  # tokens of an answer: one without a draft, then drafts
PROMPT = [1, 259, 262, 270]
NUM_ANSWERS = 12_000
DROPPED = ("ou", "er", "é", "▁a")


class _Stream:
    """Ends after LENGTH tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def push(self, token_id: int) -> TextPiece:
        self.token_ids.append(token_id)
        return TextPiece("", "", FinishReason.LENGTH if len(self.token_ids) == LENGTH else None)


def save(path, model, tokenizer_text):
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_text)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return path


def other_tokenizer(text):
    """The same letters in another order and without some tokens; the old id of each new one."""
    state = json.loads(text)
    vocab = state["model"]["vocab"]
    kept = sorted((t for t in vocab if t not in DROPPED), key=lambda t: (vocab[t] >= 3, (vocab[t] * 101) % SIZE))
    state["model"]["vocab"] = {token: index for index, token in enumerate(kept)}
    merges = [m if isinstance(m, list) else m.split(" ") for m in state["model"]["merges"]]
    state["model"]["merges"] = [m for m in merges if not {*m, "".join(m)} & {*DROPPED}]
    for token in state["added_tokens"]:
        token["id"] = kept.index(token["content"])
    special = state["post_processor"]["special_tokens"]["<s>"]
    special["ids"] = [kept.index("<s>")]
    return json.dumps(state), [vocab[token] for token in kept]


@pytest.fixture(scope="module")
def models(sentencepiece_backend, tmp_path_factory):
    """(target, its folder, the folder of a draft model that is nearly the target in another vocabulary)."""
    text = sentencepiece_backend.to_str()
    state = json.loads(text)
    assert len(state["model"]["vocab"]) > SIZE
    keep = {t: i for t, i in state["model"]["vocab"].items() if i < SIZE}
    state["model"]["vocab"] = keep
    merges = [m if isinstance(m, list) else m.split(" ") for m in state["model"]["merges"]]
    state["model"]["merges"] = [m for m in merges if "".join(m) in keep]
    text = json.dumps(state)
    assert tokenizers.Tokenizer.from_str(text).get_vocab_size() == SIZE
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
    }
    target = LlamaForCausalLM(LlamaConfig(vocab_size=SIZE, **sizes)).eval()
    # Sampling prefers what both vocabularies have, as with real models.
    with torch.no_grad():
        target.lm_head.weight.mul_(0.6)
    draft_text, old_ids = other_tokenizer(text)
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=len(old_ids), **sizes)).eval()
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][old_ids]
    weights["lm_head.weight"] += 0.2 * torch.randn_like(weights["lm_head.weight"])
    draft.load_state_dict(weights)
    folder = tmp_path_factory.mktemp("law")
    return target, save(folder / "target", target, text), save(folder / "draft", draft, draft_text)


def answers(models, num_answers):
    """Token ids of so many unseeded answers, and (drafted, accepted) in all."""
    _, target, draft = models
    serving = build(
        ServerConfig(
            ModelOptions(str(target)),
            scheduler=SchedulerOptions(max_batch_size=64, max_total_tokens=32),
            speculator=SpeculatorOptions(
                type=SpeculatorType.USD,
                id=str(draft),
                num_speculative_tokens=2,
                draft_length=DraftLengthRule.FIXED,
                dtype=SpeculatorDType.FLOAT32,
                usd_method=UsdMethod.TLI,
                verification=Verification.REJECTION,
            ),
            parallel=ParallelOptions(1, 1),
        )
    )
    engine = serving.engine.engine
    streams = [_Stream() for _ in range(num_answers)]
    for index, stream in enumerate(streams):
        sampling = SamplingParams(temperature=1.0, top_k=TOP_K, seed=index, is_seeded=False)
        engine.add(Request(PROMPT, sampling, stream, LENGTH))
    while engine.has_work():
        assert all(event.error is None for event in engine.step())
    stats = engine.stats()
    return [tuple(stream.token_ids) for stream in streams], (stats.num_drafted_tokens, stats.num_accepted_tokens)


@torch.no_grad()
def exact_law(target):
    """Answer -> probability, by transformers in float64."""
    model, law = target.double(), {(): 1.0}
    for _ in range(LENGTH):
        histories = list(law)
        logits = model(torch.tensor([PROMPT + list(history) for history in histories])).logits[:, -1]
        best = logits.topk(TOP_K)
        law = {
            (*history, int(token)): law[history] * float(p)
            for history, ids, ps in zip(histories, best.indices, best.values.softmax(dim=1), strict=True)
            for token, p in zip(ids, ps, strict=True)
        }
    target.float()
    return law


def p_value(law, drawn):
    """Chi-square over the answers; those expected less than 8 times are one cell."""
    counts = dict.fromkeys(law, 0)
    for answer in drawn:
        counts[answer] += 1  # a KeyError is a token that can't be drawn at all
    pairs = [(counts[answer], probability * len(drawn)) for answer, probability in law.items()]
    cells = [pair for pair in pairs if pair[1] >= 8]
    rare = [pair for pair in pairs if pair[1] < 8]
    cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    assert len(cells) > 100
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_law_of_answers_with_a_real_draft_model_of_another_tokenizer(models):
    law = exact_law(models[0])
    drawn, (drafted, accepted) = answers(models, NUM_ANSWERS)
    assert 0.15 < accepted / drafted < 0.95  # both ways are taken
    assert drafted > NUM_ANSWERS
    assert p_value(law, drawn) > 1e-6


@pytest.mark.parametrize("fault", ["law of other columns", "law of the whole vocabulary"])
def test_a_wrong_law_of_the_drafts_shows(models, monkeypatch, fault):
    """What the pruned head of the known implementation does, and a law that is not the one that was drawn from."""
    draw = Sampler.draw_drafts

    def wrong(self, logits, rows, target_ids=None):
        columns, law = draw(self, logits, rows, target_ids)
        assert target_ids is not None
        if fault == "law of other columns":
            order = target_ids.flip(0)
            law[:, target_ids] = law[:, order]
        else:
            law = 0.5 * law + 0.5 / law.shape[1]
        return columns, law

    monkeypatch.setattr(Sampler, "draw_drafts", wrong)
    drawn, _ = answers(models, 6000)
    assert p_value(exact_law(models[0]), drawn) < 1e-6
