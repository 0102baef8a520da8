"""How long commands say what they are doing: a bar on a terminal, elsewhere one line for every task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Gives `on_progress(what, done, total)`, which writes to stderr.

    console: the one on stderr that other lines are printed with meanwhile, so that they stand above the bar.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said: set[str] = set()  # tasks that run side by side report in turn
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)
            if what not in said and not console.is_terminal:
                console.print(f"{what} ({done} of {total})", highlight=False)
            said.add(what)

        yield on_progress
