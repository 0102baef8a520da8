"""`sparsefinder-serve`: every setting is a flag of the same name, and SIGTERM finishes what runs."""

import inspect
import os
import signal
import socket
import types
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Union, get_args, get_origin

import typer
import uvicorn
from rich.console import Console
from rich.markup import escape

from app.memory import KEPT, forget_old_shapes
from app.settings import Settings, load_settings
from app.telemetry import configure_logging, log
from sparsefinder.errors import SparsefinderError
from sparsefinder.faiss_choice import check_faiss_wheels
from sparsefinder.heap import share_one_heap

FAILED, USAGE_ERROR = 1, 2


def _flag(name: str) -> inspect.Parameter:
    """The typer option of one setting; no default, so that the environment can speak where the flag does not."""
    field = Settings.model_fields[name]
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    plain = kind if kind in (int, float, Path) else str
    shown = "" if field.default in (None, ()) else f" [default: {field.default}]"
    option = typer.Option(None, "--" + name.replace("_", "-"), help=f"{field.description}{shown}", show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=plain | None)


class _Server(uvicorn.Server):
    """uvicorn, saying as an event which port it got."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for opened in (one for server in self.servers for one in server.sockets):
            log("listening", host=opened.getsockname()[0], port=opened.getsockname()[1])


def serve(**flags: Any) -> None:
    """Serve embeddings with predicted sparse attention, over HTTP.

    Every flag is also an environment variable: --max-items is SPARSEFINDER_MAX_ITEMS. Flags win.
    """
    try:
        code = run(load_settings(**flags))
    except SparsefinderError as error:
        _say(str(error))
        code = USAGE_ERROR
    raise typer.Exit(code)


def _say(error: str) -> None:
    Console(stderr=True).print(f"[red]error:[/red] {escape(error)}", highlight=False, soft_wrap=True)


serve.__signature__ = inspect.Signature([_flag(name) for name in Settings.model_fields])  # type: ignore[attr-defined]
serve.__annotations__ = {name: _flag(name).annotation for name in Settings.model_fields}


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0 after a stop that was asked for, 1 where serving failed.

    Raises:
        SparsefinderError: the model or the artifact cannot be served.
    """
    _on_stop(_leave_at_once)
    check_faiss_wheels()
    forget_old_shapes()
    share_one_heap(KEPT)
    configure_logging(settings.log_level)
    from app.main import create_app  # here, so that --help need not wait for torch

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, on_failure=stop)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        server_header=False,
        ws="none",
    )
    server = _Server(config)

    def leave(number: int, frame: FrameType | None) -> None:
        """uvicorn finishes what runs and then raises the signal again, which would give another exit code than 0."""
        if not server.should_exit:
            _leave_at_once(number, frame)  # it has not begun

    _on_stop(leave)
    log("starting", host=settings.host, port=settings.port, admin_open=settings.admin_open)
    try:
        server.run()
    except SystemExit as asked:
        if asked.code:  # uvicorn has logged the reason of the system
            _say(f"host, port: cannot listen on {settings.host}:{settings.port}; the log's last event says why")
            return FAILED
    failure = app.state.engine.failure
    if isinstance(failure, SparsefinderError):
        raise failure
    return FAILED if failure or not server.started else 0


def _on_stop(handler: Callable[[int, FrameType | None], Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Before anything serves: an exception would come out of an imported module, as another one or not at all."""
    os._exit(0)


def main() -> None:
    """Entry point of the console script."""
    typer.run(serve)


if __name__ == "__main__":
    main()
