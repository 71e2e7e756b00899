"""Requests to what the engine takes: every limit of proto/specserve.proto, each refused by name."""

import dataclasses
import math

import pytest

from specserve.proto import specserve_pb2 as pb
from specserve.server.chat import ChatTemplate
from specserve.server.convert import MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS, RequestConverter
from specserve.server.errors import InvalidRequestError, UnsupportedError
from specserve.server.parse import parse_request


@pytest.fixture
def make_converter(server_helpers):
    def make(*, max_stop_sequences=4, max_top_n_tokens=5, **changes) -> RequestConverter:
        serving = server_helpers.make_serving(**changes)
        return RequestConverter(
            serving.tokenizer,
            serving.chat_template,
            serving.description,
            max_stop_sequences=max_stop_sequences,
            max_top_n_tokens=max_top_n_tokens,
        )

    return make


@pytest.fixture
def converter(make_converter):
    return make_converter()


def request(text="hé the", **fields) -> pb.GenerateRequest:
    """Fields by their dotted paths, with two underscores for a dot."""
    message = pb.GenerateRequest(text=text)
    for path, value in fields.items():
        *parts, name = path.split("__")
        target = message
        for part in parts:
            target = getattr(target, part)
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


def refusal(converter, message, error=InvalidRequestError) -> str:
    with pytest.raises(error) as caught:
        converter.request(message)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults(converter):
    made = converter.request(request("the"))
    assert made.prompt_token_ids == [1, 266, 269]
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p) == (0, 0, 1, 0, 1)
    assert not sampling.uses_penalties
    assert not sampling.logprobs and not sampling.prompt_logprobs and not made.prompt_details
    assert made.max_new_tokens == 93  # what 96 leaves
    assert made.max_draft_tokens is None


def test_every_field_arrives(converter):
    made = converter.request(
        request(
            sampling__temperature=0.5,
            sampling__top_k=7,
            sampling__top_p=0.25,
            sampling__min_p=0.125,
            sampling__typical_p=0.75,
            sampling__repetition_penalty=1.5,
            sampling__frequency_penalty=-2.0,
            sampling__presence_penalty=2.0,
            sampling__seed=2**64 - 1,
            stopping__max_new_tokens=9,
            stopping__min_new_tokens=9,
            stopping__stop_token_ids=[7, 5, 7],
            response__logprobs=True,
            response__top_n_tokens=5,
            response__prompt_details=True,
            speculation__max_draft_tokens=0,
        )
    )
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.75, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.seed) == (-2, 2, 2**64 - 1)
    assert (sampling.min_new_tokens, sampling.suppressed_ids) == (9, (2, 5, 7))  # EOS 400 is outside the vocabulary
    assert (sampling.logprobs, sampling.top_n_tokens, sampling.prompt_logprobs) == (True, 5, True)
    assert (made.max_new_tokens, made.prompt_details, made.max_draft_tokens) == (9, True, 0)


def push_all(made, ids):
    pieces = [made.text_stream.push(i) for i in ids]
    return "".join(piece.delta for piece in pieces), pieces[-1]


def test_stopping_arrives(converter):
    he = converter.tokenizer.encode("the", add_special_tokens=False)
    text, last = push_all(converter.request(request(stopping__stop=["he"])), he)
    assert (text, last.stop_string) == ("the", "he")
    text, last = push_all(converter.request(request(stopping__stop=["he"], stopping__include_stop=False)), he)
    assert (text, last.stop_string) == ("t", "he")
    assert push_all(converter.request(request()), [*he, 2])[1].finish_reason.value == "eos_token"
    assert push_all(converter.request(request(stopping__ignore_eos=True)), [*he, 2])[1].finish_reason is None
    assert push_all(converter.request(request(stopping__stop_token_ids=[269])), he)[1].stop_token_id == 269
    assert push_all(converter.request(request(stopping__max_new_tokens=2)), he)[1].finish_reason.value == "length"
    made = converter.request(request(stopping__ignore_eos=True, response__skip_special_tokens=False))
    assert push_all(made, [*he, 2])[0] == "the</s>"


