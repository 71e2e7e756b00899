"""What one request asks of the sampler; plain data, no torch."""

from dataclasses import dataclass

# Below this, dividing by the temperature says nothing that argmax doesn't.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request, validated and resolved (see SamplingParameters in proto/specserve.proto).

    The neutral value of each field switches it off. `seed` is always concrete, in [0, 2**64).
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    is_seeded: bool = True  # by the request itself
    min_new_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()  # can't be chosen before min_new_tokens
    logprobs: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without any draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p, min-p or typical-p is on."""
        return (self.top_k, self.top_p, self.min_p, self.typical_p) != (0, 1.0, 0.0, 1.0)

    @property
    def uses_penalties(self) -> bool:
        """Whether the history of tokens changes the distribution."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that came out of the sampler, or None for a row with non-finite logits.

    Log-probabilities (natural) are of the model's own distribution, before any processing, and are there only
    if asked for. `rank` is 1 for the likeliest token; `top` lists (id, logprob), likeliest first.
    """

    token_id: int | None
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
