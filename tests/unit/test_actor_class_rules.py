"""What the class of an actor may not be, found when it is made."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from stagekeeper.actor import Actor, ActorMesh, endpoint
from stagekeeper.actor.class_rules import MESH_NAMES
from stagekeeper.stage import Stage


class Plain(Actor):
    @endpoint
    def step(self) -> int:
        return 1

    @endpoint
    def count(self) -> Iterator[int]:
        yield 1


class Mixed(Plain):
    @endpoint
    async def look(self) -> int:
        return 1


class Careful(Actor):
    """Without endpoints of its own; its subclasses bring them."""

    async def __supervise__(self, failure: Any) -> bool:
        return True


def made(*bases: type, **members: Any) -> type:
    return type("Made", bases, members)


def supervise(self: Any, failure: Any) -> bool:
    return True


async def supervise_async(self: Any, failure: Any) -> bool:
    return True


ONLY_PLAIN = (
    r"Made\.__supervise__ is async, and all endpoints of Made \(step, count\) are plain.*"
    "write `def __supervise__`"
)


async def init_async(self: Any) -> None:
    pass


def init_that_yields(self: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("init", [init_async, init_that_yields])
def test_init_is_a_plain_method(init):
    with pytest.raises(TypeError, match=r"Made\.__init__ is async or yields"):
        made(Plain, __init__=init)


def test_actor_whose_endpoints_are_all_plain_has_no_async_supervise():
    with pytest.raises(TypeError, match=ONLY_PLAIN):
        made(Plain, __supervise__=supervise_async)


def test_async_supervise_is_refused_when_it_is_inherited_with_the_endpoints():
    with pytest.raises(TypeError, match=ONLY_PLAIN):
        made(Plain, Careful)
    with pytest.raises(TypeError, match=ONLY_PLAIN):
        made(Careful, Plain)


def test_async_supervise_is_refused_where_a_subclass_takes_the_last_async_endpoint_away():
    made(Mixed, Careful)
    with pytest.raises(TypeError, match=ONLY_PLAIN):
        made(Mixed, Careful, look=None)


@pytest.mark.parametrize("bases", [(Mixed,), (Actor,), (Careful, Mixed)])
def test_async_supervise_is_allowed_beside_an_async_endpoint_and_without_endpoints(bases):
    made(*bases, __supervise__=supervise_async)


def test_async_generator_counts_as_an_async_endpoint():
    async def values(self: Any) -> AsyncIterator[int]:
        yield 1

    made(Plain, Careful, values=endpoint(values))


@pytest.mark.parametrize("bases", [(Plain,), (Mixed,), (Actor,)])
def test_plain_supervise_is_allowed_everywhere(bases):
    made(*bases, __supervise__=supervise)


def test_plain_supervise_in_place_of_an_async_one_mends_it():
    made(Plain, Careful, __supervise__=supervise)
    made(Plain, Careful, __supervise__=None)


def one_too_few(self: Any) -> bool:
    return True


def one_too_many(self: Any, failure: Any, more: Any) -> bool:
    return True


def by_name_only(self: Any, *, failure: Any) -> bool:
    return True


@pytest.mark.parametrize("name", ["__supervise__", "__cleanup__"])
@pytest.mark.parametrize("function", [one_too_few, one_too_many, by_name_only])
def test_handler_that_cannot_be_called_with_one_argument_is_refused(name, function):
    with pytest.raises(
        TypeError, match=rf"Made\.{name}\(self.* cannot be called with one argument"
    ):
        made(Actor, **{name: function})
    with pytest.raises(TypeError, match="cannot be called with one argument"):
        made(made_without_check(name, function), Actor)


def made_without_check(name: str, function: Any) -> type:
    """A mixin, which is no actor and so checked only with one."""
    return type("Mixin", (), {name: function})


@pytest.mark.parametrize("name", ["__supervise__", "__cleanup__"])
def test_handler_with_room_for_one_argument_is_allowed(name):
    def optional(self: Any, failure: Any = None, more: int = 0) -> bool:
        return True

    def anything(*args: Any) -> bool:
        return True

    @functools.wraps(supervise)
    def wrapped(*args: Any) -> bool:
        return supervise(*args)

    for function in (optional, anything, wrapped, supervise, supervise_async):
        made(Actor, **{name: function})


@pytest.mark.parametrize("name", ["__supervise__", "__cleanup__"])
@pytest.mark.parametrize(
    "value",
    [staticmethod(supervise), classmethod(supervise), property(one_too_few), "yes", Plain()],
)
def test_handler_that_is_no_method_is_refused(name, value):
    with pytest.raises(
        TypeError, match=rf"{name} is a plain or async method, not {type(value).__name__}"
    ):
        made(Actor, **{name: value})


@pytest.mark.parametrize("name", ["__supervise__", "__cleanup__"])
def test_handler_that_yields_is_refused(name):
    def generator(self: Any, failure: Any) -> Iterator[bool]:
        yield True

    async def async_generator(self: Any, failure: Any) -> AsyncIterator[bool]:
        yield True

    for function in (generator, async_generator):
        with pytest.raises(TypeError, match="yields; it has to return"):
            made(Actor, **{name: function})


@pytest.mark.parametrize("limit", [0, -1, "5", None, True, float("nan")])
def test_limit_that_is_no_time_is_refused(limit):
    with pytest.raises(TypeError, match="__supervise_limit_s__ is a number of seconds, not"):
        made(Actor, __supervise_limit_s__=limit)
    made(Actor, __supervise_limit_s__=0.5)


@pytest.mark.parametrize("base", [Actor, Stage])
@pytest.mark.parametrize("name", sorted(MESH_NAMES))
def test_endpoint_with_a_name_that_meshes_have_is_refused(base, name):
    with pytest.raises(TypeError, match=rf"Made\.{name} cannot be an endpoint: the name is taken"):
        made(base, **{name: endpoint(one_too_few)})


@pytest.mark.parametrize("name", ["_step", "__call__", "__getitem__"])
def test_endpoint_with_a_name_that_begins_with_an_underscore_is_refused(name):
    with pytest.raises(TypeError, match=rf"Made\.{name} cannot be an endpoint: callers are other"):
        made(Actor, **{name: endpoint(one_too_few)})


@pytest.mark.parametrize("base", [Actor, Stage])
def test_names_of_meshes_are_free_for_what_is_no_endpoint(base):
    cls = made(base, **dict.fromkeys(MESH_NAMES, "its own"))
    assert all(getattr(cls(), name) == "its own" for name in MESH_NAMES)


def test_every_public_name_of_a_mesh_is_taken():
    assert {name for name in dir(ActorMesh) if not name.startswith("_")} <= MESH_NAMES
