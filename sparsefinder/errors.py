"""Every error a user can cause has a type here; the message says what was expected and what came."""


class SparsefinderError(Exception):
    """Base of all typed errors of this package (exit code 2 on the command line, 4xx in the service)."""


class AlphaError(SparsefinderError):
    """α is below 1, or not finite."""


class ShapeError(SparsefinderError):
    """A tensor has a shape, dtype or device that does not fit the others."""


class NonFiniteError(SparsefinderError):
    """NaN or infinity where finite numbers are needed."""


class PatternError(SparsefinderError):
    """A pattern cannot be built, parsed or used here (for example: an even window size)."""


class BackendError(SparsefinderError):
    """A backend was asked for that cannot run here; nothing falls back silently."""


class ArtifactError(SparsefinderError):
    """An artifact is missing, incomplete, damaged or of another schema version."""


class IncompatibleModelError(SparsefinderError):
    """A model does not route its attention where it can be replaced, or does not fit an artifact."""


class DataError(SparsefinderError):
    """Training or calibration data is missing or too small."""


class ConfigError(SparsefinderError):
    """A setting has a value outside what is allowed."""


def first_line(error: BaseException) -> str:
    """What another library's exception says, cut to one line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
