"""Programs as text: one line per role, `p0s1: RA5:9.0@0 F5:9.0 ...`. It round-trips; golden files are made of it."""

from __future__ import annotations

import re

from mixfleet.errors import InputError
from mixfleet.program.action import Program, Role, parse_action

_LINE = re.compile(r"p(\d+)s(\d+):(.*)")


def to_text(program: Program) -> str:
    """One line per role, ending in a newline."""
    return "".join(f"p{r.pipeline}s{r.stage}: {' '.join(map(str, r.actions))}\n" for r in program.roles)


def from_text(text: str) -> Program:
    """The inverse of `to_text`. Raises InputError with the line."""
    roles = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if not match:
            raise InputError(f"{line.strip()[:40]!r} does not begin with a role, as in 'p0s1:'", where=f"line {number}")
        try:
            actions = tuple(parse_action(word) for word in match[3].split())
        except InputError as error:
            raise InputError(str(error), where=f"line {number}") from None
        roles.append(Role(pipeline=int(match[1]), stage=int(match[2]), actions=actions))
    return Program(roles=tuple(roles))
