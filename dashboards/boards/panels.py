"""The kinds of panel that boards are made of.

Titles are the caller's; descriptions come from the catalogue, and so do units where none is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from seismograd.dashboards.boards.queries import Query, metrics_in
from seismograd.dashboards.boards.sdk import (
    Builder,
    common,
    common_model,
    dashboard,
    heatmap,
    heatmap_model,
    prometheus,
    stat,
    timeseries,
)
from seismograd.dashboards.boards.sdk import dashboard_model as model
from seismograd.telemetry.catalogue import MetricSpec

DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")

Panel = Builder[model.Panel]
Steps = Sequence[tuple[float, str]]
"""Thresholds: (value, colour at and above it), rising; below the first the colour is green."""


def unit_of(spec: MetricSpec) -> str:
    """Grafana's unit for a metric. Nats, norms and quotients have none; fractions are shown as percentages."""
    if spec.unit == "seconds":
        return "s"
    if spec.name.endswith("_fraction") or spec.name == "overhead_ratio":
        return "percentunit"
    return "short" if spec.unit in ("tokens", "steps") else "none"


def describe(queries: Sequence[Query], note: str = "") -> str:
    """The help of each metric that the queries name, one paragraph each, then the note."""
    specs = {spec.name: spec for query in queries for spec in metrics_in(query.expr)}
    parts = [f"{spec.name}: {spec.help}" if len(specs) > 1 else spec.help for spec in specs.values()]
    return "\n\n".join([*parts, *([note] if note else [])])


def lines(
    title: str,
    *queries: Query,
    note: str = "",
    unit: str | None = None,
    width: int = 8,
    height: int = 8,
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    soft: tuple[float, float] | None = None,
    bound: Steps = (),
    stacked: bool = False,
    steps: bool = False,
    hidden: str | None = None,
) -> timeseries.Panel:
    """Lines over time, with the last and the largest value of each in the legend.

    Args:
        log: a logarithmic axis, for what ranges over decades; 0 is not drawn on it.
        low, high: hard ends of the axis.
        soft: ends of the axis that the data may exceed.
        bound: drawn as dashed lines.
        stacked: areas on top of one another.
        steps: as stairs, for counts.
        hidden: a series that stays in the legend and is not drawn.
    """
    panel = timeseries.Panel()
    _common(panel, title, queries, note, unit, width, height)
    panel.tooltip(
        common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI).sort(common_model.SortOrder.DESCENDING)
    )
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_model.LegendDisplayMode.TABLE)
        .placement(common_model.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel.line_width(1).fill_opacity(40 if stacked else 0).show_points(common_model.VisibilityMode.AUTO)
    if log:
        panel.scale_distribution(common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LOG).log(10))
    if low is not None:
        panel.min(low)
    if high is not None:
        panel.max(high)
    if soft is not None:
        panel.axis_soft_min(soft[0]).axis_soft_max(soft[1])
    if bound:
        panel.thresholds(_thresholds(bound))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if steps:
        panel.line_interpolation(common_model.LineInterpolation.STEP_AFTER)
    if hidden is not None:
        away = {"legend": False, "tooltip": False, "viz": True}
        panel.override_by_name(hidden, [model.DynamicConfigValue(id_val="custom.hideFrom", value=away)])
    return panel


def number(
    title: str,
    query: Query,
    *,
    note: str = "",
    unit: str | None = None,
    width: int = 3,
    decimals: int | None = None,
    bound: Steps = (),
    below: str = "green",
) -> stat.Panel:
    """One value, the last that is known, so that a finished run still shows how it ended.

    Args:
        below: the colour below the first bound.
    """
    panel = stat.Panel()
    _common(panel, title, [query], note, unit, width, height=4)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel.graph_mode(common_model.BigValueGraphMode.NONE).color_mode(common_model.BigValueColorMode.VALUE)
    panel.no_value("-")
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel.thresholds(_thresholds(bound, below if bound else "text"))
    if decimals is not None:
        panel.decimals(decimals)
    return panel


def by_layer(
    title: str,
    query: Query,
    *,
    note: str,
    scheme: str,
    color: tuple[float, float] | None = None,
    width: int = 12,
    height: int = 12,
) -> heatmap.Panel:
    """One row a layer, colour for the value: readable with 60 layers, where lines are not.

    Args:
        color: the values at the ends of the colour scale; without, those of the data.
    """
    panel = heatmap.Panel()
    _common(panel, title, [query], note, "none", width, height)
    scale = heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme(scheme).steps(64)
    if color is not None:
        scale.min(color[0]).max(color[1])
    panel.calculate(False).color(scale).cell_gap(0).show_value(common_model.VisibilityMode.NEVER)
    # Values are logarithms: Grafana's own filter would hide all below 1e-9, that is all negative ones.
    panel.filter_values(heatmap.FilterValueRange().le(-1000))
    panel.cell_values(heatmap.CellValues().decimals(2)).show_legend()
    panel.y_axis(heatmap.YAxisConfig().axis_placement(common_model.AxisPlacement.LEFT).reverse(True))
    panel.tooltip(
        heatmap.HeatmapTooltip().mode(common_model.TooltipDisplayMode.SINGLE).show_color_scale(True).y_histogram(False)
    )
    return panel.max_data_points(300)


def _common(
    panel: timeseries.Panel | stat.Panel | heatmap.Panel,
    title: str,
    queries: Sequence[Query],
    note: str,
    unit: str | None,
    width: int,
    height: int,
) -> None:
    panel.title(title).description(describe(queries, note)).datasource(DATASOURCE).span(width).height(height)
    panel.unit(unit or unit_of(metrics_in(queries[0].expr)[0]))
    for query, ref_id in zip(queries, "ABCDEFGH", strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id)
        panel.with_target(target.datasource(DATASOURCE).range())


def _thresholds(bound: Steps, below: str = "green") -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color=below), *(model.Threshold(value, color) for value, color in bound)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
