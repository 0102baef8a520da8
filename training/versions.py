"""What a figure was made with."""

import platform
from importlib.metadata import version


def versions(*names: str) -> str:
    """Python and these libraries, for the `about` of a result."""
    return ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])
