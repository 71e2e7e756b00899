import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.tokenizer import Tokenizer, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = ["", "hi", " the  tie\n", "a</s>b<s>", "<s>hi", "<s><s>", "né 🙂 안녕", "▁the", "</s>"]


def byte_level_backend(specials=("<s>", "</s>", "<pad>")):
    merges = [("h", "i"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    vocab = {piece: i for i, piece in enumerate([*ALPHABET, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def write_folder(folder, backend=None, config=None, **files):
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return ModelFiles("org/model", None, folder, "hub")


# Ids: BOS and special tokens


def test_ids_are_those_of_transformers(tmp_path, sentencepiece_backend):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, backend in (("sp", sentencepiece_backend), ("bl", byte_level_backend())):
        tokenizer = load_tokenizer(write_folder(tmp_path / name, backend, config), 300)
        oracle = AutoTokenizer.from_pretrained(tmp_path / name)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == oracle.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids).strip() == oracle.decode(ids, skip_special_tokens=True).strip()
            if not text.startswith("<s>"):  # transformers doubles BOS
                assert tokenizer.encode(text) == oracle.encode(text)
        assert tokenizer.special_ids >= set(oracle.all_special_ids)
        assert tokenizer.eos_token_ids == (oracle.eos_token_id,)
        assert tokenizer.bos_token_id == oracle.bos_token_id


def test_bos_is_added_once(sentencepiece_tokenizer):
    encode = sentencepiece_tokenizer.encode
    assert sentencepiece_tokenizer.adds_bos
    assert encode("the")[:1] == [1] and encode("the") == encode("<s>the") == [1, *encode("the", False)]
    assert encode("<s><s>the")[:3] == [1, 1, encode("the")[1]]
    assert encode("") == encode("<s>") == [1]
    assert encode("", add_special_tokens=False) == []
    assert encode("a</s>b").count(2) == 1


def test_an_empty_text_has_no_ids_without_bos(demo_tokenizer):
    assert demo_tokenizer.encode("") == []
    assert demo_tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, 6004, 2]


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        ({"add_bos_token": True}, "hi", ["<s>", "hi"]),
        ({"add_bos_token": True}, "<s>hi", ["<s>", "hi"]),
        ({"add_bos_token": False}, "hi", ["hi"]),
        ({"add_bos_token": True, "add_eos_token": True}, "hi", ["<s>", "hi", "</s>"]),
        ({"add_bos_token": True, "bos_token": None}, "hi", ["hi"]),
        ({}, "hi", ["<s>", "hi"]),
    ],
)
def test_the_configuration_decides_on_bos(tmp_path, config, text, expected):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    roles = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, roles | config), 300)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)] == expected
    assert tokenizer.adds_bos == (expected[0] == "<s>")


def test_bos_is_found_without_a_configuration(tmp_path):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    tokenizer = load_tokenizer(write_folder(tmp_path, backend), 300)
    assert (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids) == (260, True, ())
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi") == [260, 256]


def test_special_text_is_parsed_only_when_asked_for(sentencepiece_tokenizer):
    parsed = sentencepiece_tokenizer.encode("a</s>b", add_special_tokens=False)
    plain = sentencepiece_tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=False)
    assert 2 in parsed and 2 not in plain
    assert sentencepiece_tokenizer.decode(plain) == " a</s>b"
    assert sentencepiece_tokenizer.encode("a</s>b", add_special_tokens=False) == parsed


def test_the_backend_has_no_state_that_other_threads_could_see(demo_tokenizer):
    text = "<|im_start|>x"
    assert demo_tokenizer.encode(text, parse_special=False) != demo_tokenizer.encode(text) == [1, 104]
    demo_tokenizer.encode(text, parse_special=False)
    assert not demo_tokenizer.backend.encode_special_tokens


def test_texts_that_cannot_be_encoded_are_errors(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend()), 262)
    with pytest.raises(ValueError, match="text: holds a lone surrogate"):
        tokenizer.encode("a\ud800b")
    assert tokenizer.encode("a</s>")[-1] == 261
    with pytest.raises(ValueError, match=r"token '<pad>' \(id 262\), but the model's vocabulary ends at 261"):
        tokenizer.encode("a<pad>")


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend), 300)
    assert len(tokenizer.encode("x y z w")) == 7


# What the configuration declares


def test_tokens_declared_outside_tokenizer_json(tmp_path):
    backend = byte_level_backend(specials=("<s>",))
    config = {
        "eos_token": "hi",  # an entry of the vocabulary that tokenizer.json doesn't have as special
        "pad_token": "<not there>",
        "added_tokens_decoder": {
            "262": {"content": "<tool>", "special": False},
            "261": {"content": "<|end|>", "special": True},
        },
    }
    files = write_folder(tmp_path, backend, config, special_tokens_map__json={"bos_token": "<s>", "eos_token": "x"})
    tokenizer = load_tokenizer(files, 300)
    assert tokenizer.special_ids == {256, 260, 261}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (256,))
    assert tokenizer.encode("a<|end|><tool>hi")[1:] == [261, 262, 256]
    assert tokenizer.decode([261, 262, 256]) == "<tool>"
    assert tokenizer.special_id_of == {"hi": 256, "<s>": 260, "<|end|>": 261}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "hi", "pad_token": "<not there>"}
    assert tokenizer.size == 263


