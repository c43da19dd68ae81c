"""The PostgreSQL engine beside other stores on the same server: one caller, 64, and several processes.

Then guarded puts and batches beside the same by hand, a sweep beside traffic, and a page of a thousand keys out of a
million beside the sequential scan that finds the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import limpet
from bench import contenders_postgres as on_postgres
from bench import goals, sweep, workload, writes
from bench.contenders import load
from bench.harness import together
from bench.remote import races
from bench.run import ROOT, Run, say
from bench.words import brief, table
from tests.servers import postgres

KEYS = 5_000
PROCESSES = (1, 2, 4)
OURS = on_postgres.LimpetPostgres.name
POOL = on_postgres.AsyncpgPool.name
LANGGRAPH = on_postgres.LanggraphPostgres.name
RAW = on_postgres.RawUnnest.name
BY_HAND = on_postgres.ByHand.name
IN_HAND = on_postgres.InHand.name


def measure(run: Run) -> None:
    # On the disk that is measured; the server is not root's, and must get there.
    run.folder.chmod(0o711)
    with postgres(folder=run.folder / "postgres") as server:
        _races(run, server.url)
        by_hand = on_postgres.OneStatement
        contenders = [on_postgres.LimpetPostgres(server.url), by_hand(server.url)]
        writes.measure(run, "postgres", "PostgreSQL", contenders, by_hand=by_hand.name, aims=goals.POSTGRES_WRITES)
        _processes(run, server.url)
        _sweeps(run, server.url)
        _pages(run, server.url)


def _races(run: Run, url: str) -> None:
    keys = run.options.scaled(KEYS, 200)
    setup, findings = run.setup("postgres-contenders"), run.findings
    with setup.open_all([kind(url) for kind in on_postgres.CONTENDERS], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)
        present = {one.name for one in contenders}
        found = races(run, "PostgreSQL", contenders, setup.checks, keys, ours=OURS, limits=(RAW, IN_HAND))
    for verb in ("put", "get"):
        what, many = f"PostgreSQL {verb}@64", found[f"{verb}@64"]
        by_pool, by_langgraph, by_raw = goals.POSTGRES[verb]
        findings.compare("postgres", f"{what}, x {POOL}", "x", many, OURS, [POOL], by_pool)
        if LANGGRAPH in present:
            findings.compare("postgres", f"{what}, x {LANGGRAPH}", "x", many, OURS, [LANGGRAPH], by_langgraph)
        findings.compare("postgres", f"{what}, of {RAW}", "of", many, OURS, [RAW], by_raw)
        # What the contract itself costs the server: with no caller and no store, this is all there could be.
        findings.compare("postgres", f"PostgreSQL {verb}: {IN_HAND}, of {RAW}", "of", many, IN_HAND, [RAW], None)
        if verb == "put":
            findings.compare("postgres", f"{what}, of {BY_HAND}", "of", many, OURS, [BY_HAND], goals.OF_BY_HAND)
        goal = goals.POSTGRES_ALONE[verb]
        findings.compare("postgres", f"PostgreSQL {verb}, x {POOL}", "x", found[verb], OURS, [POOL], goal)


# Several processes ------------------------------------------------------------


def _processes(run: Run, url: str) -> None:
    """All write one namespace at once. What they write together must not become less when there are more."""
    seconds = 2.0 if not run.options.quick else 0.2
    rates: dict[int, list[float]] = {count: [] for count in PROCESSES}
    for _ in range(run.options.scaled(3, 1)):
        for count in PROCESSES:
            rates[count].append(_rate(url, count, seconds))
    run.findings.samples["PostgreSQL put@64 by processes"] = {str(count): found for count, found in rates.items()}
    say("\nPostgreSQL, put, 64 callers in each process, one namespace")
    rows = [(str(count), brief(statistics.median(found))) for count, found in rates.items()]
    say(table(("processes", "calls/s together"), rows))
    for count in PROCESSES[1:]:
        ratios = [many / one for many, one in zip(rates[count], rates[1], strict=True)]
        run.findings.judge(
            "postgres", f"PostgreSQL put@64 of {count} processes, of one's rate", "of", ratios, goals.POSTGRES_PROCESSES
        )


def _rate(url: str, processes: int, seconds: float) -> float:
    """Calls per second of all processes together, each of which began when all were ready."""
    command = [sys.executable, "-m", "bench.postgres", url, str(seconds)]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return sum(float(json.loads(child.communicate()[0])) for child in children)


async def _write(url: str, seconds: float) -> None:
    async with limpet.open(f"{url}?schema=bench_processes", sweep=False) as store:
        jobs = workload.puts(KEYS)
        await together(store.put, jobs, 0.1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.perf_counter()
        piece = await together(store.put, jobs, seconds)
        print(json.dumps(piece.calls / (time.perf_counter() - began)), flush=True)


# One engine alone -------------------------------------------------------------


def _sweeps(run: Run, url: str) -> None:
    def new_schema(number: int) -> tuple[str, sweep.Count]:
        schema = f"bench_sweep_{number}"

        async def count() -> int:
            async with _connect(url) as connection:
                return len(await connection.fetch(sweep.ENDED_ONCE.format(schema=f"{schema}.")))

        return f"{url}?schema={schema}", count

    sweep.measure_on(run, "postgres", "PostgreSQL", new_schema, goals.POSTGRES_SWEEP_S)


def _pages(run: Run, url: str) -> None:
    """A page by its prefix: from the store, and by reading the whole table."""
    keys = run.options.scaled(1_000_000, 10_000)
    found = run.runner.run(_page_times(url, keys, run.options.rounds))
    run.findings.samples["PostgreSQL page by prefix, ms"] = found
    say(f"\nPostgreSQL, a page of {workload.KEYS_PER_PREFIX:,} keys by their prefix, of {keys:,}")
    say(table(("way", "ms"), [(way, brief(statistics.median(times))) for way, times in found.items()]))
    ratios = [scan / page for page, scan in zip(found["store.keys"], found["sequential scan"], strict=True)]
    what = f"PostgreSQL {workload.KEYS_PER_PREFIX:,} of {keys:,} keys by prefix, x a sequential scan"
    run.findings.judge("postgres", what, "x", ratios, goals.POSTGRES_PREFIX)


async def _page_times(url: str, keys: int, rounds: int) -> dict[str, list[float]]:
    schema = "bench_pages"
    times: dict[str, list[float]] = {"store.keys": [], "sequential scan": []}
    async with limpet.open(f"{url}?schema={schema}", sweep=False) as store, _connect(url) as connection:
        # As they would be stored; one by one they would take minutes.
        await connection.execute(_FILL.format(schema=schema), workload.KEYS_PER_PREFIX, keys)
        await connection.execute(f"VACUUM ANALYZE {schema}.limpet_entries")
        await store.keys(limit=1)
        # Not by chance: without an index, and by no more than this one process.
        await connection.execute(
            "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off"
        )
        await connection.execute("SET max_parallel_workers_per_gather = 0")
        sequential = await connection.prepare(_SEQUENTIAL.format(schema=schema))
        for turn in range(rounds):
            prefix = workload.prefix(turn * 7 % (keys // workload.KEYS_PER_PREFIX))
            began = time.perf_counter()
            page = await store.keys(prefix, limit=workload.KEYS_PER_PREFIX)
            times["store.keys"].append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            rows = await sequential.fetch(prefix)
            times["sequential scan"].append(1000 * (time.perf_counter() - began))
            assert page.keys == [row[0] for row in rows]
            assert len(rows) == workload.KEYS_PER_PREFIX
    return times


_FILL = """
INSERT INTO {schema}.limpet_entries (namespace, family, key, kind, value, stored, size_bytes, version, revision,
    created_revision, created_ms, updated_ms)
SELECT 'default', 'data', format('tenant/%s/session/%s/state/value', lpad((n / $1)::text, 6, '0'),
    lpad((n % $1)::text, 6, '0')), 'json', to_jsonb(n), convert_to(n::text, 'UTF8'), 50, 1, n, n, 0, 0
FROM generate_series(0, $2::int - 1) AS n"""
_SEQUENTIAL = "SELECT key FROM {schema}.limpet_entries WHERE starts_with(key, $1) ORDER BY key"


@contextlib.asynccontextmanager
async def _connect(url: str) -> AsyncIterator[Any]:
    connection = await load("asyncpg").connect(url)
    try:
        yield connection
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], float(sys.argv[2])))
