import functools
import itertools
import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from specserve.models.gguf_metadata import read_gguf_metadata
from specserve.models.gguf_tokenizer import build_gguf_tokenizer
from specserve.models.hub import ModelError, ModelFiles
from specserve.models.tokenizer import load_tokenizer

CASES = json.loads((Path(__file__).parent / "data" / "tokenizer_cases.json").read_text())["cases"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ODD_TEXT = st.text(
    st.sampled_from(list("aB'stLl 12²½\t\n\r.<|_éß日🙂\u00a0\u200b\u3000\u0301")) | st.characters(codec="utf-8")
)


def wrong_cases(tokenizer, cases):
    got = [
        (case, tokenizer.encode(case["text"], add_special_tokens=False, parse_special=case["parse_special"]))
        for case in cases
    ]
    return [(case["text"], case["parse_special"], ids, case["ids"]) for case, ids in got if ids != case["ids"]]


def test_smollm2_ids_are_those_of_llama_cpp(demo_tokenizer):
    assert len(CASES["smollm2"]) == 128
    assert wrong_cases(demo_tokenizer, CASES["smollm2"]) == []
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.adds_bos, demo_tokenizer.eos_token_ids) == (1, False, (2,))
    assert demo_tokenizer.special_ids == frozenset(range(17))
    assert demo_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>assistant" in demo_tokenizer.chat_template
    assert demo_tokenizer.size == 49152


@pytest.mark.slow
def test_gemma3_ids_are_those_of_llama_cpp(gemma3_gguf):
    path = gemma3_gguf
    tokenizer = load_tokenizer(ModelFiles(str(path), None, path, "gguf"), 262144)
    assert len(CASES["gemma3"]) == 90
    assert wrong_cases(tokenizer, CASES["gemma3"]) == []
    assert (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids) == (2, True, (1, 106))
    assert tokenizer.encode("<bos>hi") == tokenizer.encode("hi") == [2, 2202]
    for text in ("  leading\n\n\n日本 🙂\U0010ffff", " \t<h1>x</h1>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# The metadata reader


def write_gguf(path, fields):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_are_those_of_the_gguf_package(tmp_path):
    fields = {
        "a.string": "é🙂",
        "a.bool": True,
        "an.int": 7,
        "strings": ["", "x", "▁é"],
        "floats": [-0.5, 1.0],
        "i": [3, -4],
    }
    path = write_gguf(tmp_path / "a.gguf", fields)
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_gguf_metadata(path) == expected
    assert expected.items() >= fields.items()


@pytest.mark.parametrize("length", [0, 3, 20, 60, 150])
def test_a_cut_file_is_one_clear_error(tmp_path, length):
    path = write_gguf(tmp_path / "a.gguf", {"key": ["x" * 100, "y"]})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"a\.gguf: not a readable GGUF file: ") as caught:
        read_gguf_metadata(path)
    assert "\n" not in str(caught.value)


def test_a_cut_within_the_last_string_is_an_error(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"key": "x" * 100})
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data)
    assert read_gguf_metadata(path)["key"] == "x" * 100
    path.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="a string of 100 bytes reaches past the end"):
        read_gguf_metadata(path)


def test_other_files_are_clear_errors(tmp_path):
    path = tmp_path / "a.gguf"
    with pytest.raises(ModelError, match=r"a\.gguf: can't be read: No such file"):
        read_gguf_metadata(path)
    path.write_bytes(b"PK\x03\x04" + b"\0" * 50)
    with pytest.raises(ModelError, match="starts with b'PK"):
        read_gguf_metadata(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + b"\0" * 50)
    with pytest.raises(ModelError, match="version is 1"):
        read_gguf_metadata(path)


# Byte-level BPE

BYTE_LEVEL_PIECES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def bpe_metadata(pre, merge_pairs=(), extra=(), **fields):
    tokens = BYTE_LEVEL_PIECES + ["".join(pair) for pair in merge_pairs] + [token for token, _ in extra]
    types = [NORMAL] * (256 + len(merge_pairs)) + [kind for _, kind in extra]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": list(map(" ".join, merge_pairs)),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | fields).items() if value is not None}


@functools.cache
def pre_tokenizer(pre):
    return build_gguf_tokenizer(bpe_metadata(pre), "x.gguf").backend.pre_tokenizer


