"""The one error that ends a start."""


class StartError(RuntimeError):
    """The cluster cannot start or has ended; the message is for the person who started it."""
