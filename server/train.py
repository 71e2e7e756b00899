"""`specserve train`: data by the target itself, then a speculator from it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specserve.models.config import load_config
from specserve.models.hub import DEMO, ModelError, resolve_model
from specserve.server.config import Device, ServerConfig
from specserve.server.engine.async_engine import AsyncEngine
from specserve.server.engine.engine import Engine
from specserve.server.launch import build
from specserve.server.self_distillation import PromptSource, SelfDistillation, meta_of
from specserve.server.serving import Serving
from specserve.server.worker.model_runner import ModelRunner
from specserve.speculators.base import SpeculatorType
from specserve.speculators.checkpoint import DEMO_BASE
from specserve.speculators.training.dataset import Dataset, DatasetWriter
from specserve.speculators.training.heads import TrainableMedusa, TrainableMLP, TrainableSpeculator
from specserve.speculators.training.output import CURVES_FILE, check_folder, claim_folder, draw_curves, save_speculator
from specserve.speculators.training.recorder import HiddenRecorder
from specserve.speculators.training.trainer import Evaluation, Trainer, TrainingOptions
from specserve.speculators.vocabulary_mapping import VocabularyMapping

BYTES_PER_STATE = 2  # bfloat16
SPARE_BYTES = 256 * 2**20  # records, checkpoints, the speculator


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that `specserve train` can be told."""

    kind: SpeculatorType
    server: ServerConfig  # the target, and how it generates
    output: Path
    data_dir: Path
    prompts: Path | None = None
    num_tokens: int = 500_000
    max_new_tokens: int = 256
    cache_bytes: int = 8 * 2**30
    num_heads: int = 3
    inner_dim: int | None = None  # None: the hidden size
    draft_vocab_size: int | None = None
    save_dtype: str = "float16"
    training: TrainingOptions = field(default_factory=TrainingOptions)


def train(config: TrainConfig) -> None:
    """Generate what is missing of the data, train, save. ModelError or ConfigError for what a user can put right."""
    console = Console(stderr=True)
    config = replace(config, training=replace(config.training, compute_dtype=_compute_dtype(config)))
    with _process_group(config) as rank:
        source = PromptSource.read(config.prompts)
        _check_space(config)
        if rank == 0:
            check_folder(config.output, _run(config))
        torch.manual_seed(config.training.seed)
        rows = _target_rows(config, source, rank, console)
        dataset = Dataset(config.data_dir, config.num_heads)
        _train(config, dataset, rows, rank, console)


@contextmanager
def _process_group(config: TrainConfig) -> Iterator[int]:
    """The rank; several are started by torchrun, one a GPU."""
    if not dist.is_torchelastic_launched():
        yield 0
        return
    # Rank 0 generates while the others wait.
    dist.init_process_group("nccl" if _is_cuda(config) else "gloo", timeout=timedelta(days=1))
    try:
        if _is_cuda(config):
            torch.cuda.set_device(dist.get_node_local_rank())
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _is_cuda(config: TrainConfig) -> bool:
    return torch.cuda.is_available() and config.server.model.device is not Device.CPU


def _compute_dtype(config: TrainConfig) -> str:
    if config.training.compute_dtype != "auto":
        return config.training.compute_dtype
    is_fast = torch.cuda.is_bf16_supported() if _is_cuda(config) else torch.cpu.get_capabilities().get("amx_bf16")
    return "bfloat16" if is_fast else "float32"


def _check_space(config: TrainConfig) -> None:
    files = resolve_model(
        config.server.model.model_id,
        revision=config.server.model.revision,
        token=config.server.model.hub_token,
        offline=config.server.model.offline,
    )
    needed = config.num_tokens * load_config(files).hidden_size * BYTES_PER_STATE
    if needed > config.cache_bytes:
        raise ModelError(
            f"--num-tokens {config.num_tokens}: their hidden states take {needed:,} bytes, --cache-size is "
            f"{config.cache_bytes:,}; raise it or lower --num-tokens"
        )
    folder = config.data_dir.absolute()
    existing = (folder / "hidden.bin").stat().st_size if (folder / "hidden.bin").is_file() else 0
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed - existing + SPARE_BYTES > free:
        raise ModelError(
            f"--data-dir {config.data_dir}: {needed - existing + SPARE_BYTES:,} bytes are needed, {free:,} are free; "
            "lower --num-tokens or name another folder"
        )


def _run(config: TrainConfig) -> dict[str, object]:
    return {
        "kind": config.kind.value,
        "model_id": config.server.model.model_id,
        "prompts": None if config.prompts is None else str(config.prompts),
        "num_tokens": config.num_tokens,
        "max_new_tokens": config.max_new_tokens,
        "num_heads": config.num_heads,
        "inner_dim": config.inner_dim,
        "draft_vocab_size": config.draft_vocab_size,
        **asdict(config.training),
    }


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What training needs of the target: its sizes and, on the CPU, embedding and head [V, E]."""

    vocab_size: int
    hidden_size: int
    embedding: torch.Tensor
    head: torch.Tensor

    def drafted(self, vocabulary: VocabularyMapping | None) -> "TargetRows":
        """Embedding and head of the drafted tokens alone, [Vd, E]; all of them without a draft vocabulary."""
        if vocabulary is None:
            return self
        ids = vocabulary.target_ids
        return replace(self, embedding=self.embedding[ids], head=self.head[ids])


def _target_rows(config: TrainConfig, source: PromptSource, rank: int, console: Console) -> TargetRows:
    """Load the target, generate on rank 0 what is missing, and let it go again."""
    recorder = HiddenRecorder()
    serving = build(config.server, recorder)
    engine = _engine(serving)
    assert isinstance(engine.executor, ModelRunner)
    model = engine.executor.model
    if rank == 0:
        _generate(config, source, serving, model.config.hidden_size, recorder, console)
    if dist.is_initialized():
        dist.barrier()
    every = torch.arange(model.config.vocab_size, device=next(model.parameters()).device)
    embedding, head = (matrix.rows(every).float().cpu() for matrix in (model.embed_tokens.matrix, model.head.matrix))
    return TargetRows(model.config.vocab_size, model.config.hidden_size, embedding, head)


def _engine(serving: Serving) -> Engine:
    """The engine itself, driven from here instead of by AsyncEngine's thread."""
    assert isinstance(serving.engine, AsyncEngine)
    return serving.engine.engine


