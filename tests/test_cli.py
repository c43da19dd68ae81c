"""The command line, as a script meets it: what it prints, where, and how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import limpet
from limpet import errors
from limpet.cli import EXIT_CODES, main
from limpet.cli.arguments import DURATION

Run = Callable[..., Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def run(url: str) -> Run:
    """Runs ``limpet`` on a file of the test's own."""

    def run(*words: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, ["--url", url, *words], input=stdin)

    return run


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# Values in and out ------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("1", "1"),
        ("1.0", "1.0"),
        ("true", "true"),
        ("null", "null"),
        ('{"b": 1, "a": [2]}', '{"a":[2],"b":1}'),
        ("hello", '"hello"'),
        ('"hello"', '"hello"'),
        ("", '""'),
        ("{not json", '"{not json"'),
        ("grüße", '"grüße"'),
    ],
)
def test_a_value_is_json_if_it_parses_and_a_string_if_not(run: Run, written: str, printed: str) -> None:
    run("put", "k", written)

    assert run("get", "k").stdout == printed + "\n"


def test_text_is_stored_as_a_string_whatever_it_looks_like(run: Run) -> None:
    run("put", "k", "42", "--text")

    assert run("get", "k").stdout == '"42"\n'


def test_a_string_is_printed_raw_without_quotes_or_newline(run: Run) -> None:
    run("put", "k", "hello")

    assert run("get", "k", "--raw").stdout == "hello"


def test_a_file_is_read_as_a_value(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"level": 3}')

    run("put", "k", f"@{tmp_path}/config.json")

    assert answer(run("get", "k")) == {"level": 3}


def test_standard_input_is_read_as_bytes(run: Run) -> None:
    run("put", "k", "-", "--bytes", stdin=b"\xff\x00raw")

    assert run("get", "k").stdout_bytes == b"\xff\x00raw"
    assert answer(run("--json", "get", "k"))["value"] == {"$bytes": "/wByYXc="}


def test_input_that_is_no_text_needs_the_bytes_option(run: Run) -> None:
    result = run("put", "k", "-", stdin=b"\xff")

    assert result.exit_code == 7
    assert "--bytes" in result.stderr


def test_a_file_that_is_not_there_is_rejected_by_name(run: Run) -> None:
    result = run("put", "k", "@no/such/file")

    assert result.exit_code == 7
    assert "no/such/file" in result.stderr


# The shapes of --json ---------------------------------------------------------


def test_get_prints_the_whole_entry_as_json(run: Run) -> None:
    run("put", "k", "1", "--ttl", "1h")

    entry = answer(run("--json", "get", "k"))

    assert set(entry) == {
        *("key", "kind", "value", "version", "revision", "created_revision"),
        *("created_at", "updated_at", "expires_at", "meta"),
    }
    assert (entry["key"], entry["kind"], entry["value"], entry["version"]) == ("k", "json", 1, 1)
    assert entry["expires_at"] > entry["created_at"]


def test_put_prints_what_it_left_as_json(run: Run) -> None:
    run("put", "k", "1")

    assert answer(run("--json", "put", "k", "2"))["version"] == 2


def test_put_prints_nothing_for_a_script(run: Run) -> None:
    assert run("put", "k", "1").stdout == ""


def test_del_prints_json(run: Run) -> None:
    run("put", "k", "1")

    assert answer(run("--json", "del", "k")) == {"key": "k", "deleted": True}


def test_incr_prints_the_number(run: Run) -> None:
    assert run("incr", "hits").stdout == "1\n"
    assert run("incr", "hits", "41").stdout == "42\n"
    assert answer(run("--json", "incr", "hits", "--", "-2")) == {"key": "hits", "value": 40}


def test_errors_are_json_on_standard_error(run: Run) -> None:
    result = run("--json", "get", "missing")

    assert result.stdout == ""
    told = json.loads(result.stderr)
    assert (told["error"], told["retryable"], told["outcome"]) == ("not_found", False, "rejected")
    assert "missing" in told["message"]


# Listing ----------------------------------------------------------------------


