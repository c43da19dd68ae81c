"""What the server counts, under which names, and what the alert rules and the dashboard make of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import limpet
from limpet import ManualClock, Store
from limpet.errors import Conflict, InvalidNamespace, LimpetError, Unavailable
from limpet.protocol.codes import CODES, INTERFACE_CODES
from limpet.server import metrics
from limpet.server.audited import AuditedNamespaces
from limpet.server.dispatch import OWN_NAMESPACE, Dispatcher, TrustedCaller
from limpet.server.metrics import Metrics, Names
from limpet.server.operations import OPERATIONS
from limpet.server.requests import MissingField, request_of
from limpet.sweep import SWEEP_S, Round
from tests.engines import url_of
from tests.server.test_access import until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = url_of(request.param, tmp_path)
    async with limpet.open(url, namespace="trivia", clock=clock, sweep=False) as store:
        yield store


class Counted:
    """A dispatcher that counts, and a caller of it."""

    def __init__(self, store: Store, names: Names = "limpet", **options: Any) -> None:
        self.metrics = Metrics(store._session, names=names, **options)
        audited = AuditedNamespaces(observers=[self.metrics.observe])
        self.dispatcher = Dispatcher(store._session, "nats", observers=[self.metrics], semantic=audited.semantic_store)
        store._session.sweeper.listeners.append(self.metrics.swept)

    async def ask(self, operation: str, namespace: str = "trivia", **members: Any) -> Any:
        row = OPERATIONS[operation]
        return await self.dispatcher.run(row, namespace, request_of(row.request, members), TrustedCaller())

    async def samples(self) -> list[Sample]:
        text = (await self.metrics.render()).decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    async def value(self, name: str, **labels: str) -> float | None:
        found = [one.value for one in await self.samples() if one.name == name and one.labels == labels]
        assert len(found) <= 1
        return found[0] if found else None


@pytest.fixture
def counted(store: Store) -> Counted:
    return Counted(store)


# What is counted --------------------------------------------------------------


async def test_operations_are_counted_by_face_namespace_and_name(counted: Counted) -> None:
    await counted.ask("set", key="a", value=1)
    await counted.ask("get", key="a")
    await counted.ask("get", key="b")

    assert await counted.value("limpet_operations_total", face="nats", namespace="trivia", operation="set") == 1
    assert await counted.value("limpet_operations_total", face="nats", namespace="trivia", operation="get") == 2


async def test_errors_are_counted_by_code_and_as_operations(counted: Counted) -> None:
    await counted.ask("set", key="a", value=1)
    with pytest.raises(Conflict):
        await counted.ask("cas", key="a", value=1, expect={"version": 7})
    counted.dispatcher.report_refusal(TrustedCaller(), "trivia", "set", MissingField("key"))
    counted.dispatcher.report_refusal(TrustedCaller(), "trivia", "made-up", ValueError("x"))

    assert await counted.value("limpet_errors_total", namespace="trivia", code="conflict") == 1
    assert await counted.value("limpet_errors_total", namespace="trivia", code="invalid_value") == 1
    assert await counted.value("limpet_errors_total", namespace="trivia", code="internal") == 1
    assert await counted.value("limpet_operations_total", face="nats", namespace="trivia", operation="cas") == 1
    assert await counted.value("limpet_operations_total", face="nats", namespace="trivia", operation="other") == 1


async def test_a_swap_that_lost_is_a_conflict_too(counted: Counted) -> None:
    await counted.ask("fields", key="r", set={"f": 1})
    await counted.ask("fields", key="r", swap={"field": "f", "expected": 7, "new": 2})
    await counted.ask("fields", key="r", swap={"field": "f", "expected": 1, "new": 2})
    with pytest.raises(Conflict):
        await counted.ask("cas", key="r", value=1, expect={"absent": True})

    assert await counted.value("limpet_conflicts_total", namespace="trivia") == 2


CURSOR: dict[str, Any] = {
    "key": "tenant/acme/project/docs/cursor",
    "value": {},
    "lastWriter": "a:b",
    "semantics": {"purpose": "cursor"},
}


async def test_semantic_writes_are_counted_by_namespace_purpose_and_outcome(counted: Counted) -> None:
    key = {"key": CURSOR["key"], "lastWriter": "a:b"}
    await counted.ask("kv_put", **CURSOR, requestId="r")
    await counted.ask("kv_put", **CURSOR, requestId="r")
    for _ in range(2):
        with pytest.raises(Conflict):
            await counted.ask("kv_put", **CURSOR, expectedVersion=7)
    with pytest.raises(Conflict):
        await counted.ask("kv_delete", **key, expectedVersion=7)
    await counted.ask("kv_get", key=CURSOR["key"])
    await counted.ask("kv_delete", **key)

    found = {
        one.labels["outcome"]: one.value
        for one in await counted.samples()
        if one.name == "limpet_semantic_writes_total"
        and (one.labels["namespace"], one.labels["purpose"]) == ("trivia", "cursor")
    }
    assert found == {"success": 2, "replayed": 1, "conflict": 3}
    assert await counted.value("limpet_errors_total", namespace="trivia", code="version_conflict") == 3
    assert await counted.value("limpet_conflicts_total", namespace="trivia") == 3


async def test_a_purpose_that_was_made_up_gets_no_label(counted: Counted) -> None:
    for number in range(5):
        key = f"{CURSOR['key']}/{number}"
        await counted.ask("put", key=key, value={}, meta={"semantics": {"purpose": f"made-up-{number}"}})
        await counted.ask("kv_delete", key=key, lastWriter="a:b")

    found = [one for one in await counted.samples() if one.name == "limpet_semantic_writes_total"]
    assert [(one.labels["purpose"], one.value) for one in found] == [("other", 5)]


async def test_latencies_are_in_buckets(counted: Counted) -> None:
    await counted.ask("set", key="a", value=1)
    await counted.ask("set", key="a", value=1)

    assert await counted.value("limpet_operation_duration_seconds_count", operation="set") == 2
    assert await counted.value("limpet_operation_duration_seconds_bucket", operation="set", le="+Inf") == 2
    total = await counted.value("limpet_operation_duration_seconds_sum", operation="set")
    assert total is not None
    assert 0 < total < 60


def test_a_bucket_holds_what_took_as_long_or_less() -> None:
    taken = metrics._Histogram()
    for seconds in (0.0004, 0.0005, 0.0006, 5.0, 5.001):
        taken.add(seconds)

    found = dict(taken.buckets())
    assert (found["0.0005"], found["0.001"], found["2.5"], found["5.0"], found["+Inf"]) == (2, 3, 3, 4, 5)


async def test_usage_is_read_when_metrics_are_scraped_and_kept_for_a_moment(
    counted: Counted, store: Store, clock: ManualClock
) -> None:
    await counted.ask("set", key="ab", value=123)
    await counted.ask("lock", name="job", ttl=100)
    assert await counted.value("limpet_keys", namespace="trivia") == 1
    assert await counted.value("limpet_storage_bytes", namespace="trivia") == 5
    assert await counted.value("limpet_locks", namespace="trivia") == 1

    await counted.ask("set", key="cd", value=123)
    assert await counted.value("limpet_keys", namespace="trivia") == 1
    clock.advance(metrics.READ_INTERVAL_S)
    assert await counted.value("limpet_keys", namespace="trivia") == 2


async def test_watches_and_how_far_they_are_behind(counted: Counted, store: Store) -> None:
    await counted.ask("set", key="a", value=1)
    async with store.watch("*") as quick, store.watch("*") as slow:
        for number in range(3):
            await store.put("a", number)
        for _ in range(3):
            await anext(quick)
        await anext(slow)

        assert await counted.value("limpet_watches", namespace="trivia") == 2
        lag = await counted.value("limpet_watch_lag_revisions", namespace="trivia")
        assert lag == 2
        await anext(slow)
        await anext(slow)
        assert await counted.value("limpet_watch_lag_revisions", namespace="trivia") == 0
    assert await counted.value("limpet_watches", namespace="trivia") is None


async def test_what_there_was_before_is_no_lag(counted: Counted, store: Store) -> None:
    for number in range(100):
        await store.put(str(number), 1)
    async with store.watch("*", initial=True) as watch:
        await anext(watch)

        assert [lag for lags in store._session.watch_lags().values() for lag in lags] == [0]


async def test_expiries_and_rounds_of_the_sweeper_are_counted(clock: ManualClock) -> None:
    async with limpet.open("memory:", namespace="trivia", clock=clock) as store:
        counted = Counted(store)
        for number in range(4):
            await counted.ask("set", key=str(number), value=1, ttl=1)
        await until(lambda: clock.sleepers > 0)
        clock.advance(SWEEP_S)
        await until(lambda: counted.metrics._expired.total() == 4)

        assert await counted.value("limpet_expired_total", namespace="trivia") == 4
        assert await counted.value("limpet_sweep_duration_seconds_count") == 1
        assert await counted.value("limpet_sweep_failures_total") == 0


async def test_a_round_that_failed_is_counted_once(counted: Counted) -> None:
    away: LimpetError = Unavailable("away")
    counted.metrics.swept(Round({}, {"a": away, "b": away}, 6.0))

    assert await counted.value("limpet_sweep_failures_total") == 1
    assert await counted.value("limpet_sweep_duration_seconds_bucket", le="5.0") == 0


async def test_the_build_is_exported(counted: Counted, store: Store) -> None:
    (build,) = [one for one in await counted.samples() if one.name == "limpet_build_info"]

    assert build.labels["version"] == limpet.__version__
    assert build.labels["engine"] == store.traits.engine
    assert await counted.value("limpet_engine_up") == 1


async def test_an_engine_that_does_not_answer_is_down_and_the_rest_is_exported_all_the_same(clock: ManualClock) -> None:
    store = await limpet.open("memory:", namespace="trivia", clock=clock, sweep=False)
    counted = Counted(store)
    await counted.ask("set", key="a", value=1)
    assert await counted.value("limpet_engine_up") == 1

    await store.close()
    clock.advance(metrics.READ_INTERVAL_S)
    assert await counted.value("limpet_engine_up") == 0
    assert await counted.value("limpet_keys", namespace="trivia") == 1
    assert await counted.value("limpet_operations_total", face="nats", namespace="trivia", operation="set") == 1


async def test_several_servers_in_one_process_count_apart(store: Store) -> None:
    one, other = Counted(store), Counted(store)
    await one.ask("set", key="a", value=1)

    assert await one.value("limpet_operations_total", face="nats", namespace="trivia", operation="set") == 1
    assert await other.value("limpet_operations_total", face="nats", namespace="trivia", operation="set") is None


async def test_scrapes_at_once_look_once(counted: Counted) -> None:
    await counted.ask("set", key="a", value=1)

    answers = await asyncio.gather(*(counted.metrics.render() for _ in range(5)))
    found = [re.search(rb"^limpet_keys.*$", answer, re.MULTILINE) for answer in answers]
    assert {one[0] for one in found if one} == {b'limpet_keys{namespace="trivia"} 1.0'}


# How many labels there are ----------------------------------------------------


async def test_namespaces_beyond_the_limit_share_a_label(store: Store) -> None:
    counted = Counted(store, namespaces_max=3)
    for number in range(10):
        await counted.ask("set", f"n{number}", key="a", value=1)

    labels = {one.labels["namespace"] for one in await counted.samples() if "namespace" in one.labels}
    assert labels == {"n0", "n1", "n2", "other"}
    assert await counted.value("limpet_operations_total", face="nats", namespace="other", operation="set") == 7
    assert await counted.value("limpet_keys", namespace="other") == 7


async def test_a_name_that_was_made_up_gets_no_label(store: Store) -> None:
    """Or a caller without a token could use up the names."""
    counted = Counted(store, namespaces_max=3)
    for number in range(10):
        counted.dispatcher.report_refusal(TrustedCaller(), f"made-up-{number}", "set", MissingField("key"))
        with pytest.raises(InvalidNamespace):
            await counted.ask("set", f"NOT {number}", key="a", value=1)
    await counted.ask("set", "real", key="a", value=1)

    labels = {one.labels["namespace"] for one in await counted.samples() if "namespace" in one.labels}
    assert labels == {"real", "other"}


async def test_what_is_held_since_before_a_restart_is_known_by_name(store: Store) -> None:
    await store.put("a", 1)

    assert await Counted(store).value("limpet_keys", namespace="trivia") == 1


async def test_the_servers_own_namespace_is_not_exported(counted: Counted, store: Store) -> None:
    await store.namespace(OWN_NAMESPACE).put("token/1", 1)

    assert OWN_NAMESPACE not in (await counted.metrics.render()).decode()


# The names of earlier dashboards ----------------------------------------------


async def busy(store: Store, names: Names) -> Counted:
    """A server that has seen everything there is to count."""
    counted = Counted(store, names)
    await counted.ask("set", key="a", value=1)
    await counted.ask("get", key="a")
    await counted.ask("list")
    await counted.ask("delete", key="a")
    await counted.ask("set", key="a", value=1)
    await counted.ask("lock", name="job", ttl=100)
    with pytest.raises(Conflict):
        await counted.ask("cas", key="a", value=1, expect={"version": 7})
    with pytest.raises(limpet.errors.ValueTooLarge):
        await counted.ask("set", key="large", value="x" * 1_000_001)
    counted.metrics.swept(Round({"trivia": 42}, {"x": Unavailable("away")}, 0.25))
    return counted


async def test_the_earlier_names_and_labels_are_exactly_these(store: Store) -> None:
    counted = await busy(store, "rosey")
    found = {(one.name, frozenset(one.labels)) for one in await counted.samples()}
    ours = {(name, labels) for name, labels in found if not name.startswith(("process_", "python_"))}

    plugin = frozenset({"plugin"})
    histograms = [f"rosey_kv_{name}_duration_seconds" for name in ("set", "get")]
    assert ours == {
        *((f"rosey_kv_{name}_total", plugin) for name in ("set", "get", "delete", "list", "keys")),
        *((f"{name}_{part}", plugin) for name in histograms for part in ("count", "sum")),
        *((f"{name}_bucket", plugin | {"le"}) for name in histograms),
        ("rosey_kv_errors_total", plugin | {"error_code"}),
        ("rosey_kv_storage_bytes", plugin),
        ("rosey_kv_cleanup_duration_seconds", frozenset()),
        ("rosey_kv_cleanup_deleted_total", frozenset()),
    }


async def test_the_earlier_names_have_the_counts(store: Store) -> None:
    counted = await busy(store, "rosey")

    assert await counted.value("rosey_kv_set_total", plugin="trivia") == 3
    assert await counted.value("rosey_kv_errors_total", plugin="trivia", error_code="VALUE_TOO_LARGE") == 1
    assert await counted.value("rosey_kv_keys_total", plugin="trivia") == 1
    assert await counted.value("rosey_kv_cleanup_deleted_total") == 42
    assert await counted.value("rosey_kv_cleanup_duration_seconds") == 0.25
    assert await counted.value("rosey_kv_get_duration_seconds_count", plugin="trivia") == 1


async def test_both_sets_of_names_may_stand_beside_each_other(store: Store) -> None:
    text = (await (await busy(store, "both")).metrics.render()).decode()

    assert 'rosey_kv_set_total{plugin="trivia"} 3.0' in text
    assert 'limpet_operations_total{face="nats",namespace="trivia",operation="set"} 3.0' in text


# Alert rules and the dashboard ------------------------------------------------

MONITORING = files("limpet.server") / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())


def expressions() -> dict[str, str]:
    """Every expression, by where it stands; with something in place of what Grafana fills in."""
    found = {rule["alert"]: rule["expr"] for rule in RULES}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$namespace", ".*")
            found[f"{panel['title']} {target['refId']}"] = text
    return found


EXPRESSIONS = expressions()


async def exported(store: Store) -> dict[str, dict[str, set[str]]]:
    """The labels of every metric that a busy server exports, with their values."""
    counted = await busy(store, "limpet")
    await counted.ask("kv_put", **CURSOR)
    with pytest.raises(Conflict):
        await counted.ask("kv_put", **CURSOR, expectedVersion=7)
    found: dict[str, dict[str, set[str]]] = {}
    async with store.watch("*"):
        for sample in await counted.samples():
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


class Uses:
    """The metrics and labels that an expression asks for."""

    def __init__(self, expression: str) -> None:
        self.metrics: dict[str, list[tuple[str, str]]] = {}
        self.grouped: list[tuple[set[str], str]] = []
        self._visit(promql_parser.parse(expression))

    def _visit(self, node: Any) -> set[str]:
        """Returns the names of the metrics in a part."""
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None
            matchers = [(one.name, one.value) for one in node.matchers.matchers]
            self.metrics.setdefault(node.name, []).extend(matchers)
            return {node.name}
        inner: set[str] = set()
        for part in ("vector_selector", "expr", "lhs", "rhs", "param"):
            if hasattr(node, part) and getattr(node, part) is not None:
                inner |= self._visit(getattr(node, part))
        for argument in getattr(node, "args", None) or []:
            inner |= self._visit(argument)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            self.grouped += [(inner, label) for label in node.modifier.labels]
        return inner


def test_a_part_that_is_hidden_deep_in_an_expression_is_found() -> None:
    uses = Uses('sum by (namespace) (rate(a{x="1"}[5m])) / (max(b) - topk(3, c offset 5m)) > 0.1 or absent(d)')

    assert set(uses.metrics) == {"a", "b", "c", "d"}
    assert uses.grouped == [({"a"}, "namespace")]


# Labels that Prometheus itself adds when it scrapes.
OF_PROMETHEUS = {"instance", "job"}


@pytest.mark.parametrize("where", EXPRESSIONS)
async def test_every_expression_asks_for_metrics_and_labels_that_there_are(where: str) -> None:
    async with limpet.open("memory:", namespace="trivia", sweep=False) as store:
        found = await exported(store)
    uses = Uses(EXPRESSIONS[where])

    assert uses.metrics
    for name, matchers in uses.metrics.items():
        assert name in found, f"no server exports {name}"
        for label, value in matchers:
            assert label in found[name], f"{name} has no label {label}"
            if label == "le":
                assert value in found[name]["le"], f"{name} has no bucket up to {value}"
            if label == "operation":
                assert set(value.split("|")) <= set(OPERATIONS)
            if label == "outcome":
                assert set(value.split("|")) <= found[name]["outcome"]
            if label == "code":
                assert set(value.split("|")) <= {kind.code for kind in CODES} | set(INTERFACE_CODES)
    for names, label in uses.grouped:
        for name in names:
            assert label in OF_PROMETHEUS or label in found[name], f"{name} has no label {label}"


def test_these_are_the_alerts() -> None:
    assert {rule["alert"]: rule.get("for") for rule in RULES} == {
        "LimpetOutage": "5m",
        "LimpetErrorRate": "5m",
        "LimpetConflictRate": "10m",
        "LimpetSemanticConflictRate": "10m",
        "LimpetCleanupSlow": None,
        "LimpetCleanupFails": None,
        "LimpetStorage": "15m",
    }
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in RULES)


@pytest.mark.parametrize(
    ("alert", "bound"),
    [
        ("LimpetErrorRate", "> 0.1"),
        ("LimpetConflictRate", "> 0.1"),
        ("LimpetSemanticConflictRate", "> 0.1"),
        ("LimpetSemanticConflictRate", ">= 20"),
        ("LimpetCleanupSlow", 'le="5.0"'),
        ("LimpetCleanupFails", ">= 3"),
        ("LimpetStorage", "> 1e9"),
    ],
)
def test_an_alert_has_the_bound_that_was_promised(alert: str, bound: str) -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == alert]

    assert bound in rule["expr"]


def test_an_alert_names_only_labels_that_its_expression_leaves() -> None:
    for rule in RULES:
        grouped = {label for _, label in Uses(rule["expr"]).grouped}
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= grouped


def test_the_dashboard_has_a_place_for_every_metric() -> None:
    shown = " ".join(EXPRESSIONS.values())
    names = ["operations", "errors", "conflicts", "operation_duration_seconds", "expired", "sweep_duration_seconds"]
    names += ["sweep_failures", "watches", "watch_lag_revisions", "locks", "keys", "storage_bytes", "engine_up"]
    names += ["semantic_writes"]

    assert [name for name in names if f"limpet_{name}" not in shown] == []
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
