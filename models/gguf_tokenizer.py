"""Builds a `tokenizers.Tokenizer` from the tokenizer metadata of a GGUF file.

What the metadata mean (pre-tokenizer names and their patterns, defaults, token types) follows llama.cpp's
src/llama-vocab.cpp, as it is the program that these files are written for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specserve.models.hub import ModelError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Patterns that split a text one after the other, each within the pieces of those before it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise


_PRE_TOKENIZERS: tuple[tuple[str, _PreTokenizer], ...] = (
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling", _PreTokenizer((_GPT2,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        _PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe glm4", _PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", _PreTokenizer((_QWEN2,))),
    ("qwen35", _PreTokenizer((_QWEN35,))),
    ("tekken", _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2", _PreTokenizer((_GPT4O,))),
    (
        "deepseek-coder",
        _PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm",
        _PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ),
    ("falcon", _PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)
_PRE_TOKENIZER_BY_NAME = {name: pre for names, pre in _PRE_TOKENIZERS for name in names.split()}

# Ends of a turn that files without `eot_token_id` may have among their control tokens.
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

# Added tokens with these texts are parsed as control tokens are, even where a file has them as user-defined.
_ENDS = (*_END_OF_TURN, "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOS]", "<｜end▁of▁sentence｜>")


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer and the ids that its file gives special roles."""

    backend: Tokenizer
    special_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    role_ids: dict[str, int]  # "bos_token", "eos_token", "unk_token", "pad_token" where the file has them


def build_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    `metadata` is that of models/gguf_metadata.py; `source` names the file in errors. Control and unknown tokens are
    special tokens, user-defined ones plain added tokens. Raises ModelError for kinds and pre-tokenizers that aren't
    known, and for metadata that contradict each other.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{source}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE)"
        )
    vocabulary = _Vocabulary.read(metadata, source)
    is_bpe = kind == "gpt2"
    backend, adds_bos = (_byte_level_bpe if is_bpe else _sentence_piece)(metadata, vocabulary, source)
    adds_bos = bool(metadata.get(_PREFIX + "add_bos_token", adds_bos))
    adds_eos = bool(metadata.get(_PREFIX + "add_eos_token", False))

    defaults = {} if is_bpe else {"bos_token": 1, "eos_token": 2, "unk_token": 0}
    roles = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        role_id = metadata.get(f"{_PREFIX}{key}_token_id", defaults.get(f"{name}_token"))
        if role_id is not None and 0 <= role_id < len(vocabulary.tokens):
            roles[f"{name}_token"] = role_id
    eos_ids = _eos_ids(metadata, vocabulary, roles)
    special_ids = frozenset(vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)).union(
        eos_ids, (roles[name] for name in ("bos_token", "unk_token") if name in roles)
    )

    added = ((i, vocabulary.tokens[i]) for i in sorted(special_ids.union(vocabulary.ids_of(TokenType.USER_DEFINED))))
    backend.add_tokens(
        [AddedToken(text, normalized=False, special=i in special_ids or text in _ENDS) for i, text in added if text]
    )
    set_bos_eos(
        backend,
        roles.get("bos_token") if adds_bos else None,
        roles.get("eos_token") if adds_eos else None,
    )
    return GgufTokenizer(backend, special_ids, roles.get("bos_token"), eos_ids, roles)