def test_ls_lists_keys_under_a_prefix_in_order(run: Run) -> None:
    for key in ("b/2", "a/1", "b/1"):
        run("put", key, "1")

    assert run("ls").stdout == "a/1\nb/1\nb/2\n"
    assert run("ls", "b/").stdout == "b/1\nb/2\n"
    assert run("ls", "b/", "--limit", "1").stdout == "b/1\n"
    assert run("ls", "--after", "b/1").stdout == "b/2\n"


def test_ls_long_shows_numbers_in_columns(run: Run) -> None:
    run("put", "k", '"abc"', "--ttl", "1m")

    version, revision, size, ttl, key = run("ls", "-l").stdout.split()

    assert (version, revision, size, key) == ("1", "1", "5", "k")
    assert ttl in ("59s", "60s")


def test_ls_filters_by_fields(run: Run) -> None:
    run("field", "set", "job/1", "state=done", "tries=1")
    run("field", "set", "job/2", "state=open", "tries=5")

    assert run("ls", "--where", "state=open").stdout == "job/2\n"
    assert run("ls", "--where", "state!=open").stdout == "job/1\n"
    assert run("ls", "--where", "tries>=1", "--where", "tries<5").stdout == "job/1\n"
    assert run("ls", "--where", "tries>1", "--where", "tries<=5").stdout == "job/2\n"
    assert [json.loads(line)["key"] for line in run("--json", "ls").stdout.splitlines()] == ["job/1", "job/2"]


def test_a_filter_that_is_none_is_a_usage_error(run: Run) -> None:
    assert run("ls", "--where", "state").exit_code == 2


# Fields -----------------------------------------------------------------------


def test_fields_are_set_read_and_cleared(run: Run) -> None:
    run("field", "set", "job", "state=pending", "tries=0")
    run("field", "set", "job", "tries=1", "--unset", "state")

    assert answer(run("field", "get", "job")) == {"tries": 1}
    assert run("field", "get", "job", "tries").stdout == "1\n"
    assert run("field", "get", "job", "state").exit_code == 3
    assert run("field", "get", "nothing").exit_code == 3


def test_one_swap_wins_and_the_other_conflicts(run: Run) -> None:
    run("field", "set", "job", "state=pending")

    assert run("field", "swap", "job", "state", "pending", "claimed", "--set", "worker=w1").exit_code == 0
    lost = run("field", "swap", "job", "state", "pending", "claimed", "--set", "worker=w2")

    assert lost.exit_code == 4
    assert answer(run("field", "get", "job")) == {"state": "claimed", "worker": "w1"}


def test_a_record_that_must_exist_is_not_made(run: Run) -> None:
    assert run("field", "set", "job", "state=done", "--if-exists").exit_code == 3
    assert run("ls").stdout == ""


def test_an_assignment_without_a_value_is_a_usage_error(run: Run) -> None:
    assert run("field", "set", "job", "state").exit_code == 2


# Exit codes -------------------------------------------------------------------


def test_what_is_missing_exits_with_3(run: Run) -> None:
    assert run("get", "k").exit_code == 3
    assert run("del", "k").exit_code == 3


@pytest.mark.parametrize("condition", [["--if-absent"], ["--if-version", "7"], ["--if-revision", "7"]])
def test_a_condition_that_fails_exits_with_4(run: Run, condition: list[str]) -> None:
    run("put", "k", "1")

    result = run("put", "k", "2", *condition)

    assert result.exit_code == 4
    assert "'k'" in result.stderr
    assert run("get", "k").stdout == "1\n"


def test_a_condition_that_holds_lets_the_write_through(run: Run) -> None:
    assert run("put", "k", "1", "--if-absent").exit_code == 0
    assert run("put", "k", "2", "--if-version", "1").exit_code == 0
    assert run("put", "k", "3", "--if-revision", "2").exit_code == 0
    assert run("del", "k", "--if-version", "2").exit_code == 4
    assert run("del", "k", "--if-revision", "3").exit_code == 0


def test_two_conditions_are_a_usage_error(run: Run) -> None:
    assert run("put", "k", "1", "--if-absent", "--if-version", "1").exit_code == 2


