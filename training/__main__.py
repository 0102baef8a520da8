"""`sparsefinder-train`, also as `python -m training`: Ctrl-C is quiet while torch and the others are imported, too."""

import os
import signal


def main() -> None:
    """The console script."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else Ctrl-C is ignored, as for what a shell runs in the background
        # No exception: torch swallows one while it loads numpy, and goes on without. Nothing is open yet.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from training.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
