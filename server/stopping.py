"""Where a generation ends, and what of its text can be shown before that is known."""

from bisect import bisect_right
from dataclasses import dataclass

from specserve.models.tokenizer import Tokenizer
from specserve.server.detokenizer import Detokenizer
from specserve.server.engine.sequence import FinishReason, TextPiece


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When one request ends (see StoppingParameters in proto/specserve.proto).

    `eos_token_ids` is empty for a request that ignores EOS. A token before the `min_new_tokens`-th ends nothing,
    neither by its id nor by a stop string that it completes.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    include_stop: bool = True
    skip_special_tokens: bool = True


class StopTextStream:
    """Text of one generation (the TextStream of server/engine/sequence.py).

    A token can end it in several ways; the first of these counts: EOS, a stop token id, a stop string, the limit.

    - EOS: its own text is kept only if special tokens are kept (`skip_special_tokens` false) and `include_stop`.
    - A stop token id: its own text is kept if `include_stop` (a special token has none while these are skipped).
    - A stop string: found in the text as returned, also across and within tokens. The match with the smallest end
      counts, of those the longest; the text is cut at its end, or with `include_stop` false at its start. A stop
      string that is the text of a special token also stops on that token's id while special tokens are skipped.

    The end of the text that is the beginning of a stop string is held back until it can't become one any more.
    `TextPiece.token_text` is the token's own text, before a stop string cuts it.
    """

    def __init__(self, tokenizer: Tokenizer, params: StoppingParams) -> None:
        if params.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {params.max_new_tokens}; it must be at least 1")
        if "" in params.stop_strings:
            raise ValueError("stop holds an empty string; give at least one character")
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._num_tokens = 0
        self._finished = False
        self._held = ""  # a proper prefix of some stop string
        self._stops = sorted(set(params.stop_strings))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._stop_of_id: dict[int, str] = {}
        if params.skip_special_tokens:
            known = tokenizer.special_id_of if self._stops else {}
            self._stop_of_id = {known[stop]: stop for stop in self._stops if stop in known}

    def push(self, token_id: int) -> TextPiece:
        """Take the next generated token. Raises ValueError after the end."""
        if self._finished:
            raise ValueError(f"token {token_id} came after the end of its generation")
        self._num_tokens += 1
        params = self._params
        may_stop = self._num_tokens >= params.min_new_tokens
        if may_stop and token_id in params.eos_token_ids:
            keeps = params.include_stop and not params.skip_special_tokens
            return self._finish(token_id if keeps else None, FinishReason.EOS_TOKEN)
        if may_stop and token_id in params.stop_token_ids:
            return self._finish(token_id if params.include_stop else None, FinishReason.STOP_TOKEN, token_id)
        if may_stop and token_id in self._stop_of_id:
            return self._finish(None, FinishReason.STOP_STRING, stop_string=self._stop_of_id[token_id])

        token_text = self._detokenizer.push(token_id)
        text = self._held + token_text
        if may_stop and token_text and (match := self._find_stop(text)):
            start, stop = match
            self._finished = True
            shown = text[: start + len(stop) if params.include_stop else start]
            return TextPiece(token_text, shown, FinishReason.STOP_STRING, stop_string=stop)
        if self._num_tokens >= params.max_new_tokens:
            self._finished = True
            rest = self._detokenizer.flush()
            return TextPiece(token_text + rest, text + rest, FinishReason.LENGTH)
        if token_text:
            cut = self._start_of_held(text)
            self._held = text[cut:]
            return TextPiece(token_text, text[:cut])
        return TextPiece("", "")

    def _finish(
        self,
        kept_id: int | None,
        reason: FinishReason,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> TextPiece:
        """End by a token's id; `kept_id` if its text belongs to the answer."""
        self._finished = True
        token_text = "" if kept_id is None else self._detokenizer.push(kept_id)
        token_text += self._detokenizer.flush()
        return TextPiece(token_text, self._held + token_text, reason, stop_string, stop_token_id)

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first within the new part of `text`, after the held one."""
        best: tuple[int, int, str] | None = None  # end, start, stop string: of equal ends the smallest start wins
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _start_of_held(self, text: str) -> int:
        """Start of the longest end of `text` that is a proper prefix of a stop string; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                # In sorted order the strings with this prefix follow it directly.
                place = bisect_right(self._stops, tail)
                if place < len(self._stops) and self._stops[place].startswith(tail):
                    return start
        return len(text)
