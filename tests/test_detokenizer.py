import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specserve.models.tokenizer import Tokenizer
from specserve.server.detokenizer import Detokenizer

SEGMENTS = ["🤗", "👩‍👩‍👧", "안", "é", "e\u0301", " ", "  ", " the", "▁", "Ġ", "\n", "\0", "\U0010ffff", "t", "<s>"]
ODD_TEXT = st.lists(st.sampled_from(SEGMENTS) | st.characters(codec="utf-8"), max_size=30).map("".join)


def pieces_of(tokenizer, ids, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@given(ODD_TEXT)
@settings(deadline=None)
def test_byte_level_stream_is_the_text(demo_tokenizer, text):
    # SmolLM2 has no token for a few control characters and bytes, and drops them from prompts.
    known = {value for i in range(17, 300) if len(value := demo_tokenizer.token_bytes(i)) == 1}
    assume(known.issuperset(bytes([byte]) for byte in text.encode()))
    prompt_ids = demo_tokenizer.encode("Hello 世界!\n")
    ids = demo_tokenizer.encode(text, parse_special=False)
    pieces, rest = pieces_of(demo_tokenizer, ids)
    assert ("".join(pieces), rest) == (text, "")
    for decode in (demo_tokenizer.decode, demo_tokenizer.backend.decode):
        assert "".join(pieces) == decode(prompt_ids + ids)[len(decode(prompt_ids)) :]


@given(ODD_TEXT)
@settings(deadline=None)
def test_sentencepiece_stream_is_the_text(sentencepiece_tokenizer, sentencepiece_backend, text):
    prompt = "Hello 世界!"
    prompt_ids = sentencepiece_tokenizer.encode(prompt)
    ids = sentencepiece_tokenizer.encode(prompt + text, parse_special=False)[len(prompt_ids) :]
    pieces, rest = pieces_of(sentencepiece_tokenizer, ids)
    # "▁" in a text can't be told from a space afterwards; that is so with SentencePiece itself.
    assert ("".join(pieces), rest) == (text.replace("▁", " "), "")
    # transformers' way to stream: the decoded whole, less the decoded prompt.
    whole, start = (sentencepiece_backend.decode(part) for part in (prompt_ids + ids, prompt_ids))
    assert "".join(pieces) == whole[len(start) :]


def test_sentencepiece_keeps_the_space_of_each_token(sentencepiece_tokenizer):
    ids = [sentencepiece_tokenizer.backend.token_to_id(token) for token in ("▁the", "er", "▁a", "▁▁")]
    assert pieces_of(sentencepiece_tokenizer, ids) == ([" the", "er", " a", "  "], "")


def test_a_character_comes_whole_with_its_last_token(demo_tokenizer):
    ids = demo_tokenizer.encode("안🤗")
    pieces, rest = pieces_of(demo_tokenizer, ids)
    assert len(ids) > 3 and [piece for piece in pieces if piece] == ["안", "🤗"] and rest == ""
    assert pieces[-1] == "🤗" and pieces[0] == ""


@given(st.lists(st.integers(3, 258) | st.sampled_from([0, 1, 2, 263, 275, 319, 10**9]), max_size=12), st.booleans())
@settings(deadline=None)
def test_any_bytes_give_what_decoding_at_once_gives(sentencepiece_tokenizer, ids, skip):
    pieces, rest = pieces_of(sentencepiece_tokenizer, ids, skip)
    assert "".join(pieces) + rest == sentencepiece_tokenizer.decode(ids, skip)


def byte_ids(text):
    return [3 + byte for byte in text.encode()]


def test_an_incomplete_end_is_flushed_once(sentencepiece_tokenizer):
    ids = byte_ids("a🤗")[:-1]
    assert pieces_of(sentencepiece_tokenizer, ids) == (["a", "", "", ""], "\ufffd")
    assert sentencepiece_tokenizer.decode(ids) == "a\ufffd"


def test_a_special_token_within_a_character(sentencepiece_tokenizer):
    first, *others = byte_ids("é")
    assert pieces_of(sentencepiece_tokenizer, [first, 2, *others]) == (["", "", "é"], "")
    assert pieces_of(sentencepiece_tokenizer, [first, 2, 261], skip_special_tokens=False)[0][:2] == ["", "\ufffd</s>"]


def test_special_tokens_are_shown_when_asked_for(demo_tokenizer):
    ids = demo_tokenizer.encode("<|im_start|>user\n<|im_end|>")
    assert "".join(pieces_of(demo_tokenizer, ids)[0]) == "user\n"
    assert "".join(pieces_of(demo_tokenizer, ids, skip_special_tokens=False)[0]) == "<|im_start|>user\n<|im_end|>"


def test_added_tokens_are_literal_in_byte_level_tokenizers():
    # "é" and "Ġ" are letters of the byte alphabet, and yet an added token with them is just text.
    alphabet = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(["<éĠ>"])
    tokenizer = Tokenizer(backend, vocab_size=257)
    ids = tokenizer.encode("é<éĠ>Ġ")
    assert 256 in ids
    assert "".join(pieces_of(tokenizer, ids)[0]) == "é<éĠ>Ġ"
