"""The entry point: a command line in, an exit code out, and one line on stderr when it went wrong.

Decided here: how an end is shown. The verbs raise and never exit; what an exception means is
`explain`'s. Invariant: no traceback reaches a user who did not ask for it with `--debug`, Ctrl-C
while modules are loaded included.
"""

from __future__ import annotations

from stagekeeper.cli.interrupts import end_quietly, raise_again

end_quietly()  # before more is loaded

import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from stagekeeper.cli import later  # noqa: E402
from stagekeeper.cli.exits import ExitCode  # noqa: E402
from stagekeeper.cli.stdout import (  # noqa: E402
    escape_what_has_no_letter,
    leave_stdout,
    open_what_is_closed,
)

raise_again()  # `run` catches it

DEBUG_FLAG = "--debug"


def main() -> None:
    """Run the command line of this process, and end it."""
    open_what_is_closed()
    escape_what_has_no_letter()
    code = run(sys.argv[1:])
    end_quietly()
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises, and never ends the process."""
    words, is_debug = _without_debug(argv)
    try:
        later.refuse(words)
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output is gone (`… | head`), and nobody is left to tell.
        leave_stdout()
        return ExitCode.DONE
    except SystemExit:
        # typer's own way out of a broken pipe, and of nothing else: verbs never end the process.
        return ExitCode.DONE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        return _show(error, is_debug=is_debug)


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, wherever it stands: it is about how we fail, and parsing can fail too."""
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word for word in argv[:end] if word != DEBUG_FLAG]
    return [*words, *argv[end:]], len(words) < end


def _dispatch(words: Sequence[str]) -> int:
    from stagekeeper.cli.verbs import LONG_LIVED

    verb = LONG_LIVED.get(words[0]) if words else None
    if verb is not None:
        from stagekeeper.cli.light_parsing import plain_arguments

        arguments = plain_arguments(verb, words[1:])
        if arguments is not None:
            from stagekeeper.cli.light_start import collecting_nothing, load_structlog

            with collecting_nothing():
                load_structlog()
                verb(**arguments)
            return ExitCode.DONE
    from stagekeeper.cli.full_parsing import command

    run_command = command().main
    if not words:
        run_command(args=["--help"], prog_name="stagekeeper", standalone_mode=False)
        return ExitCode.USAGE
    # Whatever a verb returns that is no int means that it did what it should.
    result = run_command(args=list(words), prog_name="stagekeeper", standalone_mode=False)
    return result if isinstance(result, int) else ExitCode.DONE


def _show(error: Exception, *, is_debug: bool) -> int:
    from stagekeeper.cli.explain import explain
    from stagekeeper.cli.text.lines import LONGEST_LINE, first_line, visible

    known = explain(error)
    if is_debug:
        import traceback

        if known.debug and known.code is not ExitCode.BUG:
            # What went wrong did so elsewhere: our own frames would only hide it.
            print(visible(known.debug.rstrip()), file=sys.stderr)
        else:
            traceback.print_exception(error)
    limit = sys.maxsize if is_debug else LONGEST_LINE
    print(f"stagekeeper: {first_line(known.message, limit)}", file=sys.stderr)
    for line in known.details:
        print(f"  {first_line(line, limit)}", file=sys.stderr)
    if known.code is ExitCode.BUG and not is_debug:
        print(f"  (with {DEBUG_FLAG} the same command shows where)", file=sys.stderr)
    return known.code
