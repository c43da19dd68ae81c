"""The HTTP interface beside etcd's JSON gateway, and what a get through ``http://`` costs the client.

Both servers have every write on the disk before they reply to it. They get their requests from the same generator, on
64 connections that are kept. The CPU time of a slice is that of the server.
"""

from __future__ import annotations

import limpet
from bench import goals, workload
from bench.contenders_http import Etcd, LimpetServe, Served, can_measure, etcd_version
from bench.harness import CALLERS, Lane, in_turn, race
from bench.report import race_table
from bench.run import Run, say

KEYS = 2_000
CLIENT = "a get through http://"


def measure(run: Run) -> None:
    keys, findings = run.options.scaled(KEYS, 200), run.findings
    if not can_measure():
        _void(run, "the CPU time of another process can be read on Linux only")
        return
    if (version := etcd_version()) is not None:
        findings.about["packages"]["etcd"] = version
    ours, setup = LimpetServe(), run.setup("http-contenders")
    with setup.open_all([ours, Etcd()], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)
        for verb in ("put", "get"):
            lanes = [Lane(one.name, one.work(verb, keys)) for one in contenders if isinstance(one, Served)]
            found = race(lanes, rounds=run.options.rounds, slice_s=run.options.slice_s)
            findings.keep_race(f"HTTP {verb}@64", found)
            say(race_table(f"\nHTTP, {verb}, {CALLERS} connections, {keys:,} keys", found, ours.name, setup.checks))
            what, goal = _what(verb), goals.HTTP[verb]
            if Etcd.name in found.slices:
                findings.compare("http", what, "x", found, ours.name, [Etcd.name], goal)
            else:
                findings.missing("http", what, "x", goal, setup.absent[Etcd.name])
        _measure_client(run, ours.url, keys)


def _what(verb: str) -> str:
    return f"HTTP {verb}@{CALLERS}, x {Etcd.name}"


def _measure_client(run: Run, url: str, keys: int) -> None:
    """One caller, one get after the other, through the engine and its driver."""
    store = run.runner.run(_open(url))
    try:
        jobs = workload.gets(keys)
        lane = Lane(CLIENT, lambda seconds: run.runner.run(in_turn(store.get, jobs, seconds)))
        found = race([lane], rounds=run.options.rounds, slice_s=run.options.slice_s)
    finally:
        run.runner.run(store.close())
    run.findings.keep_race(CLIENT, found)
    rounds = [piece.cpu_us for piece in found.slices[CLIENT]]
    run.findings.judge("http", f"{CLIENT}, client CPU", "µs", rounds, goals.HTTP_CLIENT_US)


async def _open(url: str) -> limpet.Store:
    return await limpet.open(url, namespace="bench", sweep=False)


def _void(run: Run, why: str) -> None:
    for verb, goal in goals.HTTP.items():
        run.findings.missing("http", _what(verb), "x", goal, why)
    run.findings.missing("http", f"{CLIENT}, client CPU", "µs", goals.HTTP_CLIENT_US, why)
