"""Views as rich tables on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from mixfleet.report.views import Table, View

PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""


def show(*views: View) -> None:
    """Print to standard output, as wide as the terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    for i, view in enumerate(views):
        if i:
            console.print()
        console.print(_rendered(view))


def text(view: View, width: int = PLAIN_WIDTH) -> str:
    """The view as plain text without styles."""
    console = Console(highlight=False, width=width, color_system=None)
    with console.capture() as capture:
        console.print(_rendered(view))
    return capture.get()


def _rendered(view: View) -> RenderableType:
    facts = Grid.grid(padding=(0, 2))
    for name, value in view.facts:
        if value:
            facts.add_row(Text(name, style="dim"), Text(value))
    parts: list[RenderableType] = [Text(view.heading, style="bold")] if view.heading else []
    if facts.row_count:
        parts.append(facts)
    for table in view.tables:
        parts += ["", _grid(table)]
    return Group(*parts)


def _grid(table: Table) -> Grid:
    grid = Grid(title=table.title or None, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False,
                show_edge=False, header_style="bold")
    for name in table.columns:
        grid.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return grid
