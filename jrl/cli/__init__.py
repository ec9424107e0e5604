"""The ``jrl`` command.

- ``app``: the list of commands
- ``before``, ``runs``, ``policies``: what each does
- ``arguments``, ``complete``: arguments that they share, and the shell's completion of words
- ``group``, ``console``: what is printed, errors included
- ``doctor``: what this machine has
"""
