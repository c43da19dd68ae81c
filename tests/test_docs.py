"""The documents say what is so: their examples run, their links lead somewhere, their versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import limpet
from limpet.errors import InvalidValue
from tests.docs_support import DOCUMENTS, ROOT, Reader, blocks

# Commands that are shown to the reader and not run by these tests, and why not.
NOT_RUN_HERE = {
    "./dev demo": "goes on until Ctrl-C; tests/test_demo.py runs what it starts",
    "./dev test": "is what runs this test",
    "./dev check": "installs what it needs from a package index; .ci/run runs it",
    "./dev test tests/test_docs.py": "is what runs this test",
    "./dev test src/limpet/conformance --limpet-engine 'memory:{unique}'": "runs tests, and this is one",
    "pip install .": "installs from a package index",
    "pytest --pyargs limpet.conformance --asyncio-mode=auto --limpet-engine 'mine://{tmp}'": "needs an engine 'mine'",
}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_example_of_a_document_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIMPET_URL", raising=False)

    Reader(document).read()


def shown_commands() -> set[str]:
    return {
        line for document in DOCUMENTS for block in blocks(document) if block.language == "sh" for line in block.lines()
    }


def test_every_command_that_is_not_run_here_is_named_with_a_reason() -> None:
    assert shown_commands() == set(NOT_RUN_HERE)


@pytest.mark.parametrize("command", [command for command in NOT_RUN_HERE if command.startswith("./dev")])
def test_every_dev_command_that_is_shown_exists(command: str) -> None:
    name = command.split()[1]

    assert re.search(rf"^{name}\) ", (ROOT / "dev").read_text(), re.MULTILINE)


def test_the_first_stored_value_takes_at_most_fifteen_lines() -> None:
    examples = [block for block in blocks(ROOT / "README.md") if block.language == "python"]

    blocking, asynchronous = examples[:2]
    assert "limpet.sync.open" in blocking.text
    assert "await" in asynchronous.text
    assert max(len(blocking.lines()), len(asynchronous.lines())) <= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [
        link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http:", "https:", "mailto:"))
    ]

    missing = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def anchors(document: Path) -> set[str]:
    """The places within a document that a link can name: its headings, as hosts of repositories spell them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


async def test_the_readme_lists_the_engines_that_there_are() -> None:
    """An engine that is planned is called planned, and moves into the table when it can be opened."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\w+) \| `\w+:", readme, re.MULTILINE)

    with pytest.raises(InvalidValue) as refused:
        await limpet.open("nowhere:")
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert [name.lower() for name in listed] == known


def test_the_changelog_starts_with_the_version_that_this_is() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    newest = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == limpet.__version__ == project["version"]