def set_bos_eos(backend: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `backend` put these ids around every text that is encoded with special tokens."""
    pieces, special = ["$A"], []
    if bos_id is not None:
        pieces.insert(0, "[BOS]")
        special.append({"id": "[BOS]", "ids": [bos_id], "tokens": [backend.id_to_token(bos_id)]})
    if eos_id is not None:
        pieces.append("[EOS]")
        special.append({"id": "[EOS]", "ids": [eos_id], "tokens": [backend.id_to_token(eos_id)]})
    backend.post_processor = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=special)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    id_of: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], source: str) -> "_Vocabulary":
        tokens = metadata.get(_PREFIX + "tokens")
        if not tokens:
            raise ModelError(f"{source}: tokenizer.ggml.tokens is missing; convert the model with its tokenizer")
        types = metadata.get(_PREFIX + "token_type", [TokenType.NORMAL] * len(tokens))
        if len(types) != len(tokens):
            raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        id_of = {token: i for i, token in enumerate(tokens) if token}
        if len(id_of) + tokens.count("") != len(tokens):
            token, count = Counter(token for token in tokens if token).most_common(1)[0]
            raise ModelError(f"{source}: tokenizer.ggml.tokens has {token!r} {count} times; each token must be unique")
        return cls(tokens, types, id_of)

    def ids_of(self, *types: TokenType) -> Iterator[int]:
        return (i for i, kind in enumerate(self.types) if kind in types)


def _eos_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary, roles: dict[str, int]) -> tuple[int, ...]:
    """Ids that end a text or a turn, in ascending order."""
    ids = {roles[name] for name in ("eos_token",) if name in roles}
    named = [metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eot", "eom")]
    ids.update(i for i in named if i is not None and 0 <= i < len(vocabulary.tokens))
    if named[0] is None:
        candidates = (vocabulary.id_of.get(token) for token in _END_OF_TURN)
        ids.update(i for i in candidates if i is not None and vocabulary.types[i] == TokenType.CONTROL)
    return tuple(sorted(ids))


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary, source: str) -> tuple[Tokenizer, bool]:
    """Backend of the kind "gpt2", and whether it adds BOS by default."""
    name = metadata.get(_PREFIX + "pre")
    pre = _PRE_TOKENIZER_BY_NAME.get(str(name))
    if name is None or pre is None:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre is {name!r}, and guessing would give wrong token ids; known are "
            + ", ".join(sorted(_PRE_TOKENIZER_BY_NAME))
        )
    merges = metadata.get(_PREFIX + "merges")
    if merges is None:
        raise ModelError(f"{source}: tokenizer.ggml.merges is missing")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Tokenizer(_bpe(vocabulary, pairs, source, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, source: str) -> tuple[Tokenizer, bool]:
    """Backend of the kind "llama", and whether it adds BOS by default.

    SentencePiece joins, again and again, the neighbours whose joint piece has the highest score, the leftmost
    first. That is BPE with one merge for every way to cut a piece in two pieces, ordered by the piece's score.
    """
    scores = metadata.get(_PREFIX + "scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        found = "missing" if scores is None else f"{len(scores)} long"
        raise ModelError(f"{source}: tokenizer.ggml.scores is {found}; it must have {len(vocabulary.tokens)} entries")
    unknown_id = metadata.get(_PREFIX + "unknown_token_id", 0)
    model = _bpe(
        vocabulary,
        _merges_by_score(vocabulary, scores, source),
        source,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.tokens[unknown_id] if 0 <= unknown_id < len(vocabulary.tokens) else None,
    )
    backend = Tokenizer(model)
    adds_prefix = bool(metadata.get(_PREFIX + "add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if adds_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend, True


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float], source: str) -> list[tuple[str, str]]:
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    score_of = {token: scores[i] for token, i in vocabulary.id_of.items() if vocabulary.types[i] in mergeable}
    joint = sorted((token for token in score_of if len(token) > 1), key=score_of.__getitem__, reverse=True)
    score, count = Counter(score_of[token] for token in joint).most_common(1)[0] if joint else (0.0, 0)
    if count > 1 and 2 * count > len(joint):
        raise ModelError(
            f"{source}: {count} of {len(joint)} tokens have the same score {score} in tokenizer.ggml.scores, so the "
            "order of merges is lost; convert the model from its original tokenizer.model"
        )
    merges = []
    for token in joint:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in score_of and right in score_of:
                merges.append((left, right))
    return merges


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], source: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.id_of, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source}: tokenizer.ggml.merges don't fit tokenizer.ggml.tokens: {error}") from error
