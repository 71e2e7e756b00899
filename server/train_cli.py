"""The command `specserve train`."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.server import cli_options as opt
from specserve.server.config import (
    CacheOptions,
    ConfigError,
    Device,
    DraftLengthRule,
    DType,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerConfig,
    SpeculatorOptions,
)
from specserve.server.flags import hub_token, parse_kv_cache_memory, parse_size, required
from specserve.speculators.base import SpeculatorType

if TYPE_CHECKING:
    from specserve.server.train import TrainConfig

_DATA, _SPECULATOR, _RECIPE = "Data", "Speculator", "Recipe"


class Kind(enum.StrEnum):
    """What can be trained."""

    MLP = "mlp"
    MEDUSA = "medusa"


class SaveDType(enum.StrEnum):
    """Number format of the saved weights."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class ComputeDType(enum.StrEnum):
    """Number format of matrix products in training."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def _flag(panel: str, help_text: str, **settings: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **settings)


_Kind = Annotated[Kind, typer.Argument(help="What to train.")]
_Output = Annotated[Path | None, _flag(_SPECULATOR, "Folder for the speculator; new, or of the same run.")]
_MaxBatchSize = Annotated[int, _flag(_DATA, "Answers generated at once.", min=1)]
_DataDir = Annotated[
    Path | None,
    _flag(_DATA, "Folder of the generated data, to share among runs.", show_default="OUTPUT/data"),
]
_Prompts = Annotated[
    Path | None,
    _flag(
        _DATA,
        'Prompts, one a line; in a .jsonl a line is {"prompt": text} or {"messages": [...]}. '
        "Without, a chat model writes user turns itself.",
        show_default=False,
    ),
]
_NumTokens = Annotated[int, _flag(_DATA, "Tokens to generate; a prompt file may bring fewer.", min=1)]
_MaxNewTokens = Annotated[int, _flag(_DATA, "Tokens of an answer, at most.", min=2)]
_CacheSize = Annotated[str, _flag(_DATA, "Most bytes of hidden states on disk.")]
_NumHeads = Annotated[int, _flag(_SPECULATOR, "Tokens that it can draft.", min=1)]
_InnerDim = Annotated[
    int | None, _flag(_SPECULATOR, "Width of an MLP speculator.", min=1, show_default="the model's hidden size")
]
_DraftVocabSize = Annotated[
    int | None,
    _flag(_SPECULATOR, "Draft only the N most frequent tokens of the data.", min=1, show_default="all"),
]
_SaveDtype = Annotated[SaveDType, _flag(_SPECULATOR, "Number format of the saved weights.")]
_NumEpochs = Annotated[float, _flag(_RECIPE, "Passes over the data.", min=0.001)]
_BatchSize = Annotated[int, _flag(_RECIPE, "Tokens of a training step.", min=1)]
_LearningRate = Annotated[float, _flag(_RECIPE, "At its highest.", min=1e-8)]
_SoftLabelShare = Annotated[
    float,
    _flag(
        _RECIPE, "How much of a label is the model's own law instead of the token it drew from it.", min=0.0, max=1.0
    ),
]
_ComputeDtype = Annotated[
    ComputeDType, _flag(_RECIPE, "Number format of products; auto: bfloat16 where the hardware multiplies in it.")
]
_Seed = Annotated[int, _flag(_RECIPE, "Of data, initial weights and order; the same seed repeats a run.", min=0)]


def train(
    kind: _Kind,
    model_id: opt.ModelId = None,
    output: _Output = None,
    revision: opt.Revision = None,
    offline: opt.Offline = False,
    dtype: opt.DTypeFlag = DType.AUTO,
    device: opt.DeviceFlag = Device.AUTO,
    num_threads: opt.NumThreads = None,
    kv_cache_memory: opt.KvCacheMemory = None,
    max_batch_size: _MaxBatchSize = 48,
    data_dir: _DataDir = None,
    prompts: _Prompts = None,
    num_tokens: _NumTokens = 500_000,
    max_new_tokens: _MaxNewTokens = 256,
    cache_size: _CacheSize = "8GiB",
    num_heads: _NumHeads = 3,
    inner_dim: _InnerDim = None,
    draft_vocab_size: _DraftVocabSize = None,
    save_dtype: _SaveDtype = SaveDType.FLOAT16,
    num_epochs: _NumEpochs = 3.0,
    batch_size: _BatchSize = 512,
    learning_rate: _LearningRate = 1e-3,
    soft_label_share: _SoftLabelShare = 1.0,
    compute_dtype: _ComputeDtype = ComputeDType.AUTO,
    seed: _Seed = 0,
) -> None:
    """Train a speculator for a model, on its own answers. On several GPUs: torchrun -m specserve.server train …"""
    model_id = required({"model_id": model_id}, "model_id")
    if output is None:
        raise ConfigError("--output is not set; name a folder for the speculator")
    if kind is Kind.MEDUSA and inner_dim is not None:
        raise ConfigError(f"--inner-dim is {inner_dim}, but medusa has none; leave it out")
    recipe: dict[str, Any] = {"num_epochs": num_epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    recipe |= {"soft_label_share": soft_label_share, "compute_dtype": compute_dtype.value, "seed": seed}
    config = _config(
        SpeculatorType(kind.value),
        ServerConfig(
            ModelOptions(model_id, revision, dtype, device, offline=offline, hub_token=hub_token()),
            CacheOptions(parse_kv_cache_memory(kv_cache_memory)),
            SchedulerOptions(max_batch_size=max_batch_size),
            SpeculatorOptions(draft_length=DraftLengthRule.FIXED),  # the recorder is to be asked in every step
            parallel=ParallelOptions(num_threads=num_threads),
        ),
        output=output,
        data_dir=data_dir or output / "data",
        prompts=prompts,
        num_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        cache_bytes=parse_size("--cache-size", cache_size),
        num_heads=num_heads,
        inner_dim=inner_dim,
        draft_vocab_size=draft_vocab_size,
        save_dtype=save_dtype.value,
        recipe=recipe,
    )
    _run(config)


def _run(config: "TrainConfig") -> None:
    from specserve.models.hub import ModelError
    from specserve.server.train import train as run

    try:
        run(config)
    except ModelError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def _config(kind: SpeculatorType, server: ServerConfig, *, recipe: dict[str, Any], **options: Any) -> "TrainConfig":
    from specserve.server.train import TrainConfig
    from specserve.speculators.training.trainer import TrainingOptions

    return TrainConfig(kind, server, training=TrainingOptions(**recipe), **options)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(train)
