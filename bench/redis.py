"""The Redis engine beside other stores on the same server: one caller, and 64. Then guarded puts and batches."""

from __future__ import annotations

from bench import contenders_redis as on_redis
from bench import goals, writes
from bench.remote import races
from bench.run import Run
from tests.servers import redis

KEYS = 5_000
OURS = on_redis.LimpetRedis.name
DRIVER = on_redis.RedisPy.name
RAW = on_redis.RawRedis.name
PEERS = [kind.name for kind in on_redis.CONTENDERS if kind.role == "peer"]


def measure(run: Run) -> None:
    keys, findings = run.options.scaled(KEYS, 200), run.findings
    with redis({"appendonly": "yes", "appendfsync": "everysec"}) as server:
        setup = run.setup("redis-contenders")
        with setup.open_all([kind(server.url) for kind in on_redis.CONTENDERS], keys) as contenders:
            findings.keep_checks(setup.checks, setup.absent)
            peers = [name for name in PEERS if name in {one.name for one in contenders}]
            found = races(run, "Redis", contenders, setup.checks, keys, ours=OURS, limits=(RAW,))
        for verb in ("put", "get"):
            by_best, by_raw = goals.REDIS[verb]
            many = found[f"{verb}@64"]
            findings.compare("redis", f"Redis {verb}@64, x the best peer", "x", many, OURS, peers, by_best)
            findings.compare("redis", f"Redis {verb}@64, of {RAW}", "of", many, OURS, [RAW], by_raw)
            goal = goals.REDIS_ALONE[verb]
            findings.compare("redis", f"Redis {verb}, x {DRIVER}", "x", found[verb], OURS, [DRIVER], goal)
        by_hand = on_redis.Scripted
        contenders = [on_redis.LimpetRedis(server.url), by_hand(server.url)]
        writes.measure(run, "redis", "Redis", contenders, by_hand=by_hand.name, aims=goals.REDIS_WRITES)