def test_seeds_are_drawn_over_64_bits(converter):
    seeds = {converter.request(request()).sampling.seed for _ in range(40)}
    assert len(seeds) == 40
    assert max(seeds) >= 2**60 and all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"sampling__seed": 3}, 0.0),
        ({"sampling__top_k": 3}, 1.0),
        ({"sampling__top_p": 0.5}, 1.0),
        ({"sampling__top_p": 1.0}, 0.0),
        ({"sampling__min_p": 0.5}, 1.0),
        ({"sampling__min_p": 0.0}, 0.0),
        ({"sampling__typical_p": 0.5}, 1.0),
        ({"sampling__typical_p": 1.0}, 0.0),
        ({"sampling__top_p": 0.5, "sampling__temperature": 0.0}, 0.0),
    ],
)
def test_temperature_unset(converter, fields, temperature):
    assert converter.request(request(**fields)).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, -0.0, 1e-38, 1e-8, 100.0], [-1e-6, 100.01, 1e30]),
        ("top_p", [1e-6, 1.0], [0.0, -0.5, 1.0001]),
        ("min_p", [0.0, 1.0], [-0.1, 1.0001]),
        ("typical_p", [1e-6, 1.0], [0.0, 1.0001]),
        ("repetition_penalty", [1e-6, 1.0, 1e6], [0.0, -1.0, 9e-7, 1.1e6]),
        ("frequency_penalty", [-2.0, 2.0], [-2.001, 2.001]),
        ("presence_penalty", [-2.0, 2.0], [-2.001, 2.001]),
        ("top_k", [1, 319, 320, 2**32 - 1], [0]),
    ],
)
def test_sampling_ranges(converter, name, good, bad):
    for value in good:
        converter.request(request(**{f"sampling__{name}": value}))
    for value in [*bad, *([math.nan, math.inf, -math.inf] if name != "top_k" else [])]:
        text = refusal(converter, request(**{f"sampling__{name}": value}))
        assert text.startswith(f"sampling.{name} is {value:.7g}; it must be "), text


def test_top_k_of_the_whole_vocabulary_is_off(converter):
    assert converter.request(request(sampling__top_k=319)).sampling.top_k == 319
    assert converter.request(request(sampling__top_k=320)).sampling.top_k == 0


@pytest.mark.parametrize("value", [6, 320, 321, 10**6])
def test_top_n_tokens_above_the_limit(converter, value):
    text = refusal(converter, request(response__top_n_tokens=value))
    assert text.startswith(f"response.top_n_tokens is {value}; it must be at most 5")


def test_lengths(make_converter):
    converter = make_converter(max_input_tokens=10, max_total_tokens=12)
    assert converter.request(request("x" * 9)).max_new_tokens == 2  # with BOS 10 tokens
    text = refusal(converter, request("x" * 10))
    assert text.startswith("text has 11 tokens; at most 10 ") and "truncate" in text
    assert converter.request(request("x" * 9, stopping__max_new_tokens=2)).max_new_tokens == 2
    text = refusal(converter, request("x" * 9, stopping__max_new_tokens=3))
    assert text.startswith("stopping.max_new_tokens is 3; with a prompt of 10 tokens at most 2 fit in 12 ")
    assert "4294967295" in refusal(converter, request(stopping__max_new_tokens=2**32 - 1))
    assert refusal(converter, request(stopping__max_new_tokens=0)) == (
        "stopping.max_new_tokens is 0; it must be at least 1"
    )


def test_prompt_as_long_as_the_total_limit_leaves_no_room(make_converter):
    text = refusal(make_converter(max_input_tokens=10, max_total_tokens=10), request("x" * 9))
    assert text.startswith("the prompt has 10 tokens, which leaves no room") and "--max-total-tokens" in text


def test_default_of_max_new_tokens_is_at_most_1024(make_converter):
    converter = make_converter(max_input_tokens=10, max_total_tokens=5000)
    assert converter.request(request("x")).max_new_tokens == 1024
    text = refusal(converter, request("x", stopping__min_new_tokens=1025))
    assert text.startswith("stopping.min_new_tokens is 1025; it must be at most") and "unset and so 1024" in text
    assert converter.request(request("x", stopping__min_new_tokens=4998, stopping__max_new_tokens=4998))


def test_min_new_tokens_above_max(converter):
    text = refusal(converter, request(stopping__max_new_tokens=3, stopping__min_new_tokens=4))
    assert text == "stopping.min_new_tokens is 4; it must be at most stopping.max_new_tokens, which is 3"


