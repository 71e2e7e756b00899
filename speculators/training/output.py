"""What a training run leaves: the speculator in the published format, and curves."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from specserve.models.hub import CONFIG_FILE, ModelError
from specserve.speculators.training.heads import TrainableSpeculator
from specserve.speculators.training.trainer import Evaluation, write_atomically

RUN_FILE, CURVES_FILE = "run.json", "training.png"


def check_folder(folder: Path, run: dict[str, Any]) -> None:
    """Make sure that the folder is free, or holds the same run. ModelError, in one line, if it doesn't."""
    run_file = folder / RUN_FILE
    if run_file.is_file():
        found = json.loads(run_file.read_text())
        for name in ("kind", "model_id"):
            if found.get(name) != run[name]:
                raise ModelError(
                    f"--output {folder} holds a run with {name} {found.get(name)!r}, this one has {run[name]!r}; "
                    "name another folder"
                )
    elif folder.exists() and (not folder.is_dir() or (folder / CONFIG_FILE).exists()):
        raise ModelError(f"--output {folder} holds another model's files; name a folder that is new or empty")


def claim_folder(folder: Path, run: dict[str, Any]) -> None:
    """Note whose folder it is."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUN_FILE, lambda path: path.write_text(json.dumps(run, indent=1) + "\n"))


def save_speculator(
    model: TrainableSpeculator,
    target_ids: torch.Tensor | None,
    base_model: str | None,
    dtype: torch.dtype,
    folder: Path,
) -> int:
    """Write weights, then config.json; their size in bytes."""
    tensors, config = model.export(target_ids)
    saved = {}
    for name, tensor in tensors.items():
        saved[name] = (tensor.detach().to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        if not bool(saved[name].isfinite().all()):
            raise ModelError(f"{name} does not fit {dtype}; choose --save-dtype float32")
    config |= {"torch_dtype": str(dtype).removeprefix("torch.")}
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    write_atomically(folder / model.file_name, lambda path: path.write_bytes(save(saved, metadata={"format": "pt"})))
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
    return (folder / model.file_name).stat().st_size


def draw_curves(evaluations: list[Evaluation], path: Path) -> bool:
    """Losses, top-1 matches and acceptance length over the steps, as a PNG; False if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [evaluation.step for evaluation in evaluations]
    figure = Figure(figsize=(12, 4), layout="constrained")
    loss, match, length = figure.subplots(1, 3)
    loss.plot(steps, [evaluation.train_loss for evaluation in evaluations], label="training")
    loss.plot(steps, [evaluation.loss for evaluation in evaluations], label="held-out")
    for head in range(len(evaluations[0].top1)):
        match.plot(steps, [evaluation.top1[head] for evaluation in evaluations], label=f"head {head}")
    length.plot(steps, [evaluation.length for evaluation in evaluations], label="greedy, held-out")
    for axes, title in ((loss, "loss, summed over heads"), (match, "top-1 match"), (length, "acceptance length")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
