"""``python -m jrl`` is the ``jrl`` command."""

from jrl.cli import main

if __name__ == "__main__":
    main()