def test_min_new_tokens_needs_a_token_that_does_not_stop(make_converter):
    converter = make_converter(vocab_size=300)
    ids = [i for i in range(300) if i not in (2, 7)]
    assert converter.request(request(stopping__stop_token_ids=ids, stopping__min_new_tokens=1))
    assert converter.request(request(stopping__stop_token_ids=[*ids, 7]))
    text = refusal(converter, request(stopping__stop_token_ids=[*ids, 7], stopping__min_new_tokens=1))
    assert text.startswith("stopping.min_new_tokens is 1, but")


def test_truncate(converter):
    long = "x" * 500 + "the"
    full = converter.tokenizer.encode(long)
    assert converter.request(request(long, truncate=20)).prompt_token_ids == full[-20:]
    assert converter.request(request("the", truncate=3)).prompt_token_ids == [1, 266, 269]
    assert converter.request(request("the", truncate=2**32 - 1)).prompt_token_ids == [1, 266, 269]
    assert refusal(converter, request(long, truncate=65)).startswith("text has 65 tokens; at most 64 ")
    assert refusal(converter, request("the", truncate=0)).startswith("truncate is 0; it must be at least 1")


def test_megabytes_are_refused_before_they_are_tokenized(converter, monkeypatch):
    def encode(*args, **kwargs):
        raise AssertionError("tokenized")

    monkeypatch.setattr(converter.tokenizer, "encode", encode)
    assert converter.max_input_bytes == 64 * len("<unk>")
    text = refusal(converter, request("é" * 10**6))
    assert text.startswith("text has 2000000 bytes, too many for 64 tokens")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="y" * 400)])
    assert refusal(converter, pb.GenerateRequest(chat=chat)).startswith("chat has ")


def test_the_longest_text_of_special_tokens_is_not_refused_by_its_bytes(converter):
    assert len(converter.request(request("<unk>" * 63)).prompt_token_ids) == 64


def test_empty_prompts(make_converter):
    converter = make_converter()
    assert converter.request(request("")).prompt_token_ids == [1]  # BOS
    assert refusal(converter, pb.GenerateRequest(token_ids=pb.TokenIds())).startswith("token_ids is empty")
    assert refusal(converter, pb.GenerateRequest()).startswith("input is not set; give one of text, token_ids, chat")
    assert refusal(converter, pb.GenerateRequest(chat=pb.Chat())).startswith("chat.messages is empty")
    converter.tokenizer.backend.post_processor = None
    assert refusal(converter, request("")).startswith("text is empty; it must give at least 1 token")


def test_token_ids(converter):
    made = converter.request(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[319, 0, 2])))
    assert made.prompt_token_ids == [319, 0, 2]
    text = refusal(converter, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 320, 2**32 - 1])))
    assert text == "token_ids.ids[1] is 320; it must be below the vocabulary size 320"
    text = refusal(converter, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3] * 65)))
    assert text.startswith("token_ids has 65 tokens; at most 64 ")


def chat(*messages) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages]))


def test_chat(converter):
    made = converter.request(chat(("system", "ä"), ("user", "the")))
    rendered = "<s>[system] ä\n[user] the\n[assistant]"
    assert made.prompt_token_ids == converter.tokenizer.encode(rendered, add_special_tokens=False)
    assert made.prompt_token_ids.count(1) == 1  # one BOS, the template's
    bare = dataclasses.replace(converter, chat_template=ChatTemplate("{{ messages[0].content }}", {}))
    assert bare.request(chat(("user", "the"))).prompt_token_ids == [266, 269]  # no BOS that the template doesn't write
    text = refusal(converter, chat(("user", "a"), ("usr", "b")))
    assert text.startswith("chat.messages[1].role is 'usr'; it must be one of system, user")


