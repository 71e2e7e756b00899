"""USD in its parts: the draft's view of a text, confidence, what is refused at load."""

import shutil

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.parallel import TensorParallel
from specserve.models.tokenizer import Tokenizer, load_tokenizer
from specserve.speculators.base import NoSpeculator, ProposalInput, RowsRoom, UsdMethod
from specserve.speculators.checkpoint import Base
from specserve.speculators.confidence import Confidence
from specserve.speculators.translator import DraftContext, Translator
from specserve.speculators.usd_loader import UsdOptions, load_usd, overlap_weight, vocabulary_mapping


def context_of(translator, *pieces):
    context = DraftContext()
    for piece in pieces:
        translator.extend(context, piece)
    return context


# ---- the translator


def test_text_goes_over_as_text_and_roles_as_roles(demo_tokenizer, sentencepiece_tokenizer):
    """Two tokenizers without any common special token but the end: the chat marks are written out."""
    translator = Translator(demo_tokenizer, sentencepiece_tokenizer)
    assert not translator.is_identity
    prompt = demo_tokenizer.encode("<|im_start|>user\nthe naïve 日本<|im_end|>\n<|im_start|>the", False)
    context = context_of(translator, prompt[:3], prompt[3:7], prompt[7:])
    ids, end = context.token_ids, sentencepiece_tokenizer.eos_token_ids[0]
    assert ids.count(end) == 1 and context.num_fixed == ids.index(end) + 1
    before, after = ids[: ids.index(end)], ids[ids.index(end) + 1 :]
    assert prompt[0] == demo_tokenizer.bos_token_id and before[0] == sentencepiece_tokenizer.bos_token_id
    texts = [b"".join(map(sentencepiece_tokenizer.token_bytes, part)).decode() for part in (before[1:], after)]
    assert texts == [" user\nthe naïve 日本", " \n<|im_start|>the"]  # it puts a space in front


def test_special_tokens_with_the_same_text_are_the_same(demo_tokenizer, sentencepiece_tokenizer):
    back = Translator(sentencepiece_tokenizer, demo_tokenizer)
    end = demo_tokenizer.eos_token_ids[0]
    assert back.roles[sentencepiece_tokenizer.eos_token_ids[0]] == end
    itself = Translator(demo_tokenizer, demo_tokenizer)
    assert itself.is_identity and all(target == draft for target, draft in itself.roles.items())


def test_the_same_tokenizer_hands_ids_over_but_for_padding(demo_tokenizer):
    translator = Translator(demo_tokenizer, demo_tokenizer)
    context = context_of(translator, [5, 6, 7], [demo_tokenizer.size + 3, 8])
    assert context.token_ids == [5, 6, 7, 0, 8] and context.num_final == 5


def test_ids_that_the_draft_has_no_row_for_are_not_looked_up(demo_tokenizer):
    """The same tokenizer, and an embedding that ends before it (Gemma's image token, say)."""
    size = demo_tokenizer.size
    short = Tokenizer(
        demo_tokenizer.backend, vocab_size=size - 2, special_ids=demo_tokenizer.special_ids, eos_token_ids=(2,)
    )
    translator = Translator(demo_tokenizer, short)
    assert translator.is_identity
    assert context_of(translator, [5, size - 1, size - 3]).token_ids == [5, 0, size - 3]


def test_a_text_of_nothing_still_begins_somewhere(demo_tokenizer, sentencepiece_tokenizer):
    """A target that says only what the draft has no word for."""
    translator = Translator(sentencepiece_tokenizer, demo_tokenizer)
    assert context_of(translator, [sentencepiece_tokenizer.bos_token_id]).token_ids == [2]
    assert len(context_of(translator, [1], sentencepiece_tokenizer.encode("the", False)).token_ids) > 0


# ---- confidence


def test_confidence_learns_from_the_judged_drafts_alone():
    confidence = Confidence()
    assert abs(confidence.chance(0.95) - 0.95) < 0.01 and abs(confidence.chance(0.05) - 0.05) < 0.01
    for _ in range(400):
        confidence.observe([0.95, 0.55, 0.15], 1)  # the second is wrong, the third was never judged
    assert confidence.chance(0.93) > 0.98 and confidence.chance(0.51) < 0.02
    assert abs(confidence.chance(0.15) - 0.15) < 0.01
    assert abs(confidence.average - 0.5) < 0.01
    assert confidence.chance(1.0) == confidence.chance(0.95)


# ---- loading


def load(files, target, options, *, num_tokens):
    return load_usd(files, target, options, parallel=TensorParallel(), num_tokens=num_tokens)


def write_model(path, tokenizer, *, rows=None, size=16):
    torch.manual_seed(size)
    rows = rows or tokenizer.size
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    return ModelFiles(f"org/{path.name}", None, path, "hub")


