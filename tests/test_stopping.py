import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.server.engine.sequence import FinishReason, TextPiece
from specserve.server.stopping import StoppingParams, StopTextStream

LENGTH, EOS, STRING, TOKEN = (
    FinishReason.LENGTH,
    FinishReason.EOS_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.STOP_TOKEN,
)


class PieceTokenizer:
    """Token i stands for the bytes pieces[i]; the last ids are special tokens with the texts `specials`."""

    def __init__(self, *pieces: str | bytes, specials: tuple[str, ...] = ()) -> None:
        texts = [*pieces, *specials]
        self._bytes = [text.encode() if isinstance(text, str) else text for text in texts]
        self.special_ids = frozenset(range(len(pieces), len(texts)))
        self.special_id_of = {text: len(pieces) + i for i, text in enumerate(specials)}

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


def stream(tokenizer, ids, **params) -> list[TextPiece]:
    params.setdefault("max_new_tokens", 100)
    for name in ("stop_token_ids", "eos_token_ids"):
        params[name] = frozenset(params.get(name, ()))
    text_stream = StopTextStream(tokenizer, StoppingParams(**params))
    pieces = []
    for token_id in ids:
        pieces.append(text_stream.push(token_id))
        if pieces[-1].finish_reason:
            break
    return pieces


def run(tokenizer, ids, **params):
    """Deltas, number of tokens taken, finish reason."""
    pieces = stream(tokenizer, ids, **params)
    return [piece.delta for piece in pieces], pieces[-1].finish_reason


def text_of(tokenizer, ids, **params):
    deltas, reason = run(tokenizer, ids, **params)
    return "".join(deltas), reason


# Stop strings


def test_no_fragment_of_a_stop_string_is_shown():
    letters = PieceTokenizer(*"ABC", "DE", "FGH", "IJK")
    deltas, reason = run(letters, range(6), stop_strings=("DEFGHIJ",), include_stop=False)
    assert (deltas, reason) == (["A", "B", "C", "", "", ""], STRING)
    deltas, reason = run(letters, range(6), stop_strings=("DEFGHIJ",))
    assert (deltas, reason) == (["A", "B", "C", "", "", "DEFGHIJ"], STRING)


def test_a_stop_string_ends_within_a_token():
    tokenizer = PieceTokenizer(" in", " Paris", ".")
    pieces = stream(tokenizer, [0, 1, 2], stop_strings=("Par",))
    assert pieces == [TextPiece(" in", " in"), TextPiece(" Paris", " Par", STRING, stop_string="Par")]
    assert text_of(tokenizer, [0, 1, 2], stop_strings=("Par",), include_stop=False) == (" in ", STRING)


@pytest.mark.parametrize("stop", ["b", "ab", "bc", "cd", "bcd", "d", "abcdef"])
def test_a_stop_string_may_begin_and_end_anywhere(stop):
    tokenizer = PieceTokenizer("xa", "bc", "", "de", "fg")
    whole = "xabcdefg"
    assert text_of(tokenizer, range(5), stop_strings=(stop,)) == (whole[: whole.index(stop) + len(stop)], STRING)
    assert text_of(tokenizer, range(5), stop_strings=(stop,), include_stop=False) == (
        whole[: whole.index(stop)],
        STRING,
    )


def test_held_text_is_released_when_it_can_stop_no_more():
    tokenizer = PieceTokenizer("a?", "X", "?", "Y", "z")
    assert run(tokenizer, [0, 2, 3, 4], stop_strings=("?X",), max_new_tokens=4)[0] == ["a", "?", "?Y", "z"]
    assert text_of(tokenizer, [0, 2, 1], stop_strings=("?X",)) == ("a??X", STRING)


def test_held_text_is_released_at_every_other_end():
    tokenizer = PieceTokenizer("a?", "b", specials=("</s>",))
    options = {"stop_strings": ("?X",), "include_stop": False}
    assert text_of(tokenizer, [0], max_new_tokens=1, **options) == ("a?", LENGTH)
    assert text_of(tokenizer, [0, 2], eos_token_ids=[2], **options) == ("a?", EOS)
    assert text_of(tokenizer, [0, 1], stop_token_ids=[1], **options) == ("a?", TOKEN)
    assert text_of(tokenizer, [0, 2], stop_strings=("?X", "</s>"), include_stop=False) == ("a?", STRING)


def test_only_a_true_prefix_is_held():
    tokenizer = PieceTokenizer("hello", " world", "x" * 500)
    stop = "x" * 1000
    assert run(tokenizer, [0, 1, 2], stop_strings=(stop, "Q" * 1000), max_new_tokens=9)[0] == ["hello", " world", ""]
    assert text_of(tokenizer, [0, 2, 2, 1], stop_strings=(stop,)) == ("hello" + stop, STRING)
    assert (
        text_of(tokenizer, [0, 2, 1, 0], stop_strings=(stop,), max_new_tokens=4)[0]
        == "hello" + "x" * 500 + " worldhello"
    )