def split(pre, text):
    """Pieces of `text`, as text."""
    data = text.encode()
    return [text[start:end] for _, (start, end) in pre_tokenizer(pre).pre_tokenize_str(data.decode())]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", " I", "'", "M", " 1234²", " x", "  ", " y", "\n", "\n", "z", ".", "\r\n"]),
        (
            "smollm",
            ["I", "'m", " I", "'", "M", " ", "1", "2", "3", "4", "²", " x", "  ", " y", "\n", "\n", "z", ".", "\r\n"],
        ),
        ("llama-bpe", ["I", "'m", " I", "'M", " ", "123", "4²", " x", "  ", " y", "\n\n", "z", ".\r\n"]),
        ("qwen2", ["I", "'m", " I", "'M", " ", "1", "2", "3", "4", "²", " x", "  ", " y", "\n\n", "z", ".\r\n"]),
        ("tekken", ["I", "'m", " I", "'M", " ", "1", "2", "3", "4", "²", " x", "  ", " y", "\n\n", "z", ".\r\n"]),
        ("gpt-4o", ["I'm", " I'M", " ", "123", "4²", " x", "  ", " y", "\n\n", "z", ".\r\n"]),
        ("deepseek-v3", ["I", "'m", " I", "'M", " ", "123", "4²", " x", "  ", " y", "\n\n", "z", ".\r\n"]),
        ("default", ["I", "'", "m", " I", "'", "M", " ", "123", "4²", " x", "  ", " y", "\n", "\n", "z", ".", "\r\n"]),
    ],
)
def test_pre_tokenizers_split_as_their_patterns_say(pre, pieces):
    assert split(pre, "I'm I'M 1234² x   y\n\nz.\r\n") == pieces


def test_tekken_splits_at_case():
    assert split("tekken", "camelCaseHTTPServer") == ["camel", "Case", "HTTPServer"]
    assert split("llama-bpe", "camelCaseHTTPServer") == ["camelCaseHTTPServer"]


ORIGINAL_PATTERNS = {  # of the models' own tokenizer.json
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}


@given(ODD_TEXT.filter(lambda text: "ſ" not in text))  # (?i:'s) matches "ſ" too
@pytest.mark.parametrize("pre", ORIGINAL_PATTERNS)
def test_pre_tokenizers_split_as_the_original_models(pre, text):
    original = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(ORIGINAL_PATTERNS[pre]), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert pre_tokenizer(pre).pre_tokenize_str(text) == original.pre_tokenize_str(text)


@given(ODD_TEXT)
def test_gpt2_splits_as_the_byte_level_pre_tokenizer(text):
    original = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert pre_tokenizer("gpt-2").pre_tokenize_str(text) == original.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", ["made-up", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre):
    with pytest.raises(ModelError, match=rf"x\.gguf: tokenizer.ggml.pre is {pre!r}.*llama-bpe.*smollm"):
        build_gguf_tokenizer(bpe_metadata(pre), "x.gguf")


def test_ignore_merges_goes_with_the_pre_tokenizer():
    # "abc" is a token that no merge reaches.
    extra = [("abc", NORMAL)]
    merges = [("a", "b")]
    encode = {
        pre: build_gguf_tokenizer(bpe_metadata(pre, merges, extra), "x").backend.encode("abc").tokens
        for pre in ("llama-bpe", "qwen2")
    }
    assert encode == {"llama-bpe": ["abc"], "qwen2": ["ab", "c"]}


def test_bos_is_added_as_the_file_or_else_the_pre_tokenizer_says():
    extra = [("<s>", CONTROL), ("</s>", CONTROL)]
    roles = {"bos_token_id": 256, "eos_token_id": 257}

    def encoded(pre, **fields):
        backend = build_gguf_tokenizer(bpe_metadata(pre, (), extra, **roles, **fields), "x").backend
        return backend.encode("a").tokens

    assert encoded("llama-bpe") == ["<s>", "a"]
    assert encoded("llama-bpe", add_bos_token=False) == ["a"]
    assert encoded("qwen2") == ["a"]
    assert encoded("qwen2", add_bos_token=True, add_eos_token=True) == ["<s>", "a", "</s>"]


def test_eos_ids_are_those_of_the_file_and_the_ends_of_turn():
    extra = [("</s>", CONTROL), ("<|im_end|>", CONTROL), ("<|end|>", NORMAL), ("<|eom_id|>", CONTROL)]

    def eos(**fields):
        return build_gguf_tokenizer(bpe_metadata("qwen2", (), extra, eos_token_id=256, **fields), "x").eos_token_ids

    assert eos() == (256, 257, 259)  # 258 is no control token
    assert eos(eot_token_id=258) == (256, 258)
    assert eos(eot_token_id=258, eom_token_id=259) == (256, 258, 259)
    assert eos(eot_token_id=9999) == (256,)


def test_roles_outside_the_vocabulary_are_none():
    built = build_gguf_tokenizer(bpe_metadata("qwen2", bos_token_id=9999, eos_token_id=5, add_bos_token=True), "x")
    assert (built.bos_token_id, built.role_ids, built.eos_token_ids) == (None, {"eos_token": 5}, (5,))
    assert built.backend.encode("a").tokens == ["a"]


