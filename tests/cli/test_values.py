"""What goes in and what comes out: values, keys, lists, counters, records."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import limpet
from limpet.cli.arguments import INPUT_BYTES_MAX, duration
from tests.cli.support import Limpet, start, wait_for_end

# How a value is written -------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("1", "1"),
        ("-5", "-5"),
        ("-0.5", "-0.5"),
        ("-12e3", "-12000.0"),
        ("1.0", "1.0"),
        ("true", "true"),
        ("True", '"True"'),
        ("null", "null"),
        ('{"b": 1, "a": [2]}', '{"a":[2],"b":1}'),
        ("hello", '"hello"'),
        ('"hello"', '"hello"'),
        ('"half a quote', '"\\"half a quote"'),
        ("01234", '"01234"'),
        ("NaN", '"NaN"'),
        ("1e400", '"1e400"'),
        ("", '""'),
        (" ", '" "'),
        ("grüße 🐚", '"grüße 🐚"'),
    ],
)
def test_a_value_is_json_if_it_parses_and_a_string_if_not(run: Limpet, written: str, printed: str) -> None:
    assert run("put", "k", written).exit_code == 0

    assert run("get", "k").stdout == printed + "\n"


@pytest.mark.parametrize("written", ["{a:1}", '{"a": 1', "[1,]", " {", "[draft] hello"])
def test_what_starts_like_json_and_is_not_is_refused(run: Limpet, written: str) -> None:
    """The shell took the quotes of {"a":1}, and a string would be stored where an object was meant."""
    result = run("put", "k", written)

    assert result.exit_code == 7
    assert "starts like JSON and is not" in result.stderr
    assert "--text" in result.stderr
    assert run("put", "k", written, "--text").exit_code == 0
    assert run("get", "k", "--raw").stdout == written


def test_nesting_without_end_is_refused(run: Limpet) -> None:
    result = run("put", "k", "[" * 100_000)

    assert result.exit_code == 7
    assert "nested too deep" in result.stderr


def test_text_is_stored_as_a_string_whatever_it_looks_like(run: Limpet) -> None:
    run("put", "k", "42", "--text")

    assert run("get", "k").stdout == '"42"\n'


def test_a_file_is_read_as_a_value(run: Limpet, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "level": 3\n}\n')

    run("put", "k", "@config.json")

    assert json.loads(run("get", "k").stdout) == {"level": 3}


def test_a_text_keeps_the_newline_at_its_end(run: Limpet) -> None:
    run("put", "k", "-", stdin="hello\n")

    assert run("get", "k").stdout == '"hello\\n"\n'


def test_a_zero_byte_in_a_text_is_kept(run: Limpet) -> None:
    run("put", "k", "-", stdin=b"\0zero")

    assert run("get", "k").stdout == '"\\u0000zero"\n'


def test_standard_input_is_read_as_bytes(run: Limpet) -> None:
    run("put", "k", "-", "--bytes", stdin=b"\xff\x00raw")

    assert run("get", "k").stdout_bytes == b"\xff\x00raw"
    assert run("get", "k", "--raw").stdout_bytes == b"\xff\x00raw"


def test_bytes_may_be_given_as_an_argument(url: str) -> None:
    code, _, stderr = wait_for_end(start("--url", url, "put", "k", os.fsdecode(b"\xff\xfe"), "--bytes"))

    assert (code, stderr) == (0, "")
    with limpet.sync.open(url) as store:
        assert store.get("k") == b"\xff\xfe"


def test_input_that_is_no_text_needs_the_bytes_option(run: Limpet) -> None:
    result = run("put", "k", "-", stdin=b"ab\xff")

    assert result.exit_code == 7
    assert result.stderr == "limpet: standard input is not UTF-8 (byte 2): store it with --bytes\n"


def test_a_file_that_is_not_there_is_named(run: Limpet) -> None:
    result = run("put", "k", "@no/such/file")

    assert result.exit_code == 7
    assert "cannot read 'no/such/file': No such file or directory" in result.stderr


def test_a_text_that_starts_with_an_at_sign_is_written_as_json(run: Limpet) -> None:
    run("put", "k", '"@alice"')

    assert run("get", "k", "--raw").stdout == "@alice"


def test_input_has_a_bound(run: Limpet) -> None:
    result = run("put", "k", "-", stdin=b" " * (INPUT_BYTES_MAX + 1))

    assert result.exit_code == 7
    assert "standard input has more than 16,000,000 bytes" in result.stderr


def test_a_string_is_printed_raw_without_quotes_or_newline(run: Limpet) -> None:
    run("put", "k", "hello")
    run("put", "n", "1")

    assert run("get", "k", "--raw").stdout == "hello"
    assert run("get", "n", "-r").stdout == "1\n"


def test_a_key_may_look_like_an_option_behind_the_two_dashes(run: Limpet) -> None:
    run("put", "--", "--odd", "-value")

    assert run("get", "--", "--odd").stdout == '"-value"\n'


def test_a_put_prints_nothing_for_a_script(run: Limpet) -> None:
    assert run("put", "k", "1").output == ""
    assert run("field", "set", "r", "a=1").output == ""
    assert run("field", "swap", "r", "a", "1", "2").output == ""
    assert run("del", "k").output == ""


# Times to live ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("24h", 86_400),
        ("7d", 604_800),
        ("1h30m", 5_400),
        ("1d2h3m4s5ms", 93_784.005),
        ("250ms", 0.25),
        ("1.5m", 90),
        ("2M", 120),
        ("9", 9),
        ("0.5", 0.5),
        ("0s", 0),
    ],
)
def test_a_duration_is_written_with_units(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 m", "m", "1h-5m", "10y", "-5s", "5m1h", "nan", "inf", "1e3"])
def test_what_is_no_duration_is_a_usage_error(run: Limpet, text: str) -> None:
    result = run("put", "k", "1", f"--ttl={text}")

    assert result.exit_code == 2
    assert f"Invalid value for '--ttl': {text!r} is not a duration: write 250ms, 30s, 5m, 1h30m" in result.stderr


def test_a_put_without_a_ttl_never_expires(run: Limpet) -> None:
    run("put", "k", "1", "--ttl", "1h")
    run("put", "k", "2")

    assert run.json("get", "k")["expires_at"] is None


def test_keep_ttl_leaves_the_moment_as_it_was(run: Limpet) -> None:
    run("put", "k", "1", "--ttl", "1h")
    before = run.json("get", "k")
    run("put", "k", "2", "--keep-ttl")

    after = run.json("get", "k")
    assert (after["value"], after["expires_at"]) == (2, before["expires_at"])
    assert before["expires_at"] is not None


def test_a_counter_keeps_its_ttl_unless_given_another(run: Limpet) -> None:
    run("incr", "k", "--ttl", "1h")
    first = run.json("get", "k")["expires_at"]
    run("incr", "k")
    second = run.json("get", "k")["expires_at"]
    run("incr", "k", "--ttl", "2h")

    assert first == second
    assert run.json("get", "k")["expires_at"] > second


# Guards -----------------------------------------------------------------------


def test_a_condition_that_holds_lets_the_write_through(run: Limpet) -> None:
    assert run("put", "k", "1", "--if-absent").exit_code == 0
    assert run("put", "k", "2", "--if-version", "1").exit_code == 0
    assert run("put", "k", "3", "--if-revision", "2").exit_code == 0
    assert run("del", "k", "--if-version", "2").exit_code == 4
    assert run("del", "k", "--if-revision", "3").exit_code == 0


def test_a_request_id_makes_every_write_safe_to_repeat(run: Limpet) -> None:
    def twice(*words: str) -> list[str]:
        return [run("--json", *words, "--request-id", words[0] + words[1]).stdout for _ in range(2)]

    for words in (
        ("put", "k", "1"),
        ("incr", "n"),
        ("field", "set", "r", "a=1"),
        ("del", "k"),
    ):
        first, second = twice(*words)
        assert first == second != ""
    assert run("get", "n").stdout == "1\n"
    assert run.json("get", "r")["version"] == 1


def test_a_repeated_swap_is_won_again(run: Limpet) -> None:
    run("field", "set", "r", "state=open")

    for _ in range(2):
        assert run("field", "swap", "r", "state", "open", "done", "--request-id", "x").exit_code == 0
    assert run.json("get", "r")["version"] == 2


# Listing ----------------------------------------------------------------------


def test_ls_lists_keys_under_a_prefix_in_order(run: Limpet) -> None:
    for key in ("b/2", "a/1", "b/1"):
        run("put", key, "1")

    assert run("ls").stdout == "a/1\nb/1\nb/2\n"
    assert run("ls", "b/").stdout == "b/1\nb/2\n"
    assert run("ls", "b/", "--limit", "1").stdout == "b/1\n"
    assert run("ls", "--after", "b/1").stdout == "b/2\n"
    assert run("ls", "--after", "a/1", "--limit", "1").stdout == "b/1\n"
    assert run("ls", "c/").output == ""


def test_ls_goes_on_over_pages(run: Limpet, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limpet.sync.open(url) as store:
        for number in range(7):
            store.put(f"k{number}", number)
    monkeypatch.setattr("limpet.cli.PAGE_MAX", 3)

    assert run("ls").stdout.split() == [f"k{number}" for number in range(7)]
    assert run("ls", "--limit", "5").stdout.split() == [f"k{number}" for number in range(5)]
    assert run("ls", "--limit", "6").stdout.split() == [f"k{number}" for number in range(6)]


def test_incr_keeps_a_minimum_or_a_maximum(run: Limpet) -> None:
    assert [run("incr", "high", str(number), "--maximum").stdout for number in (5, 3, 7)] == ["5\n", "5\n", "7\n"]
    assert run("incr", "low", "--minimum", "--", "-2").stdout == "-2\n"
    assert run("incr", "new", "--ttl-if-new", "1h").stdout == "1\n"
    assert run("incr", "high", "1", "--ttl-if-new", "1h").stdout == "8\n"
    assert (run.json("get", "new")["expires_at"] is None, run.json("get", "high")["expires_at"]) == (False, None)
    assert run("incr", "n", "--ttl", "1h", "--ttl-if-new", "1h").exit_code == 2


def test_append_prints_the_new_key(run: Limpet) -> None:
    assert run("append", "event/", '{"n": 1}').stdout == "event/0000000000000001\n"
    assert run("append", "event/", "plain", "--request-id", "once").stdout == "event/0000000000000002\n"
    assert run("append", "event/", "plain", "--request-id", "once").stdout == "event/0000000000000002\n"
    assert json.loads(run("append", "event/", "3", "--json", "--ttl", "1h").stdout)["key"] == "event/0000000000000003"
    assert run("ls", "event/", "--values").stdout.count("event/") == 3
    assert run("append", "", "1").exit_code == 7


def test_del_with_prefix_deletes_and_counts(run: Limpet) -> None:
    for key in ("session/1", "session/2", "theme"):
        run("put", key, "1")

    assert run("del", "session/", "--prefix").stdout == "2\n"
    assert run("del", "session/", "--prefix").stdout == "0\n"
    assert json.loads(run("del", "t", "--prefix", "--json").stdout) == {"prefix": "t", "deleted": 1}
    assert run("del", "x", "--prefix", "--if-version", "1").exit_code == 2


def test_folders_are_listed_with_their_numbers_of_keys(run: Limpet) -> None:
    for key in ("job/1", "job/2/a", "job/2/b", "theme"):
        run("put", key, "1")

    assert run("folders").stdout == "3\tjob/\n1\ttheme\n"
    assert run("folders", "job/").stdout == "1\tjob/1\n2\tjob/2/\n"
    assert run("folders", "t", "--delimiter", "e").stdout == "1\tthe\n"
    assert json.loads(run("folders", "th", "--json").stdout) == {"key": "theme", "folder": False, "keys": 1}
    assert run("folders", "x").output == ""


def test_namespaces_are_listed(run: Limpet) -> None:
    run("put", "k", "1")
    run("put", "k", "1", "-n", "trivia")

    assert run("namespaces").stdout == "default\ntrivia\n"
    assert json.loads(run("namespaces", "--json", "-n", "x").stdout.splitlines()[1]) == {"namespace": "trivia"}


def test_ls_in_reverse_begins_with_the_last_key(run: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.cli.PAGE_MAX", 2)
    for key in ("a", "k/1", "k/2", "k/3", "k/4", "z"):
        run("put", key, "1")

    assert run("ls", "k/", "--reverse").stdout == "k/4\nk/3\nk/2\nk/1\n"
    assert run("ls", "k/", "-r", "--limit", "3").stdout == "k/4\nk/3\nk/2\n"
    assert run("ls", "-r", "--after", "k/2", "--values").stdout == "k/1\t1\na\t1\n"


def test_ls_long_shows_numbers_in_columns(run: Limpet) -> None:
    run("put", "k", '"abc"', "--ttl", "1h")
    run("put", "l", "1")

    first, second = run("ls", "-l").stdout.splitlines()

    version, revision, size, ttl, writer, key = first.split("\t")
    assert (version, revision, size, writer, key) == ("1", "1", "5", "-", "k")
    assert re.fullmatch(r"1h|59m5\ds", ttl)
    assert second == "1\t2\t1\t-\t-\tl"
    assert run("ls", "--long", "l").stdout == second + "\n"


def test_ls_shows_values_beside_the_keys(run: Limpet, url: str) -> None:
    run("put", "a", '{"x": 1}')
    with limpet.sync.open(url) as store:
        store.put("b", b"\xff")

    assert run("ls", "--values").stdout == 'a\t{"x":1}\nb\t{"$bytes":"/w=="}\n'


def test_ls_filters_by_fields(run: Limpet) -> None:
    run("field", "set", "job/1", "state=done", "tries=1")
    run("field", "set", "job/2", "state=open", "tries=5")

    assert run("ls", "--where", "state=open").stdout == "job/2\n"
    assert run("ls", "--where", "state!=open").stdout == "job/1\n"
    assert run("ls", "--where", "tries>=1", "--where", "tries<5").stdout == "job/1\n"
    assert run("ls", "--where", "tries>1", "--where", "tries<=5").stdout == "job/2\n"
    assert run("ls", "--where", "state=open", "--limit", "1", "--long").stdout.split("\t")[-1] == "job/2\n"


def test_a_filter_takes_its_value_literally(run: Limpet) -> None:
    """A filter that read files or waited for standard input would surprise."""
    run("field", "set", "job/1", 'owner="@alice"', 'mark="-"')

    assert run("ls", "--where", "owner=@alice", "--where", "mark=-").stdout == "job/1\n"


STRANGE = [
    ("two\nlines", "two\\nlines"),
    ("tab\there", "tab\\there"),
    ("return\r", "return\\r"),
    ("\x1b[31mred", "\\u001b[31mred"),
    ("c1\u009b", "c1\\u009b"),
    ("right\u202eleft", "right\\u202eleft"),
    ("tag\U000e0001", "tag\\udb40\\udc01"),
    ("smörgås 🐚", "smörgås 🐚"),
]


@pytest.mark.parametrize(("key", "shown"), STRANGE)
def test_a_key_is_one_line_and_gives_the_terminal_no_orders(run: Limpet, key: str, shown: str) -> None:
    run("put", key, "1")

    assert run("ls").stdout == shown + "\n"
    assert run("ls", "-l").stdout.split("\t")[-1] == shown + "\n"
    assert run("ls", "--values").stdout == f"{shown}\t1\n"
    assert run("history", key).stdout.split("\t")[5] == shown
    assert run.json("ls")["key"] == key


# Counters and records ---------------------------------------------------------


def test_incr_prints_the_number(run: Limpet) -> None:
    assert run("incr", "hits").stdout == "1\n"
    assert run("incr", "hits", "41").stdout == "42\n"
    assert run("incr", "hits", "-2").stdout == "40\n"
    assert run("incr", "hits", "-15", "--ttl", "1h").stdout == "25\n"
    assert run("incr", "hits", "--", "-5").stdout == "20\n"


def test_fields_are_set_read_and_cleared(run: Limpet) -> None:
    run("field", "set", "job", "state=pending", "tries=0")
    run("field", "set", "job", "tries=1", "note=a=b", "--unset", "state")

    assert run("field", "get", "job").stdout == '{"note":"a=b","tries":1}\n'
    assert run("field", "get", "job", "tries").stdout == "1\n"
    assert run("field", "get", "job", "note", "--raw").stdout == "a=b"
    assert run("field", "set", "job", "--unset", "note", "--unset", "tries").exit_code == 0
    assert run("field", "get", "job").stdout == "{}\n"


def test_fields_come_from_files_and_standard_input(run: Limpet, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("all well")

    run("field", "set", "job", "log=@run.log", "mail=-", stdin="dear reader")

    assert run("field", "get", "job").stdout == '{"log":"all well","mail":"dear reader"}\n'


def test_one_swap_wins_and_the_other_conflicts(run: Limpet) -> None:
    run("field", "set", "job", "state=pending")

    assert run("field", "swap", "job", "state", "pending", "claimed", "--set", "worker=w1").exit_code == 0
    lost = run("field", "swap", "job", "state", "pending", "claimed", "--set", "worker=w2")

    assert lost.exit_code == 4
    assert run("field", "get", "job").stdout == '{"state":"claimed","worker":"w1"}\n'


def test_a_swap_may_set_the_time_to_live(run: Limpet) -> None:
    run("field", "set", "job", "state=pending")

    run("field", "swap", "job", "state", "pending", "claimed", "--ttl", "5m")

    assert run.json("get", "job")["expires_at"] is not None


def test_a_record_that_must_exist_is_not_made(run: Limpet) -> None:
    run("put", "other", "1")

    assert run("field", "set", "job", "state=done", "--if-exists").exit_code == 3
    assert run("ls").stdout == "other\n"


# The shared options -----------------------------------------------------------


def test_the_shared_options_stand_before_the_command_or_behind_it(run: Limpet, url: str) -> None:
    run("put", "k", "1", "-n", "other")

    assert run("get", "k").exit_code == 3
    assert run("-n", "other", "get", "k").stdout == "1\n"
    assert run("get", "k", "--namespace", "other").stdout == "1\n"
    assert run("--json", "get", "k", "-n", "other").stdout == run("get", "k", "-n", "other", "--json").stdout
    assert Limpet("sqlite:///nowhere.db")("get", "k", "--url", url, "-n", "other").stdout == "1\n"


def test_the_variables_name_store_and_namespace(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_URL", url)
    monkeypatch.setenv("LIMPET_NAMESPACE", "jobs")
    Limpet()("put", "k", "1")

    with limpet.sync.open(url, namespace="jobs") as store:
        assert store.get("k") == 1


def test_without_a_url_the_store_is_in_this_folder(tmp_path: Path) -> None:
    Limpet()("put", "k", "1")

    assert (tmp_path / "limpet.db").is_file()
    assert Limpet()("get", "k").stdout == "1\n"
    assert Limpet()("get", "k", "--url", "").stdout == "1\n"


def test_the_time_that_is_left_is_shown(run: Limpet) -> None:
    run("put", "short", "1", "--ttl", "90s")
    run("put", "lasting", "1")

    assert re.fullmatch(r"1m(29|30)s\n", run("ttl", "short").stdout)
    assert 0 < json.loads(run("ttl", "short", "--json").stdout)["remaining"] <= 90
    assert run("ttl", "lasting").stdout == "never\n"
    assert run("ttl", "none").exit_code == 3


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        (["address.city=Oslo"], ["a"]),
        (["address.city = Oslo | vip = true"], ["a", "b"]),
        (['note="x | y"|tries>8'], ["c", "d"]),
        (["address.city=Oslo|vip=true", "tries<2"], ["a"]),
        (["a\\.b=1"], ["d"]),
        (["note='half \" | tries>8"], ["d"]),
    ],
)
def test_where_looks_below_and_joins(run: Limpet, tests: list[str], found: list[str]) -> None:
    documents = {
        "a": {"address": {"city": "Oslo"}, "tries": 1},
        "b": {"vip": True, "tries": 5, "address": "Oslo"},
        "c": {"note": "x | y", "tries": 2},
        "d": {"tries": 9, "a.b": 1},
    }
    for key, document in documents.items():
        run("put", key, json.dumps(document))

    shown = run("ls", *(part for test in tests for part in ("--where", test)))

    assert shown.stdout.split() == found


@pytest.mark.parametrize("test", ["a..b=1", ".a=1", "a.=1", "a=1|", "a", "|"])
def test_where_that_is_no_test_is_refused(run: Limpet, test: str) -> None:
    run("put", "k", "1")

    assert run("ls", "--where", test).exit_code == 2
