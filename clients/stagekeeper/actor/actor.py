"""`Actor`: an object that lives in one process and answers calls from others.

Decided here: what a class must be to be one. Not decided here: where actors run, and who hears of
their failures. Invariant: every Actor class carries the table of its endpoints, made when the class
is, so that a mistake in one shows at import and not at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from stagekeeper.actor.endpoint import Endpoint, endpoint_table


class Actor:
    """Base of everything that has endpoints."""

    __endpoints__: ClassVar[Mapping[str, Endpoint]] = MappingProxyType({})
    """By name, in order of definition. Read by whatever serves the actor."""

    __reserved_names__: ClassVar[frozenset[str]] = frozenset()
    """Names that an endpoint of a subclass may not take."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__endpoints__ = endpoint_table(cls, reserved=cls.__reserved_names__)
