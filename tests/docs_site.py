"""Looks over the built site, as a browser would: ``python -m tests.docs_site site``.

Every link inside leads to a page and a place that are there, the navigation included. No script,
style, image or font comes from another host; only a link that a reader may follow names one.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a page loads, by element. A <link> is loaded unless it only tells of a relation.
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}
_RELATIONS = {"canonical", "next", "prev"}
_LOADED_BY_STYLE = re.compile(r"""(?:url\(|@import\s)\s*["']?([^"')\s]+)""")


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what matters of an element."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag in _LOADED and _LOADED[tag] in given and given.get("rel") not in _RELATIONS:
            self.loads.add(given[_LOADED[tag]])
        self.loads |= set(_LOADED_BY_STYLE.findall(given.get("style", "")))


def faults(site: Path) -> list[str]:
    """What is wrong with a site, one line each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} holds no page"]
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: {link} leads nowhere" for link in sorted(page.links) if not _leads(link, path, site, pages)]
        found += [f"{name}: {load}" + wrong for load in sorted(page.loads) if (wrong := _misloaded(load, path, site))]
    for path in sorted(site.rglob("*.css")):
        loads = set(_LOADED_BY_STYLE.findall(path.read_text(encoding="utf-8")))
        name = path.relative_to(site)
        found += [f"{name}: {load}" + wrong for load in sorted(loads) if (wrong := _misloaded(load, path, site))]
    return found


def _leads(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> bool:
    """Whether a link may be followed: out into the world, or to a place that is there."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = _target(parts.path, path, site)
    if target in pages and parts.fragment:
        return unquote(parts.fragment) in pages[target].places
    return target.is_file()


def _misloaded(load: str, path: Path, site: Path) -> str:
    """Why something should not be loaded; empty when it may be."""
    parts = urlsplit(load)
    if parts.scheme == "data" or load.startswith("#"):
        return ""
    if parts.scheme or parts.netloc:
        return " comes from another host"
    return "" if _target(parts.path, path, site).is_file() else " is not there"


def _target(link: str, path: Path, site: Path) -> Path:
    if link.startswith("/"):
        target = (site / link.lstrip("/")).resolve()
    else:
        target = (path.parent / unquote(link)).resolve() if link else path
    return target / "index.html" if target.is_dir() else target


def main() -> int:
    """Print what is wrong, and tell whether anything is."""
    site = Path(sys.argv[1]).resolve()
    found = faults(site)
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
