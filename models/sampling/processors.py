"""From raw logits to the distribution that is sampled, in the order of Hugging Face `generate`.

repetition penalty, frequency and presence penalties, min_new_tokens; then temperature, top-k, top-p, min-p,
typical-p. Each exists once, for rows of a batch at a time. The truncations work on tokens sorted by logit, ties by
id; as a rule the few likeliest hold all survivors, and only rows for which they don't are sorted further.
"""

from dataclasses import dataclass

import torch

from specserve.models.sampling.row_ops import row_mass, sorted_head

# So many of the likeliest tokens are looked at first, and next; then all.
HEADS = (256, 4096)


def penalise(
    logits: torch.Tensor,  # [n]
    counts: torch.Tensor,  # [n] times generated
    repetition: torch.Tensor,  # [n]
    frequency: torch.Tensor,  # [n]
    presence: torch.Tensor,  # [n]
) -> torch.Tensor:
    """Logits of tokens seen in prompt or answer, [n] -> [n].

    Repetition as in CTRL (arXiv 1909.05858), for all of them; frequency and presence, as in the OpenAI API, for
    those generated.
    """
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    return penalised - frequency * counts - presence * (counts > 0)


@dataclass(slots=True)
class Truncation:
    """Parameters of S rows, each [S, 1]. Off: top_k 0, top_p 1, min_p 0, typical_p 1; top_k is less than V."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor

    def rows(self, indices: torch.Tensor) -> "Truncation":
        """The parameters of some rows."""
        return Truncation(self.top_k[indices], self.top_p[indices], self.min_p[indices], self.typical_p[indices])


def truncate(logits: torch.Tensor, params: Truncation) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits [S, V] after temperature -> groups of (row indices [s], logits [s, n], token ids [s, n]).

    Every row is in one group. Tokens that don't survive have -inf; a row's survivors do not depend on the group.
    """
    vocab_size = logits.shape[1]
    mass = row_mass(logits)
    todo = torch.arange(len(logits), device=logits.device)
    groups = []
    for size in (*(head for head in HEADS if head < vocab_size), vocab_size):
        values, token_ids = sorted_head(logits[todo], size)
        kept, is_done = _survivors(values, mass[todo], params.rows(todo), is_all=size == vocab_size)
        done = is_done.nonzero()[:, 0]
        if len(done):
            groups.append((todo[done], kept[done], token_ids[done]))
        todo = todo[(~is_done).nonzero()[:, 0]]
        if not len(todo):
            break
    return groups


def _survivors(
    values: torch.Tensor, mass: torch.Tensor, params: Truncation, *, is_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The n largest logits [S, n], sorted, and the row_mass [S, 3] -> (-inf where truncated [S, n], is_done [S]).

    A row is done if these n hold all its survivors, and if they suffice to tell.
    """
    largest, total, weighted = (mass[:, column : column + 1] for column in range(3))
    # Closed: nothing behind the n tokens survives what was applied so far.
    is_closed = torch.full_like(params.top_k, is_all, dtype=torch.bool)
    # Top-k; ties with the k-th stay, as in Hugging Face's.
    uses_top_k = params.top_k > 0
    kth = values.gather(1, (params.top_k - 1).clamp(0, values.shape[1] - 1))
    values = values.masked_fill(uses_top_k & (values < kth), -torch.inf)
    is_closed = is_closed | (uses_top_k & (values[:, -1:] == -torch.inf))
    knows_mass = is_closed | ~uses_top_k
    # Top-p: a token goes if those before it have the mass already. The first one stays.
    weights = (values - largest).double().exp()
    cumulative = weights.cumsum(dim=1)
    total = torch.where(is_closed, cumulative[:, -1:], total)
    uses_top_p = params.top_p < 1
    values = values.masked_fill(uses_top_p & (cumulative - weights >= params.top_p * total), -torch.inf)
    is_closed = is_closed | (uses_top_p & (values[:, -1:] == -torch.inf))
    # Min-p.
    uses_min_p = params.min_p > 0
    values = values.masked_fill(uses_min_p & (values - values[:, :1] < params.min_p.log()), -torch.inf)
    is_closed = is_closed | (uses_min_p & (values[:, -1:] == -torch.inf))
    uses_typical = params.typical_p < 1
    if bool(uses_typical.any()):
        is_cut = uses_top_k | uses_top_p | uses_min_p
        typical, is_done = _typical(values - largest, params.typical_p, total, weighted, is_closed, is_cut)
        values = torch.where(uses_typical & ~typical, -torch.inf, values)
        is_closed = torch.where(uses_typical, is_done, is_closed)
    return values, (is_closed & knows_mass)[:, 0]


def _typical(
    shifted: torch.Tensor,  # [S, n]: logits less the largest, -inf where truncated already
    typical_p: torch.Tensor,
    total: torch.Tensor,  # [S, 1] float64, of the whole row
    weighted: torch.Tensor,  # [S, 1] float64, of the whole row
    is_closed: torch.Tensor,
    is_cut: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Locally typical (arXiv 2202.00666): the tokens whose surprise is closest to the entropy.

    -> (is_typical [S, n], is_done [S, 1]). Rows that nothing has cut may be told from the head: the tokens behind
    it are at least as far as its last one, if that is on the far side.
    """
    shifted = shifted.double()
    weights = shifted.exp()
    own_weighted = torch.where(weights > 0, shifted * weights, 0.0).cumsum(dim=1)[:, -1:]
    total = torch.where(is_closed, weights.cumsum(dim=1)[:, -1:], total)
    weighted = torch.where(is_closed, own_weighted, weighted)
    log_total = total.log()
    entropy = log_total - weighted / total
    distance = (log_total - shifted - entropy).abs()
    by_distance, order = distance.sort(dim=1, stable=True)
    cumulative = (weights / total).gather(1, order).cumsum(dim=1)
    last = (cumulative < typical_p).sum(dim=1, keepdim=True)
    is_reached = last < shifted.shape[1]
    furthest = by_distance.gather(1, last.clamp(max=shifted.shape[1] - 1))
    next_distance = log_total - shifted[:, -1:] - entropy
    is_done = is_closed | (~is_cut & is_reached & (furthest < next_distance))
    return distance <= furthest, is_done
