"""The interface of all speculators."""

import enum
from dataclasses import dataclass, field


class SpeculatorType(enum.StrEnum):
    """What drafts tokens; the only selector of a speculator."""

    NONE = "none"
    MEDUSA = "medusa"
    MLP = "mlp"
    USD = "usd"


@dataclass(slots=True)
class Draft:
    """Proposed continuations, one list of token ids a row (ragged; empty where nothing is drafted)."""

    token_ids: list[list[int]] = field(default_factory=list)
