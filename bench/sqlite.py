"""The SQLite engine beside other stores on SQLite: 64 callers on a loop, and one that blocks.

Then guarded puts and batches beside the same by hand.
"""

from __future__ import annotations

from bench import contenders_sqlite as on_sqlite
from bench import goals, workload, writes
from bench.contenders import AnyContender, Contender
from bench.harness import Lane, Race, blocking, in_batches, race, together
from bench.report import race_table
from bench.run import Run, say

KEYS = 10_000

_ASYNC_PEERS = (on_sqlite.Aiosqlite, on_sqlite.PyKeyValueDisk, on_sqlite.LanggraphSqlite)
_LIMITS = (on_sqlite.RawBatched, on_sqlite.RawSameWork)

FULL = on_sqlite.LimpetFull.name
NORMAL = on_sqlite.LimpetNormal.name
BLOCKING_FULL = on_sqlite.LimpetBlockingFull.name
BLOCKING_NORMAL = on_sqlite.LimpetBlockingNormal.name


def measure(run: Run) -> None:
    _on_a_loop(run)
    _blocking(run)
    by_hand = on_sqlite.OneTransaction
    contenders = [on_sqlite.LimpetFull(), by_hand()]
    writes.measure(run, "sqlite", "SQLite FULL", contenders, by_hand=by_hand.name, aims=goals.SQLITE_WRITES)


def _on_a_loop(run: Run) -> None:
    keys = run.options.scaled(KEYS, 500)
    setup, findings = run.setup("sqlite"), run.findings
    kinds = (on_sqlite.LimpetFull, on_sqlite.LimpetNormal, *_ASYNC_PEERS, on_sqlite.DiskcacheFull, *_LIMITS)
    raw, same_work = (kind.name for kind in _LIMITS)
    with setup.open_all([kind() for kind in kinds], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)

        puts = _race(run, "SQLite put@64", [_put_lane(run, one, keys) for one in contenders])
        say(race_table(f"\nSQLite, put, 64 callers, {keys:,} keys", puts, FULL, setup.checks))
        what = "SQLite FULL put@64"
        for peer in (on_sqlite.Aiosqlite, on_sqlite.PyKeyValueDisk, on_sqlite.DiskcacheFull):
            findings.compare("sqlite", f"{what}, x {peer.name}", "x", puts, FULL, [peer.name], goals.PUT_OF_ONE_BY_ONE)
        langgraph = on_sqlite.LanggraphSqlite.name
        findings.compare("sqlite", f"{what}, x {langgraph}", "x", puts, FULL, [langgraph], goals.PUT_OF_LANGGRAPH)
        findings.compare("sqlite", f"{what}, of raw batched SQLite", "of", puts, FULL, [raw], goals.PUT_OF_RAW)
        findings.compare("sqlite", f"{what}, of raw SQLite doing the same work", "of", puts, FULL, [same_work])
        findings.compare("sqlite", "SQLite put@64, FULL of NORMAL", "of", puts, FULL, [NORMAL], goals.DURABLE_OF_NOT)

        readers = [one for one in contenders if one.name not in (NORMAL, on_sqlite.DiskcacheFull.name, same_work)]
        gets = _race(run, "SQLite get@64", [_get_lane(run, one, keys) for one in readers])
        say(race_table(f"\nSQLite, get, 64 callers, {keys:,} keys", gets, FULL, setup.checks))
        peers = [kind.name for kind in _ASYNC_PEERS]
        findings.compare(
            "sqlite", "SQLite get@64, x the best peer on a loop", "x", gets, FULL, peers, goals.GET_OF_BEST
        )
        findings.compare("sqlite", "SQLite get@64, of raw batched SQLite", "of", gets, FULL, [raw])


def _blocking(run: Run) -> None:
    keys = run.options.scaled(KEYS, 500)
    setup, findings = run.setup("sqlite-blocking"), run.findings
    kinds = (
        *(on_sqlite.LimpetBlockingFull, on_sqlite.LimpetBlockingNormal),
        *(on_sqlite.DiskcacheFull, on_sqlite.DiskcacheNormal),
    )
    full, normal = on_sqlite.DiskcacheFull.name, on_sqlite.DiskcacheNormal.name
    with setup.open_all([kind() for kind in kinds], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)

        puts = _race(
            run, "SQLite blocking put", [_blocking_lane(one, "put", workload.puts(keys)) for one in contenders]
        )
        say(race_table(f"\nSQLite, put, one blocking caller, {keys:,} keys", puts, BLOCKING_FULL, setup.checks))
        what = "SQLite blocking put, x diskcache, both"
        findings.compare("sqlite", f"{what} NORMAL", "x", puts, BLOCKING_NORMAL, [normal], goals.BLOCKING_PUT_NORMAL)
        findings.compare("sqlite", f"{what} FULL", "x", puts, BLOCKING_FULL, [full], goals.BLOCKING_PUT_FULL)

        readers = [one for one in contenders if one.name not in (BLOCKING_NORMAL, normal)]
        gets = _race(run, "SQLite blocking get", [_blocking_lane(one, "get", workload.gets(keys)) for one in readers])
        say(race_table(f"\nSQLite, get, one blocking caller, {keys:,} keys", gets, BLOCKING_FULL, setup.checks))
        findings.compare(
            "sqlite", "SQLite blocking get, x diskcache", "x", gets, BLOCKING_FULL, [full], goals.BLOCKING_GET
        )


def _race(run: Run, name: str, lanes: list[Lane]) -> Race:
    result = race(lanes, rounds=run.options.rounds, slice_s=run.options.slice_s)
    run.findings.keep_race(name, result)
    return result


def _put_lane(run: Run, contender: AnyContender, keys: int) -> Lane:
    jobs = workload.puts(keys)
    if isinstance(contender, Contender):
        return Lane(contender.name, lambda seconds: run.runner.run(together(contender.put, jobs, seconds)))
    if isinstance(contender, on_sqlite.RawBatched):
        return Lane(contender.name, lambda seconds: in_batches(contender.put_all, jobs, seconds))
    return _blocking_lane(contender, "put", jobs)


def _get_lane(run: Run, contender: AnyContender, keys: int) -> Lane:
    jobs = workload.gets(keys)
    if isinstance(contender, Contender):
        return Lane(contender.name, lambda seconds: run.runner.run(together(contender.get, jobs, seconds)))
    assert isinstance(contender, on_sqlite.RawBatched)
    return Lane(contender.name, lambda seconds: in_batches(contender.get_all, jobs, seconds))


def _blocking_lane(contender: AnyContender, verb: str, jobs: workload.Jobs) -> Lane:
    call = getattr(contender, verb)
    return Lane(contender.name, lambda seconds: blocking(call, jobs, seconds))
