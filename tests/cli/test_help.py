"""The help, the reference page, the completion and the start: what a newcomer meets first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import limpet
from limpet.cli import main
from limpet.cli.commands import SECTIONS, Command
from tests.cli.support import Limpet, command
from tests.docs_support import ROOT, blocks
from tests.processes import unmeasured

PAGE = ROOT / "docs" / "reference" / "cli.md"
TEXT = PAGE.read_text(encoding="utf-8")


def all_commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that there is, as it is called: ``field get``."""
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from all_commands(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


COMMANDS = dict(all_commands())


def test_these_are_the_commands() -> None:
    assert set(COMMANDS) == {
        *("get", "put", "append", "del", "ls", "folders", "namespaces", "incr", "field get", "field set", "field swap"),
        *("call", "watch", "history", "lock", "serve", "stat", "doctor", "index", "grant"),
        *("token create", "token list", "token revoke", "token rotate"),
        *("audit verify", "audit show", "audit seal", "audit prune"),
        *("deadletters list", "deadletters show", "deadletters replay", "deadletters drop"),
        *("encryption new", "encryption rotate", "encryption list"),
        *("backup", "restore", "epoch"),
        *("take", "touch", "persist", "txn", "locks", "top", "demo", "help", "completion"),
        *("migrate status", "migrate up", "migrate down", "migrate sql"),
    }


# The help ---------------------------------------------------------------------


def test_the_help_lists_every_command_under_a_heading(run: Limpet) -> None:
    shown = run("--help").stdout

    assert {name for names in SECTIONS.values() for name in names} == set(main.commands)
    for heading, names in SECTIONS.items():
        assert f"\n{heading}:\n" in shown
        for name in names:
            (line,) = re.findall(rf"^  {name} .*$", shown, re.MULTILINE)
            assert line.endswith(".")
            assert "..." not in line


def test_the_help_answers_the_questions_of_a_night(run: Limpet) -> None:
    shown = run("--help").stdout

    assert "who holds which lock?" in shown
    assert "which namespace is at work?" in shown
    assert "what changed this key?" in shown
    assert "is the store healthy?" in shown
    assert "[env: LIMPET_URL; default:" in " ".join(shown.split())
    for code in ("3 not found", "4 conflict", "5 lock not held", "6 unavailable", "7 rejected", "2 usage", "128+n"):
        assert code in shown


@pytest.mark.parametrize("path", [*COMMANDS, "field", "token", ""])
def test_every_help_fits_a_terminal_and_has_examples(run: Limpet, path: str) -> None:
    for option in ("-h", "--help"):
        result = run(*path.split(), option)
        assert result.exit_code == 0

    shown = result.stdout
    assert "\b" not in shown
    assert "\\b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "Examples:" in shown or path == ""


@pytest.mark.parametrize(("path", "found"), COMMANDS.items(), ids=COMMANDS)
def test_every_option_is_explained_in_the_help(run: Limpet, path: str, found: click.Command) -> None:
    shown = run(*path.split(), "--help").stdout
    own, _, shared = shown.partition("Options of every command:")

    for option in found.params:
        if isinstance(option, click.Option):
            assert option.help
            assert option.help.endswith((".", "]")), option.help
            assert isinstance(found, Command)
            place = shared if option in found.shared else own
            assert all(re.search(rf"^  .*{name}\b", place, re.MULTILINE) for name in option.opts), option.opts


EXAMPLES = [
    line.strip().partition("  #")[0]
    for found in (*COMMANDS.values(), main.commands["field"], main.commands["token"])
    for line in (found.epilog or "").splitlines()
    if line.startswith("  ")
]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_is_understood(example: str, tmp_path: Path) -> None:
    """Run in a shell, with everything that it names at hand, none is a wrong use."""
    tmp_path.joinpath("config.json").write_text("{}")
    tmp_path.joinpath("run.log").write_text("")
    tmp_path.joinpath("out.json").write_text("{}")
    tmp_path.joinpath("transfer.json").write_text('{"writes": [{"op": "add", "key": "runs", "by": 1}]}')
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in {
        "limpet": f'exec "{sys.executable}" -m limpet "$@"',
        "jq": "cat",
        "make": "true",
        "../report.sh": "true",
        "../restart.sh": "true",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    environment = {**unmeasured(), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    Limpet("sqlite:///limpet.db")("put", "theme", "dark")
    example = example.replace("POSITION", "0")

    for seconds in (2, 30, 300):
        # A watch and a server go on for ever, and say nothing about their use after they have begun. On a machine that
        # is busy, that may take its time.
        bounded = re.sub(r"limpet (watch|serve|top)", rf"timeout -s INT {seconds} limpet \1", example)
        done = subprocess.run(["sh", "-c", bounded], env=environment, capture_output=True, text=True, check=False)
        if "KeyboardInterrupt" not in done.stderr:
            break

    assert "Usage:" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 3, 4, 6, 7, 124, 130), done.stderr


def test_the_version_is_printed(run: Limpet) -> None:
    assert run("--version").stdout == f"limpet, version {limpet.__version__}\n"


# The reference ----------------------------------------------------------------


def section(path: str) -> str:
    """The section of the reference about a command."""
    found = re.search(rf"^### `limpet {path}( .*)?`\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/reference/cli.md has no heading '### `limpet {path} …`'"
    return found[0]


@pytest.mark.parametrize(("path", "found"), COMMANDS.items(), ids=COMMANDS)
def test_every_command_and_option_is_in_the_reference(path: str, found: click.Command) -> None:
    assert isinstance(found, Command)
    text = section(path)
    named = set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", text))
    own = [option for option in found.params if isinstance(option, click.Option) if option not in found.shared]

    for option in own:
        assert set(option.opts) <= named, f"{path} does not name {option.opts}"
    for argument in found.params:
        if isinstance(argument, click.Argument):
            metavar = argument.metavar or (argument.name or "").upper()
            assert metavar.removeprefix("-- ").strip("[].") in text.splitlines()[0], metavar


@pytest.mark.parametrize("path", COMMANDS)
def test_every_heading_is_the_usage_of_its_command(run: Limpet, path: str) -> None:
    usage = run(*path.split(), "--help").stdout.splitlines()[0]

    heading = section(path).splitlines()[0]
    assert heading == "### `" + usage.removeprefix("Usage: ").replace(" [OPTIONS]", "") + "`"


def test_the_shared_options_are_in_the_reference() -> None:
    text = TEXT.partition("\n## The store\n")[2].partition("\n## ")[0]

    for option in main.params:
        for name in option.opts:
            assert f"`{name}" in text, name
    for option in (*main.params, *next(iter(COMMANDS.values())).params):
        assert not isinstance(option, click.Option) or option.envvar is None or f"`{option.envvar}`" in text


def test_the_reference_names_no_option_that_is_not_there() -> None:
    known = {name for found in (main, *COMMANDS.values()) for option in found.params for name in option.opts}
    shown = TEXT.partition("\n## Completion")[0]
    named = set(re.findall(r"`(--?[a-z][\w-]*)[^`]*`", shown))

    assert named - known - {"-h", "--help", "-wal"} == set()


def test_every_exit_code_is_in_the_reference() -> None:
    codes = re.findall(r"^\| ([\d, +n]+) \|", TEXT.partition("\n## Exit codes\n")[2], re.MULTILINE)

    assert codes == ["0", "1", "2", "3", "4", "5", "6", "7", "126, 127", "128 + n"]


def test_every_command_is_shown_at_work() -> None:
    shown = "".join(block.text for block in blocks(PAGE) if block.language == "console")

    for path in COMMANDS:
        if path not in ("del", "demo"):
            assert re.search(rf"limpet (--json |-n team )?{path}\b", shown), path


# Completion -------------------------------------------------------------------


def complete(url: str, *words: str) -> list[str]:
    """What a shell offers behind these words."""
    environment = {
        **os.environ,
        "LIMPET_URL": url,
        "_LIMPET_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("limpet", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_options_and_keys_are_completed(url: str, run: Limpet) -> None:
    for key in ("config/a", "config/b", "other"):
        run("put", key, "1")

    assert complete(url, "h") == ["history", "help"]
    assert complete(url, "field", "s") == ["set", "swap"]
    assert complete(url, "put", "k", "1", "--if-a") == ["--if-absent"]
    assert complete(url, "get", "config/") == ["config/a", "config/b"]
    assert complete(url, "lock", "nightly", "--w") == ["--wait"]


def test_completion_makes_no_file_and_says_nothing(url: str, file: Path) -> None:
    assert complete(url, "get", "k") == []
    assert complete("nosuch:", "get", "k") == []
    assert not file.exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_that_are_named_are_served(shell: str) -> None:
    assert shell in TEXT.partition("\n## Completion\n")[2]
    done = subprocess.run(command("completion", shell), capture_output=True, text=True, check=True)

    assert f"_LIMPET_COMPLETE={shell}_complete" in done.stdout


# The start --------------------------------------------------------------------


def test_a_get_loads_nothing_that_only_others_need(url: str, run: Limpet) -> None:
    run("put", "k", "1")
    script = (
        "import json, sys\n"
        "from limpet.cli import main\n"
        f"main(['--url', {url!r}, 'get', 'k'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}

    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))

    assert "limpet.engines.sqlite.engine" in loaded
    assert (
        loaded
        & {
            *(
                "limpet.cli.health",
                "limpet.cli.running",
                "limpet.conformance",
                "limpet.demo.acts",
                "limpet.engines.memory",
            ),
            *(
                "click.testing",
                "click.shell_completion",
                "rich",
                "email",
                "http",
                "xml",
                "difflib",
                "importlib.metadata",
            ),
        }
        == set()
    )
