"""Draft vocabulary <-> target's, by the bytes that tokens stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specserve.models.hub import ModelFiles
from specserve.models.tokenizer import load_tokenizer
from specserve.speculators.vocabulary_mapping import VocabularyMapping


def test_pairs_are_the_same_bytes_whatever_the_spelling(demo_tokenizer, sentencepiece_tokenizer):
    """Byte-level BPE against SentencePiece: Ġ and ▁, line ends, bytes, letters that are more than one byte."""
    target, draft = demo_tokenizer, sentencepiece_tokenizer
    mapping = VocabularyMapping.of_bytes(target.ids_by_bytes, draft.ids_by_bytes, [(2, 2)])
    pairs = dict(zip(mapping.target_ids.tolist(), mapping.draft_ids.tolist(), strict=True))
    assert pairs.pop(2) == 2  # EOS, by its role
    assert all(target.token_bytes(t) == draft.token_bytes(d) != b"" for t, d in pairs.items())
    texts = {target.token_bytes(t) for t in pairs}
    assert {b" the", b"\n", b"\t", b"a", b" ", "é".encode()} <= texts
    assert not target.special_ids & pairs.keys() and not draft.special_ids & set(pairs.values())
    everything = {target.token_bytes(i) for i in range(target.size) if i not in target.special_ids}
    everything &= {draft.token_bytes(i) for i in range(draft.size) if i not in draft.special_ids}
    assert texts == everything - {b""}


def test_of_two_ids_for_the_same_bytes_the_emitted_one_counts(sentencepiece_tokenizer):
    """Each letter has a literal and a byte; byte 0x41 has only itself."""
    tokenizer = sentencepiece_tokenizer
    ids = tokenizer.ids_by_bytes
    for letter in "etao.,":
        byte = tokenizer.backend.token_to_id(f"<0x{ord(letter):02X}>")
        assert ids[letter.encode()] == tokenizer.backend.token_to_id(letter) != byte
    assert ids[b"A"] == tokenizer.backend.token_to_id("<0x41>")
    assert ids[b"\xc3"] == tokenizer.backend.token_to_id("<0xC3>")


@given(
    target=st.dictionaries(st.binary(min_size=1, max_size=2), st.integers(0, 400), max_size=40),
    draft=st.dictionaries(st.binary(min_size=1, max_size=2), st.integers(0, 400), max_size=40),
    same=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=3, unique_by=(lambda p: p[0], lambda p: p[1])
    ),
)
def test_each_id_is_in_one_pair(target, draft, same):
    mapping = VocabularyMapping.of_bytes(target, draft, same)
    targets, drafts = mapping.target_ids.tolist(), mapping.draft_ids.tolist()
    assert targets == sorted(set(targets)) and len(set(drafts)) == len(drafts)
    pairs = set(zip(targets, drafts, strict=True))
    assert set(same) <= pairs
    assert pairs - set(same) <= {(target[text], draft[text]) for text in target.keys() & draft.keys()}
    ids = torch.arange(401)
    back = mapping.to_draft(ids, missing=-1).tolist() if targets else [-1] * 401
    assert back == [dict(pairs).get(i, -1) for i in range(401)]


@pytest.mark.slow
def test_gemma3_and_smollm2_share_46145_byte_strings(demo_tokenizer, gemma3_gguf):
    """46,117 by normal and byte tokens; with Gemma's runs of newlines and spaces, which are user-defined, 28 more."""
    target = load_tokenizer(ModelFiles(str(gemma3_gguf), None, gemma3_gguf, "gguf"), 262144)
    mapping = VocabularyMapping.of_bytes(target.ids_by_bytes, demo_tokenizer.ids_by_bytes)
    assert len(mapping.target_ids) == 46145
    texts = {target.token_bytes(i) for i in mapping.target_ids.tolist()}
    assert {b"\n", b"\n\n", b"\t", "’".encode(), b" the"} <= texts
    for text in ("The cat\n\nsat — “there”.", "def f(x):\n\treturn x + 1  # naïve"):
        covered = [i for i in target.encode(text, False) if i in set(mapping.target_ids.tolist())]
        assert len(covered) > 0.8 * len(target.encode(text, False))
