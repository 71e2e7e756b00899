"""The version of the installed package."""

from importlib import metadata


def package_version() -> str:
    """As in pyproject.toml."""
    try:
        return metadata.version("specserve")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
