"""The errors that the tools report as one line."""


class InputError(ValueError):
    """A config or data that cannot work; the message is what the user reads."""
