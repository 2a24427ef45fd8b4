"""The version of nanoinfer that runs."""

from importlib import metadata


def own_version() -> str:
    """Return the installed package's version, or "0+source" for a source tree on Python's path."""
    try:
        return metadata.version("nanoinfer")
    except metadata.PackageNotFoundError:
        return "0+source"
