"""Programs as text: one line per role, `p0s1: RA5:9.0@0 F5:9.0 ...`; of several seats, `p0s1+p1s0: ...`.

It round-trips; golden files are made of it.
"""

from __future__ import annotations

import re

from mixfleet.errors import InputError
from mixfleet.program.action import Program, Role, parse_action

_LINE = re.compile(r"(p\d+s\d+(?:\+p\d+s\d+)*):(.*)")
_SEAT = re.compile(r"p(\d+)s(\d+)")


def to_text(program: Program) -> str:
    """One line per role, ending in a newline."""
    return "".join(f"{'+'.join(f'p{p}s{s}' for p, s in r.seats)}: {' '.join(map(str, r.actions))}\n"
                   for r in program.roles)


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
            actions = tuple(parse_action(word) for word in match[2].split())
        except InputError as error:
            raise InputError(str(error), where=f"line {number}") from None
        (pipeline, stage), *more = ((int(p), int(s)) for p, s in _SEAT.findall(match[1]))
        roles.append(Role(pipeline=pipeline, stage=stage, actions=actions, more=tuple(more)))
    return Program(roles=tuple(roles))
