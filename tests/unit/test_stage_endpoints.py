from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from stagekeeper.actor import Actor, EndpointKind, endpoint
from stagekeeper.stage import Stage


class Voice(Actor):
    def hidden(self) -> None: ...

    @endpoint
    def speak(self, text: str, *, loud: bool = False) -> str:
        """Say something."""
        return text.upper() if loud else text

    @endpoint(idempotent=True)
    async def listen(self) -> str:
        return "heard"

    @endpoint
    def sing(self) -> Iterator[int]:
        yield 1

    @endpoint
    async def hum(self) -> AsyncIterator[int]:
        yield 1


def test_table_holds_the_marked_methods_in_order_of_definition():
    assert list(Voice.__endpoints__) == ["speak", "listen", "sing", "hum"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("speak", EndpointKind.SYNC),
        ("listen", EndpointKind.ASYNC),
        ("sing", EndpointKind.SYNC_STREAM),
        ("hum", EndpointKind.ASYNC_STREAM),
    ],
)
def test_kind_follows_from_how_the_method_is_written(name, kind):
    assert Voice.__endpoints__[name].kind is kind


def test_only_what_says_so_is_idempotent():
    assert [e.name for e in Voice.__endpoints__.values() if e.idempotent] == ["listen"]


def test_endpoint_shows_itself_as_its_caller_sees_it():
    assert str(Voice.__endpoints__["speak"]) == "speak(text: str, *, loud: bool = False)"


def test_marked_method_is_still_a_plain_method():
    assert Voice().speak("hi", loud=True) == "HI"
    assert Voice.speak.__doc__ == "Say something."


def test_subclass_has_the_endpoints_of_its_bases_and_its_own():
    class Choir(Voice):
        @endpoint
        def rest(self) -> None: ...

    assert list(Choir.__endpoints__) == ["speak", "listen", "sing", "hum", "rest"]
    assert "rest" not in Voice.__endpoints__


def test_override_replaces_the_endpoint_with_its_own_marks():
    class Whisper(Voice):
        @endpoint(idempotent=True)
        async def speak(self, text: str) -> str:  # type: ignore[override]
            return text

    assert Whisper.__endpoints__["speak"].kind is EndpointKind.ASYNC
    assert Whisper.__endpoints__["speak"].idempotent
    assert not Voice.__endpoints__["speak"].idempotent


def test_override_without_a_mark_is_refused_at_class_definition():
    with pytest.raises(TypeError, match=r"Whisper\.speak replaces an endpoint without being one"):

        class Whisper(Voice):
            # A checker refuses it too.
            def speak(  # type: ignore[override]
                self, text: str, *, loud: bool = False
            ) -> str:
                return text


def test_override_by_none_takes_the_endpoint_away():
    class Mute(Voice):
        speak = None  # type: ignore[assignment]

    assert "speak" not in Mute.__endpoints__


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property])
def test_mark_on_something_else_than_a_plain_method_is_refused(wrap):
    with pytest.raises(TypeError, match="plain method"):
        endpoint(wrap(lambda self: None))
    with pytest.raises(TypeError, match="plain method"):
        type("Odd", (Actor,), {"method": wrap(endpoint(lambda self: None))})


@pytest.mark.parametrize("name", ["load", "allocate", "progress", "context", "siblings"])
def test_stage_refuses_an_endpoint_whose_name_it_needs_itself(name):
    def method(self) -> None: ...

    with pytest.raises(TypeError, match=rf"Taken\.{name} cannot be an endpoint"):
        type("Taken", (Stage,), {name: endpoint(method)})


def test_method_without_self_is_refused():
    with pytest.raises(TypeError, match="takes no self"):
        type("Odd", (Actor,), {"method": endpoint(lambda: None)})  # type: ignore[misc, arg-type]
