"""The import direction, and that documentation and limits hold for every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("proto", "models", "speculators", "server", "router_client")
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
ALLOWED = {
    "proto": {"proto"},
    "models": {"models"},
    "speculators": {"models", "speculators"},
    "server": set(FOLDERS),
    "router_client": {"proto", "router_client"},
}
WITHOUT_PROTO = {"engine", "worker"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    folder, *rest = path.relative_to(ROOT).parts
    for name in imports(path):
        package, _, inner = name.partition(".")
        assert package not in FOLDERS and package != "transformers", name
        if package == "specserve":
            assert inner.split(".")[0] in ALLOWED[folder], name
        if folder == "server" and rest[0] in WITHOUT_PROTO:
            assert not inner.startswith("proto") and package != "grpc", name
        if (folder == "server" and rest[0] == "engine") or folder == "router_client":
            assert package != "torch", name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 62, node.name


def test_every_module_has_a_line_in_the_structure_page():
    page = (ROOT / "docs" / "structure.md").read_text()
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.stem in ("__init__", "__main__") or "layers" in parts or "cpu_kernels" in parts:
            continue
        names = (f"`{path.stem}`", f"`{'/'.join(parts[1:])}`")
        assert any(name in page for name in names), path


@pytest.mark.parametrize("module", ["specserve.server.engine.async_engine", "specserve.router_client.client"])
def test_engine_and_client_run_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_the_configuration_reads_the_environment():
    for path in MODULES:
        if path.name not in {"flags.py", "place.py"} or path.parent.name != "server":
            assert "os.environ" not in path.read_text() and "getenv" not in path.read_text(), path
