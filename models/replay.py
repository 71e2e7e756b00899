"""Small steps of a model under the CPU kernels, recorded once and replayed without Python between the kernels."""

from collections.abc import Callable

import torch

from specserve.models.cpu_kernels.binding import replay
from specserve.models.cpu_kernels.tape import Tape
from specserve.models.forward_batch import ForwardBatch
from specserve.models.kv_cache import KVCache

Rotaries = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Decode = Callable[[torch.Tensor, Rotaries, ForwardBatch, KVCache], torch.Tensor]

MAX_ROWS = 256  # more tokens take so long that Python doesn't count


class ReplayedDecode:
    """CausalLM.decode for batches of up to MAX_ROWS tokens; the same bits as without replay."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._kv_cache: KVCache | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether anything was replayed yet."""
        return self._kv_cache is not None

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether this batch is small."""
        return batch.input_ids.shape[0] <= MAX_ROWS

    def decode(
        self, embedded: torch.Tensor, rotaries: Rotaries, batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """See CausalLM.decode."""
        if self._kv_cache is not kv_cache:
            self._record(embedded, rotaries, batch, kv_cache)
        num_rows = embedded.shape[0]
        inputs = [embedded, *(x for rotary in rotaries for x in rotary)]
        for own, given in zip(self._inputs, inputs, strict=True):
            own[:num_rows] = given
        replay(self._tape, num_rows)
        return self._hidden[:num_rows]

    def _record(self, embedded: torch.Tensor, rotaries: Rotaries, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Run once over as many rows as there ever are; attention sees only those of the batch."""

        def at_most(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(MAX_ROWS, *x.shape[1:])

        own_embedded = at_most(embedded)
        own_rotaries = tuple((at_most(cos), at_most(sin)) for cos, sin in rotaries)
        self._inputs = [own_embedded, *(x for rotary in own_rotaries for x in rotary)]
        self._tape = Tape(MAX_ROWS)
        with self._tape:
            self._hidden = self._decode(own_embedded, own_rotaries, batch, kv_cache)
        self._kv_cache = kv_cache