def test_a_request_id_makes_a_put_safe_to_repeat(run: Run) -> None:
    first = answer(run("--json", "put", "k", "1", "--request-id", "r"))
    second = answer(run("--json", "put", "k", "1", "--request-id", "r"))

    assert second["revision"] == first["revision"]
    assert run("put", "k", "2", "--request-id", "r").exit_code == 4


def test_a_place_that_cannot_be_opened_exits_with_6(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--url", f"sqlite:///{tmp_path}/no/such/folder/state.db", "get", "k"])

    assert result.exit_code == 6
    assert "no/such/folder" in result.stderr


@pytest.mark.parametrize(
    "words",
    [["get", ""], ["put", "k", "1", "--ttl", "0s"], ["put", "k", "@"], ["incr", "text"], ["-n", "Not Allowed", "ls"]],
)
def test_what_the_contract_refuses_exits_with_7(run: Run, words: list[str]) -> None:
    run("put", "text", "words")

    assert run(*words).exit_code == 7


def test_an_unknown_engine_exits_with_7() -> None:
    result = CliRunner().invoke(main, ["--url", "sqlight:///x.db", "ls"])

    assert result.exit_code == 7
    assert "sqlite" in result.stderr


def test_every_error_has_an_exit_code() -> None:
    leaves = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]

    for kind in leaves:
        assert kind is errors.LimpetError or any(issubclass(kind, known) for known in EXIT_CODES), kind


# Durations --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("24h", 86_400),
        ("7d", 604_800),
        ("1h30m", 5_400),
        ("250ms", 0.25),
        ("1.5m", 90),
        ("9", 9),
    ],
)
def test_a_duration_is_written_with_units(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "5 m", "m", "1h-5m", "10y"])
def test_what_is_no_duration_is_a_usage_error(run: Run, text: str) -> None:
    result = run("put", "k", "1", "--ttl", text)

    assert result.exit_code == 2
    assert "30s" in result.stderr


# The log ----------------------------------------------------------------------


def test_history_shows_the_changes_of_a_key(run: Run) -> None:
    run("put", "k", "1")
    run("del", "k")

    assert run("history", "k").stdout == "1\tput\tk\t1\n2\tdelete\tk\t\n"
    first = json.loads(run("--json", "history", "k").stdout.splitlines()[0])
    assert (first["op"], first["value"], first["version"]) == ("put", 1, 1)


def test_watch_prints_what_there_is_and_resumes(run: Run) -> None:
    run("put", "config/a", "1")
    run("put", "config/b", "2")

    events = [
        json.loads(line) for line in run("--json", "watch", "config/*", "--initial", "--count", "3").stdout.splitlines()
    ]

    assert [(event["op"], event["key"]) for event in events] == [
        ("put", "config/a"),
        ("put", "config/b"),
        ("synced", ""),
    ]
    run("put", "config/c", "3")
    resumed = run("watch", "--after", events[-1]["position"], "--count", "1")
    assert resumed.stdout.split("\t")[1:3] == ["put", "config/c"]


def test_a_foreign_position_is_told(run: Run) -> None:
    assert run("watch", "--after", "elsewhere:default:1:5").exit_code == 7


# The operator's questions -----------------------------------------------------


def test_stat_tells_what_there_is_and_who_holds_locks(run: Run, url: str) -> None:
    run("put", "k", "1")
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30, holder="worker-7"):
        told = answer(run("--json", "stat"))
        shown = run("stat").stdout

    assert (told["engine"], told["durability"], told["keys"]) == ("sqlite", "disk", 1)
    assert [(lock["name"], lock["holder"]) for lock in told["locks"]] == [("nightly", "worker-7")]
    assert "nightly held by worker-7" in shown


def test_doctor_says_what_is_well(run: Run) -> None:
    result = run("doctor")

    assert result.exit_code == 0
    assert "a power cut" in result.stdout
    assert "BAD" not in result.stdout


def test_doctor_says_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database at all, only words " * 20)

    result = CliRunner().invoke(main, ["--url", f"sqlite:///{tmp_path}/notes.txt", "--json", "doctor"])

    assert result.exit_code == 6
    assert json.loads(result.stdout)["well"] is False


