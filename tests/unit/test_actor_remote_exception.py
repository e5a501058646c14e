"""Exceptions across processes: what they are on the other side, and how much of them travels."""

from __future__ import annotations

import asyncio
import builtins
import errno
import pickle
import sys
import traceback
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.actor import error_text
from stagekeeper.actor.entrypoint import load_class
from stagekeeper.actor.errors import RemoteError
from stagekeeper.actor.remote_exception import exception_from_proto, exception_to_proto
from stagekeeper.client.errors import EndpointRaised
from stagekeeper.v1.stage_service_pb2 import RemoteException

in_its_time = settings(deadline=None)

_BUILTINS = [
    cls
    for cls in vars(builtins).values()
    if isinstance(cls, type) and issubclass(cls, BaseException)
]
_STEERING = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
    BaseExceptionGroup,
)


_MISSING: dict[str, int] = {}


class OutOfCards(ValueError):
    """As a library has them."""


OutOfCards.__module__ = "somelib"


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        if cause is not None:
            raise error from cause
        raise error
    except BaseException as caught:
        return caught


def _sent(error: BaseException, mesh_name="workers", rank=2) -> RemoteError:
    message = exception_to_proto(error, mesh_name=mesh_name, rank=rank)
    return exception_from_proto(RemoteException.FromString(message.SerializeToString()))


def _mro_names(cls: type) -> list[str]:
    return [it.__name__ for it in cls.__mro__ if it is not object]


def test_an_exception_is_caught_by_its_builtin_type_and_tells_who_raised():
    error = _sent(_raised(OutOfCards("none left")))
    assert isinstance(error, ValueError) and isinstance(error, RemoteError)
    assert isinstance(error, EndpointRaised)
    assert str(error) == "workers[2] raised somelib.OutOfCards: none left"
    assert (error.mesh_name, error.rank) == ("workers", 2)
    assert (error.remote_type, error.remote_message) == ("somelib.OutOfCards", "none left")
    assert error.builtin_types == ("ValueError", "Exception", "BaseException")
    assert error.reason == "ENDPOINT_RAISED" and error.next_move and not error.never_ran
    assert "test_actor_remote_exception" in error.remote_traceback
    assert type(error) is type(_sent(ValueError()))


@pytest.mark.parametrize("cls", _BUILTINS, ids=lambda it: it.__name__)
def test_every_builtin_type_is_taken_over_unless_it_steers_a_process(cls):
    error = exception_from_proto(
        RemoteException(type=cls.__name__, builtin_types=_mro_names(cls), message="so it is")
    )
    assert isinstance(error, RemoteError)
    if issubclass(cls, _STEERING) or cls in (BaseException, Exception):
        assert type(error) is RemoteError
    else:
        assert isinstance(error, cls)
        assert type(error).__name__ == f"RemoteError[{cls.__name__}]"
    assert str(error) == f"{cls.__name__}: so it is"
    assert cls.__name__ in "".join(traceback.format_exception(error))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and vars(again) == vars(error)


def test_what_steers_a_task_steers_none_elsewhere():
    assert type(_sent(asyncio.CancelledError())) is RemoteError
    assert type(_sent(_raised(SystemExit(3)))) is RemoteError


def test_a_type_of_a_later_python_is_the_next_one_that_is_known_here():
    told = RemoteException(type="NewError", builtin_types=["NewError", "KeyError", "Exception"])
    assert isinstance(exception_from_proto(told), KeyError)
    for names in (["print"], ["object"], ["__import__"], []):
        assert type(exception_from_proto(RemoteException(builtin_types=names))) is RemoteError


def test_an_os_error_keeps_its_number():
    error = _sent(FileNotFoundError(errno.ENOENT, "No such file", "/x"))
    assert isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT
    again = pickle.loads(pickle.dumps(error))
    assert again.errno == errno.ENOENT
    plain = _sent(OSError("[Errno x] odd"))
    assert isinstance(plain, OSError) and plain.errno is None


