"""`mixfleet train`: train by a plan."""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, json_option


@click.command()
@click.argument("plan", type=EXISTING)
@json_option
def train(plan: Path, as_json: bool) -> int:
    """Train by PLAN."""
    raise NotImplementedError
