"""The documents say what is so: their examples run, their links lead somewhere, their versions agree."""

from __future__ import annotations

import ast
import codeop
import os
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import InvalidValue
from tests.docs_site import faults
from tests.docs_support import DOCUMENTS, PAGES, ROOT, SITE, Reader, blocks, prose
from tests.judges.run import PAGES as PAGES_OF_JUDGES

SUITE = "-p limpet.conformance.plugin --asyncio-mode=auto --pyargs limpet.conformance"

# The author of an engine imports what a user of stores does not.
FOR_AUTHORS = SITE / "how-to" / "write-an-engine.md"

# Commands that are shown to the reader and not run by these tests, and why not.
NOT_RUN_HERE = {
    "./dev demo": "goes on until Ctrl-C; tests/test_demo.py runs what it starts",
    "./dev test": "is what runs this test",
    "./dev check": "installs what it needs from a package index; .ci/run runs it",
    "./dev test tests/test_docs.py": "is what runs this test",
    "./dev test src/limpet/conformance --limpet-engine 'memory:{unique}'": "runs tests, and this is one",
    "limpet serve --url sqlite:///state.db --nats nats://127.0.0.1:4222": "goes on; tests/server/test_serve.py runs it",
    "limpet serve --url sqlite:///state.db --http 127.0.0.1:8080 --nats nats://127.0.0.1:4222": "goes on, likewise",
    "limpet serve --host limpet.internal --host limpet": "goes on; tests/server/test_attacks.py gives names",
    "limpet serve --url sqlite:///state.db --http 127.0.0.1:8080": "goes on, likewise",
    "limpet mcp --url sqlite:///agents.db --http 127.0.0.1:8090 --auth tokens": "goes on; tests/mcp runs it",
    "export LIMPET=http://127.0.0.1:8080/v1/shop": "the set-up of the page does this",
    'export AUTH="Authorization: Bearer $(limpet token create me -n shop --right admin)"': "likewise",
    "export JSON='Content-Type: application/json'": "likewise",
    "pip install 'limpet[server,nats]'": "installs from a package index",
    "pip install .": "installs from a package index",
    f"pytest {SUITE} --limpet-engine 'mine://{{tmp}}'": "needs an engine 'mine'",
    "pip install 'limpet[conformance]'": "installs from a package index",
    f"pytest {SUITE} --limpet-engine 'table:{{tmp}}/state.table'": "runs tests; tests/key_value runs it",
}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# A page with many commands starts as many processes.
COMMANDS_MANY = 6


def runnable() -> list[Any]:
    """Every document; those that start many processes are slow.

    A page that needs a framework runs where the framework is: ./dev judges runs those, by name.
    """
    documents = [path for path in DOCUMENTS if _has_framework(str(path.relative_to(ROOT)))]
    starts = {path: sum(block.text.count("$ ") for block in blocks(path)) for path in documents}
    slow = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(path, id=str(path.relative_to(ROOT)), marks=slow[starts[path] > COMMANDS_MANY])
        for path in documents
    ]


def _has_framework(document: str) -> bool:
    return document not in PAGES_OF_JUDGES or find_spec(PAGES_OF_JUDGES[document]) is not None


def test_every_page_that_is_left_to_the_judges_is_there() -> None:
    assert set(PAGES_OF_JUDGES) <= set(names(DOCUMENTS))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", runnable())
def test_every_example_of_a_document_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIMPET_URL", raising=False)
    # A page may set variables, as its reader would. They end with it.
    before = dict(os.environ)
    try:
        Reader(document).read()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_no_example_escapes_the_reader(document: Path) -> None:
    """A block that is indented, or fenced in another way, would be shown and never run."""
    assert re.findall(r"^\s*(?:```|~~~).*$", prose(document), re.MULTILINE) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=names([ROOT / "README.md", *PAGES]))
def test_no_reader_is_shown_the_test_machinery_or_a_private_module(page: Path) -> None:
    """What a page shows is what a user would write. Its set-up stands in comments that only the tests read."""
    shown = re.sub(r"^<!-- python\n.*?^-->$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)

    assert re.findall(r"LIMPET_TEST_\w+", shown) == []
    if page != FOR_AUTHORS:
        assert re.findall(r"from limpet\.(?:opening|session|store|engines?|server\.\w+)[\w.]* import", shown) == []


# Pages that a newcomer follows at a prompt. Before Python 3.13, an empty line ends a function there.
FOLLOWED = [
    *(SITE / "how-to" / f"{name}.md" for name in ("agents", "fastmcp", "langgraph", "mcp")),
    *sorted((SITE / "tutorial").glob("*.md")),
]


@pytest.mark.parametrize("page", FOLLOWED, ids=names(FOLLOWED))
def test_the_examples_of_a_page_can_be_pasted_at_a_prompt(page: Path) -> None:
    prompt = codeop.CommandCompiler()
    prompt.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for block in blocks(page):
        # A whole program is saved as a file.
        if block.language == "python" and not re.search(r"def main\(|asyncio\.run\(", block.text):
            pending: list[str] = []
            for line in [*block.text.splitlines(), ""]:
                pending.append(line)
                if prompt("\n".join(pending), f"{page.name}:{block.line}") is not None:
                    pending = []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nprint(1 + 1)  # 3\n```\n", "prints ['2']"),
        ("```python\nprint(1 + 1) # 2\n```\n", "no test checks print(1 + 1) # 2"),
        ("```python\nprint(\n    1 + 1,\n)  # 2\n```\n", "no test checks )  # 2"),
        ("```python\nif False:\n    print(1)  # 1\n```\n", "prints []"),
        ("```python\nassert False\n```\n", ""),
        ("```console\n$ echo one\ntwo\n```\n", "prints 'one"),
        ("```console\necho one\n```\n", "a console starts with a command"),
        ("```toml\n[\n```\n", ""),
        ("```python title=bot.py\n```\n", "no rule for a 'python title=bot.py' block"),
    ],
)
def test_an_example_that_does_not_hold_is_found(text: str, complaint: str, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"# Page\n\n{text}")

    with pytest.raises((AssertionError, tomllib.TOMLDecodeError)) as found:
        Reader(document).read()
    assert complaint in str(found.value)


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
    readme = ROOT / "README.md"
    start = readme.read_text(encoding="utf-8").splitlines().index("## The first stored value")
    examples = [block for block in blocks(readme) if block.language == "python" and block.line > start]

    blocking, asynchronous = examples[:2]
    assert "limpet.sync.open" in blocking.text
    assert "await" in asynchronous.text
    assert max(len(blocking.lines()), len(asynchronous.lines())) <= 15


