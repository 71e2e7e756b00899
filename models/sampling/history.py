"""The tokens of one sequence as penalties see them."""

from collections.abc import Iterable

import numpy as np


class History:
    """Each token that was seen, in prompt or answer, once, with how often it was generated.

    It grows with the tokens, not with the vocabulary, so that a penalty costs as much as there is to penalise.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        prompt = dict.fromkeys(prompt_token_ids)
        self._index = {token_id: index for index, token_id in enumerate(prompt)}
        self._token_ids = np.fromiter(prompt, np.int64, len(prompt))
        self._counts = np.zeros(len(prompt), dtype=np.float32)
        self.add(output_token_ids)

    def add(self, token_ids: Iterable[int]) -> None:
        """Count generated tokens."""
        for token_id in token_ids:
            index = self._index.setdefault(token_id, len(self._index))
            if index == len(self._token_ids):
                # Twice the room: what is added one by one is copied only now and then.
                self._token_ids = np.concatenate([self._token_ids, np.zeros(index + 16, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(index + 16, dtype=np.float32)])
            self._token_ids[index] = token_id
            self._counts[index] += 1

    def seen(self, draft_prefix: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [n] and counts [n], with the drafts counted as if generated; they leave no trace."""
        size = len(self._index)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        if not draft_prefix:
            return token_ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token_id in draft_prefix:
            index = self._index.get(token_id)
            if index is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[index] += 1
        more = np.fromiter(new.values(), np.float32, len(new))
        return np.concatenate([token_ids, np.fromiter(new, np.int64, len(new))]), np.concatenate([counts, more])
