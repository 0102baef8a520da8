"""Where the artifact that comes with this package lies: beside the code in an installed wheel, or in the checkout."""

from pathlib import Path

from sparsefinder.errors import ArtifactError

SHIPPED_NAME = "minilm-entmax"


def default_artifact(name: str = SHIPPED_NAME) -> Path:
    """Folder of the shipped artifact `name` (the entmax MiniLM with its predictors, unless said otherwise).

    Raises:
        ArtifactError: this installation does not hold it; the message names the folders that were searched.
    """
    package = Path(__file__).resolve().parent
    folders = [package / "_artifacts" / name]
    if (package.parent / "pyproject.toml").is_file():  # a checkout, not a wheel among others
        folders.insert(0, package.parent / "artifacts" / name)
    found = next((folder for folder in folders if (folder / "card.json").is_file()), None)
    if found is None:
        searched = " or ".join(str(folder) for folder in folders)
        raise ArtifactError(f"shipped artifact {name!r}: expected a folder with card.json at {searched}, found none")
    return found
