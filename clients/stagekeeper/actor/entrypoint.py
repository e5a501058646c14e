"""Classes by name: how an actor's class is named on the wire, and how the other process finds it.

No class and no code travels: both processes import the same source. Decided here: which classes
have a name that means the same elsewhere, and how a class of a script's `__main__` is found again.
Not decided here: what paths a process imports from. Invariant: a script is imported again at most
once per process, under a name of its own, so that its `if __name__ == "__main__":` block never runs
there.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from stagekeeper.actor.actor import Actor
from stagekeeper.actor.error_text import one_line
from stagekeeper.client.errors import BadRequest

_MAIN: Final = "__main__"
_ALIAS: Final = "__stagekeeper_main_{number}__"

_lock = threading.RLock()
"""One import of a script at a time. Reentrant: a script may load classes while it is imported."""
_alias_by_path: dict[str, str] = {}
_path_by_alias: dict[str, str] = {}


class EntrypointError(BadRequest):
    """A class cannot be named for another process, or is not found by its name; says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=None, next_move="do what the message says")


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A class's name, the same in every process that has the same source.

    Attributes:
        entrypoint: `module:qualname`.
        main_path: the script's absolute path when the module is `__main__`; otherwise empty.
    """

    entrypoint: str
    main_path: str = ""

    def __str__(self) -> str:
        if not self.main_path:
            return self.entrypoint
        return f"{self.main_path}:{self.entrypoint.partition(':')[2]}"


def entrypoint_of(cls: object) -> Entrypoint:
    """Name an actor's class.

    Raises:
        EntrypointError: it has no name under which another process would find it.
    """
    if not isinstance(cls, type):
        raise EntrypointError(_no_class(cls))
    where = f"{cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, Actor):
        raise EntrypointError(f"{where} is no actor: derive it from stagekeeper.actor.Actor")
    if "<locals>" in cls.__qualname__:
        raise EntrypointError(
            f"{where} is defined inside a function, where no other process finds it: move it to "
            "the top level of its module"
        )
    module = sys.modules.get(cls.__module__)
    if module is None:
        raise EntrypointError(
            f"{where}: no module {cls.__module__} has been imported, so no other process can "
            "import it either: define the class in a module"
        )
    if _attribute(module, cls.__qualname__) is not cls:
        raise EntrypointError(
            f"{where} is not what its module has under that name (it was renamed, replaced or "
            "defined twice): give the class a name of its own at the top level of its module"
        )
    if cls.__module__ == _MAIN:
        return _entrypoint_in_main(module, cls.__qualname__)
    path = _path_by_alias.get(cls.__module__)
    if path is not None:
        return Entrypoint(f"{_MAIN}:{cls.__qualname__}", path)
    return Entrypoint(f"{cls.__module__}:{cls.__qualname__}")


def load_class(entrypoint: str, main_path: str = "") -> type[Actor]:
    """Find an actor's class by the name that `entrypoint_of` gave it, importing what has to be.

    Blocks while modules are imported.

    Args:
        entrypoint: `module:qualname`.
        main_path: the script, where the module is `__main__`.

    Raises:
        EntrypointError: there is no such class here, or it is no actor. What an import raised is
            its cause.
    """
    module_name, separator, qualname = entrypoint.partition(":")
    if not separator or not module_name or not qualname:
        raise EntrypointError(f"{entrypoint!r} is not of the form module:Class")
    module = _main_again(main_path) if module_name == _MAIN else _imported(module_name)
    found = _attribute(module, qualname)
    if found is None:
        home = main_path if module_name == _MAIN else module_name
        raise EntrypointError(
            f"{home} has no {qualname} in this process: both processes need the same version of "
            "it, and what it defines must not depend on how it is started"
        )
    if not isinstance(found, type) or not issubclass(found, Actor):
        raise EntrypointError(
            f"{entrypoint} is {found!r:.80}, no class derived from stagekeeper.actor.Actor"
        )
    return found


# --- names


def _no_class(value: object) -> str:
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda is no class: give the class itself, and its arguments after it"
    origin = getattr(value, "__origin__", None)
    if isinstance(origin, type):
        return f"{value!r} is no class: give {origin.__qualname__} itself, without brackets"
    if isinstance(value, Actor):
        return (
            f"{value!r:.80} is an actor already made: give its class, {type(value).__qualname__}, "
            "and the arguments of its __init__ after it"
        )
    return f"{value!r:.80} is no class: give the class itself, and its arguments after it"


def _attribute(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def _entrypoint_in_main(module: ModuleType, qualname: str) -> Entrypoint:
    name = _name_of_main(module)
    if name is not None:
        return Entrypoint(f"{name}:{qualname}")
    path = _path_of_main(module)
    if path is None:
        raise EntrypointError(
            f"{qualname} is defined interactively or by `python -c`, where no other process finds "
            "it: put it into a file and import it from there"
        )
    return Entrypoint(f"{_MAIN}:{qualname}", path)


def _name_of_main(module: ModuleType) -> str | None:
    """Return the name under which `python -m` found `__main__`; None when it was not `-m`."""
    spec = getattr(module, "__spec__", None)
    # A folder or archive that is run has a spec too, of the name `__main__`.
    return None if spec is None or spec.name == _MAIN else str(spec.name)


def _path_of_main(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    return os.path.realpath(file)


# --- imports


def _imported(module_name: str) -> ModuleType:
    main = sys.modules.get(_MAIN)
    if main is not None and _name_of_main(main) == module_name:
        # A second import would make second classes, of which the running ones are no instances.
        return main
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise EntrypointError(_import_failed(module_name, error)) from error


def _import_failed(name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{name}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing} here: install it for {sys.executable}, or have its "
            "folder in PYTHONPATH"
        )
    return f"the import of {name} raised {one_line(error)}"


def _main_again(path: str) -> ModuleType:
    """Return the module of the script at `path`, imported under a name of its own."""
    if not path:
        raise EntrypointError("a class of __main__ needs the path of its script")
    main = sys.modules.get(_MAIN)
    if main is not None and _name_of_main(main) is None and _path_of_main(main) == path:
        return main
    with _lock:
        alias = _alias_by_path.get(path)
        if alias is None:
            alias = _ALIAS.format(number=len(_alias_by_path))
            _alias_by_path[path], _path_by_alias[alias] = alias, path
        known = sys.modules.get(alias)
        return known if known is not None else _import_script(alias, path)


def _import_script(alias: str, path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise EntrypointError(
            f"there is no script {path} on this host: put the class into a module that is "
            "installed here too"
        )
    # By its loader: a script may have any suffix, or none.
    loader = importlib.machinery.SourceFileLoader(alias, path)
    spec = importlib.util.spec_from_file_location(alias, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # What the script imports lies beside it, as when it is run.
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[alias] = module  # before it runs: dataclasses and others look their module up
    try:
        loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(alias, None)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        failed = _import_failed(path, error)
        if isinstance(error, ModuleNotFoundError):
            raise EntrypointError(failed) from error
        # The advice first: what is printed of a long line is its beginning.
        raise EntrypointError(
            "a script that has actors is imported again where they are, so what it does when it is "
            f'run belongs under `if __name__ == "__main__":`; {failed}'
        ) from error
    return module
