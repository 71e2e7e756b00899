"""Text to token ids and back, for models in Hub format and in GGUF."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from specserve.models.gguf_metadata import read_gguf_metadata
from specserve.models.gguf_tokenizer import build_gguf_tokenizer, set_bos_eos
from specserve.models.hub import ModelError, ModelFiles

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the bytes that each id stands for.

    BOS: `encode` adds it where the model's tokenizer does, and not a second time to a text that begins with it
    ("<s>hi" and "hi" give the same ids). Generate and Tokenize both go through `encode`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        special_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        """Wrap `backend`; its truncation and padding are switched off.

        `vocab_size` is the model's; ids from there on are refused by `encode`. `special_tokens` are the template
        variables "bos_token", "eos_token", … Raises ModelError for a kind of tokenizer whose bytes aren't known.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = vocab_size
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(special_ids).union(i for i, token in added.items() if token.special)
        self.eos_token_ids = eos_token_ids
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        prefix = _added_prefix(backend)
        if bos_token_id is None and len(prefix) == 1:
            bos_token_id = prefix[0]
        self.bos_token_id = bos_token_id
        self.adds_bos = bos_token_id is not None and prefix == [bos_token_id]
        self._piece_bytes = _piece_decoder(backend, source)
        # Special tokens are written as they are, and so are added ones, except that SentencePiece has its ▁ in them.
        # (`id_to_token` gives added tokens normalized, with that ▁ before them.)
        literal = added if self._piece_bytes is _byte_level_bytes else self.special_ids
        texts = ((i, added[i].content if i in added else backend.id_to_token(i)) for i in sorted(literal))
        self._literal = {i: text for i, text in texts if text is not None}
        self._bytes_of: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """Number of tokens that have an entry; the model's vocabulary may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_id_of(self) -> dict[str, int]:
        """Id of each special token, by its text."""
        return {text: i for i, text in self._literal.items() if i in self.special_ids}

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: whether BOS (and EOS, for a tokenizer that adds it) go around the text.
        `parse_special`: whether special tokens written in the text become their ids, as in Hugging Face and TGI; if
        not, they are split like any other text.

        Raises ValueError for a text with lone surrogates, or with a token that the model has no embedding for.
        """
        backend = self.backend if parse_special else self._plain_backend
        try:
            # Unlike `encode` of the library, this lets other threads run: a prompt of megabytes takes seconds.
            ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("text: holds a lone surrogate, which is no character; send valid Unicode") from error
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        if ids and max(ids) >= self.vocab_size:
            outside = next(i for i in ids if i >= self.vocab_size)
            raise ValueError(
                f"text: holds the token {self.backend.id_to_token(outside)!r} (id {outside}), but the model's "
                f"vocabulary ends at {self.vocab_size - 1}; leave it out"
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without clean-up of spaces; bytes that are no whole character become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes (UTF-8, perhaps a part of a character) that a token adds to the text.

        Special tokens stand for their own text. Ids without an entry (a padded vocabulary) give nothing.
        """
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        piece = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if piece is None else self._piece_bytes(piece)

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The token that stands for each byte string; special tokens and ids without an entry are left out.

        Where several do (a literal and the byte that stands in for what has none), it is the one that `encode` gives.
        """
        ids: dict[bytes, list[int]] = {}
        for token_id in range(min(self.vocab_size, self.size)):
            text = self.token_bytes(token_id)
            if text and token_id not in self.special_ids:
                ids.setdefault(text, []).append(token_id)
        return {text: self._emitted(text, some) if len(some) > 1 else some[0] for text, some in ids.items()}

    def _emitted(self, text: bytes, candidates: list[int]) -> int:
        """Which of the tokens with these bytes is the one that appears in encoded text."""
        piece = text.decode(errors="replace")
        for context in ("", "\n", "a"):  # some put a space before what stands first
            found = [i for i in self.encode(context + piece, False, False) if i in candidates]
            if found:
                return found[-1]
        return candidates[-1]

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy: the switch is state of the backend, and other threads may be encoding.
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend


def load_tokenizer(files: ModelFiles, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of a model whose configuration has `vocab_size` tokens.

    Raises ModelError if files are missing or corrupt, or the kind of tokenizer is not supported.
    """
    return _load_gguf(files, vocab_size) if files.kind == "gguf" else _load_hub(files, vocab_size)


def _load_gguf(files: ModelFiles, vocab_size: int) -> Tokenizer:
    metadata = read_gguf_metadata(files.path)
    gguf = build_gguf_tokenizer(metadata, str(files.path))
    tokens = {name: gguf.backend.id_to_token(i) for name, i in gguf.role_ids.items()}
    return Tokenizer(
        gguf.backend,
        vocab_size=vocab_size,
        special_ids=gguf.special_ids,
        bos_token_id=gguf.bos_token_id,
        eos_token_ids=gguf.eos_token_ids,
        special_tokens={name: token for name, token in tokens.items() if token is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
        source=str(files.path),
    )


def _load_hub(files: ModelFiles, vocab_size: int) -> Tokenizer:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json") if (files.path / name).is_file()]
        found = f"only {others[0]}" if others else "no tokenizer"
        raise ModelError(
            f"{files.path}: has {found}, and tokenizer.json is needed; make it once where transformers is installed: "
            f"AutoTokenizer.from_pretrained({files.model_id!r}).save_pretrained(DIRECTORY)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: can't be read: {error}") from error
    config = _read_json(files.path / "tokenizer_config.json")
    roles = {**_token_texts(_read_json(files.path / "special_tokens_map.json")), **_token_texts(config)}
    _add_declared_tokens(backend, config, roles)
    ids = {name: i for name, token in roles.items() if (i := backend.token_to_id(token)) is not None}
    if "add_bos_token" in config or "add_eos_token" in config:  # as transformers: they replace the post-processor
        bos_id = ids.get("bos_token") if config.get("add_bos_token") else None
        set_bos_eos(backend, bos_id, ids.get("eos_token") if config.get("add_eos_token") else None)
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        special_ids=ids.values(),
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=(ids["eos_token"],) if "eos_token" in ids else (),
        special_tokens=roles,
        chat_template=_chat_template(files.path, config),
        source=str(path),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__} instead of an object")
    return value


def _token_texts(config: dict[str, Any]) -> dict[str, str]:
    """Texts of the tokens with a role, each given as a string or as an object with `content`."""
    values = ((name, config.get(name)) for name in _ROLES)
    texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in values)
    return {name: text for name, text in texts if isinstance(text, str) and text}


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], roles: dict[str, str]) -> None:
    """Make tokens that only tokenizer_config.json declares as added or special so in the backend."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for token_id in sorted(declared, key=int):
        fields = declared[token_id]
        if fields["content"] in known:
            continue
        flags = {name: bool(fields.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        backend.add_tokens(
            [tokenizers.AddedToken(fields["content"], normalized=fields.get("normalized", True), **flags)]
        )
        known.add(fields["content"])
    backend.add_special_tokens(
        [
            token
            for token in dict.fromkeys(roles.values())
            if backend.token_to_id(token) is not None and token not in known
        ]
    )


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template in chat_template.jinja, chat_template.json or tokenizer_config.json, whichever is there first."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" in named:
        return str(named["default"])
    raise ModelError(f"{path}: has the chat templates {', '.join(sorted(named))}, but none is called 'default'")


def _added_prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """Ids that the backend puts before a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    return [token_id for token_id, _ in itertools.takewhile(lambda pair: pair[1], marked)]


def _piece_decoder(backend: tokenizers.Tokenizer, source: str) -> Callable[[str], bytes]:
    """How an entry of the vocabulary becomes bytes."""
    components = [*_components(backend.decoder, "decoders"), *_components(backend.pre_tokenizer, "pretokenizers")]
    kinds = [component["type"] for component in components]
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    model = backend.model
    space = next((s for component in components if (s := _space_symbol(component))), None)
    if space is not None:
        return _SentencePieceBytes(space, falls_back="ByteFallback" in kinds or getattr(model, "byte_fallback", False))
    raise ModelError(
        f"{source}: a {type(model).__name__} tokenizer with {', '.join(dict.fromkeys(kinds)) or 'no decoder'} is not "
        "supported; supported are byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece (Llama 2, Mistral, Gemma)"
    )


def _components(component: Any, parts: str) -> list[dict[str, Any]]:
    """The configurations of a decoder or pre-tokenizer and, of a sequence, of its parts."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[parts] if state["type"] == "Sequence" else [state]


def _space_symbol(component: dict[str, Any]) -> str | None:
    """The character that stands for a space, if this component says so."""
    if component["type"] == "Metaspace":
        return str(component["replacement"])
    if component["type"] == "Replace" and component.get("content") == " ":
        symbol = component["pattern"].get("String")
        return None if symbol is None else str(symbol)
    return None


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:  # an entry that was never written in the alphabet
        return piece.encode()


class _SentencePieceBytes:
    _BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

    def __init__(self, space: str, falls_back: bool) -> None:
        self.space = space
        self.falls_back = falls_back

    def __call__(self, piece: str) -> bytes:
        if self.falls_back and (byte := self._BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return piece.replace(self.space, " ").encode()