# Links and navigation ---------------------------------------------------------


def links(document: Path) -> list[str]:
    """The links of a document to others, and within itself."""
    # In the text, a link that is set as code is no link.
    text = re.sub(r"`[^`\n]*`", "code", prose(document))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]


def anchors(document: Path) -> set[str]:
    """The places within a document that a link can name: its headings, as hosts of repositories spell them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    missing = []
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)

    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_a_page_of_the_site_links_to_pages_of_the_site(page: Path) -> None:
    """What lies outside docs/ is not on the site, and ./dev docs would refuse the link."""
    targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]

    assert [target for target in targets if not target.is_relative_to(SITE)] == []


def navigation(items: list[Any]) -> list[str]:
    """The pages that a navigation leads to, in its order."""
    pages: list[str] = []
    for item in items:
        inside = list(item.values()) if isinstance(item, dict) else item
        pages += [inside] if isinstance(inside, str) else navigation(inside)
    return pages


def test_every_page_is_in_the_navigation_once() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]

    assert sorted(navigation(site["nav"])) == sorted(str(page.relative_to(SITE)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_page_starts_with_the_one_heading_that_names_it(page: Path) -> None:
    assert page.read_text(encoding="utf-8").startswith("# ")
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


# The built site ---------------------------------------------------------------

# What ./dev docs would complain of, by what is wrong with a page.
FAULTS = {
    '<a href="nowhere.html">x</a>': "index.html: nowhere.html leads nowhere",
    '<a href="page.html#nowhere">x</a>': "index.html: page.html#nowhere leads nowhere",
    '<a href="#nowhere">x</a>': "index.html: #nowhere leads nowhere",
    '<script src="https://elsewhere.example/x.js"></script>': "index.html: https://elsewhere.example/x.js comes from",
    '<link rel="stylesheet" href="//elsewhere.example/x.css">': "index.html: //elsewhere.example/x.css comes from",
    '<link rel="preconnect" href="https://fonts.example">': "index.html: https://fonts.example comes from",
    '<img src="https://elsewhere.example/x.png">': "index.html: https://elsewhere.example/x.png comes from",
    '<img src="gone.png">': "index.html: gone.png is not there",
    '<p style="background: url(https://elsewhere.example/x.png)">': "index.html: https://elsewhere.example/x.png comes",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A small site that is in order."""
    (tmp_path / "page.html").write_text('<h1 id="top">Page</h1><a href="index.html">back</a>')
    (tmp_path / "style.css").write_text("a { background: url(data:image/png;base64,AA) } b { fill: url(#x) }")
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css"><link rel="canonical" href="https://limpet.example">'
        '<a href="page.html#top">on</a><a href=".">here</a><a href="https://elsewhere.example">away</a>'
    )
    return tmp_path


def test_a_site_in_order_has_no_faults(site: Path) -> None:
    assert faults(site) == []


@pytest.mark.parametrize(("text", "fault"), FAULTS.items())
def test_what_is_wrong_with_a_page_is_told(text: str, fault: str, site: Path) -> None:
    with (site / "index.html").open("a") as page:
        page.write(text)

    (found,) = faults(site)
    assert found.startswith(fault)


def test_a_style_that_loads_from_another_host_is_told(site: Path) -> None:
    (site / "style.css").write_text('@import "https://fonts.example/x.css"; p { src: url("gone.woff") }')

    assert faults(site) == [
        "style.css: gone.woff is not there",
        "style.css: https://fonts.example/x.css comes from another host",
    ]


def test_a_site_without_pages_is_not_in_order(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path} holds no page"]


# Versions and engines ---------------------------------------------------------


async def test_the_readme_lists_the_engines_that_there_are() -> None:
    """An engine that is planned is called planned, and moves into the table when it can be opened."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| [\w ,]+ \| `(\w+):", readme, re.MULTILINE)

    with pytest.raises(InvalidValue) as refused:
        await limpet.open("nowhere:")
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert sorted(scheme.replace("https", "http") for scheme in listed) == known


def test_the_changelog_starts_with_the_version_that_this_is() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    newest = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == limpet.__version__ == project["version"]
