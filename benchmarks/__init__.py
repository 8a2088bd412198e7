"""Claims of speed and accuracy, each with its bound. `python -m benchmarks [NAME ...]` repeats them."""

from typing import NamedTuple


class Figure(NamedTuple):
    """One measured claim."""

    what: str
    value: str
    bound: str = ""
    """What it is measured against."""
    reached: bool | None = None
    """None where there is no limit to reach."""
