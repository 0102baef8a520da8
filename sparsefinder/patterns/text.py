"""Patterns as one line of text: `"window(5) | global(1) & ~strided(8) | clusters(top=2)"`.

`|`, `&` and `~` bind as in Python. The text is read by a whitelist over its syntax tree; nothing in it is ever run.
"""

import ast
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields

from torch import Tensor

from sparsefinder.errors import PatternError, first_line
from sparsefinder.patterns.algebra import Complement, Context, Intersection, Pattern, Union, rebuild
from sparsefinder.patterns.compositions import bigbird, longformer, sparse_transformer, star_transformer
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
    window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys

Value = int | float | bool | str | None | tuple[int, ...]

# `global` is a keyword of Python: outside of quoted words it gets another spelling before the text is read.
GLOBAL = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\bglobal\b""")
TOO_LARGE = 1e15  # nothing is as many, and longer numbers make long messages
LONGEST, DEEPEST = 4000, 100  # characters; brackets, operators and `~` inside each other

LEAVES: dict[str, type[Pattern]] = {
    "global": GlobalTokens,
    "positions": GlobalPositions,
    "past": Past,
    "dilated": Dilated,
    "strided": Strided,
    "fixed": Fixed,
    "blocks": BlockDiagonal,
    "random": RandomKeys,
    "random_blocks": RandomBlocks,
}
# These are read but not written: they give the leaves above.
SHORTHANDS: dict[str, Callable[..., Pattern]] = {
    "window": window,
    "longformer": longformer,
    "bigbird": bigbird,
    "sparse_transformer": sparse_transformer,
    "star_transformer": star_transformer,
}
OF_PATTERNS: dict[str, type[Sequential] | type[Multihead]] = {"sequential": Sequential, "multihead": Multihead}
NAMES = (*SHORTHANDS, *LEAVES, *OF_PATTERNS)


@dataclass(frozen=True)
class Predicted(Pattern):
    """What a predictor will say, by its name and the settings that the text changes; `resolve` puts it in."""

    name: str
    settings: tuple[tuple[str, Value], ...] = ()

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Raises PatternError: nobody knows the pairs before there are queries and keys."""
        raise PatternError(f"{self.name}: expected a predictor in its place (resolve the pattern first), got its name")


