"""Errors a user can cause. Everything else that is raised is a bug of ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Bad input: what is wrong, where, what is allowed. The command line prints it and exits with 2."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)


def unknown(kind: str, name: object, known: Iterable[str], *, where: str = "") -> InputError:
    """The error for a name that is not in a table; it names the nearest entries."""
    names = sorted(known)
    near = get_close_matches(str(name).lower(), [n.lower() for n in names], n=3, cutoff=0.5)
    nearest = [n for n in names if n.lower() in near]
    hint = f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    shown = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])} and {len(names) - 10} more"
    return InputError(f"unknown {kind} {name!r}{hint} Known: {shown}." if hint else
                      f"unknown {kind} {name!r}. Known: {shown}.", where=where)


class RunError(RuntimeError):
    """A run that started and could not go on: a worker died, a device ran out of memory. The command exits with 1."""