def test_doctor_hides_a_password(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--url", "nosuch://user:hunter2@host/db", "doctor"])

    assert result.exit_code == 6
    assert "hunter2" not in result.output


def test_help_names_the_exit_codes() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout

    for code in (3, 4, 5, 6, 7, 130):
        assert f"{code} " in shown


# lock, with real processes ----------------------------------------------------


def limpet_command(url: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "limpet.cli", "--url", url, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def test_lock_runs_the_command_while_held_and_passes_its_exit_code_on(url: str) -> None:
    script = (
        "import limpet, os, sys\n"
        f"with limpet.sync.open({url!r}) as store:\n"
        "    (held,) = store.locks()\n"
        "    print(held.name == os.environ['LIMPET_LOCK'], held.token == int(os.environ['LIMPET_FENCING_TOKEN']))\n"
        "sys.exit(9)\n"
    )

    code, stdout, _ = finished(limpet_command(url, "lock", "nightly", "--", sys.executable, "-c", script))

    assert (code, stdout) == (9, "True True\n")
    with limpet.sync.open(url) as store:
        assert store.locks() == []


def test_the_fencing_token_of_the_command_fences(url: str) -> None:
    script = (
        "import limpet, os\n"
        "fence = limpet.Fence(os.environ['LIMPET_LOCK'], int(os.environ['LIMPET_FENCING_TOKEN']))\n"
        f"with limpet.sync.open({url!r}) as store:\n"
        "    store.put('report', 1, fence=fence)\n"
    )

    code, _, stderr = finished(limpet_command(url, "lock", "nightly", "--", sys.executable, "-c", script))

    assert (code, stderr) == (0, "")


def test_a_lock_that_is_held_exits_with_5_and_runs_nothing(url: str) -> None:
    with limpet.sync.open(url) as store, store.lock("nightly", ttl=30, holder="somebody"):
        code, stdout, stderr = finished(limpet_command(url, "lock", "nightly", "--", "echo", "ran"))

    assert (code, stdout) == (5, "")
    assert "somebody" in stderr


def test_lock_waits_for_the_release(url: str) -> None:
    with limpet.sync.open(url) as store:
        lock = store.lock("nightly", ttl=30).acquire()
        waiting = limpet_command(url, "lock", "nightly", "--wait", "50s", "--", "echo", "ran")
        time.sleep(0.5)
        lock.release()
        code, stdout, _ = finished(waiting)

    assert (code, stdout) == (0, "ran\n")


def test_a_command_that_loses_its_lock_is_ended(url: str) -> None:
    """Stopped past its time like a laptop that slept, the wrapper finds the lock gone and ends the command."""
    running = limpet_command(
        url,
        "lock",
        "nightly",
        "--ttl",
        "1s",
        "--",
        sys.executable,
        "-c",
        "import time; print('on', flush=True); time.sleep(60)",
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "on\n"
    os.kill(running.pid, signal.SIGSTOP)
    with limpet.sync.open(url) as store:
        thief = store.lock("nightly", ttl=30, wait=20).acquire()
        os.kill(running.pid, signal.SIGCONT)
        code, _, stderr = finished(running)
        thief.release()

    assert code == 5
    assert "lost" in stderr


def test_a_command_that_cannot_be_run_is_told(url: str) -> None:
    code, _, stderr = finished(limpet_command(url, "lock", "nightly", "--", "no-such-program-here"))

    assert code == 127
    assert "no-such-program-here" in stderr


def test_a_signal_reaches_the_command(url: str) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))\n"
        "print('on', flush=True)\n"
        "time.sleep(60)\n"
    )
    running = limpet_command(url, "lock", "nightly", "--", sys.executable, "-c", script)
    assert running.stdout is not None
    assert running.stdout.readline() == "on\n"

    running.send_signal(signal.SIGTERM)

    assert finished(running)[0] == 33


def test_interrupting_a_watch_exits_with_130(url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("k", 1)
    watching = limpet_command(url, "watch", "--initial")
    assert watching.stdout is not None
    assert watching.stdout.readline().endswith("k\t1\n")

    watching.send_signal(signal.SIGINT)

    code, _, stderr = finished(watching)
    assert code == 130
    assert "Traceback" not in stderr
