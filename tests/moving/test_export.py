"""Exports and imports: between all engines, cut off at any place, changed, redacted, and large."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import Conflict, InvalidValue
from limpet.moving.entries import entries_of
from limpet.moving.loader import load
from tests.engines import ENGINES, unique, url_of
from tests.moving.support import ODD, bring, export, fill


def opened(engine: str, folder: Path, name: str, **options: Any) -> Any:
    return limpet.open(url_of(engine, folder), namespace=name, sweep=False, **options)


# From engine to engine --------------------------------------------------------


@pytest.mark.parametrize("engine", [*ENGINES, "encrypted"])
@pytest.mark.asyncio
async def test_an_export_of_what_was_imported_is_the_same_but_for_its_header(engine: str, tmp_path: Path) -> None:
    """All kinds of entries and odd keys, from a SQLite file to every engine, and back."""
    name, keyring = unique(), limpet.Keyring({"k1": bytes(32)}) if engine == "encrypted" else None
    async with limpet.open(f"sqlite:///{tmp_path}/first.db", namespace=name, sweep=False) as first:
        await fill(first)
        before = await export(first, tmp_path / "first.ndjson")
    engine = "sqlite" if keyring else engine
    async with opened(engine, tmp_path, name, encryption=keyring) as second:
        report = await bring(second, tmp_path / "first.ndjson")
        after = await export(second, tmp_path / "second.ndjson")
        again = await bring(second, tmp_path / "first.ndjson")
        assert await second.append("event/", "third") == await second.entry("event/0000000000000003")

    assert report.written == report.read == len(before) - 2 == len(ODD) + 11
    assert (again.written, again.same) == (0, report.read)
    assert before[1:] == after[1:]
    assert list(json.loads(before[0])["namespaces"]) == [name]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.asyncio
async def test_a_store_is_copied_between_engines(engine: str, tmp_path: Path) -> None:
    name = unique()
    async with (
        opened(engine, tmp_path, name) as first,
        limpet.open(f"sqlite:///{tmp_path}/copy.db", namespace=name, sweep=False) as second,
    ):
        await fill(first)
        report = await load(second, entries_of(first, [name]))
        ours, theirs = [[entry async for entry in store.scan()] for store in (first, second)]

    assert report.written == report.read > len(ours)
    assert [entry.stored for entry in ours] == [entry.stored for entry in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.key, one.version, one.meta, one.writer) == (other.key, other.version, other.meta, other.writer)
        assert (one.created_ms, one.updated_ms) == (other.created_ms, other.updated_ms)
        assert one.expires_ms == other.expires_ms


# What is there already --------------------------------------------------------


@pytest.fixture
async def pair(tmp_path: Path) -> Any:
    """A store that was exported, and another one that has entries of its own."""
    async with (
        limpet.open("memory:", namespace="n", sweep=False, clock=limpet.ManualClock()) as first,
        limpet.open("memory:", namespace="n", sweep=False, clock=limpet.ManualClock()) as second,
    ):
        yield first, second


@pytest.mark.asyncio
async def test_another_entry_stops_an_import(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await first.put("a", 1)
    await second.put("a", 2)
    await export(first, tmp_path / "x")

    with pytest.raises(Conflict) as caught:
        await bring(second, tmp_path / "x")

    assert (caught.value.key, await second.get("a")) == ("a", 2)


@pytest.mark.parametrize(("policy", "found"), [("keep", 2), ("replace", 1), ("newer", 2)])
@pytest.mark.asyncio
async def test_a_policy_decides_about_other_entries(pair: Any, tmp_path: Path, policy: str, found: int) -> None:
    first, second = pair
    await first.put("a", 1)
    await second.put("a", 0)
    second._session.clock.advance(5)
    await second.put("a", 2)
    await export(first, tmp_path / "x")

    report = await bring(second, tmp_path / "x", policy=policy)

    assert await second.get("a") == found
    assert (report.written, report.kept) == ((1, 0) if found == 1 else (0, 1))
    assert report.examples == ([] if found == 1 else [("n", "a", "the store has another entry")])


@pytest.mark.asyncio
async def test_a_newer_entry_replaces_an_older_one(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await second.put("a", 2)
    first._session.clock.advance(5)
    await first.put("a", 1)
    await export(first, tmp_path / "x")

    assert (await bring(second, tmp_path / "x", policy="newer")).written == 1
    assert await second.get("a") == 1


@pytest.mark.asyncio
async def test_a_dry_run_reports_and_writes_nothing(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await fill(first)
    await export(first, tmp_path / "x")

    report = await bring(second, tmp_path / "x", dry_run=True)

    assert report.written == report.read
    assert (await second.status()).revision == 0


@pytest.mark.asyncio
async def test_what_has_expired_meanwhile_is_left_out(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await first.put("a", 1, ttl=5)
    await export(first, tmp_path / "x")
    second._session.clock.advance(6)

    report = await bring(second, tmp_path / "x")

    assert (report.written, report.expired) == (0, 1)
    assert (await second.status()).keys == 0


@pytest.mark.asyncio
async def test_a_write_beside_an_import_is_not_lost(pair: Any, tmp_path: Path) -> None:
    """Another writer is faster, between the comparison and the write: it is decided again."""
    first, second = pair
    await first.put("a", 1)
    await export(first, tmp_path / "x")
    commit = second._session.engine.commit

    async def late(namespace: str, batch: Any) -> Any:
        second._session.engine.commit = commit
        await second.put("a", "faster")
        return await commit(namespace, batch)

    second._session.engine.commit = late
    report = await bring(second, tmp_path / "x", policy="keep")

    assert (await second.get("a"), report.kept) == ("faster", 1)


# Files that are not whole -------------------------------------------------------


@pytest.mark.asyncio
async def test_an_export_that_was_cut_off_goes_on(pair: Any, tmp_path: Path) -> None:
    """At every byte, a part and another call make the same file as one call."""
    first, _ = pair
    await fill(first)
    whole = b"".join(await export(first, tmp_path / "x"))
    body = whole[whole.index(b"\n") :]
    for size in range(0, len(whole), 37):
        (tmp_path / "y.part").write_bytes(whole[:size])
        assert b"".join(await export(first, tmp_path / "y")).endswith(body)
        assert not (tmp_path / "y.part").exists()


@pytest.mark.asyncio
async def test_a_part_of_another_export_is_not_continued(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await first.put("a", 1)
    await second.put("a", 1)
    await export(first, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "y.part")

    with pytest.raises(InvalidValue, match="another export"):
        await export(second, tmp_path / "y")


@pytest.mark.asyncio
async def test_a_file_that_was_cut_off_or_changed_is_not_imported(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await fill(first)
    lines = await export(first, tmp_path / "x")
    whole = b"".join(lines)
    damaged = [
        b"",
        b"{}\n",
        b"not json\n",
        lines[0],
        whole[: len(whole) // 2],
        b"".join(lines[:-1]),
        b"".join(lines[:5] + lines[6:]),
        whole.replace(b'"version":3', b'"version":4'),
        whole + lines[3],
        whole.replace(b'"format":1', b'"format":2'),
    ]
    for content in damaged:
        (tmp_path / "y").write_bytes(content)
        with pytest.raises(InvalidValue):
            await bring(second, tmp_path / "y")
    assert (await second.status()).revision == 0


@pytest.mark.asyncio
async def test_a_damaged_line_is_named_without_its_value(pair: Any, tmp_path: Path) -> None:
    import hashlib

    first, second = pair
    await first.put("a", "hunter2")
    lines = await export(first, tmp_path / "x")
    lines[1] = lines[1].replace(b'"kind":"json"', b'"kind":"record"')
    lines[2] = b'{"limpet":"end","entries":1,"sha256":"%s"}\n' % hashlib.sha256(lines[1]).hexdigest().encode()
    (tmp_path / "x").write_bytes(b"".join(lines))

    with pytest.raises(InvalidValue, match="line 2") as caught:
        await bring(second, tmp_path / "x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.asyncio
async def test_a_redacted_export_has_no_value_and_is_not_imported(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    await first.put("a", "hunter2", meta={"by": "hunter3"})
    await first.put("b", limpet.Fields(x="hunter4"))

    lines = await export(first, tmp_path / "x", redact=True)

    assert b"hunter" not in b"".join(lines)
    assert json.loads(lines[1])["size_bytes"] == 9
    with pytest.raises(InvalidValue, match="redacted"):
        await bring(second, tmp_path / "x")


@pytest.mark.asyncio
async def test_an_export_is_its_owners_alone_and_replaces_nothing(pair: Any, tmp_path: Path) -> None:
    first, _ = pair
    await first.put("a", 1)
    await export(first, tmp_path / "x")

    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidValue, match="--force"):
        await export(first, tmp_path / "x", force=False)


# Size -------------------------------------------------------------------------

_FILL = """
import sys, limpet.sync
with limpet.sync.open(f"sqlite:///{sys.argv[1]}/a.db", sweep=False) as store:
    for start in range(0, 100_000, 100):
        batch = store.batch()
        for number in range(start, start + 100):
            batch.put(f"key/{number:09}", {"n": number, "text": "x" * 40})
        batch.commit()