@pytest.mark.parametrize(
    ("config", "files", "template"),
    [
        ({}, {}, None),
        ({"chat_template": "C"}, {}, "C"),
        ({"chat_template": "C"}, {"chat_template__json": {"chat_template": "J"}}, "J"),
        ({"chat_template": "C"}, {"chat_template__json": {"chat_template": "J"}, "chat_template__jinja": "é"}, "é"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, {}, "D"),
    ],
)
def test_where_the_chat_template_is(tmp_path, config, files, template):
    assert load_tokenizer(write_folder(tmp_path, byte_level_backend(), config, **files), 300).chat_template == template


# Bytes


def test_byte_level_tokens_give_their_bytes(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend()), 300)
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.token_bytes(i) for i in (259, 260, 263, 299, -1)] == [b" the", b"<s>", b"", b"", b""]
    assert tokenizer.decode([259, 260, 299], skip_special_tokens=False) == " the<s>"


def test_sentencepiece_tokens_give_their_bytes(sentencepiece_tokenizer):
    assert [sentencepiece_tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    by_token = {
        sentencepiece_tokenizer.backend.id_to_token(i): sentencepiece_tokenizer.token_bytes(i) for i in range(290)
    }
    assert (by_token["▁the"], by_token["▁▁"], by_token["é"], by_token["<s>"]) == (b" the", b"  ", "é".encode(), b"<s>")


def test_added_tokens_of_sentencepiece(sentencepiece_backend):
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend.to_str())
    backend.add_special_tokens(["<｜end▁of▁sentence｜>"])  # literal
    backend.add_tokens([tokenizers.AddedToken("▁▁▁", normalized=False)])  # Gemma's runs of spaces are such tokens
    tokenizer = Tokenizer(backend, vocab_size=400)
    first = backend.token_to_id("<｜end▁of▁sentence｜>")
    assert tokenizer.special_id_of["<｜end▁of▁sentence｜>"] == first
    assert [tokenizer.token_bytes(first).decode(), tokenizer.token_bytes(first + 1)] == [
        "<｜end▁of▁sentence｜>",
        b"   ",
    ]


def test_normalized_special_tokens_are_literal(sentencepiece_backend):
    """Vicuna has these; the tokenizers library then calls the token "▁<t>"."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<t>", normalized=True, special=True)])
    tokenizer = Tokenizer(backend, vocab_size=400)
    token_id = tokenizer.special_id_of["<t>"]
    assert tokenizer.encode("a <t>")[-1] == token_id and tokenizer.token_bytes(token_id) == b"<t>"


def test_a_token_with_a_role_is_special_even_if_added_as_plain(tmp_path):
    config = {"eos_token": "<x>", "added_tokens_decoder": {"261": {"content": "<x>", "special": False}}}
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend(specials=("<s>",)), config), 300)
    assert tokenizer.special_ids == {260, 261}
    assert tokenizer.decode(tokenizer.encode("hi<x>")) == "hi"


@pytest.mark.parametrize(("in_model", "in_decoder"), [(False, False), (True, False), (False, True)])
def test_byte_fallback_may_be_in_the_model_or_the_decoder(in_model, in_decoder):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "<0x41>": 1, "<0x4>": 2}, [], byte_fallback=in_model))
    replace = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback()]) if in_decoder else replace
    tokenizer = Tokenizer(backend, vocab_size=3)
    assert tokenizer.token_bytes(1) == (b"A" if in_model or in_decoder else b"<0x41>")
    assert tokenizer.token_bytes(2) == b"<0x4>"


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), None])
def test_metaspace_is_sentencepiece(decoder):
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<0x41>": 3}, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend, vocab_size=4)
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b" ", b"a", b" a", b"<0x41>"]  # no byte fallback here
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    assert Tokenizer(unigram, vocab_size=2).token_bytes(1) == b" a"


# Errors


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    word_piece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    word_piece.pre_tokenizer = pre_tokenizers.Whitespace()
    word_piece.decoder = decoders.WordPiece()
    with pytest.raises(
        ModelError, match="a WordPiece tokenizer with WordPiece, Whitespace is not supported; supported"
    ):
        load_tokenizer(write_folder(tmp_path, word_piece), 3)
    bpe = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(ModelError, match="a BPE tokenizer with no decoder is not supported"):
        Tokenizer(bpe, vocab_size=1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer, and tokenizer.json is needed; make it once .*AutoTokenizer.from_pretrained"),
        ({"tokenizer__model": "x"}, "has only tokenizer.model, and tokenizer.json is needed; make it once"),
        ({"vocab__json": {}, "merges__txt": ""}, "has only vocab.json, and"),
        ({"tokenizer__json": '{"a": '}, r"tokenizer\.json: can't be read: "),
    ],
)
def test_missing_and_corrupt_files_are_clear_errors(tmp_path, files, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(write_folder(tmp_path, **files), 300)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config__json": '{"a": '}, r"tokenizer_config\.json: can't be read: "),
        ({"tokenizer_config__json": [1]}, r"tokenizer_config\.json: holds a list instead of an object"),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "rag", "template": "R"}]}},
            "has the chat templates rag, but none is called 'default'",
        ),
    ],
)
def test_corrupt_configurations_are_clear_errors(tmp_path, files, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(write_folder(tmp_path, byte_level_backend(), **files), 300)


def test_a_conversion_by_transformers_is_read(tmp_path, sentencepiece_backend):
    """What `save_pretrained` writes, as the error for a missing tokenizer.json advises."""
    fast = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ bos_token }}"
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelFiles("m", None, tmp_path, "hub"), 320)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (1, (2,), "{{ bos_token }}")
    assert tokenizer.encode("the tie") == fast.encode("the tie")
