"""From raw logits to the distribution that is sampled, in the order of Hugging Face `generate`.

repetition penalty, frequency and presence penalties, min_new_tokens; then temperature, top-k, top-p, min-p,
typical-p. Each exists once, on rows of a batch at a time. The truncations work on tokens sorted by logit; as a
rule the HEAD likeliest hold all survivors, and only the rows for which they don't are sorted whole.
"""

from dataclasses import dataclass

import torch

HEAD = 1024


def apply_penalties(
    logits: torch.Tensor,  # [S, V], changed in place
    seen: torch.Tensor,  # [S, V] bool: in prompt or answer
    counts: torch.Tensor,  # [S, V] times generated
    repetition: torch.Tensor,  # [S, 1]
    frequency: torch.Tensor,  # [S, 1]
    presence: torch.Tensor,  # [S, 1]
) -> None:
    """Repetition as in CTRL (arXiv 1909.05858) over prompt and answer; the others as in the OpenAI API."""
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    torch.where(seen, penalised, logits, out=logits)
    logits -= frequency * counts + presence * (counts > 0)


@dataclass(slots=True)
class Truncation:
    """Parameters of S rows, each [S, 1]; top_k 0 (and less than V) and the others at 1 (min_p: 0) are off."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor

    def rows(self, indices: torch.Tensor) -> "Truncation":
        """The parameters of some rows."""
        return Truncation(self.top_k[indices], self.top_p[indices], self.min_p[indices], self.typical_p[indices])


def truncate(logits: torch.Tensor, params: Truncation) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits [S, V] after temperature -> groups of (row indices [s], logits [s, n], token ids [s, n]).

    Every row is in one group. Tokens that don't survive have -inf; a row's survivors are the same whichever
    group it is in.
    """
    vocab_size = logits.shape[1]
    log_z = logits.logsumexp(dim=1, keepdim=True)
    values, token_ids = logits.topk(min(HEAD, vocab_size), dim=1)
    kept, is_whole = _survivors(values, log_z, params, is_all=vocab_size <= HEAD)
    groups = []
    head_rows = is_whole.nonzero()[:, 0]
    if len(head_rows):
        groups.append((head_rows, kept[head_rows], token_ids[head_rows]))
    other_rows = (~is_whole).nonzero()[:, 0]
    if len(other_rows):
        values, token_ids = logits[other_rows].sort(dim=1, descending=True, stable=True)
        kept, _ = _survivors(values, log_z[other_rows], params.rows(other_rows), is_all=True)
        groups.append((other_rows, kept, token_ids))
    return groups


def _survivors(
    values: torch.Tensor, log_z: torch.Tensor, params: Truncation, *, is_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted logits [S, n], the likeliest of each row -> (the same with -inf where truncated, is_whole [S]).

    is_whole says for each row whether all its survivors are among the n.
    """
    num_tokens = values.shape[1]
    # Top-k; ties with the k-th stay, as in Hugging Face's.
    uses_top_k = (params.top_k > 0) & (params.top_k <= num_tokens)
    kth = values.gather(1, (params.top_k - 1).clamp(0, num_tokens - 1))
    values = values.masked_fill(uses_top_k & (values < kth), -torch.inf)
    is_cut = uses_top_k & (values[:, -1:] == -torch.inf)  # nothing behind the n tokens survives
    # The steps that follow need the mass of what top-k left, so they can only be judged here if it was cut here.
    is_judged_here = (params.top_k == 0) | is_cut
    log_z = torch.where(uses_top_k, values.logsumexp(1, keepdim=True), log_z)
    # Top-p: a token goes if those before it have the mass already. The first one stays.
    mass_before = _mass_before((values - log_z).exp())
    uses_top_p = params.top_p < 1
    values = values.masked_fill(uses_top_p & (mass_before >= params.top_p), -torch.inf)
    is_cut = is_cut | (uses_top_p & (values[:, -1:] == -torch.inf))
    # Min-p.
    uses_min_p = params.min_p > 0
    values = values.masked_fill(uses_min_p & (values - values[:, :1] < params.min_p.log()), -torch.inf)
    is_cut = is_cut | (uses_min_p & (values[:, -1:] == -torch.inf))
    # Locally typical (arXiv 2202.00666): keep the tokens whose surprise is closest to the entropy.
    uses_typical = params.typical_p < 1
    if bool(uses_typical.any()):
        values = torch.where(uses_typical, _typical(values, params.typical_p), values)
    return values, ((is_cut & is_judged_here) | is_all)[:, 0]


def _mass_before(probabilities: torch.Tensor) -> torch.Tensor:
    """[S, n] -> [S, n]: the sum of the probabilities before each."""
    before = probabilities.cumsum(dim=1).roll(1, dims=1)
    before[:, 0] = 0
    return before


def _typical(values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    log_p = values.log_softmax(dim=1)
    entropy = -(log_p.exp() * log_p).nansum(dim=1, keepdim=True)
    distance, order = (-log_p - entropy).abs().sort(dim=1, stable=True)
    cumulative = log_p.gather(1, order).exp().cumsum(dim=1)
    last = (cumulative < mass).sum(dim=1, keepdim=True).clamp(max=values.shape[1] - 1)
    return values.masked_fill((-log_p - entropy).abs() > distance.gather(1, last), -torch.inf)