@pytest.fixture(scope="module")
def target(model_helpers, demo_tokenizer, tmp_path_factory):
    files = write_model(tmp_path_factory.mktemp("target"), demo_tokenizer, size=32)
    return Base(model_helpers.load(files.path), files, load_tokenizer(files, demo_tokenizer.size))


@pytest.fixture(scope="module")
def letters(sentencepiece_tokenizer, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("letters"), sentencepiece_tokenizer, rows=333)


def test_what_is_shared_weighs(target, letters):
    draft = load_tokenizer(letters, 333)
    translator = Translator(target.tokenizer, draft)
    mapping = vocabulary_mapping(translator, letters)
    assert 0.1 < overlap_weight(mapping, target.tokenizer) < 0.9
    assert load(letters, target, UsdOptions(), num_tokens=None).method is UsdMethod.SLEM
    assert load(letters, target, UsdOptions(UsdMethod.TLI), num_tokens=3).method is UsdMethod.TLI
    same = load(target.files, target, UsdOptions(), num_tokens=4)
    assert same.method is UsdMethod.TLI and same.mapping is None and same.max_draft_tokens == 4


def test_who_has_the_draft_model(target, letters):
    """Its 2 heads can't be split over 3 ranks, so the first has it whole, unless that was asked for."""
    last = TensorParallel(2, 3)
    assert isinstance(load_usd(letters, target, UsdOptions(), parallel=last, num_tokens=None), NoSpeculator)
    with pytest.raises(
        ModelError, match=r"^--speculator-num-shard is 3, but the draft model has 2 attention heads \(2 KV .*choose 1$"
    ):
        load_usd(letters, target, UsdOptions(num_shard=3), parallel=last, num_tokens=None)
    last = TensorParallel(1, 2)
    whole = load_usd(letters, target, UsdOptions(num_shard=1), parallel=last, num_tokens=None)
    assert isinstance(whole, NoSpeculator)


def test_misfits_are_one_line_with_the_numbers(target, letters, tmp_path):
    big = write_model(tmp_path / "big", target.tokenizer, size=64)
    with pytest.raises(
        ModelError, match=r"org/big: the draft model has \d{7} parameters, more than the \d{7} of the m"
    ):
        load(big, target, UsdOptions(), num_tokens=None)
    shutil.copytree(letters.path, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load(ModelFiles("org/mute", None, tmp_path / "mute", "hub"), target, UsdOptions(), num_tokens=None)
    few = tmp_path / "few"
    write_model(few, Tokenizer(_backend_of("▁etaoinshrdlu"), vocab_size=13))
    with pytest.raises(ModelError, match=r"org/few: only 13 of the 13 tokens .* \(\d+\.\d% by weight\); at least 100"):
        load(ModelFiles("org/few", None, few, "hub"), target, UsdOptions(), num_tokens=None)


def _backend_of(letters):
    """A tokenizer that knows these letters and nothing else."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = tokenizers.decoders.Replace("▁", " ")
    return backend


# ---- drafting


@torch.inference_mode()
def test_rows_of_both_methods_draft_together_and_stop_where_it_does_not_pay(target, letters):
    """What is asked for is drafted, less where the chances are too small for another round; ids are the target's."""
    speculator = load(letters, target, UsdOptions(), num_tokens=4)
    speculator.allocate(RowsRoom(64, 4, 4, 64, 128))
    prompts = ["the tan hat is on the other side of the road", "no other soul", "tie", "1234"]
    for slot, (text, method) in enumerate(zip(prompts, ("tli", "slem", "tli", "slem"), strict=True)):
        speculator.admit(slot, target.tokenizer.encode(text, False), UsdMethod(method))
    steps = []

    def choose(logits, step, target_ids=None, indices=None, head=None):
        steps.append((step, list(indices)))
        return logits.argmax(dim=1)

    def propose(min_gain):
        slots = [0, 1, 2, 3]
        hidden = torch.zeros(4, 32)
        rows = ProposalInput(slots, torch.tensor([1, 2, 3, 4]), hidden, [4, 4, 2, 1], choose, min_gain)
        return speculator.propose(rows)

    draft = propose(0.0)
    assert 1 <= len(draft.rows()[0]) <= 4
    assert len(draft.rows()[2]) <= 2 and not draft.is_routine
    assert all(0 <= token < target.vocab_size for row in draft.rows() for token in row)
    assert steps[0] == (0, [0, 2]) and all(set(indices) <= {0, 2} for _, indices in steps)
    for slot in range(4):
        speculator.accept(slot, [draft.rows()[slot][0] if draft.rows()[slot] else 5])
    steps.clear()
    hopeless = propose(100.0)
    assert steps == [(0, [0, 2])] and hopeless.is_routine
    assert all(len(row) <= 1 for row in hopeless.rows()[::2])
    for slot in range(4):
        speculator.release(slot)
    speculator._model.check_integrity()
