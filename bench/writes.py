"""Guarded puts and batches of ten puts, beside the same done by hand with the driver on the same server.

Each guard expects what the same contender last wrote, so it holds, and the whole price of a guard is in the figure.
Before and after each race the writes are counted in the store; a contender that has not written exactly what it was
timed for voids the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench import workload
from bench.contenders import AnyContender, Void, Writer
from bench.goals import Goal
from bench.harness import CALLERS, Lane, Race, Slice, in_turn, race, together
from bench.report import Unit, race_table
from bench.run import Run, say

KEYS: Final = 5_000
KEYS_QUICK: Final = 1_000
"""More than 64 callers have in hand at a time, ten in each batch: no two may write one key at once."""

BATCH: Final = 10
WORDS: Final = {"guarded": "guarded put", "batch": f"batch of {BATCH} puts"}

Aims = dict[str, Goal]
"""Goals by race: ``guarded``, ``guarded@64``, ``batch`` and ``batch@64``. One without a goal is not judged."""


def measure(
    run: Run, group: str, engine: str, contenders: Sequence[AnyContender], *, by_hand: str, aims: Aims
) -> dict[str, Race]:
    """The races of Limpet, the first of the contenders, and the driver by hand. Others may run beside them."""
    keys, findings = run.options.scaled(KEYS, KEYS_QUICK), run.findings
    setup = run.setup(f"{group}-writes")
    found = {}
    with setup.open_all(contenders, keys) as present:
        findings.keep_checks(setup.checks, setup.absent)
        ours = present[0].name
        for verb, words in WORDS.items():
            for callers in (1, CALLERS):
                name = verb if callers == 1 else f"{verb}@{callers}"
                what = f"{engine} {words}" if callers == 1 else f"{engine} {words}@{callers}"
                lanes = [_CountedLane(run, one, verb, keys, callers) for one in present if _takes_part(one, verb)]
                found[name] = race(
                    [Lane(lane.name, lane.run) for lane in lanes],
                    rounds=run.options.rounds,
                    slice_s=run.options.slice_s,
                )
                for lane in lanes:
                    lane.check()
                findings.keep_race(what, found[name])
                who = "one caller" if callers == 1 else f"{callers} callers"
                say(race_table(f"\n{engine}, {words}, {who}, {keys:,} keys", found[name], ours, setup.checks))
                unit: Unit = "of" if callers == 1 else "x"
                against = f"{what}, {unit} {by_hand}"
                findings.compare(group, against, unit, found[name], ours, [by_hand], aims.get(name))
    return found


def _takes_part(contender: AnyContender, verb: str) -> bool:
    """One that has nothing of its own for a verb does not race in it."""
    return isinstance(contender, Writer) and verb not in contender.lacks


class _CountedLane:
    """A lane that counts its writes, to compare them with those that the store has counted."""

    def __init__(self, run: Run, contender: AnyContender, verb: str, keys: int, callers: int) -> None:
        assert isinstance(contender, Writer)
        self.name = contender.name
        self._contender, self._callers, self._runner = contender, callers, run.runner
        self._keys = [workload.key(number) for number in range(keys)]
        self._call = getattr(contender, verb)
        self._jobs = _tens(workload.puts(keys)) if verb == "batch" else workload.puts(keys)
        self._each = BATCH if verb == "batch" else 1
        self._counted = self._runner.run(contender.load(self._keys))

    def run(self, seconds: float) -> Slice:
        if self._callers == 1:
            piece = self._runner.run(in_turn(self._call, self._jobs, seconds))
        else:
            piece = self._runner.run(together(self._call, self._jobs, seconds, self._callers))
        self._counted += piece.calls * self._each
        return piece

    def check(self) -> None:
        found = self._runner.run(self._contender.load(self._keys))
        if found != self._counted:
            raise Void(f"{self.name}: {self._counted} writes were acknowledged, and the store has counted {found}")


def _tens(jobs: workload.Jobs) -> Iterator[workload.Job]:
    """The puts of a batch as the one argument of a call."""
    return iter(lambda: ([next(jobs) for _ in range(BATCH)],), None)
