"""The NATS engine beside the driver's own key-value store: as a server comes, and where each write is synced."""

from __future__ import annotations

from collections.abc import Sequence

from bench import contenders_nats as on_nats
from bench import goals, workload, writes
from bench.contenders import AnyContender
from bench.harness import CALLERS, Lane, Race, race, together
from bench.report import race_table
from bench.run import Run, say
from tests.servers import jetstream, nats

KEYS = 5_000
OURS = on_nats.LimpetNats.name
PEER = on_nats.NatsPy.name
BY_HAND = on_nats.ByHand.name
BATCH_BY_HAND = on_nats.BatchByHand.name


def measure(run: Run) -> None:
    keys, findings = run.options.scaled(KEYS, 200), run.findings
    with nats() as server:
        setup = run.setup("nats-contenders")
        with setup.open_all([kind(server.url) for kind in on_nats.CONTENDERS], keys) as contenders:
            findings.keep_checks(setup.checks, setup.absent)
            for verb, jobs in (("put", workload.puts), ("get", workload.gets)):
                found = _race(run, verb, contenders, jobs(keys), CALLERS)
                say(race_table(f"\nNATS, {verb}, 64 callers, {keys:,} keys", found, OURS, setup.checks))
                name = f"NATS {verb}@64, x {PEER}"
                findings.compare("nats", name, "x", found, OURS, [PEER], goals.NATS[verb])
                if verb == "put":
                    by_cpu = found.cpu_ratios(OURS, [PEER])
                    findings.judge("nats", f"{name}, by CPU", "x", by_cpu, goals.NATS_PUT_BY_CPU)
                    # With no store above it, this is all there could be.
                    findings.compare("nats", f"{BY_HAND}, {name}", "x", found, BY_HAND, [PEER], None)
                    findings.compare(
                        "nats", f"NATS put@64, of {BY_HAND}", "of", found, OURS, [BY_HAND], goals.OF_BY_HAND
                    )
        contenders = [kind(server.url) for kind in (*on_nats.CONTENDERS, on_nats.BatchByHand)]
        written = writes.measure(run, "nats", "NATS", contenders, by_hand=PEER, aims=goals.NATS_WRITES)
        name = f"{BY_HAND}, NATS guarded put@64, x {PEER}"
        findings.compare("nats", name, "x", written["guarded@64"], BY_HAND, [PEER], None)
        # The peer's ten updates are no batch: the server takes long for one that is, by any client.
        for verb in ("batch", "batch@64"):
            what = f"NATS {verb.replace('batch', writes.WORDS['batch'])}, of {BATCH_BY_HAND}"
            findings.compare("nats", what, "of", written[verb], OURS, [BATCH_BY_HAND], goals.OF_BY_HAND)
    with nats(lambda folder: jetstream(folder, "sync_interval: always")) as server:
        setup = run.setup("nats-synced-contenders")
        url = f"{server.url}?sync=always"
        synced = [on_nats.LimpetNats(url), on_nats.NatsPy(server.url), on_nats.BatchByHand(url)]
        with setup.open_all(synced, keys) as contenders:
            for callers in (64, 512):
                found = _race(run, "put", contenders, workload.puts(keys), callers, synced=True)
                say(race_table(f"\nNATS, each put synced, {callers} callers", found, OURS, setup.checks))
                name = f"NATS synced put@{callers}, x {PEER}"
                findings.compare("nats", name, "x", found, OURS, [PEER], goals.NATS_SYNCED[callers])
                findings.compare("nats", f"{BATCH_BY_HAND}, {name}", "x", found, BATCH_BY_HAND, [PEER], None)


def _race(
    run: Run,
    verb: str,
    contenders: Sequence[AnyContender],
    jobs: workload.Jobs,
    callers: int,
    *,
    synced: bool = False,
) -> Race:
    def lane(contender: AnyContender) -> Lane:
        call = getattr(contender, verb)
        return Lane(contender.name, lambda seconds: run.runner.run(together(call, jobs, seconds, callers)))

    result = race([lane(one) for one in contenders], rounds=run.options.rounds, slice_s=run.options.slice_s)
    run.findings.keep_race(f"NATS {'synced ' if synced else ''}{verb}@{callers}", result)
    return result
