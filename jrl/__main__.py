"""``python -m jrl`` is the ``jrl`` command."""

import contextlib

from jrl.errors import INTERRUPTED
from jrl.system.signals import end_at_once, ignore


def main() -> None:
    """Runs the command line; the entry point of ``jrl``."""
    try:
        with contextlib.ExitStack() as starting:
            starting.enter_context(end_at_once())
            from jrl.cli.app import main as run  # takes a third of a second

            run(starting.close)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            ignore()  # another one while Python closes would change the exit code
        raise


if __name__ == "__main__":
    main()
