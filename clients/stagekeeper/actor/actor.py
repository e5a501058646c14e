"""`Actor`: an object that lives in one process and answers calls from others.

Decided here: what a class must be to be one. Not decided here: where actors run, and who hears of
their failures. Invariant: every Actor class carries the table of its endpoints, made when the class
is, so that a mistake in one shows at import and not at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from stagekeeper.actor.class_rules import MESH_NAMES, check_handlers
from stagekeeper.actor.endpoint import Endpoint, endpoint_table

if TYPE_CHECKING:
    from stagekeeper.actor.mesh_names import MeshNames
else:
    MeshNames = object


class Actor(MeshNames):
    """Base of everything that has endpoints.

    Two methods are called when they are there, plain or async (an actor whose endpoints are all
    plain can have no async `__supervise__`):

    * `__supervise__(self, failure) -> bool`: a mesh that this actor spawned has failed, in part or
      whole. True: handled. False: this actor fails too, and its owner is told. It may take
      `__supervise_limit_s__` seconds.
    * `__cleanup__(self, exc)`: the actor ends; `exc` says why, None when it was asked to.
    """

    __endpoints__: ClassVar[Mapping[str, Endpoint]] = MappingProxyType({})
    """By name, in order of definition. Read by whatever serves the actor."""

    __reserved_names__: ClassVar[frozenset[str]] = MESH_NAMES
    """Names that an endpoint of a subclass may not take, beside those of the bases."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        names = [vars(base).get("__reserved_names__", frozenset()) for base in cls.__mro__]
        cls.__endpoints__ = endpoint_table(cls, reserved=frozenset().union(*names))
        check_handlers(cls, cls.__endpoints__)
