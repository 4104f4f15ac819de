"""The board "seismograd: run": one run, from its state to its own cost, on one page.

Built with grafana-foundation-sdk, which only those need who generate ``run.json`` again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from seismograd.dashboards.boards import run_gradients, run_tokens
from seismograd.dashboards.boards.panels import DATASOURCE, Panel
from seismograd.dashboards.boards.queries import series
from seismograd.dashboards.boards.sdk import JSONEncoder, dashboard, prometheus
from seismograd.dashboards.boards.sdk import dashboard_model as model
from seismograd.telemetry.catalogue import CATALOGUE

UID = "seismograd-run"

_DESCRIPTION = (
    "One training run seen by seismograd. Prometheus sees the last value at each scrape: a step shorter than the "
    "scrape interval may not be drawn, but its spikes are counted and marked."
)


def run_board() -> str:
    """The text of ``run.json``."""
    board = (
        dashboard.Dashboard("seismograd: run")
        .uid(UID)
        .description(_DESCRIPTION)
        .tags(["seismograd"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .version(1)
        .editable()
        .annotation(_spike_marks())
    )
    for variable in _variables():
        board.with_variable(variable)
    for title, panels in _rows():
        board.with_row(dashboard.Row(title))
        for panel in panels:
            board.with_panel(panel)
    trainer = dashboard.Row("What the trainer logs").collapsed(True)
    board.with_row(trainer.with_panel(run_gradients.trainer()))
    tree = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    _number_panels(tree)
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def _number_panels(tree: dict[str, list[dict[str, object]]]) -> None:
    """Ids by position, so that the file is the same each time."""
    panels = [inner for panel in tree["panels"] for inner in (panel, *panel.get("panels", []))]  # type: ignore[misc]
    for i, panel in enumerate(panels, start=1):
        panel["id"] = i


def _variables() -> Iterator[dashboard.QueryVariable | dashboard.DatasourceVariable]:
    step = CATALOGUE["step"].prometheus_name
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    yield _values_of("job", f"label_values({step}, job)").label("Job")
    # Descending, so that of runs named by their time the newest comes first.
    runs = _values_of("run", f'label_values({step}{{job="$job"}}, run)').label("Run")
    yield runs.sort(model.VariableSort.ALPHABETICAL_DESC)
    layers = _values_of("layer", f"label_values({series('layer_proportion')}, layer)").label("Layer")
    yield _several(layers.sort(model.VariableSort.NATURAL_ASC)).all_value(".+")
    yield _several(_values_of("ratio", f"label_values({series('clip_fraction')}, ratio)")).hide(
        model.VariableHide.HIDE_VARIABLE
    )
    names = _values_of("trainer_metric", f"label_values({series('trainer_metric')}, name)").label("Trainer's metrics")
    yield _several(names.sort(model.VariableSort.ALPHABETICAL_ASC))


def _values_of(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).datasource(DATASOURCE).definition(query)
    variable.query({"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _several(variable: dashboard.QueryVariable) -> dashboard.QueryVariable:
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).current(everything)


def _spike_marks() -> dashboard.AnnotationQuery:
    expr = f"increase({series('spikes_total')}[$__rate_interval]) > 0"
    mark = dashboard.AnnotationQuery().name("Spikes").datasource(DATASOURCE).enable(True).icon_color("red")
    mark.target(prometheus.Dataquery().expr(expr).ref_id("Anno").range())
    return mark.title_format("spike: {{signal}}").text_format("run {{run}}").tag_keys("signal")


def _rows() -> Iterator[tuple[str, list[Panel]]]:
    yield "Now", run_tokens.now()
    yield "Log-ratio: what the policy changed (alpha) and what precision adds (beta)", run_tokens.ratio()
    yield "Clipping", run_tokens.clipping()
    yield "The loss's weight on each token", run_tokens.weight()
    yield "Gradients before clipping", run_gradients.gradients()
    yield "Where the gradient points, and what reaches the weights", run_gradients.geometry()
    yield "Detection and effect", run_gradients.detection()
    yield "Controls", run_gradients.controls()
    yield "seismograd itself", run_gradients.own()