def test_the_smallest_end_wins_then_the_longest_string():
    tokenizer = PieceTokenizer("__abcde")
    assert stream(tokenizer, [0], stop_strings=("cde", "bc", "abcd", "c"))[0].stop_string == "bc"
    assert stream(tokenizer, [0], stop_strings=("c", "bc", "abc", "d"))[0].stop_string == "abc"
    assert text_of(tokenizer, [0], stop_strings=("c", "bc", "abc", "d"), include_stop=False)[0] == "__"


def test_a_match_that_overlaps_a_failed_one_is_found():
    assert text_of(PieceTokenizer(*"aab"), [0, 0, 0, 0, 2], stop_strings=("aab",)) == ("aaaab", STRING)
    assert text_of(PieceTokenizer("ab", "a", "c"), [0, 0, 1, 2], stop_strings=("abac",)) == ("ababac", STRING)


def reference(pieces, stops, include_stop, min_new_tokens, max_new_tokens):
    """What the text and its end must be, looked for after each character of the whole."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for character in piece:
            text += character
            ends = [stop for stop in stops if text.endswith(stop)]
            if ends and count >= min_new_tokens:
                stop = max(ends, key=len)
                return (text if include_stop else text[: len(text) - len(stop)]), STRING, stop, count
        if count == max_new_tokens:
            return text, LENGTH, None, count
    return text, None, None, len(pieces)


@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    include_stop=st.booleans(),
    min_new_tokens=st.integers(0, 4),
    room=st.integers(0, 8),
)
@settings(max_examples=400, deadline=None)
def test_every_stream_is_the_reference(pieces, stops, include_stop, min_new_tokens, room):
    max_new_tokens = max(1, min_new_tokens + room)
    text, reason, stop, count = reference(pieces, stops, include_stop, min_new_tokens, max_new_tokens)
    got = stream(
        PieceTokenizer(*pieces),
        range(len(pieces)),
        stop_strings=tuple(stops),
        include_stop=include_stop,
        min_new_tokens=min_new_tokens,
        max_new_tokens=max_new_tokens,
    )
    joined = "".join(piece.delta for piece in got)
    assert [piece.token_text for piece in got] == pieces[: len(got)]
    assert (len(got), got[-1].finish_reason, got[-1].stop_string) == (count, reason, stop)
    if reason:
        assert joined == text
    else:  # only an end that could still become a stop string is missing
        held = text[len(joined) :]
        assert text.startswith(joined) and (not held or any(stop.startswith(held) and stop != held for stop in stops))
        assert not any(stop.startswith(text[i:]) and stop != text[i:] for stop in stops for i in range(len(joined)))


# EOS, stop token ids, the limit


@pytest.mark.parametrize("max_new_tokens", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("params", "reason"),
    [({"eos_token_ids": [2, 9]}, EOS), ({"stop_token_ids": [2]}, TOKEN), ({"stop_strings": ("c",)}, STRING)],
)
def test_a_stop_wins_over_the_limit_at_the_same_token(params, reason, max_new_tokens):
    pieces = stream(PieceTokenizer(*"abcdef"), range(6), max_new_tokens=max_new_tokens, **params)
    assert (len(pieces), pieces[-1].finish_reason) == ((2, LENGTH) if max_new_tokens == 2 else (3, reason))
    assert pieces[-1].stop_token_id == (2 if pieces[-1].finish_reason == TOKEN else None)


def test_eos_wins_over_a_stop_token_and_that_over_a_stop_string():
    options = {"stop_token_ids": [1], "stop_strings": ("b",)}
    assert run(PieceTokenizer(*"ab"), [0, 1], eos_token_ids=[1], **options) == (["a", ""], EOS)
    assert stream(PieceTokenizer(*"ab"), [0, 1], **options)[-1] == TextPiece("b", "b", TOKEN, None, 1)


def test_the_text_of_eos():
    tokenizer = PieceTokenizer("a", specials=("</s>",))
    for skip, include, text in [(True, True, ""), (True, False, ""), (False, True, "</s>"), (False, False, "")]:
        pieces = stream(tokenizer, [0, 1], eos_token_ids=[1], skip_special_tokens=skip, include_stop=include)
        assert pieces[-1] == TextPiece(text, text, EOS)
    # Without skipping it would show, whether or not the tokenizer has it as special.
    assert text_of(PieceTokenizer(*"ab"), [0, 1], eos_token_ids=[1]) == ("a", EOS)
    # Ignored, it is a token like others.
    assert text_of(tokenizer, [0, 1, 0], max_new_tokens=3) == ("aa", LENGTH)
    assert text_of(tokenizer, [0, 1, 0], max_new_tokens=3, skip_special_tokens=False) == ("a</s>a", LENGTH)


def test_the_text_of_a_stop_token():
    tokenizer = PieceTokenizer("a", "b", specials=("<end>",))
    assert text_of(tokenizer, [0, 1], stop_token_ids=[1]) == ("ab", TOKEN)
    assert text_of(tokenizer, [0, 1], stop_token_ids=[1], include_stop=False) == ("a", TOKEN)
    assert text_of(tokenizer, [0, 2], stop_token_ids=[2]) == ("a", TOKEN)
    assert text_of(tokenizer, [0, 2], stop_token_ids=[2], skip_special_tokens=False) == ("a<end>", TOKEN)


def test_nothing_stops_before_min_new_tokens():
    tokenizer = PieceTokenizer(*"abc")
    ids = [0, 1, 2, 0, 1, 2]
    assert text_of(tokenizer, ids, min_new_tokens=4, eos_token_ids=[1]) == ("abca", EOS)
    assert text_of(tokenizer, ids, min_new_tokens=2, eos_token_ids=[1]) == ("a", EOS)
    assert text_of(tokenizer, ids, min_new_tokens=3, stop_token_ids=[1]) == ("abcab", TOKEN)
    # The first "bc" is over when stop strings begin to count, and isn't found later.
    assert text_of(tokenizer, ids, min_new_tokens=4, stop_strings=("bc",)) == ("abcabc", STRING)
    # One that the min_new_tokens-th token completes counts.
    assert text_of(tokenizer, ids, min_new_tokens=3, stop_strings=("bc",)) == ("abc", STRING)
    assert run(tokenizer, ids, min_new_tokens=3, stop_strings=("bc",), include_stop=False)[0] == ["a", "", ""]


# Special tokens and incomplete characters


def test_a_stop_string_that_is_a_special_token_stops_at_its_id():
    tokenizer = PieceTokenizer("ab", "c", specials=("</s>",))
    pieces = stream(tokenizer, [0, 1, 2], stop_strings=("</s>",))
    assert pieces[-1] == TextPiece("", "", STRING, stop_string="</s>")
    assert "".join(piece.delta for piece in pieces) == "abc"
    for include, text in ((True, "abc</s>"), (False, "abc")):
        options = {"stop_strings": ("</s>",), "skip_special_tokens": False, "include_stop": include}
        assert text_of(tokenizer, [0, 1, 2], **options) == (text, STRING)
    assert text_of(tokenizer, [2, 0], stop_strings=("</s>",), min_new_tokens=2, max_new_tokens=2) == ("ab", LENGTH)


def test_a_character_over_several_tokens():
    tokenizer = PieceTokenizer(b"a\xf0", b"\x9f\xa4", b"\x97b", "c")
    pieces = stream(tokenizer, [0, 1, 2, 3], max_new_tokens=4)
    assert [piece.token_text for piece in pieces] == [piece.delta for piece in pieces] == ["a", "", "🤗b", "c"]
    assert text_of(tokenizer, [0, 1, 2], stop_strings=("🤗",)) == ("a🤗", STRING)
    assert text_of(tokenizer, [0, 1, 2], stop_strings=("🤗",), include_stop=False) == ("a", STRING)


def test_an_incomplete_character_is_flushed_at_the_end():
    tokenizer = PieceTokenizer("?", b"\xf0\x9f", "b", specials=("</s>",))
    options = {"stop_strings": ("?X",)}
    assert stream(tokenizer, [0, 1], max_new_tokens=2, **options)[-1] == TextPiece("\ufffd", "?\ufffd", LENGTH)
    assert stream(tokenizer, [0, 1, 3], eos_token_ids=[3], **options)[-1] == TextPiece("\ufffd", "?\ufffd", EOS)
    assert text_of(tokenizer, [0, 1, 2], stop_token_ids=[2], **options) == ("?\ufffdb", TOKEN)
    assert text_of(tokenizer, [0, 1, 2], stop_token_ids=[2], include_stop=False, **options) == ("?\ufffd", TOKEN)


def test_ids_of_a_padded_vocabulary_are_no_text():
    assert text_of(PieceTokenizer("a"), [0, 77, 0, 10**6], stop_strings=("aab",), max_new_tokens=4) == ("aa", LENGTH)


def test_many_long_stop_strings():
    stops = tuple(f"{i:04d}" + "x" * 10_000 for i in range(1000))
    tokenizer = PieceTokenizer("hello ", "0123", "x" * 5000, "y")
    deltas, reason = run(tokenizer, [0, 1, 3, 0, 1, 2, 2], stop_strings=stops, include_stop=False)
    assert (deltas, reason) == (["hello ", "", "0123y", "hello ", "", "", ""], STRING)


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="stop holds an empty string"):
        StopTextStream(PieceTokenizer("a"), StoppingParams(1, stop_strings=("a", "")))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        StopTextStream(PieceTokenizer("a"), StoppingParams(0))
    ended = StopTextStream(PieceTokenizer("a"), StoppingParams(1))
    ended.push(0)
    with pytest.raises(ValueError, match="after the end"):
        ended.push(0)


def test_with_the_real_tokenizer(demo_tokenizer):
    ids = demo_tokenizer.encode("Paris is the capital of France 🤗.<|im_end|>")
    pieces = stream(demo_tokenizer, ids, stop_strings=("capital of Fr",), include_stop=False)
    assert "".join(piece.delta for piece in pieces) == "Paris is the "
    assert text_of(demo_tokenizer, ids, eos_token_ids=[2]) == ("Paris is the capital of France 🤗.", EOS)
    assert text_of(demo_tokenizer, ids, stop_strings=("<|im_end|>",)) == ("Paris is the capital of France 🤗.", STRING)
