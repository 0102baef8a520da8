"""Folders of a few files that are replaced as a whole: a reader sees the old ones or the new ones, never a mixture."""

import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparsefinder.errors import ArtifactError

MAX_BYTES = 2**31
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP, errno.EPERM}


def write_folder(path: Path, files: Mapping[str, bytes], marker: str) -> None:
    """Replace the folder `path` by one that holds exactly `files`.

    Everything is written and flushed to disk in a sibling folder first, which then takes the place of the old one in
    one step, so that a crash at any moment leaves one of the two complete.

    Args:
        marker: a file that an existing folder must hold to be replaced, so that nobody's other files are lost.

    Raises:
        ArtifactError: `path` is something else than such a folder, or cannot be written.
    """
    path = path.resolve()
    if path.exists() and not (path / marker).is_file():
        raise ArtifactError(f"{path}: expected nothing or an artifact to replace, got something without {marker}")
    new = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        for name, content in files.items():
            _write(new / name, content)
        _flush(new)
        _put_in_place(new, path)
        _flush(path.parent)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)  # after an exchange this is the old folder


def read_folder(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Contents of those of `names` that exist, all from the same state of the folder.

    Only regular files inside the folder are read; links and anything else are refused, not followed.

    Raises:
        ArtifactError: no such folder, or an entry that is not a regular file of reasonable size.
    """
    wanted = tuple(names)
    for _ in range(5):
        folder = _existing(path)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ArtifactError(f"{path}: expected an artifact folder ({error.strerror})") from None
        try:
            found = {name: content for name in wanted if (content := _read(handle, name, path)) is not None}
            if _same(handle, folder):  # else it was replaced while we read, and may be half deleted
                return found
        finally:
            os.close(handle)
    raise ArtifactError(f"{path}: was replaced again and again while it was read")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _existing(path: Path) -> Path:
    path = path.resolve()
    return _previous(path) if not path.exists() and _previous(path).is_dir() else path


def _same(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def _read(handle: int, name: str, path: Path) -> bytes | None:
    if Path(name).name != name or name in {"", ".", ".."}:
        raise ArtifactError(f"{path}: expected a plain file name, got {name!r}")
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise ArtifactError(f"{path}: {name}: expected a regular file, got {reason}") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        os.close(file)
        raise ArtifactError(f"{path}: {name}: expected a regular file of at most {MAX_BYTES} bytes")
    with os.fdopen(file, "rb") as stream:
        return stream.read()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):
        # Without an exchange there is a moment with no folder at `path`; readers then take the previous one.
        previous = _previous(path)
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
        try:
            new.rename(path)
        except OSError:
            previous.rename(path)
            raise
    shutil.rmtree(_previous(path), ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if swap(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))
