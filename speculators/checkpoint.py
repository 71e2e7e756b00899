"""What the checkpoints of medusa and mlp share: their files, their configuration, the draft vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specserve.models.causal_lm import CausalLM
from specserve.models.hub import CONFIG_FILE, DEMO, INDEX_FILE, ModelError, ModelFiles, read_json
from specserve.models.tokenizer import Tokenizer
from specserve.models.weights import SafetensorsFiles, TorchFile, WeightReader, WeightSource
from specserve.speculators.vocabulary_mapping import VocabularyMapping

DRAFT_VOCABULARY = "draft_vocabulary.target_ids"
DEMO_BASE = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Base:
    """The target that a speculator drafts for."""

    model: CausalLM
    files: ModelFiles
    tokenizer: Tokenizer

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.model.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The serving dtype."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device


class SpeculatorConfig:
    """config.json of a speculator; a value that doesn't do is an error that names file, key and value."""

    def __init__(self, files: ModelFiles) -> None:
        self.model_id = files.model_id
        self.path = files.path / CONFIG_FILE
        self.values: Mapping[str, Any] = read_json(self.path)

    def integer(self, key: str, default: int | None, *, at_least: int) -> int:
        """A whole number; without a default the key must be there."""
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ModelError(f"{self.path}: {key} is {value!r}; it must be a whole number of at least {at_least}")
        return value

    def flag(self, key: str) -> bool:
        """A truth value, false if it is absent."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} is {value!r}; it must be true or false")
        return value

    def check_size(self, key: str, value: int, base_value: int, base: Base, what: str) -> None:
        """A size of the speculator must be the target's."""
        if value != base_value:
            raise ModelError(
                f"--speculator-id {self.model_id}: {key} is {value}, but the {what} of the model "
                f"{base.files.model_id} is {base_value}; choose a speculator that was made for this model"
            )

    def check_base(self, base: Base) -> None:
        """The model that the file names must be the target, as far as the target's name tells."""
        named = self.values.get("base_model_name_or_path")
        served = DEMO_BASE if base.files.model_id == DEMO else base.files.model_id
        if not isinstance(named, str) or not named or Path(served).exists():
            return  # early files name none, and a path says nothing about what lies there
        if named.rstrip("/").rpartition("/")[2].lower() != served.rstrip("/").rpartition("/")[2].lower():
            raise ModelError(
                f"--speculator-id {self.model_id}: it was made for the model {named}, but --model-id is "
                f"{base.files.model_id}; choose a speculator that was made for this model"
            )


def open_speculator(files: ModelFiles, names: Sequence[str]) -> WeightSource:
    """Weights: an index of safetensors, or the first of `names` that is there; .pt and .bin are read weights-only."""
    integers = [prefix + DRAFT_VOCABULARY for prefix in ("", "speculator.", "medusa_head.")]
    if (files.path / INDEX_FILE).is_file():
        return SafetensorsFiles.open(files.path, integers=integers)
    for name in names:
        path = files.path / name
        if path.is_file():
            is_safe = path.suffix == ".safetensors"
            return SafetensorsFiles.open_file(path, integers=integers) if is_safe else TorchFile.open(path)
    raise ModelError(f"--speculator-id {files.path}: has none of {', '.join(names)}")


def load_draft_vocabulary(reader: WeightReader, vocab_size: int) -> VocabularyMapping | None:
    """The subset of the target's vocabulary that the heads know, if the checkpoint has one."""
    shape = reader.shape(DRAFT_VOCABULARY)
    if shape is None:
        return None
    target_ids = torch.empty(shape, dtype=torch.int64)
    reader.copy(DRAFT_VOCABULARY, target_ids)
    ascends = len(shape) == 1 and bool((target_ids[1:] > target_ids[:-1]).all())
    if not ascends or not shape[0] or int(target_ids[0]) < 0 or int(target_ids[-1]) >= vocab_size:
        raise ModelError(
            f"the tensor {DRAFT_VOCABULARY} of the speculator must hold ascending ids in 0..{vocab_size - 1}"
        )
    return VocabularyMapping.of_subset(target_ids.to(reader.device))


def resolve_num_tokens(asked: int | None, available: int, name: str) -> int:
    """Tokens to draft; ModelError if more are asked for than the checkpoint has heads."""
    if asked is not None and asked > available:
        raise ModelError(f"--num-speculative-tokens is {asked}, but {name} is {available}; ask for at most {available}")
    return available if asked is None else asked