def test_stop_strings(converter):
    assert converter.request(request(stopping__stop=["é" * 1000, "a", "b", "c"]))
    text = refusal(converter, request(stopping__stop=["a", "b", "c", "d", "e"]))
    assert text.startswith("stopping.stop has 5 strings; at most 4 (--max-stop-sequences)")
    assert refusal(converter, request(stopping__stop=["x" * 10_000] * 1000)).startswith(
        "stopping.stop has 1000 strings"
    )
    assert refusal(converter, request(stopping__stop=["a", ""])).startswith("stopping.stop[1] is empty")
    half = "é" * (MAX_STOP_BYTES // 4)
    assert converter.request(request(stopping__stop=[half, half]))
    text = refusal(converter, request(stopping__stop=[half, half, "a"]))
    assert text == "stopping.stop has 16385 bytes in all; at most 16384 are allowed"


def test_stop_token_ids(converter):
    assert converter.request(request(stopping__stop_token_ids=[5] * MAX_STOP_TOKEN_IDS))
    assert "at most 1024" in refusal(converter, request(stopping__stop_token_ids=[5] * (MAX_STOP_TOKEN_IDS + 1)))
    assert refusal(converter, request(stopping__stop_token_ids=[5, 320])) == (
        "stopping.stop_token_ids[1] is 320; it must be below the vocabulary size 320"
    )


def test_logprobs_of_the_prompt_are_computed_only_if_asked(converter):
    made = converter.request(request(response__prompt_details=True))
    assert made.prompt_details and not made.sampling.prompt_logprobs
    assert converter.request(request(response__prompt_details=True, response__top_n_tokens=1)).sampling.prompt_logprobs
    assert not converter.request(request(response__logprobs=True)).sampling.prompt_logprobs


def test_unsupported_things_are_refused_not_ignored(converter):
    assert refusal(converter, request(grammar__regex=""), UnsupportedError).startswith("grammar is set")
    assert refusal(converter, request(grammar__json_schema="{}"), UnsupportedError).startswith("grammar is set")
    assert refusal(converter, request(adapter_id="né"), UnsupportedError).startswith("adapter_id is 'né'")
    assert converter.request(request(adapter_id=""))


def test_tokenize_has_no_limit(converter):
    ids = converter.prompt(pb.TokenizeRequest(text="x" * 1000), enforce_limit=False)
    assert len(ids) == 1001
    with pytest.raises(InvalidRequestError, match="input is not set; give one of text, chat"):
        converter.prompt(pb.TokenizeRequest(), enforce_limit=False)


def test_tokenize_agrees_with_generate(converter):
    for text in ("hi", "<s>hi", " the 🤗", "a</s>b"):
        ids = converter.prompt(pb.TokenizeRequest(text=text), enforce_limit=False)
        assert ids == converter.request(request(text)).prompt_token_ids
    assert converter.request(request("<s>hi")).prompt_token_ids == converter.request(request("hi")).prompt_token_ids


def with_bad_utf8(message: pb.GenerateRequest) -> bytes:
    """The message with its X turned into the first byte of something that never comes."""
    return message.SerializeToString().replace(b"X", b"\xed")


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.GenerateRequest(text="aX"), "text"),
        (chat(("user", "a"), ("user", "ü bX")), "chat.messages[1].content"),
        (chat(("X", "a")), "chat.messages[0].role"),
        (request(stopping__stop=["é", "X"]), "stopping.stop[1]"),
        (request(adapter_id="X"), "adapter_id"),
        (request(grammar__regex="X"), "grammar.regex"),
    ],
)
def test_invalid_utf8_is_named(message, path):
    assert parse_request(pb.GenerateRequest, message.SerializeToString()) == message
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(pb.GenerateRequest, with_bad_utf8(message))
    assert str(caught.value).startswith(f"{path} is not valid UTF-8: ")


def test_encoded_surrogates_are_no_utf8():
    with pytest.raises(InvalidRequestError, match=r"^text is not valid UTF-8"):
        parse_request(pb.GenerateRequest, b"\x0a\x03\xed\xa0\x80")


def test_bytes_that_are_no_message():
    with pytest.raises(
        InvalidRequestError, match=r"the request \(2 bytes\) is no specserve.v1.GenerateRequest message"
    ):
        parse_request(pb.GenerateRequest, b"\x0a\x05")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x78\x01", "GenerateRequest has a field number 15 "),
        (b"\x08\x01", "GenerateRequest has a field number 1 "),  # text with the wire type of an int
        (b"\x2a\x03\xa0\x06\x01", "sampling has a field number 100 "),
        (b"\x1a\x06\x0a\x04\x0a\x00\x50\x01", "chat.messages[0] has a field number 10 "),
    ],
)
def test_unknown_fields_are_refused(data, text):
    with pytest.raises(UnsupportedError) as caught:
        parse_request(pb.GenerateRequest, data)
    assert str(caught.value).startswith(text)