def test_the_attributes_of_a_unicode_error_can_be_read():
    caught = _raised(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    error = _sent(caught)
    assert isinstance(error, UnicodeDecodeError)
    assert (error.object, error.start, error.end, error.encoding) == (b"", 0, 0, "")
    assert "invalid start byte" in str(error)


def test_a_key_error_is_told_as_python_prints_it():
    error = _sent(_raised(KeyError("a")))
    assert str(error) == "workers[2] raised KeyError: 'a'"


def test_a_group_tells_its_members():
    error = _sent(_raised(ExceptionGroup("both", [ValueError("a"), KeyError("b")])))
    assert error.remote_message == "both (2 sub-exceptions): ValueError: a; KeyError: 'b'"
    assert not isinstance(error, BaseExceptionGroup)


def test_causes_and_contexts_are_chained_as_they_were():
    try:
        try:
            try:
                _MISSING["a"]
            except KeyError:
                raise OSError("inner")  # noqa: B904 - without `from`, as in much code
        except OSError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        error = _sent(outer)
    else:
        raise AssertionError
    assert isinstance(error.__cause__, OSError) and error.__suppress_context__
    assert error.__cause__.__cause__ is None and not error.__cause__.__suppress_context__
    assert isinstance(error.__cause__.__context__, KeyError)
    assert "KeyError" in error.remote_traceback


def test_a_context_that_was_suppressed_does_not_travel():
    try:
        try:
            _MISSING["a"]
        except KeyError:
            raise ValueError("alone") from None
    except ValueError as alone:
        error = _sent(alone)
    else:
        raise AssertionError
    assert error.__cause__ is None and error.__context__ is None
    assert "KeyError" not in error.remote_traceback


def test_printing_it_shows_the_remote_traceback_once():
    error = _sent(_raised(ValueError("outer"), cause=_raised(KeyError("inner"))))
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback of workers[2]:") == 1
    assert "The above exception was the direct cause" in shown
    assert shown.startswith("stagekeeper.actor.RemoteError[KeyError]: workers[2] raised KeyError")


def test_an_error_that_passes_through_another_rank_stays_what_it_was():
    at_manager = _raised(_sent(_raised(OutOfCards("none left"))))
    error = _sent(at_manager, mesh_name="manager", rank=0)
    assert isinstance(error, ValueError)
    assert str(error) == "manager[0] raised somelib.OutOfCards: none left"
    assert "Traceback of workers[2]:" in error.remote_traceback
    wrapped = _sent(_raised(RuntimeError("r"), cause=at_manager), mesh_name="manager", rank=0)
    assert isinstance(wrapped.__cause__, ValueError)
    assert str(wrapped.__cause__) == "workers[2] raised somelib.OutOfCards: none left"


def test_a_circular_chain_ends():
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    error = _sent(one)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.__cause__ is None


def test_a_long_chain_of_long_errors_is_cut_to_what_a_message_holds():
    error: BaseException | None = None
    for number in range(1_000):
        error = _raised(ValueError(f"{number} " + "ß" * 1_000), cause=error)
    assert error is not None
    message = exception_to_proto(error, mesh_name="m" * 10_000, rank=0)
    assert message.ByteSize() < 160 * 1_024
    back: BaseException | None = exception_from_proto(message)
    assert "999 " in str(back)
    depth = 0
    while back is not None:
        back, depth = back.__cause__, depth + 1
    assert depth == 12


@pytest.mark.parametrize("length", [32, 33])
def test_a_traceback_tells_of_so_many_errors_and_that_there_were_more(length):
    error: BaseException | None = None
    for number in range(length):
        error = _raised(ValueError(f"number {number}"), cause=error)
    assert error is not None
    told = _sent(error).remote_traceback
    assert told.count("ValueError: number") == 32
    assert told.startswith("…\n") == (length > 32)
    assert told.endswith(f"ValueError: number {length - 1}\n")


def test_an_error_that_python_cannot_print_is_told_by_its_frames():
    broken = SyntaxError("odd")
    broken.lineno, broken.text = 1, 5  # type: ignore[assignment]
    error = _sent(_raised(ValueError("v"), cause=_raised(broken)))
    assert "in _raised" in error.remote_traceback
    assert error.remote_traceback.endswith("ValueError: v\n")
    assert isinstance(error.__cause__, SyntaxError)


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("module", ["__main__", None])
def test_an_error_that_cannot_say_what_it_is_travels_nevertheless(raised, module):
    class Broken(Exception):
        def __str__(self) -> str:
            raise raised("no")

    Broken.__module__ = module
    Broken.__qualname__ = "Broken"
    broken = Broken()
    broken.__notes__ = 3  # type: ignore[assignment]
    error = _sent(_raised(broken))
    assert str(error) == (
        f"workers[2] raised Broken: (its message cannot be read: __str__ raised {raised.__name__})"
    )
    assert _sent(ValueError("a\udc80")).remote_message == "a?"


def test_what_a_script_defines_is_named_as_in_the_script(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "from stagekeeper.actor import Actor\n"
        "class Odd(Exception):\n    pass\n"
        "class Job(Actor):\n    class Inner(Exception):\n        pass\n"
    )
    module = sys.modules[load_class("__main__:Job", str(script)).__module__]
    assert module.__name__ != "__main__"

    error = _sent(_raised(module.Odd("no"), cause=_raised(module.Job.Inner("why"))))

    assert error.remote_type == "Odd" and str(error) == "workers[2] raised Odd: no"
    assert error.remote_traceback.endswith("\nOdd: no\n")
    assert module.__name__ not in "".join(traceback.format_exception(error))
    assert isinstance(error.__cause__, RemoteError) and error.__cause__.remote_type == "Job.Inner"


def test_frames_that_led_to_the_authors_code_are_left_out(monkeypatch):
    # This module plays ours; what it runs is somebody else's.
    monkeypatch.setattr(error_text, "_NOT_THEIRS", (__file__,))
    theirs = types.ModuleType("theirs")
    source = "def run(then):\n    then()\n    raise ValueError('x')\n"
    exec(compile(source, "/home/a/theirs.py", "exec"), vars(theirs))

    def call(then) -> RemoteError:
        try:
            theirs.run(then)
        except ValueError as error:
            return _sent(error)
        raise AssertionError

    def fail() -> None:
        raise ValueError("here")

    assert __file__ not in call(lambda: None).remote_traceback
    assert "/home/a/theirs.py" in call(lambda: None).remote_traceback
    deeper = call(fail).remote_traceback
    assert deeper.index("/home/a/theirs.py") < deeper.index(__file__)
    assert __file__ in _sent(_raised(ValueError("ours alone"))).remote_traceback


_names = st.sampled_from([cls.__name__ for cls in _BUILTINS]) | st.text(max_size=5)
_texts = st.text(st.characters(codec="utf-8"), max_size=10)
_alone = st.builds(
    RemoteException,
    type=_texts,
    builtin_types=st.lists(_names, max_size=3),
    message=_texts,
    traceback=_texts,
    rank=st.integers(0, 2**32 - 1),
    mesh_name=_texts,
)


@in_its_time
@given(st.lists(st.tuples(_alone, st.booleans()), min_size=1, max_size=4))
def test_any_message_becomes_an_error_that_tells_the_same_again(chain):
    message: RemoteException | None = None
    for told, is_explicit in chain:
        if message is not None:
            told.cause.CopyFrom(message)
            told.is_explicit_cause = is_explicit
        message = told
    assert message is not None
    error: BaseException | None = exception_from_proto(message)
    assert isinstance(error, RemoteError)
    sent_on = exception_to_proto(error, mesh_name=message.mesh_name, rank=message.rank)
    again: BaseException | None = pickle.loads(pickle.dumps(error))
    for told, _ in reversed(chain):
        assert isinstance(error, RemoteError) and again is not None
        assert (error.remote_type, error.remote_message) == (told.type, told.message)
        assert (error.remote_traceback, error.rank) == (told.traceback, told.rank)
        assert (str(again), vars(again), type(again)) == (str(error), vars(error), type(error))
        assert (sent_on.type, sent_on.message, sent_on.builtin_types, sent_on.rank) == (
            told.type,
            told.message,
            told.builtin_types,
            told.rank,
        )
        assert error.__suppress_context__ == sent_on.is_explicit_cause == told.is_explicit_cause
        sent_on = sent_on.cause
        error, again = (
            (it.__cause__ if told.is_explicit_cause else it.__context__) for it in (error, again)
        )
    assert error is None and again is None
