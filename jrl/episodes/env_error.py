"""The error of an environment. Imports nothing, as the sandbox and reward workers use it."""


class EnvError(Exception):
    """A fault of an environment, recorded with the member that it ends."""


class FormError(EnvError):
    """A value of another type or shape than environments return, which no later turn mends."""
