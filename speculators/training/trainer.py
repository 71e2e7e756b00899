"""The training loop: frozen target, cached states, summed cross-entropy over the heads.

AdamW with warm-up and cosine decay and clipped gradients, as the published speculators were trained
(arXiv 2404.19124, 2401.10774). They learnt from the emitted tokens; here the labels are, by soft_label_share, the
laws that these were drawn from, which the target's head gives for the cached states (distillation, arXiv 1503.02531).
A run continues from its last checkpoint and then ends as it would have without a break: batches follow from the seed
and the step alone.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from specserve.models.hub import ModelError
from specserve.speculators.training.dataset import Dataset
from specserve.speculators.training.heads import TrainableSpeculator
from specserve.speculators.vocabulary_mapping import VocabularyMapping

LOG_FILE, CHECKPOINT_FILE = "training.jsonl", "checkpoint.pt"
EVALUATED_EXAMPLES = 16_384
MAX_GRADIENT_NORM = 1.0

SoftLabels = tuple[torch.Tensor, torch.Tensor]  # laws [B, n, Vd]; their share of the labels [B, n]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The recipe; what it says is kept in checkpoints, which are not continued with another one."""

    num_epochs: float = 3.0
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    soft_label_share: float = 1.0  # the rest of a label is the emitted token
    label_temperature: float = 0.7  # of the target's law; below 1, as a greedy draft needs but its likeliest token
    compute_dtype: str = "float32"  # of matrix products; weights are float32
    warm_up_share: float = 0.05
    final_share: float = 0.02  # of the learning rate, at the end
    num_evaluations: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """On held-out prompts. Acceptance is that of greedy serving: a draft counts if all before it are right too."""

    step: int
    seconds: float
    train_loss: float
    loss: float
    top1: list[float]  # per head, fed with the right tokens
    acceptance: list[float]  # per position, fed with its own drafts
    length: float  # emitted tokens per verification, 1 + the sum of acceptance