def test_token_types_decide_what_is_parsed():
    extra = [("<ctl>", CONTROL), ("<usr>", USER_DEFINED), ("<nrm>", NORMAL), ("</s>", USER_DEFINED)]
    gguf_tokenizer = build_gguf_tokenizer(bpe_metadata("gpt-2", (), extra), "x")
    backend = gguf_tokenizer.backend
    text = "<ctl><usr><nrm></s>"
    assert backend.encode(text).tokens == ["<ctl>", "<usr>", "<", "n", "r", "m", ">", "</s>"]
    backend.encode_special_tokens = True
    assert backend.encode(text).tokens == [*"<ctl>", "<usr>", *"<nrm></s>"]
    assert gguf_tokenizer.special_ids == {256}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert'; supported are 'gpt2'"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a zz"]}, "merges don't fit"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 256 tokens"),
        ({"tokens": [*BYTE_LEVEL_PIECES[:-1], "a"]}, "has 'a' 2 times"),
    ],
)
def test_contradicting_metadata_are_clear_errors(fields, message):
    with pytest.raises(ModelError, match=message) as caught:
        build_gguf_tokenizer(bpe_metadata("gpt-2", **fields), "x.gguf")
    assert "\n" not in str(caught.value)


# SentencePiece

LETTERS = ["▁", "a", "b", "é", "日"]
JOINT = ["ab", "▁a", "ba", "aba", "▁ab", "bb", "▁▁", "日b", "aa", "éé", "▁▁a"]
SPECIALS = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]


def sentencepiece_metadata(joint=JOINT, scores=None, extra=(), **fields):
    entries = [(token, kind, 0.0) for token, kind in SPECIALS]
    entries += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    entries += [(token, NORMAL, -1000.0 - i) for i, token in enumerate(LETTERS)]
    scores = scores or [-float(i) for i in range(len(joint))]
    entries += [(token, NORMAL, score) for token, score in zip(joint, scores, strict=True)]
    entries += [(token, kind, -1000.0) for token, kind in extra]
    tokens, types, values = map(list, zip(*entries, strict=True))
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": values, "add_space_prefix": False}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | fields).items()}


def reference_ids(metadata, text):
    """SentencePiece's BPE as its paper and code tell it: join the best-scored neighbours, the leftmost first."""
    tokens, types, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    score_of = {token: scores[i] for i, token in enumerate(tokens) if types[i] == NORMAL}
    symbols = list(text.replace(" ", "▁"))
    while True:
        joints = [(-score_of[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score_of]
        if not joints:
            break
        _, i = min(joints)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = []
    for symbol in symbols:
        pieces = [symbol] if symbol in score_of else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        ids += [tokens.index(piece) for piece in pieces]
    return ids


@given(st.text("ab é日▁🙂\n", max_size=40), st.permutations(range(len(JOINT))))
def test_sentencepiece_joins_by_score(text, order):
    metadata = sentencepiece_metadata(scores=[-float(rank) for rank in order])
    backend = build_gguf_tokenizer(metadata, "x").backend
    assert backend.encode(text, add_special_tokens=False).ids == reference_ids(metadata, text)


def test_the_space_prefix_comes_before_each_stretch_of_text():
    def tokens(**fields):
        metadata = sentencepiece_metadata(extra=[("<usr>", USER_DEFINED)], **fields)
        return build_gguf_tokenizer(metadata, "x").backend.encode("ab<usr>b</s> a").tokens

    assert tokens() == ["<s>", "ab", "<usr>", "b", "</s>", "▁a"]
    assert tokens(add_space_prefix=True) == ["<s>", "▁ab", "<usr>", "▁", "b", "</s>", "▁▁a"]
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.add_space_prefix"]
    assert build_gguf_tokenizer(metadata, "x").backend.encode("ab").tokens == ["<s>", "▁ab"]


def test_text_never_becomes_a_control_or_byte_token():
    tokenizer = build_gguf_tokenizer(sentencepiece_metadata(joint=["<0", "x0", "0A", "A>", "</", "s>"]), "x")
    tokenizer.backend.encode_special_tokens = True
    ids = tokenizer.backend.encode("<0x0A></s>", add_special_tokens=False).ids
    assert not {1, 2, 3 + 0x0A} & set(ids)


def test_scores_without_an_order_are_refused():
    with pytest.raises(ModelError, match=r"11 of 11 tokens have the same score -5\.0 .*tokenizer\.model"):
        build_gguf_tokenizer(sentencepiece_metadata(scores=[-5.0] * len(JOINT)), "x.gguf")
    with pytest.raises(ModelError, match="scores is 3 long; it must have"):
        build_gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0] * 3}, "x.gguf")
