"""What a user sees of a command line that cannot be run, and the code that it ends with."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from stagekeeper.cli import later
from stagekeeper.cli.calling import call_shown
from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.explain import explain
from stagekeeper.cli.main import run
from stagekeeper.cli.serving import MOST_FILES, allowed_entrypoints, raise_file_limit
from stagekeeper.client import (
    Client,
    DeadlineExceeded,
    EndpointRaised,
    SupervisorUnreachable,
    Unavailable,
)


@pytest.mark.parametrize("verb", sorted(later.VERBS))
def test_verb_of_a_later_release_is_refused_with_what_to_do_instead(verb, capsys):
    code = run([verb, "something", "--flag"])

    assert code == ExitCode.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"stagekeeper: not yet: `stagekeeper {verb}` ")
    assert "until then: " in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--drain-on-term", "--drain-on-term=5"])
def test_flag_of_a_later_release_is_refused_and_not_called_unknown(flag, capsys):
    code = run(["agent", flag, "5"])

    assert code == ExitCode.USAGE
    assert "not yet: `--" in capsys.readouterr().err


def test_what_looks_like_a_later_flag_after_a_double_dash_is_left_alone():
    later.refuse(["agent", "--", "--drain-on-term"])


def test_flag_of_another_verb_is_left_alone():
    later.refuse(["supervisor", "--drain-on-term"])


@pytest.mark.parametrize("argv", [["no-such-verb"], ["agent", "--no-such-flag"], ["validate"]])
def test_unknown_words_end_with_the_usage_code_and_name_the_help(argv, capsys):
    code = run(argv)

    assert code == ExitCode.USAGE
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "--help`" in err


def test_nothing_at_all_shows_the_help_and_ends_with_the_usage_code(capsys):
    code = run([])

    assert code == ExitCode.USAGE
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["init", "--help"], ["supervisor", "-h"]])
def test_help_is_an_answer_and_not_a_failure(argv, capsys):
    code = run(argv)

    assert code == ExitCode.DONE
    assert "Usage: stagekeeper" in capsys.readouterr().out


def test_version_is_printed(capsys):
    assert run(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("stagekeeper ")


def test_settings_that_contradict_each_other_are_a_usage_error(capsys):
    code = run(["supervisor", "--no-store", "--heartbeat-s", "9"])

    assert code == ExitCode.USAGE
    assert "times must nest" in capsys.readouterr().err


def test_address_beyond_loopback_is_refused_without_insecure(capsys):
    code = run(["supervisor", "--no-store", "--endpoint", "0.0.0.0:0"])

    assert code == ExitCode.USAGE
    assert "--insecure" in capsys.readouterr().err


def test_every_problem_of_an_agents_settings_is_listed(tmp_path: Path, capsys):
    code = run(
        ["agent", f"--state-dir={tmp_path}", "--listen=0.0.0.0:0", "--devices=gpu", "--cluster="]
    )

    assert code == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "--insecure" in err
    assert "'gpu'" in err
    assert "cluster ''" in err


def test_no_traceback_without_debug_and_one_with_it(monkeypatch, capsys):
    def break_down(argv):
        raise RuntimeError("wheels came off")

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", break_down)

    assert run(["status"]) == ExitCode.BUG
    quiet = capsys.readouterr().err
    assert "Traceback" not in quiet
    assert "wheels came off" in quiet
    assert "--debug" in quiet

    assert run(["status", "--debug"]) == ExitCode.BUG
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (CliError(ExitCode.FAILED, "it raised\nand\nmore"), "stagekeeper: it raised …\n"),
        (RuntimeError("one\ntwo"), "a bug (RuntimeError: one …): please report it\n"),
        (
            Unavailable("x" * 3000, next_move="come later"),
            "x" * 500 + "…: come later\n",
        ),
        (
            EndpointRaised("ValueError: one\ntwo", reason="ENDPOINT_RAISED"),
            "ValueError: one … (--debug shows the remote traceback)\n",
        ),
    ],
)
def test_long_text_of_others_is_cut_to_a_line_and_whole_with_debug(
    error, ending, monkeypatch, capsys
):
    def refuse(argv):
        raise error

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", refuse)

    run(["status"])
    shown = capsys.readouterr().err
    assert ending in shown
    run(["status", "--debug"])
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["up", "--agents=x"], "'--agents': it needs a whole number (see `stagekeeper up --help`)"),
        (["up", "--agents=0"], "'--agents': it needs at least 1 (see"),
        (["call", "m", "e", "--timeout=x"], "'--timeout': it needs a number (see"),
        (["status", "--output=x"], "'x' is not one of 'text', 'json' (see"),
        # An empty path is what a script makes of a variable that is not set, and not this folder.
        (["agent", "--lock-dir", ""], "'--lock-dir': it is empty: name a file or a folder"),
        (["up", "--state-dir="], "'--state-dir': it is empty: name a file or a folder"),
        (["validate", ""], "it is empty: name a file or a folder"),
    ],
)
def test_value_that_does_not_fit_is_refused_in_our_words(argv, words, capsys):
    assert run(argv) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert words in err
    assert "Input" not in err
    assert "Value error" not in err


@pytest.mark.parametrize("never_ran", [True, False])
async def test_call_without_an_answer_says_what_where_and_what_to_do(never_ran):
    class Late(Client):
        async def get(self, *args, **kwargs):
            raise DeadlineExceeded("the routes were not told", never_ran=never_ran)

    with pytest.raises(CliError) as caught:
        await call_shown(Late("127.0.0.1:1"), "g", "slow", ((), {}), stage=None, timeout=0.3)

    why = " (the routes were not told)" if never_ran else ""
    assert caught.value.message == (
        f"'slow' of 'g' did not answer within 0.3 s{why}: raise --timeout"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/s/store"),
            "cannot write /s/store: no space left on device: free some space, then start again",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "cannot write a file: no space left on device: free some space, then start again",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", "/s/f/logs"),
            "cannot open /s/f/logs: not a directory: a file stands where a folder is needed: "
            "move it, or name another",
        ),
        (OSError(errno.EIO, "Input/output error", b"/s/x"), "cannot use /s/x: input/output error"),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (OSError("said by us"), "said by us"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_path_and_what_to_do(error, said):
    assert explain(error).message == said


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("ipv4:127.0.0.1:5: connection attempt timed out before receiving SETTINGS frame", True),
        ("ipv4:127.0.0.1:5: Failed to connect to remote host: Connection refused", False),
    ],
)
def test_supervisor_that_hangs_is_not_said_to_be_missing(why, said):
    known = explain(
        SupervisorUnreachable(
            "the supervisor at 127.0.0.1:5 cannot be reached: failed to connect to all addresses; "
            f"last error: UNKNOWN: {why}"
        )
    )
    assert known.code == ExitCode.UNREACHABLE
    assert ("somebody is at 127.0.0.1:5 and does not answer" in known.message) is said
    assert ("start one with `stagekeeper supervisor`" in known.message) is not said


def test_lines_below_an_error_keep_their_place(monkeypatch, capsys):
    def refuse(argv):
        raise CliError(ExitCode.FAILED, "it failed", details=["its log:", "    | raise"])

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", refuse)

    run(["status"])

    assert capsys.readouterr().err.endswith("  its log:\n      | raise\n")


@pytest.mark.parametrize("verb", [("call", "m", "e"), ("deploy", "f.yaml"), ("delete", "m")])
@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf"])
def test_timeout_that_is_no_time_is_a_usage_error(verb, seconds, capsys):
    assert run([*verb, f"--timeout={seconds}"]) == ExitCode.USAGE
    assert "--timeout" in capsys.readouterr().err


def test_debug_of_an_error_shows_what_it_keeps_for_it(monkeypatch, capsys):
    def refuse(argv):
        raise CliError(ExitCode.FAILED, "it raised", details=["x" * 3000], debug="remote traceback")

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", refuse)

    assert run(["status"]) == ExitCode.FAILED
    assert "remote traceback" not in capsys.readouterr().err
    assert run(["--debug", "status"]) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert told == f"remote traceback\nstagekeeper: it raised\n  {'x' * 3000}\n"


def test_ctrl_c_ends_with_its_own_code(monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", interrupt)

    assert run(["status"]) == ExitCode.INTERRUPTED


def test_explaining_a_failure_does_not_fail_itself(monkeypatch, capsys):
    def break_down(argv):
        raise RuntimeError("wheels came off")

    def broken(error):
        raise ImportError("half an installation")

    monkeypatch.setattr("stagekeeper.cli.main.later.refuse", break_down)
    monkeypatch.setattr("stagekeeper.cli.explain._of_a_server", broken)

    assert run(["status"]) == ExitCode.BUG
    assert "wheels came off" in capsys.readouterr().err


def test_agent_that_others_can_reach_must_be_told_what_it_may_start(tmp_path, capsys):
    code = run(["agent", f"--state-dir={tmp_path}", "--listen=10.0.0.1:0", "--insecure"])

    assert code == ExitCode.USAGE
    assert "--allow" in capsys.readouterr().err


def test_agent_on_loopback_may_start_everything_and_a_pattern_limits_it():
    loopback = ("127.0.0.1:0", "127.0.0.1:0")

    assert allowed_entrypoints((), loopback) == ("*",)
    assert allowed_entrypoints(["m.*"], loopback) == ("m.*",)
    assert allowed_entrypoints(["m.*"], ("10.0.0.1:0", "10.0.0.1:0")) == ("m.*",)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--devices=gpu", "device 'gpu' is none of: cuda"),
        ("--cluster=", "cluster ''"),
        ("--worker-prefix=a/b", "--worker-prefix"),
        ("--heartbeat-s=9", "--heartbeat-s"),
        ("--heartbeat-s=nan", "--heartbeat-s"),
        ("--endpoint=nowhere", "--endpoint"),
        ("--pythonpath=/no/such/folder", "--pythonpath: /no/such/folder does not exist"),
    ],
)
def test_up_refuses_flags_before_it_starts_or_writes_anything(flag, words, short_folder, capsys):
    code = run(["up", f"--state-dir={short_folder / 's'}", flag])

    assert code == ExitCode.USAGE
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (short_folder / "s").exists()


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--worker-id=", "worker id ''"), ("--pythonpath=/no/such/folder", "does not exist")],
)
def test_agent_refuses_an_empty_name_and_a_missing_folder(flag, words, tmp_path, capsys):
    assert run(["agent", f"--state-dir={tmp_path}", flag]) == ExitCode.USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("127.0.0.1:0", "--endpoint '127.0.0.1:0' has no port from 1 to 65535"),
        ("http://127.0.0.1:7070", "--endpoint: address 'http://127.0.0.1:7070' is not host:port"),
        ("127.0.0.1:٧٠", "is not host:port"),
    ],
)
def test_endpoint_that_cannot_be_meant_ends_with_the_usage_code(endpoint, said, capsys):
    assert run(["status", "--endpoint", endpoint]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_a_supervisor_opens_as_many_files_as_it_may():
    """A thousand workers and readers are more than the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1024), hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
