"""The dashboard: Grafana's own models take all of it, and a real Prometheus answers each of its queries."""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from recorder.records import KEEP_STATS
from tests.daemon.support import at_work
from tests.rigs.prometheus import Prometheus
from tests.rigs.schemas import lost
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "prometheus" / "dashboard.json").read_text())
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def unfit(value: Any, hint: Any, at: str) -> Iterator[str]:
    """The paths of values that are not of the type that a model of Grafana's says."""
    if type(value).__module__.startswith("grafana_foundation_sdk") and not isinstance(value, enum.Enum):
        for name, of_member in typing.get_type_hints(type(value)).items():
            yield from unfit(getattr(value, name), of_member, f"{at}.{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from unfit(item, next(iter(typing.get_args(plain(hint))), Any), f"{at}.{number}")
    elif not any(fits(value, one) for one in typing.get_args(hint) or (hint,)):
        yield f"{at}: {value!r}"


def plain(hint: Any) -> Any:
    """The one of two alternatives that is not None."""
    return next((one for one in typing.get_args(hint) if one is not type(None)), hint) if is_union(hint) else hint


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def fits(value: Any, hint: Any) -> bool:
    if hint in (Any, object):
        return True
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [one.value for one in hint]
    if hint is float:
        return isinstance(value, int | float)
    kind = typing.get_origin(hint) or hint
    return not isinstance(kind, type) or type(value) is kind or (isinstance(value, kind) and type(value) is not bool)


def faults(document: dict[str, Any]) -> list[str]:
    """The members that Grafana's models do not know, and the values that are not of the type that the models say."""
    register_default_plugins()
    model = Dashboard.from_json(document)
    kept = json.loads(json.dumps(model, cls=JSONEncoder))
    return lost(document, kept) + list(unfit(model, Dashboard, "dashboard"))


def test_the_dashboard_is_one_by_grafanas_models() -> None:
    assert faults(DASHBOARD) == []


def test_faults_of_a_dashboard_are_found() -> None:
    document = json.loads(json.dumps(DASHBOARD))
    panel, variable = document["panels"][0], document["templating"]["list"][1]
    panel["colour"] = "red"
    panel["targets"][0]["exprs"] = panel["targets"][0].pop("expr")
    panel["options"]["legend"]["displayMode"] = "lst"
    panel["gridPos"]["h"] = "8"
    variable["refresh"] = 7
    assert [fault.partition(":")[0] for fault in faults(document)] == [
        "panels.0.colour",
        "panels.0.targets.0.exprs",
        "dashboard.panels.0.grid_pos.h",
        "dashboard.panels.0.options.legend.display_mode",
        "dashboard.templating.list_val.1.refresh",
    ]


def test_the_dashboard_has_panels_beside_each_other_and_variables_that_there_are() -> None:
    dashboard = DASHBOARD
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        cells = {(where["x"] + x, where["y"] + y) for x in range(where["w"]) for y in range(where["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["refId"] and target["expr"] for target in panel["targets"])
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used <= names


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen a daemon for some seconds that ships a run under way."""
    folder = tmp_path_factory.mktemp("dashboard")
    rig = Rig(folder / "recordings" / "run-a", flush_interval_s=0.05).start()
    rig.writer.set_status({"step": 7, "observed": 1, "pool_bytes": 10, "pool_used_bytes": 5, "waited_s": 0.5})
    rig.writer.count_drop("pool_full", 0)
    rig.put(step=7, keep=KEEP_STATS)
    assert rig.drain()
    with at_work(folder, str(folder / "there"), listen="127.0.0.1:0") as daemon:
        wait_until(lambda: daemon.port and (folder / "there" / "run-a" / "_run.json").exists())
        daemon.runs[0].findings = {("spike", "warning"): 2}
        started = Prometheus(
            folder / "prometheus",
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {"job_name": "recorder", "static_configs": [{"targets": [f"127.0.0.1:{daemon.port}"]}]}
                ],
            },
        )
        try:
            wait_until(lambda: started.series("count_over_time(recorder_daemon_info[1m]) >= 4"))
            yield started
        finally:
            started.close()
    rig.close()


def as_grafana_asks(query: str) -> str:
    """The query with the variables at "All", as Grafana writes them: a group of all their values."""
    return query.replace("$run", "(run-a)").replace("$job", "(recorder)")


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=lambda one: one["refId"] if isinstance(one, dict) else one)
def test_a_query_has_an_answer_with_the_labels_of_its_legend(
    prometheus: Prometheus, title: str, target: dict[str, str]
) -> None:
    found = prometheus.series(as_grafana_asks(target["expr"]))
    assert found, f"{title}: {target['expr']}: no series"
    labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert all(labels <= set(one) for one in found)
    legends = [target["legendFormat"].replace("{{", "{").replace("}}", "}").format_map(one) for one in found]
    assert len(set(legends)) == len(legends), "two lines have one name"


def test_variables_have_their_values(prometheus: Prometheus) -> None:
    asked = {one["name"]: one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"}
    values = {}
    for name, query in asked.items():
        words = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert words is not None
        values[name] = prometheus.ask(f"label/{words[2]}/values", **{"match[]": words[1]})
    assert values == {"job": ["recorder"], "run": ["run-a"]}
