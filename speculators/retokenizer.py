"""The text of a request, told in the tokens of another vocabulary, as it grows.

Only the last few tokens are tokenized again when text is added, together with it: a tokenizer looks no further back
than a word or so. What lies before is kept wherever both agree on a place where a token begins.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from specserve.models.tokenizer import Tokenizer

WINDOW = 8  # tokens that are tokenized again
MAX_WINDOW = 64  # or so many where no common place is found (a byte without a token, say)


class Retokenizer:
    """Bytes -> tokens of one vocabulary; the same for all requests."""

    def __init__(self, tokenizer: Tokenizer, ids_by_bytes: Mapping[bytes, int]) -> None:
        """ids_by_bytes: for the bytes that are no part of a character."""
        self._tokenizer, self._ids_by_bytes = tokenizer, ids_by_bytes
        # SentencePiece puts a space before what it takes for the beginning of a text.
        self._dummy_prefix = b"".join(map(self.token_bytes, self._encode(b"a") or [])).removesuffix(b"a")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._tokenizer.token_bytes(token_id)

    def extend(self, token_ids: Sequence[int], added: bytes, *, first: int = 0) -> list[int]:
        """The tokens of a text with `added` behind it; those before index `first` stay as they are.

        What the tokenizer refuses (a token without an embedding) is left out.
        """
        window = WINDOW
        while True:
            start = max(first, len(token_ids) - window)
            pieces = [self.token_bytes(token_id) for token_id in token_ids[start:]]
            text = b"".join(pieces) + added
            if start == first:
                text = text.removeprefix(self._dummy_prefix if pieces else b"")
            new_ids = self._encode(text)
            if new_ids is None:
                return list(token_ids)
            if start == first:
                return [*token_ids[:start], *new_ids]
            new_begins = self._begins(new_ids, text)
            for index, distance in enumerate(_distances_from_end(pieces, len(added))[1:], 1):
                if new_begins.get(distance):
                    return [*token_ids[: start + index], *new_ids[new_begins[distance] :]]
            if window >= MAX_WINDOW:
                return [*token_ids, *self._encode_alone(added)]
            window *= 2

    def continuation(self, token_ids: Sequence[int], added: bytes) -> list[int]:
        """Tokens of `added` behind others, which stay, even where the tokenizer would join what meets there.

        None if it can't be told what `added` is there, because the tokenizer puts a space before it.
        """
        text = b"".join(map(self.token_bytes, token_ids)) + added
        new_ids = self._encode(text) or []
        begin = self._begins(new_ids, text).get(len(added))
        if begin is not None:
            return new_ids[begin:]
        alone = self._encode_alone(added)
        return alone if b"".join(map(self.token_bytes, alone)) == added else []

    def _encode_alone(self, added: bytes) -> list[int]:
        """Tokens of a text that continues another; without a made-up space, if that is a token of its own."""
        token_ids = self._encode(added) or []
        return token_ids[1:] if token_ids and self.token_bytes(token_ids[0]) == self._dummy_prefix else token_ids

    def _begins(self, token_ids: Sequence[int], text: bytes) -> dict[int, int]:
        """Distance from the end of the text -> index of the token that begins there.

        Only as far as they spell the text: SentencePiece makes up a space here and there.
        """
        pieces = [self.token_bytes(token_id) for token_id in token_ids]
        begins: dict[int, int] = {}
        for index, distance in reversed(list(enumerate(_distances_from_end(pieces, 0)))):
            if distance > len(text) or not text[: len(text) - distance + len(pieces[index])].endswith(pieces[index]):
                break
            begins[distance] = index
        return begins

    def _encode(self, text: bytes) -> list[int] | None:
        """Tokens of bytes; what is no character goes as single bytes, or not at all if they have no tokens.

        None if the tokenizer refuses the text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        token_ids: list[int] = []
        while text:
            try:
                valid, rest = decoder.decode(text), decoder.getstate()[0]
                invalid, text = rest, b""
            except UnicodeDecodeError as error:
                valid, invalid, text = text[: error.start].decode(), text[error.start : error.end], text[error.end :]
            decoder.reset()
            try:
                token_ids += self._tokenizer.encode(valid, False, False) if valid else []
            except ValueError:
                return None
            single = (self._ids_by_bytes.get(bytes([byte])) for byte in invalid)
            token_ids += [token_id for token_id in single if token_id is not None]
        return token_ids


def _distances_from_end(pieces: Iterable[bytes], behind: int) -> list[int]:
    """How far from the end of the text each piece begins, with `behind` more bytes after them."""
    distances, distance = [], behind
    for piece in reversed(list(pieces)):
        distance += len(piece)
        distances.append(distance)
    return distances[::-1]
