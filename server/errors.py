"""What a request can be refused for before it reaches the engine; interceptors.py has the status of each."""


class InvalidRequestError(ValueError):
    """A field is wrong; the message names the field, its value and the limit."""


class UnsupportedError(Exception):
    """A field asks for something that this server can't do."""


class NotReadyError(Exception):
    """The model is still loading."""