class Trainer:
    """Trains one speculator on one dataset; over several ranks, each takes its part of every batch."""

    def __init__(
        self,
        model: TrainableSpeculator,
        dataset: Dataset,
        vocabulary: VocabularyMapping | None,
        head: torch.Tensor,
        options: TrainingOptions,
        folder: Path,
        device: torch.device,
    ) -> None:
        """head: the target's, of the drafted tokens, [Vd, E]."""
        self.model, self.dataset, self.options, self.folder, self.device = model, dataset, options, folder, device
        self.vocabulary = vocabulary
        self._compute_dtype = getattr(torch, options.compute_dtype)
        self._head = head.to(device, self._compute_dtype)
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.steps_per_epoch = max(1, len(dataset.train_indices) // options.batch_size)
        self.num_steps = max(1, round(options.num_epochs * self.steps_per_epoch))
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self._step, self._seconds = 0, 0.0
        self._order: tuple[int, np.ndarray] = (-1, dataset.train_indices)
        self.evaluations: list[Evaluation] = []

    def run(self, on_progress: Callable[[int, float], None], on_evaluation: Callable[[Evaluation], None]) -> None:
        """Train to the end, with checkpoints at each evaluation."""
        self._resume()
        every = math.ceil(self.num_steps / self.options.num_evaluations)
        losses: list[float] = []
        started = time.monotonic() - self._seconds
        while self._step < self.num_steps:
            losses.append(self._train_step())
            self._step += 1
            on_progress(self._step, losses[-1])
            if self._step % every == 0 or self._step == self.num_steps:
                self._seconds = time.monotonic() - started
                evaluation = self._evaluate(float(np.mean(losses)))
                losses = []
                self.evaluations.append(evaluation)
                self._save()
                on_evaluation(evaluation)

    def _train_step(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self._rate()
        indices = self._indices()
        states, tokens, following = self._to_draft(*self.dataset.batch(indices))
        with torch.autocast(self.device.type, self._compute_dtype, enabled=self._compute_dtype is not torch.float32):
            loss = _loss(self.model(states, tokens, following), following, self._soft_labels(indices))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if self.num_ranks > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None
                parameter.grad /= self.num_ranks
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ModelError(
                f"the loss is {value} at step {self._step}; lower --learning-rate {self.options.learning_rate}"
            )
        return value

    def _rate(self) -> float:
        """Share of the learning rate: linear warm-up, then cosine."""
        warm_up = max(1, round(self.options.warm_up_share * self.num_steps))
        if self._step < warm_up:
            return (self._step + 1) / warm_up
        progress = (self._step - warm_up) / max(1, self.num_steps - warm_up)
        return self.options.final_share + (1 - self.options.final_share) * 0.5 * (1 + math.cos(math.pi * progress))

    def _indices(self) -> np.ndarray:
        """The examples that this rank takes of this step's batch."""
        epoch, place = divmod(self._step, self.steps_per_epoch)
        if self._order[0] != epoch:
            shuffled = np.random.default_rng((self.options.seed, epoch)).permutation(self.dataset.train_indices)
            self._order = epoch, shuffled
        batch = self._order[1][place * self.options.batch_size : (place + 1) * self.options.batch_size]
        return np.sort(batch[self.rank :: self.num_ranks])

    def _to_draft(
        self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States, draft ids of the tokens, draft ids of those after (-1: none, or not in the draft vocabulary)."""
        if self.vocabulary is not None:
            tokens = self.vocabulary.to_draft(tokens, missing=len(self.vocabulary.target_ids))
            following = self.vocabulary.to_draft(following, missing=-1)
        # Behind a token that can't be drafted no draft is ever looked at.
        known = (following >= 0).cumprod(dim=1).bool()
        following = following.masked_fill(~known, -1)
        return states.to(self.device), tokens.to(self.device), following.to(self.device)

    @torch.no_grad()
    def _soft_labels(self, indices: np.ndarray) -> SoftLabels | None:
        share = self.options.soft_label_share
        if not share:
            return None
        states, known = self.dataset.following_states(indices)
        scores = F.linear(states.to(self.device, self._compute_dtype), self._head).float()
        laws = torch.softmax(scores / self.options.label_temperature, dim=-1)
        return laws, known.to(self.device).float() * share

    @torch.no_grad()
    def _evaluate(self, train_loss: float) -> Evaluation:
        num_heads = self.model.num_heads
        right, accepted, wanted = (torch.zeros(num_heads) for _ in range(3))
        num_examples, losses = 0, []
        for batch in self.dataset.held_out_batches(1024):
            states, tokens, following = self._to_draft(*batch)
            logits = self.model(states, tokens, following)
            losses.append(float(_loss(logits, following, None)) * len(tokens))
            top1 = torch.stack([scores.argmax(dim=1) for scores in logits], dim=1)
            right += (top1 == following).sum(dim=0).cpu()
            wanted += (following >= 0).sum(dim=0).cpu()
            hits = (self.model.draft(states, tokens) == following).cumprod(dim=1)
            accepted += hits.sum(dim=0).cpu()
            num_examples += len(tokens)
            if num_examples >= EVALUATED_EXAMPLES:
                break
        num_examples = max(1, num_examples)
        acceptance = (accepted / num_examples).tolist()
        return Evaluation(
            step=self._step,
            seconds=round(self._seconds, 1),
            train_loss=train_loss,
            loss=sum(losses) / num_examples,
            top1=(right / wanted.clamp(min=1)).tolist(),
            acceptance=acceptance,
            length=1 + sum(acceptance),
        )

    # ---- checkpoints

    def _identity(self) -> dict[str, Any]:
        sizes = {name: list(parameter.shape) for name, parameter in self.model.named_parameters()}
        return {"options": asdict(self.options), "num_steps": self.num_steps, "sizes": sizes}

    def _save(self) -> None:
        if self.rank:
            return
        state = {
            "identity": json.dumps(self._identity()),
            "step": self._step,
            "seconds": self._seconds,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "evaluations": json.dumps([asdict(evaluation) for evaluation in self.evaluations]),
        }
        write_atomically(self.folder / CHECKPOINT_FILE, lambda path: torch.save(state, path))
        lines = "".join(json.dumps(asdict(evaluation)) + "\n" for evaluation in self.evaluations)
        write_atomically(self.folder / LOG_FILE, lambda path: path.write_text(lines))

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT_FILE
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if json.loads(state["identity"]) != json.loads(json.dumps(self._identity())):
            raise ModelError(
                f"--output {self.folder}: {CHECKPOINT_FILE} is of a run with other options or other data; "
                "name another --output, or remove that file to begin anew"
            )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._seconds = state["step"], state["seconds"]
        self.evaluations = [Evaluation(**values) for values in json.loads(state["evaluations"])]


def _loss(logits: list[torch.Tensor], following: torch.Tensor, soft: SoftLabels | None) -> torch.Tensor:
    """Cross-entropy summed over heads, a mean over examples; where nothing can be drafted it is 0.

    So the mean over ranks is what one rank would have computed.
    """
    total = logits[0].new_zeros((), dtype=torch.float32)
    for head, scores in enumerate(logits):
        emitted = following[:, head].clamp(min=0)
        if soft is None:
            losses = F.cross_entropy(scores.float(), emitted, reduction="none")
        else:
            laws, shares = soft[0][:, head], soft[1][:, head, None]
            labels = (laws * shares).scatter_add_(1, emitted[:, None], 1 - shares)
            losses = F.cross_entropy(scores.float(), labels, reduction="none")
        total = total + (losses * (following[:, head] >= 0)).sum()
    return total / len(following)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path`, then put it in its place in one step."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    os.replace(part, path)
