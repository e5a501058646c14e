"""Actors: what `@endpoint` opens to callers, and what a running call may know of itself."""

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.call_context import CallContext, context
from stagekeeper.actor.endpoint import Endpoint, EndpointKind, endpoint

__all__ = ["Actor", "CallContext", "Endpoint", "EndpointKind", "context", "endpoint"]
