"""The whole command line, as typer reads it: every verb, help, and what to say of a mistake.

Decided here: the order of the verbs, and the flags that belong to none. Not decided here: what the
verbs' own flags are (their signatures, `flags`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from stagekeeper.cli.flags import Argument, Parameter
from stagekeeper.cli.verbs.agent import agent
from stagekeeper.cli.verbs.call import call
from stagekeeper.cli.verbs.delete import delete
from stagekeeper.cli.verbs.deploy import deploy
from stagekeeper.cli.verbs.describe import describe
from stagekeeper.cli.verbs.events import events
from stagekeeper.cli.verbs.init import init
from stagekeeper.cli.verbs.logs import logs
from stagekeeper.cli.verbs.plan import plan
from stagekeeper.cli.verbs.stages import stages
from stagekeeper.cli.verbs.status import status
from stagekeeper.cli.verbs.supervisor import supervisor
from stagekeeper.cli.verbs.up import up
from stagekeeper.cli.verbs.validate import validate

HELP = """Keep multi-stage models serving while the things around them fail.

\b
Exit codes: 0 done, 1 it failed, 2 usage, 69 nobody answers, 70 a bug,
78 bad spec, 130 Ctrl-C.
"""

_VERBS = (
    init,
    validate,
    up,
    supervisor,
    agent,
    plan,
    deploy,
    status,
    describe,
    call,
    logs,
    events,
    delete,
    stages,
)
"""In the order in which somebody new needs them."""


def command(verbs: Sequence[Callable[..., object]] = _VERBS) -> Any:
    """Build the command line."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=HELP,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_everywhere)
    for verb in verbs:
        app.command()(_for_typer(verb))
    return typer.main.get_command(app)


def _for_typer(verb: Callable[..., object]) -> Callable[..., object]:
    """Return a verb whose flags are described by typer's own classes."""

    @functools.wraps(verb)
    def same(**arguments: Any) -> object:
        return verb(**arguments)

    hints = get_type_hints(verb, include_extras=True)
    signature = inspect.signature(verb)
    parameters = [
        it.replace(annotation=_typers(hints[name])) for name, it in signature.parameters.items()
    ]
    same.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    same.__annotations__ = {it.name: it.annotation for it in parameters}
    return same


def _typers(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    value_type, *about = get_args(hint)
    more = {"parser": _place} if Path in _named_in(value_type) else {}
    made = [_described(it, more) if isinstance(it, Parameter) else it for it in about]
    return Annotated[value_type, *made]


def _named_in(value_type: Any) -> Iterator[Any]:
    yield value_type
    for part in get_args(value_type):
        yield from _named_in(part)


def _described(it: Parameter, more: Mapping[str, Any]) -> Any:
    kind = typer.Argument if isinstance(it, Argument) else typer.Option
    settings = {**it.settings, **more}
    return kind(*it.names, **settings)


def _place(text: str) -> Path:
    if not text:  # it would mean the folder that one happens to be in
        raise typer.BadParameter("it is empty: name a file or a folder, or leave it out")
    return Path(text)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"stagekeeper {version('stagekeeper')}")
        raise typer.Exit


def _everywhere(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
            show_default=False,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks; anywhere on the line.", show_default=False),
    ] = False,
) -> None:
    """Take the flags that belong to no verb; both have been dealt with by now."""
