"""The base of every specification: keyword-only, immutable, checked when it is built.

msgspec takes `kw_only` per class, so each spec repeats `frozen=True, kw_only=True`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound="Spec")


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A frozen value. Equal fields make equal, hashable specs (where the fields are hashable)."""

    def replace(self: S, **changes: Any) -> S:
        """A copy with some fields changed; it is checked again."""
        return msgspec.structs.replace(self, **changes)
