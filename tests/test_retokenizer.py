"""A growing text in the tokens of another vocabulary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculators.retokenizer import WINDOW, Retokenizer

TEXT = (
    "The history of the steam engine begins in 1712. It's Newcomen's…\n\n\tdef f(x):\n        return {'a': 1.5e-3}\n"
    "naïve 日本語 👩‍👩‍👧 안녕 — “quotes”   and    spaces, antidisestablishmentarianism!!!???"
)


def follow(retokenizer, chunks, first=()):
    token_ids = list(first)
    for chunk in chunks:
        token_ids = retokenizer.extend(token_ids, chunk, first=len(first))
    return token_ids


@pytest.fixture(scope="module")
def byte_level(demo_tokenizer):
    return Retokenizer(demo_tokenizer, demo_tokenizer.ids_by_bytes)


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_tokenizer):
    return Retokenizer(sentencepiece_tokenizer, sentencepiece_tokenizer.ids_by_bytes)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 1000])
def test_tokens_that_come_bit_by_bit_are_those_of_the_whole_text(byte_level, demo_tokenizer, size):
    """In pieces of any size, in the middle of characters too: at the end all is as the tokenizer would have it."""
    data = TEXT.encode()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert follow(byte_level, chunks) == demo_tokenizer.encode(TEXT, add_special_tokens=False)


def test_only_a_window_is_tokenized_again(byte_level, demo_tokenizer, monkeypatch):
    context, seen = demo_tokenizer.encode(TEXT * 50, add_special_tokens=False), []
    encode = demo_tokenizer.encode
    monkeypatch.setattr(demo_tokenizer, "encode", lambda text, *args: seen.append(text) or encode(text, *args))
    longer = byte_level.extend(context, b" it")
    assert longer[: len(context) - WINDOW] == context[:-WINDOW] and longer != context
    assert len(seen) == 1 and len(seen[0]) < 80


def test_what_stands_before_a_barrier_stays(byte_level, demo_tokenizer):
    """A token by its role (EOS, say) is not tokenized again, though its text could be."""
    barrier = [2, 28, 339]
    token_ids = follow(byte_level, [b"hel", b"lo wor", b"ld"], barrier)
    assert token_ids == [*barrier, *demo_tokenizer.encode("hello world", add_special_tokens=False)]


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode)), max_size=12))
def test_no_bytes_are_lost_or_made_up(byte_level, demo_tokenizer, chunks):
    """Whatever comes, characters or not, as long as this vocabulary has tokens for all of its bytes."""
    known = {text[0] for text in demo_tokenizer.ids_by_bytes if len(text) == 1}
    assert len(known) > 200
    spelled = [bytes(byte for byte in chunk if byte in known) for chunk in chunks]
    token_ids = follow(byte_level, spelled)
    assert b"".join(map(byte_level.token_bytes, token_ids)) == b"".join(spelled)


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.text("the an er\nAé日", min_size=1, max_size=6), min_size=1, max_size=10))
def test_a_tokenizer_that_puts_a_space_in_front(sentencepiece, sentencepiece_tokenizer, chunks):
    """Only in front of the whole text, not of what is tokenized again, and the tokens are those of the whole."""
    token_ids = follow(sentencepiece, [chunk.encode() for chunk in chunks])
    assert token_ids == sentencepiece_tokenizer.encode("".join(chunks), add_special_tokens=False)


def test_bytes_without_a_token_are_left_out(demo_tokenizer):
    poor = Retokenizer(demo_tokenizer, {})
    expected = [*demo_tokenizer.encode("a", add_special_tokens=False)]
    assert follow(poor, [b"a", b"\xff\xfe"]) == expected


def test_a_text_that_the_tokenizer_refuses_is_left_out(demo_tokenizer, monkeypatch):
    """As where a token lies beyond the rows of the draft model's embedding."""
    encode = demo_tokenizer.encode

    def refuse(text, *args):
        if "!" in text:
            raise ValueError("no embedding")
        return encode(text, *args)

    monkeypatch.setattr(demo_tokenizer, "encode", refuse)
    followed = follow(Retokenizer(demo_tokenizer, {}), [b"a", b"!", b" b"])
    assert followed == encode("a b", add_special_tokens=False)


def test_what_comes_behind_tokens_that_stay(byte_level, demo_tokenizer, sentencepiece, sentencepiece_tokenizer):
    """The tokens of the whole text where it splits there; else those of what is added, without a made-up space."""
    for retokenizer, tokenizer in ((byte_level, demo_tokenizer), (sentencepiece, sentencepiece_tokenizer)):

        def encode(text, tokenizer=tokenizer):
            return tokenizer.encode(text, add_special_tokens=False)

        for before, added in (("The tree", " and the"), ("a", "\n\nthe"), ("it", "'s here"), ("日", "本 a")):
            first, whole = encode(before), encode(before + added)
            if whole[: len(first)] == first:
                assert retokenizer.continuation(first, added.encode()) == whole[len(first) :]
        joined = retokenizer.continuation(encode("th"), b"e an")
        assert b"".join(map(tokenizer.token_bytes, joined)) in (b"e an", b"")
        assert joined or tokenizer is sentencepiece_tokenizer
    assert byte_level.continuation(demo_tokenizer.encode("hel", False, False), b"lo you")


def test_bytes_that_it_can_t_spell_cost_a_window_at_most(demo_tokenizer, monkeypatch):
    """The same ones again and again, behind a long text."""
    poor, encode, longest = Retokenizer(demo_tokenizer, {}), demo_tokenizer.encode, 0

    def watch(text, *args):
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text, *args)

    token_ids = encode("The end of the road. " * 200, False)
    monkeypatch.setattr(demo_tokenizer, "encode", watch)
    for _ in range(20):
        assert poor.extend(token_ids, b"\xff") == token_ids
    assert b"".join(map(poor.token_bytes, poor.extend(token_ids, b"\xff the"))).endswith(b"road.  the")
    assert 0 < longest < 600
