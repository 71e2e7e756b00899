"""Generated token ids to text, piece by piece."""

import codecs

from specserve.models.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence of ids incrementally.

    The pieces of `push` and the rest of `flush`, joined, are what `Tokenizer.decode` gives for all ids at once. As
    it works on bytes, a character spread over tokens comes whole, with the token that completes it, and leading
    spaces survive.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" for a skipped special token and within a character."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for a character that stays incomplete, else ""; call it once, at the end."""
        return self._decoder.decode(b"", final=True)