"""
_MOVE = """
import asyncio, re, sys
from pathlib import Path
import limpet
def peak_kb():
    # Of this program alone: what getrusage tells begins with the size of the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
from limpet.moving.export import export_file, import_file
async def main():
    folder = Path(sys.argv[1])
    before = peak_kb()
    async with limpet.open(f"sqlite:///{folder}/a.db", sweep=False) as store:
        await export_file(store, folder / "x", ["default"], redact=False, force=False, progress=lambda _: None)
    async with limpet.open(f"sqlite:///{folder}/b.db", sweep=False) as store:
        file, nothing = folder / "x", lambda _: None
        report = await import_file(store, file, [], policy="refuse", dry_run=False, progress=nothing)
        assert report.written == 100_000
    print(peak_kb() - before)
asyncio.run(main())
"""
PEAK_KB_MAX = 60 * 1024
"""Room for what SQLite keeps in its caches of two files: a million entries take 25 MB."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_moving_many_entries_takes_little_memory(tmp_path: Path) -> None:
    """What grows with the number of entries would show: so many as objects take about a hundred megabytes."""
    subprocess.run([sys.executable, "-c", _FILL, str(tmp_path)], check=True)
    moved = subprocess.run([sys.executable, "-c", _MOVE, str(tmp_path)], capture_output=True, text=True, check=True)

    print(f"100,000 entries: {int(moved.stdout) / 1024:.0f} MB more")
    assert int(moved.stdout) < PEAK_KB_MAX
