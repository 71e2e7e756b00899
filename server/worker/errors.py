"""What can go wrong between ranks; no torch."""


class RankError(Exception):
    """A rank has ended, failed or stands still; the message says which."""
