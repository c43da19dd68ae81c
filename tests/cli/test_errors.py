"""The messages of errors, and their exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import limpet
from limpet import errors
from limpet.cli.failure import describe, exit_code
from limpet.protocol.codes import CODES
from tests.cli.support import Limpet

PLACE = "namespace 'default' of sqlite:///state.db"


# Every command's own errors ---------------------------------------------------

NOT_FOUND = "'limpet ls' lists the keys; -n chooses another namespace."
CONFLICT = "Nothing was changed. Read it with 'limpet get --json KEY', decide, and try again."
KIND = "'limpet get --json KEY' shows its kind; incr needs an integer, field a record."
DURATION = "Write a duration above zero, such as 30s, 5m or 1h30m."
KEY = "A key is 1 to 1,024 bytes of UTF-8 without U+0000."


@pytest.mark.parametrize(
    ("words", "code", "message", "advice"),
    [
        ("get none", 3, "'none' does not exist in {place}", NOT_FOUND),
        ("del none", 3, "'none' does not exist in {place}", NOT_FOUND),
        ("field get none", 3, "'none' does not exist in {place}", NOT_FOUND),
        ("field set none a=1 --if-exists", 3, "'none' does not exist in {place}", NOT_FOUND),
        ("get text -n other", 3, "'text' does not exist in {place}", NOT_FOUND),
        (
            "field get record none",
            3,
            "record 'record' has no field 'none', in {place}",
            "'limpet field get KEY' shows the fields it has.",
        ),
        (
            "history none",
            3,
            "no change of 'none' is in the log of {place}",
            "'limpet get KEY' shows whether the key exists.",
        ),
        (
            "put text 1 --if-absent",
            4,
            "conflict on 'text': expected no such key, found version 1 at revision 1",
            CONFLICT,
        ),
        (
            "put text 1 --if-version 7",
            4,
            "conflict on 'text': expected version 7, found version 1 at revision 1",
            CONFLICT,
        ),
        (
            "put text 1 --if-revision 7",
            4,
            "conflict on 'text': expected revision 7, found version 1 at revision 1",
            CONFLICT,
        ),
        (
            "del text --if-version 7",
            4,
            "conflict on 'text': expected version 7, found version 1 at revision 1",
            CONFLICT,
        ),
        (
            "del text --if-revision 7",
            4,
            "conflict on 'text': expected revision 7, found version 1 at revision 1",
            CONFLICT,
        ),
        ("put none 1 --if-version 7", 4, "conflict on 'none': expected version 7, found no such key", CONFLICT),
        (
            "field swap record a 9 2",
            4,
            "conflict on 'record': expected a certain value in field 'a', found version 1 at revision 2",
            CONFLICT,
        ),
        (
            "field swap none a 9 2",
            4,
            "conflict on 'none': expected a certain value in field 'a', found no such key",
            CONFLICT,
        ),
        (
            "put text 2 --request-id used",
            4,
            "request id 'used' was used before for another request",
            "Nothing was changed. Give a new request a new --request-id.",
        ),
        (
            "watch --after elsewhere:default:1:5",
            7,
            "cannot watch from there: the position belongs to another store, namespace or epoch",
            "Start again with --initial.",
        ),
        (
            "watch --after 99",
            7,
            "cannot watch from there: revision 99 lies ahead of this store, which is at 3",
            "Start again with --initial.",
        ),
        ("put text 1 --ttl 0s", 7, "ttl is not above zero", DURATION),
        ("incr n --ttl 0", 7, "ttl is not above zero", DURATION),
        ("put text 1 --ttl 40000d", 7, "ttl is more than a hundred years", DURATION),
        ("incr text", 7, "'text' holds another JSON value, and this needs an integer", KIND),
        ("field get text", 7, "'text' holds a plain value, and this needs a record", KIND),
        ("field set text a=1", 7, "'text' holds another JSON value, and this needs a record", KIND),
        ("field swap text a 1 2", 7, "'text' holds a plain value, and this needs a record", KIND),
        ("put text 9223372036854775808", 7, "an integer is outside -2^63 to 2^63-1 at $", None),
        ("get ''", 7, "key '' is not allowed: it is empty", KEY),
        ("field set record a=1 --unset a", 7, "field 'a' is both set and unset", None),
        ("field swap record a 1 2 --set a=3", 7, "field 'a' is both swapped and set", None),
        (
            "ls -n Not/Allowed",
            7,
            "namespace 'Not/Allowed' is not allowed: use 1 to 100 characters of a-z, 0-9, '_' and '-'",
            None,
        ),
        (
            "ls --url sqlight:///x.db",
            7,
            "unknown engine 'sqlight': did you mean 'sqlite'? known: http, memory, nats, postgresql, redis, sqlite",
            None,
        ),
        (
            "ls --url state.db",
            7,
            "'state.db' is not an engine URL: try 'sqlite:///state.db' or 'memory:'",
            None,
        ),
        (
            "ls --url sqlite:state.db",
            7,
            "sqlite:state.db: write sqlite:///relative.db or sqlite:////absolute/path.db",
            None,
        ),
        (
            "put k 1 --url memory:x",
            7,
            "memory:x ends with the process that opens it, and every limpet command is its own process: "
            "name a file, such as sqlite:///state.db",
            None,
        ),
    ],
)
def test_an_error_says_what_where_and_what_next(
    run: Limpet, url: str, words: str, code: int, message: str, advice: str | None
) -> None:
    run("put", "text", "words", "--request-id", "used")
    run("field", "set", "record", "a=1")
    run("incr", "number")

    result = run(*("" if word == "''" else word for word in words.split(" ")))

    place = f"namespace '{'other' if '-n other' in words else 'default'}' of {url}"
    shown = f"limpet: {message.replace('{place}', place)}\n"
    assert result.stderr == shown + ("" if advice is None else f"  {advice}\n")
    assert result.exit_code == code
    assert result.stdout == ""
    assert run("get", "text").stdout == '"words"\n'


def test_history_tells_where_the_log_begins(run: Limpet, url: str) -> None:
    clock = limpet.ManualClock()
    with limpet.sync.open(url, clock=clock, sweep=False) as store:
        store.put("old", 1)
        clock.advance(100_000)
        store.put("new", 1)
        store.trim()

    result = run("history", "old")

    assert result.exit_code == 3
    assert "which begins after revision 1\n" in result.stderr
    assert run("get", "old").stdout == "1\n"


def test_a_folder_that_is_not_there_is_rejected(run: Limpet, tmp_path: Path) -> None:
    result = run("put", "k", "1", "--url", "sqlite:///no/such/folder/state.db")

    assert result.exit_code == 7
    assert result.stderr == f"limpet: cannot open {tmp_path}/no/such/folder/state.db: No such file or directory\n"


def test_a_path_with_a_zero_in_it_is_rejected(run: Limpet) -> None:
    result = run("put", "k", "1", "--url", "sqlite:///a%00b.db")

    assert result.exit_code == 7
    assert "U+0000" in result.stderr


def test_a_file_that_is_no_database_is_unavailable(run: Limpet, file: Path) -> None:
    file.write_text("no database at all, only words " * 20)

    result = run("get", "k")

    assert result.exit_code == 6
    assert result.stderr == f"limpet: cannot use {file}: file is not a database\n  Run 'limpet doctor' for details.\n"


def test_a_traceback_is_never_the_answer(run: Limpet) -> None:
    """What is raised beside our own errors is a bug, and click shows it; nothing here does."""
    for words in (
        ["get", "\udcff"],
        ["put", "k", "\udcff"],
        ["put", "k\0", "1"],
        ["get", "k", "--url", "sqlite:///\0"],
    ):
        result = run(*words)
        assert result.exit_code in (3, 6, 7), result.exception


# Usage ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["get"], "Missing argument 'KEY'."),
        (["get", "k", "--oops"], "No such option '--oops'."),
        (["incr", "k", "x"], "Invalid value for '[BY]': 'x' is not a valid integer."),
        (["put", "k", "1", "--if-version", "x"], "Invalid value for '--if-version': 'x' is not a valid integer."),
        (["ls", "--limit", "0"], "Invalid value for '--limit': 0 is not in the range x>=1."),
        (["watch", "--count", "0"], "Invalid value for '--count': 0 is not in the range x>=1."),
        (["ls", "--long", "--values"], "give one of --long and --values"),
        (["ls", "--where", "state"], "--where takes FIELD=VALUE, or != < <= > >= in place of ="),
        (["put", "k", "1", "--ttl", "1s", "--keep-ttl"], "give one of --ttl and --keep-ttl"),
        (["put", "k", "1", "--if-absent", "--if-version", "1"], "give one of --if-absent, --if-version and --if-rev"),
        (["del", "k", "--if-revision", "1", "--if-version", "1"], "give one of --if-absent, --if-version and --if-rev"),
        (["watch", "--initial", "--after", "1"], "give one of --initial and --after"),
        (["field", "set", "k"], "give at least one NAME=VALUE or --unset NAME"),
        (["field", "set", "k", "a"], "a field must be written NAME=VALUE, and one of the arguments is not"),
        (["field", "set", "k", "=a"], "a field must be written NAME=VALUE, and one of the arguments is not"),
        (["field", "swap", "k", "a", "1", "2", "--set", "b"], "a field must be written NAME=VALUE, and one of the arg"),
        (["field", "set", "k", "a=1", "a=2"], "field 'a' is given twice"),
        (["field", "set", "k", "a=-", "b=-"], "standard input can be read only once, and several fields use it"),
        (["put", "k", "two", "words"], "there are too many arguments: put quotes around a value that holds spaces"),
        (["put", "k", "1", "--fenced"], "--fenced works in a command that 'limpet lock NAME -- COMMAND' runs"),
        (["lock"], "Missing argument 'NAME'."),
        (["lock", "n"], "the command to run comes after --, as in: limpet lock NAME -- COMMAND"),
        (["lock", "n", "rsync", "-a"], "the command to run comes after --, as in: limpet lock NAME -- COMMAND"),
        (["lock", "n", "--"], "Missing argument '-- COMMAND...'."),
        (["lock", "--", "true"], "Missing argument '-- COMMAND...'."),
        (["lock", "n", "m", "--", "true"], "give the name of one lock before --, and the command to run after it"),
        (["lock", "n", "--ttl", "soon", "--", "true"], "Invalid value for '--ttl': 'soon' is not a duration"),
    ],
)
def test_wrong_use_exits_with_2_and_says_how_it_is_right(
    run: Limpet, file: Path, words: list[str], message: str
) -> None:
    result = run(*words)

    assert result.exit_code == 2
    assert f"Error: {message}" in result.stderr
    assert "--help' for help" in result.stderr
    assert not file.exists()


# Secrets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["put", "k", "hunter2", "--if-absent"],
        ["put", "k", "hunter2", "--if-version", "9"],
        ["put", "k", "hunter2-new", "--request-id", "used"],
        ["put", "k", "my", "hunter2"],
        ["put", "k", "{hunter2"],
        ["put", "k", '{"password": hunter2}'],
        ["put", "k", "hunter2" * 200_000],
        ["incr", "k"],
        ["field", "set", "k", "a=hunter2"],
        ["field", "set", "r", "hunter2"],
        ["field", "swap", "r", "a", "hunter2", "hunter2"],
        ["field", "get", "r", "missing"],
        ["ls", "--where", "hunter2"],
        ["get", "missing", "--url", "nosuch://user:hunter2@host/db"],
        ["get", "missing", "--url", "user:hunter2@host"],
        ["doctor", "--url", "nosuch://user:hunter2@host/db"],
        ["doctor", "--url", "sqlite:///x.db?password=hunter2"],
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_error_shows_a_value_or_a_password(run: Limpet, words: list[str], form: list[str]) -> None:
    run("put", "k", "hunter2", "--request-id", "used")
    run("field", "set", "r", "a=hunter2-old")

    result = run(*words, *form)

    assert result.exit_code not in (0, 1)
    assert "hunter2" not in result.output
    assert result.stderr != "" or words[0] == "doctor"


# Every error of the library ---------------------------------------------------

ENTRY = limpet.Entry("k", b'"hunter2"', 3, 9, 1, 0, 0)
LATER = "Nothing was changed. Try again; if it fails again, run 'limpet doctor'."

ALL = [
    (errors.NotFound("k"), 3, f"'k' does not exist in {PLACE}", NOT_FOUND),
    (
        errors.Conflict("k", expected="version 2", current=ENTRY),
        4,
        "conflict on 'k': expected version 2, found version 3 at revision 9",
        CONFLICT,
    ),
    (
        errors.LockHeld("n", holder="w", token=3, remaining=2.5),
        5,
        "lock 'n' is held by w for another 2.5 s (token 3)",
        "COMMAND was not run. Try again later, or wait for the lock with --wait.",
    ),
    (errors.LockNotHeld("n"), 5, "lock 'n' is not held by this handle: acquire it first", None),
    (
        errors.LockExpired("n", token=3),
        5,
        "lock 'n' expired; token 3 is stale, acquire it again before going on",
        None,
    ),
    (
        errors.LockLost("n", token=3),
        5,
        "lock 'n' was lost; token 3 is stale",
        "Stop: another process may hold it now. Writes with --fenced are refused.",
    ),
    (errors.Unavailable("state.db cannot serve now"), 6, "state.db cannot serve now", LATER),
    (errors.Contention("k", attempts=64), 6, "'k' changed under 64 attempts in a row", LATER),
    (errors.RateLimited("too many", retry_after=2), 6, "too many; try again in 2.0 s", LATER),
    (
        errors.Ambiguous("unknown outcome"),
        6,
        "unknown outcome",
        "It may have been written, once. Repeat it with the same --request-id, or read the key first.",
    ),
    (errors.Corrupt("a stored value is not JSON"), 6, "a stored value is not JSON", "Run 'limpet doctor' for details."),
    (errors.Closed(), 6, "the store is closed: open it again", None),
    (errors.InvalidKey("", "it is empty"), 7, "key '' is not allowed: it is empty", KEY),
    (
        errors.InvalidNamespace("A"),
        7,
        "namespace 'A' is not allowed: use 1 to 100 characters of a-z, 0-9, '_' and '-'",
        None,
    ),
    (errors.InvalidValue("nested deeper than 128", path="$.a"), 7, "nested deeper than 128 at $.a", None),
    (errors.InvalidTTL("is not a number"), 7, "ttl is not a number", DURATION),
    (
        errors.ValueTooLarge("k", size_bytes=2_000_000, limit_bytes=1_000_000),
        7,
        "value for 'k' is 2,000,000 bytes, limit 1,000,000: store a reference to it, or split it over several keys",
        None,
    ),
    (
        errors.TypeMismatch("k", expected="a record", found="raw bytes"),
        7,
        "'k' holds raw bytes, and this needs a record",
        KIND,
    ),
    (errors.PermissionDenied("not for you"), 7, "not for you", None),
    (
        errors.Compacted("revision 1 was trimmed, the log starts after 5", oldest=5),
        7,
        "cannot watch from there: revision 1 was trimmed, the log starts after 5",
        "Start again with --initial.",
    ),
]


@pytest.mark.parametrize(("error", "code", "message", "advice"), ALL, ids=[type(row[0]).__name__ for row in ALL])
def test_every_error_has_an_exit_code_and_words(
    error: errors.LimpetError, code: int, message: str, advice: str | None
) -> None:
    assert exit_code(error) == code
    assert describe(error, PLACE) == (message, advice)


def test_no_error_is_left_out() -> None:
    kinds = {kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)}
    groups = {base for kind in kinds for base in kind.__mro__[1:]}

    assert kinds - groups == {type(error) for error, *_ in ALL}
    assert {code.exit for code in CODES.values()} == {3, 4, 5, 6, 7}


def test_no_words_are_meant_for_a_programmer() -> None:
    for error, *_ in ALL:
        message, advice = describe(error, PLACE)
        assert not re.search(r"\w\(\)|\w=|store\.|None|timedelta", f"{message} {advice or ''}"), message


def test_a_long_key_is_shortened() -> None:
    message, _ = describe(errors.Conflict("k" * 1000, expected="version 2", current=None), PLACE)

    assert message.startswith("conflict on 'kkkk")
    assert "kk...'" in message
    assert len(message) < 200


def test_an_error_that_is_none_of_these_is_unexpected() -> None:
    assert exit_code(errors.LimpetError("?")) == 1


# A question makes no file -----------------------------------------------------

QUESTIONS = ["get k", "del k", "ls", "field get k", "field swap k a 1 2", "field set k a=1 --if-exists", "watch"]


@pytest.mark.parametrize("words", [*QUESTIONS, "history k", "stat"])
def test_a_question_makes_no_file(run: Limpet, url: str, file: Path, words: str) -> None:
    result = run(*words.split())

    assert result.exit_code == 3
    assert result.stderr == (
        f"limpet: there is no store at {url}: no such file\n"
        "  A write makes it ('limpet put KEY VALUE'); --url or LIMPET_URL names another.\n"
    )
    assert not file.exists()


def test_the_default_is_explained(tmp_path: Path) -> None:
    result = Limpet()("get", "k")

    assert result.stderr.startswith(
        "limpet: there is no store at sqlite:///limpet.db"
        " (the default, because neither --url nor LIMPET_URL is given): no such file\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["put k 1", "incr k", "field set k a=1", "lock n -- true"])
def test_a_write_makes_it(run: Limpet, file: Path, words: str) -> None:
    assert run(*words.split()).exit_code == 0

    assert file.exists()


# Odd arguments ----------------------------------------------------------------

ODD = [
    "",
    " ",
    "\0",
    "\udcff",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "1e999",
    "9" * 30,
    "9" * 5000,
    "x" * 2000,
    "[",
    "{}",
    "=",
    "@",
]
COMMANDS = [
    "get {}",
    "get k -n {}",
    "put {} 1",
    "put k {}",
    "put k 1 --ttl {}",
    "put k 1 --if-version {}",
    "put k 1 --if-revision {}",
    "put k 1 --request-id {}",
    "del {}",
    "ls {}",
    "ls --limit {}",
    "ls --after {}",
    "ls --where {}",
    "ls --where a={}",
    "incr {}",
    "incr n {}",
    "field get {}",
    "field get r {}",
    "field set r {}",
    "field set r a={}",
    "history {}",
    "index {}",
    "call {}",
    "call get {}",
    "audit verify --anchor {}",
    "audit prune --before {}",
    "audit show {}",
    "deadletters show {}",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_odd_arguments_end_in_words_and_not_in_a_traceback(
    words: str, run: Limpet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", "1:" + "00" * 32)
    run("put", "k", "1")
    found = []
    for odd in ODD:
        result = run(*(odd if word == "{}" else word.replace("{}", odd) for word in words.split(" ")))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            found.append(f"{odd[:20]!a}: {result.exception!r}"[:200])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("token", ["", "x", "9" * 5000, "\u0663"])
def test_an_odd_fencing_token_is_reported(token: str, run: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_LOCK", "job")
    monkeypatch.setenv("LIMPET_FENCING_TOKEN", token)

    assert run("put", "k", "1", "--fenced").exit_code == 2
