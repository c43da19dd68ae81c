"""Where a server's settings come from, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest

from limpet.cli.arguments import Setup
from limpet.cli.serve import _settings, serve_command
from limpet.errors import InvalidValue
from limpet.server.limits import Limit
from limpet.server.settings import ListenAddress, Settings, read_file


def settings_of(*words: str, **environment: str) -> Settings:
    """What ``limpet serve`` makes of its options, without serving."""
    found: list[Settings] = []

    @click.pass_obj
    def take(setup: Setup, /, **given: Any) -> None:
        found.append(_settings(setup, given))

    command = click.Command("serve", params=serve_command.params, callback=take)
    group = click.Group("limpet", commands=[command])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        command.context_settings = serve_command.context_settings
        group.main(["serve", *words], obj=Setup(None, "default", False), standalone_mode=False)
    return found[0]


def test_alone_it_serves_http_on_this_machine() -> None:
    settings = settings_of()

    assert settings.http == ListenAddress("127.0.0.1", 8080)
    assert (settings.nats, settings.auth, settings.prefix) == (None, "none", "db.kv")
    assert settings.url == "sqlite:///limpet.db"


def test_with_nats_http_is_served_only_where_asked_for() -> None:
    assert settings_of("--nats", "nats://127.0.0.1:4222").http is None
    assert settings_of("--nats", "nats://127.0.0.1:4222", "--http", ":9000").http == ListenAddress("127.0.0.1", 9000)


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "limpet.toml"
    file.write_text(
        'url = "sqlite:///other.db"\nhttp = "127.0.0.1:1"\nprefix = "a"\nread-only = true\n'
        "[limits]\nrate = 10\n[limits.namespaces.trivia]\nkeys = 5\n"
    )

    settings = settings_of(
        *("--config", str(file), "--prefix", "c"), LIMPET_SERVE_HTTP="127.0.0.1:2", LIMPET_SERVE_PREFIX="b"
    )

    assert (settings.url, settings.http, settings.prefix) == ("sqlite:///other.db", ListenAddress("127.0.0.1", 2), "c")
    assert settings.read_only
    assert settings.limits.default == Limit(rate=10)
    assert settings.limits.namespaces == {"trivia": Limit(rate=10, keys=5)}


def test_audited_namespaces_are_named_by_flags_a_variable_or_a_list_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "limpet.toml"
    file.write_text('audit = ["platform", "billing"]\n')

    assert [*settings_of().audit] == []
    assert [*settings_of("--config", str(file)).audit] == ["platform", "billing"]
    assert [*settings_of("--config", str(file), LIMPET_SERVE_AUDIT="a b").audit] == ["a", "b"]
    assert [*settings_of("--audit", "c", "--audit", "d", LIMPET_SERVE_AUDIT="a b").audit] == ["c", "d"]


def test_names_are_given_by_flags_a_variable_or_a_list_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "limpet.toml"
    file.write_text('host = ["limpet.internal"]\nconnections = 50\n')

    assert [*settings_of().host] == []
    assert [*settings_of("--config", str(file)).host] == ["limpet.internal"]
    assert settings_of("--config", str(file)).connections == 50
    assert [*settings_of("--config", str(file), LIMPET_SERVE_HOST="a b").host] == ["a", "b"]
    assert [*settings_of("--host", "c", "--host", "d", LIMPET_SERVE_HOST="a b").host] == ["c", "d"]


def test_a_server_on_this_machine_is_called_by_names_of_this_machine() -> None:
    settings = Settings(url="memory:", http=ListenAddress("127.0.0.2", 0), host=["Limpet.Internal."])

    assert settings.hosts == ["localhost", "127.0.0.1", "::1", "127.0.0.2", "limpet.internal"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("htpt = 'x'", "unknown setting 'htpt'"),
        ("audit = 'platform'", "audit is a list"),
        ("http = ", "is not TOML"),
        (b"\xff", "cannot read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str | bytes, problem: str) -> None:
    file = tmp_path / "limpet.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(InvalidValue, match=problem):
        read_file(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="No such file"):
        read_file(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["8080", "host", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_a_place_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape("HOST:PORT")):
        ListenAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("127.0.0.1:80", True),
        ("127.9.9.9:80", True),
        ("[::1]:80", True),
        ("localhost:80", True),
        (":80", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("example.org:80", False),
    ],
)
def test_it_is_known_who_can_reach_an_address(text: str, is_loopback: bool) -> None:
    address = ListenAddress.parse(text)

    assert address.is_loopback is is_loopback
    assert ListenAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"http": None}, "no interface"),
        ({"http": ListenAddress.parse("0.0.0.0:80")}, "other machines"),
        ({"certificate": "a"}, "both"),
        ({"prefix": "db.*"}, "subject"),
        ({"prefix": "db..kv"}, "subject"),
        ({"prefix": ""}, "subject"),
        ({"cleanup_interval": 0.0}, "interval"),
        ({"audit": ["limpet-server"]}, "own"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], problem: str) -> None:
    settings = Settings(**{"url": "memory:", "http": ListenAddress("127.0.0.1", 0), **given})

    with pytest.raises(InvalidValue, match=problem):
        settings.check()


def test_other_machines_are_served_with_tokens_or_when_somebody_insists() -> None:
    everywhere = ListenAddress.parse("0.0.0.0:80")

    Settings(url="memory:", http=everywhere, auth="tokens").check()
    Settings(url="memory:", http=everywhere, insecure=True).check()