def _generate(
    config: TrainConfig,
    source: PromptSource,
    serving: Serving,
    hidden_size: int,
    recorder: HiddenRecorder,
    console: Console,
) -> None:
    seed, length = config.training.seed, config.max_new_tokens
    distillation = SelfDistillation(serving, _engine(serving), recorder, source, seed=seed, length=length)
    claim_folder(config.output, _run(config))
    meta = meta_of(serving, hidden_size, source, seed=seed, length=length)
    writer = DatasetWriter(config.data_dir, meta)
    try:
        with _progress(console) as progress:
            task = progress.add_task("generating", total=config.num_tokens, completed=writer.num_tokens, note="tokens")
            distillation.run(writer, config.num_tokens, lambda done: progress.update(task, completed=done))
        console.print(f"data: {writer.num_records:,} answers, {writer.num_tokens:,} tokens in {config.data_dir}")
    finally:
        writer.close()


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *columns, TimeRemainingColumn(), console=console)


def _train(config: TrainConfig, dataset: Dataset, rows: TargetRows, rank: int, console: Console) -> None:
    if not len(dataset.train_indices) or not len(dataset.held_out_indices):
        raise ModelError(
            f"--data-dir {config.data_dir} holds {len(dataset.train_indices)} examples to train on and "
            f"{len(dataset.held_out_indices)} held out; give more prompts or raise --num-tokens"
        )
    vocabulary = None
    if config.draft_vocab_size is not None and config.draft_vocab_size < rows.vocab_size:
        target_ids, share = dataset.frequent_tokens(config.draft_vocab_size)
        vocabulary = VocabularyMapping.of_subset(torch.tensor(target_ids))
        console.print(f"draft vocabulary: {len(target_ids):,} tokens, {share:.2%} of the generated ones")
    drafted = rows.drafted(vocabulary)
    model = _speculator(config, drafted, has_unknown=vocabulary is not None)
    device = torch.device("cuda", torch.cuda.current_device()) if _is_cuda(config) else torch.device("cpu")
    trainer = Trainer(model.to(device), dataset, vocabulary, drafted.head, config.training, config.output, device)
    console.print(f"training on {len(dataset.train_indices):,} tokens, {trainer.num_steps:,} steps, on {device}")
    with _progress(console) as progress:
        task = progress.add_task("training", total=trainer.num_steps, note="")
        trainer.run(
            lambda step, loss: progress.update(task, completed=step, note=f"loss {loss:.3f}"),
            lambda evaluation: console.print(_line(evaluation)),
        )
    if rank == 0:
        _save(config, model, vocabulary, trainer.evaluations, console)


def _speculator(config: TrainConfig, drafted: TargetRows, *, has_unknown: bool) -> TrainableSpeculator:
    model: TrainableSpeculator
    if config.kind is SpeculatorType.MLP:
        model = TrainableMLP(
            hidden_size=drafted.hidden_size,
            vocab_size=drafted.vocab_size,
            num_drafted=len(drafted.head),
            inner_dim=config.inner_dim or drafted.hidden_size,
            num_heads=config.num_heads,
            has_unknown=has_unknown,
        )
    else:
        model = TrainableMedusa(
            hidden_size=drafted.hidden_size, num_drafted=len(drafted.head), num_heads=config.num_heads
        )
    model.start_from(drafted.embedding, drafted.head)
    return model


def _line(evaluation: Evaluation) -> str:
    top1 = " ".join(f"{value:.3f}" for value in evaluation.top1)
    acceptance = " ".join(f"{value:.3f}" for value in evaluation.acceptance)
    return (
        f"step {evaluation.step}: loss {evaluation.train_loss:.3f}, held-out {evaluation.loss:.3f}, top-1 {top1}, "
        f"greedy acceptance {acceptance}, length {evaluation.length:.3f}"
    )


def _save(
    config: TrainConfig,
    model: TrainableSpeculator,
    vocabulary: VocabularyMapping | None,
    evaluations: list[Evaluation],
    console: Console,
) -> None:
    model_id = config.server.model.model_id
    base = DEMO_BASE if model_id == DEMO else None if Path(model_id).exists() else model_id
    ids = None if vocabulary is None else vocabulary.target_ids
    size = save_speculator(model, ids, base, getattr(torch, config.save_dtype), config.output)
    if not draw_curves(evaluations, config.output / CURVES_FILE):
        console.print("no curves: matplotlib is not installed (pip install 'specserve[train]')")
    flags = f"--speculator {config.kind.value} --speculator-id {config.output}"
    console.print(f"saved {size / 1e6:.1f} MB; serve it with: specserve serve --model-id {model_id} {flags}")