def parse_pattern(text: str, predictors: Collection[str] = ()) -> Pattern:
    """The pattern that a line of text means.

    Args:
        text: calls of the names in `NAMES` (a name alone is a call without arguments), joined by `|`, `&`, `~` and
            brackets. Arguments are numbers, words in quotes, `True`, `False`, `None` and tuples of whole numbers, as
            in the pattern's own definition; `sequential` and `multihead` take patterns.
        predictors: further names that may stand in the text, with settings by name. They become `Predicted`.

    Raises:
        PatternError: says what cannot be read, and what may stand there.
    """
    if len(text) > LONGEST or "#" in text:
        raise PatternError(f"pattern: expected at most {LONGEST} characters without #, got {_short(text)}")
    try:
        tree = ast.parse(GLOBAL.sub(lambda found: found[1] or "global_", " ".join(text.split())), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else first_line(error)
        raise PatternError(f"pattern: expected names joined by | & ~, got {_short(text)}: {why}") from None
    return _read(tree.body, frozenset(predictors), DEEPEST)


def format_pattern(pattern: Pattern) -> str:
    """The text of a pattern; `parse_pattern` reads it as the same value.

    Raises PatternError for patterns that hold tensors: only their predictors have a name.
    """
    if isinstance(pattern, Union):
        return f"{format_pattern(pattern.left)} | {_bracketed(pattern.right, Union)}"
    if isinstance(pattern, Intersection):
        return f"{_bracketed(pattern.left, Union)} & {_bracketed(pattern.right, Union, Intersection)}"
    if isinstance(pattern, Complement):
        return f"~{_bracketed(pattern.inner, Union, Intersection)}"
    if isinstance(pattern, Sequential | Multihead):
        name = next(name for name, cls in OF_PATTERNS.items() if type(pattern) is cls)
        return f"{name}({', '.join(map(format_pattern, pattern.patterns))})"
    if isinstance(pattern, Nothing | Window):
        return f"window({2 * pattern.radius + 1 if isinstance(pattern, Window) else 0})"
    if isinstance(pattern, Predicted):
        return f"{pattern.name}({', '.join(f'{key}={value!r}' for key, value in pattern.settings)})"
    for name, cls in LEAVES.items():
        if type(pattern) is cls:
            return f"{name}({', '.join(_arguments(pattern))})"
    raise PatternError(f"pattern: expected one that has a text form, got {type(pattern).__name__}")


def resolve(pattern: Pattern, fill: Callable[[Predicted], Pattern]) -> Pattern:
    """The same pattern with `fill(leaf)` in place of every `Predicted` leaf."""
    return fill(pattern) if isinstance(pattern, Predicted) else rebuild(pattern, lambda part: resolve(part, fill))


def _read(node: ast.expr, predictors: frozenset[str], depth: int) -> Pattern:
    if depth == 0:
        raise PatternError(f"pattern: expected at most {DEEPEST} levels, got more")
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return _read(left, predictors, depth - 1) | _read(right, predictors, depth - 1)
        case ast.BinOp(left, ast.BitAnd(), right):
            return _read(left, predictors, depth - 1) & _read(right, predictors, depth - 1)
        case ast.UnaryOp(ast.Invert(), inner):
            return ~_read(inner, predictors, depth - 1)
        case ast.Call(ast.Name(name), arguments, []) if name in OF_PATTERNS:
            return OF_PATTERNS[name](tuple(_read(part, predictors, depth - 1) for part in arguments))
        case ast.Call(ast.Name(name), arguments, keywords):
            values = [_value(part) for part in arguments]
            named = {str(part.arg): _value(part.value) for part in keywords}
            if len(named) < len(keywords):
                raise PatternError(f"{_spelled(name)}: expected every argument once, got one repeated")
            return _build(_spelled(name), values, named, predictors)
        case ast.Name(name):
            return _build(_spelled(name), [], {}, predictors)
    raise PatternError(f"pattern: expected a name, a call or | & ~, got {_short(_spelled(ast.unparse(node)))}")


def _build(name: str, values: list[Value], named: dict[str, Value], predictors: frozenset[str]) -> Pattern:
    build = SHORTHANDS.get(name) or LEAVES.get(name)
    if build is not None:
        try:
            bound = inspect.signature(build).bind(*values, **named)
        except TypeError as error:
            raise PatternError(f"{name}: {error}; expected {_usage(build)}") from None
        return build(*bound.args, **bound.kwargs)
    if name not in predictors:
        known = ", ".join((*NAMES, *sorted(predictors)))
        raise PatternError(f"pattern: expected one of {known}, got {_short(name)}")
    if values:
        raise PatternError(f"{name}: expected settings by name, got {values[0]!r}")
    return Predicted(name, tuple(named.items()))


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(bool() | str() | None as value):
            return value
        case ast.Constant(int() | float() as value) if abs(value) < TOO_LARGE:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if abs(value) < TOO_LARGE:
            return -value
        case ast.Tuple(parts):
            values = tuple(_value(part) for part in parts)
            if all(isinstance(value, int) for value in values):
                return values  # type: ignore[return-value]
    got = _short(_spelled(ast.unparse(node)))
    raise PatternError(f"pattern: expected numbers below 1e15, words or tuples as arguments, got {got}")


def _arguments(pattern: Pattern) -> list[str]:
    """The first field, and those after it that differ from their default, by name."""
    found = []
    for place, field in enumerate(fields(pattern)):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        if place == 0:
            found.append(repr(value))
        elif field.default is MISSING or value != field.default:
            found.append(f"{field.name}={value!r}")
    return found


def _bracketed(pattern: Pattern, *weaker: type[Pattern]) -> str:
    text = format_pattern(pattern)
    return f"({text})" if isinstance(pattern, weaker) else text


def _usage(build: Callable[..., Pattern]) -> str:
    return ", ".join(inspect.signature(build).parameters) or "no argument"


def _spelled(text: str) -> str:
    return re.sub(r"\bglobal_\b", "global", text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
