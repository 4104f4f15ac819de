"""Rows of the run board about gradients, what was detected, what the trainer logs, and seismograd's own cost."""

from __future__ import annotations

from seismograd.dashboards.boards.panels import Panel, by_layer, lines
from seismograd.dashboards.boards.queries import (
    ALL_LAYERS,
    PEAK,
    Query,
    in_layer_order,
    largest,
    largest_by_layer,
    or_zero,
    over_usual,
    series,
)

_EACH_LAYER = ('layer!="all"', 'group="all"')
_CHOSEN = 'layer=~"$layer"'
_COUNTED = "Since the start of the run."


def gradients() -> list[Panel]:
    norms = largest(series("grad_norm", *_EACH_LAYER))
    rho = series("layer_proportion")
    by_group = series("grad_norm", _CHOSEN, 'layer!="all"', 'group!="all"')
    return [
        lines(
            "Gradient norm",
            Query(largest(series("grad_norm", *ALL_LAYERS)), "|G|"),
            Query(f"max({norms})", "largest layer"),
            Query(f"quantile(0.5, {norms})", "median layer"),
            note=PEAK,
            unit="sci",
            width=12,
            log=True,
        ),
        lines(
            "Heterogeneity",
            Query(largest(series("heterogeneity")), "heterogeneity"),
            note=PEAK,
            width=12,
            log=True,
        ),
        by_layer(
            "Norm of each layer, log10",
            Query(in_layer_order(f"log10({norms})"), "{{layer}}"),
            note=f"{PEAK} Exact zeros are left out.",
            scheme="Oranges",
        ),
        by_layer(
            "Proportion of each layer over its own median in the time shown, log2",
            Query(in_layer_order(f"log2({over_usual(rho)})"), "{{layer}}"),
            note="0 is usual, 1 is twice the usual. In a burst of the whole model no layer stands out.",
            scheme="RdYlBu",
            color=(-4, 4),
        ),
        lines(
            "Proportion: the 8 layers that stand out most",
            Query(largest_by_layer(rho, 8), "{{layer}}"),
            width=12,
            height=10,
            log=True,
        ),
        lines(
            "Norm of the layers chosen above",
            Query(largest(series("grad_norm", _CHOSEN, *_EACH_LAYER)), "{{layer}}"),
            note=PEAK,
            unit="sci",
            width=12,
            height=10,
            log=True,
        ),
        lines(
            "Norm by module group, of the layers chosen above",
            Query(f"sqrt(sum by (group) ({by_group} ^ 2))", "{{group}}"),
            unit="sci",
            width=12,
            log=True,
        ),
        lines(
            "Non-finite values and steps without a gradient",
            Query(series("nonfinite_total"), "not finite: {{where}}"),
            Query(series("zero_gradient_steps_total"), "steps with |G| = 0"),
            note=_COUNTED,
            unit="short",
            width=12,
            low=0,
            soft=(0, 1),
            steps=True,
        ),
    ]


def geometry() -> list[Panel]:
    changed = ("weights_changed_ratio", "weights_changed_since_sync_ratio")
    return [
        lines(
            "Cosine with the clean REINFORCE gradient",
            Query(series("gradient_cosine"), "cosine"),
            Query(series("gradient_cosine_floor"), "floor: two halves of the step"),
            width=12,
            low=-1,
            high=1,
        ),
        lines("Shares of the squared norm", Query(series("gradient_share"), "{{part}}"), width=12, soft=(0, 1)),
        lines(
            "Weights that the engine sees changed",
            Query(series(changed[0], 'layer="all"'), "in the step"),
            Query(series(changed[1], 'layer="all"'), "since the last sync"),
            unit="percentunit",
            width=8,
            low=0,
        ),
        *(
            by_layer(
                title,
                Query(in_layer_order(series(metric, 'layer!="all"')), "{{layer}}"),
                note="Share of a layer's weights, from 0 to 1.",
                scheme="Blues",
                color=(0, 1),
                width=8,
                height=8,
            )
            for metric, title in zip(changed, ("Changed in the step", "Changed since the last sync"), strict=True)
        ),
    ]


def detection() -> list[Panel]:
    return [
        lines(
            "Spikes by signal",
            Query(series("spikes_total"), "{{signal}}"),
            note=_COUNTED,
            width=12,
            height=10,
            low=0,
            soft=(0, 1),
            steps=True,
        ),
        lines(
            "Incidents by verdict",
            Query(series("incidents_total"), "{{verdict}}"),
            note=_COUNTED,
            width=12,
            low=0,
            soft=(0, 1),
            steps=True,
        ),
        lines(
            "Time of the last localisation",
            Query(series("gradloc_seconds"), "seconds"),
            width=6,
            low=0,
        ),
        lines(
            "Completeness of the last localisation",
            Query(series("gradloc_completeness_ratio"), "sum of shares"),
            width=6,
            soft=(0.9, 1.1),
        ),
        lines(
            "Deployed improvement",
            Query(series("deployed_improvement"), "improvement"),
            width=12,
            height=10,
            bound=[(0, "green")],
        ),
    ]


def controls() -> list[Panel]:
    return [
        lines(
            "State of the controls",
            Query(largest(series("control_state")), "{{control}}"),
            width=8,
            low=0,
            high=3,
            steps=True,
        ),
        lines(
            "LayerClip's scales",
            Query(f"min by (layer) ({series('layerclip_scale')})", "{{layer}}"),
            width=8,
            low=0,
            high=1,
        ),
        lines(
            "Tokens that the ratio controls would change",
            Query(series("control_effect_fraction"), "{{control}}"),
            width=8,
            low=0,
        ),
    ]


def trainer() -> Panel:
    panel = lines(
        "$trainer_metric",
        Query(series("trainer_metric", 'name=~"$trainer_metric"'), "{{name}}"),
        width=24,
        height=6,
    )
    return panel.repeat("trainer_metric").repeat_direction("h").max_per_row(4)


def own() -> list[Panel]:
    return [
        lines("Time in its own code, by part", Query(series("hook_seconds"), "{{part}}"), low=0, stacked=True),
        lines("Overhead", Query(series("overhead_ratio"), "overhead"), low=0, bound=[(0.02, "orange")]),
        lines("Step time", Query(series("step_seconds"), "step"), low=0),
        lines(
            "Age and spacing of the probes",
            Query(series("probe_age_steps"), "{{probe}}"),
            Query(series("probe_spacing_steps"), "{{probe}}: from one run to the next"),
            low=0,
            soft=(0, 1),
            steps=True,
        ),
        lines(
            "Faults, each fenced off from training",
            Query(or_zero(f"sum by (part) ({series('faults_total')})"), "{{part}}"),
            note=_COUNTED,
            low=0,
            soft=(0, 1),
            steps=True,
        ),
        lines(
            "Readings dropped by a full queue",
            Query(or_zero(f"sum({series('dropped_readings_total')})"), "dropped"),
            note=_COUNTED,
            low=0,
            soft=(0, 1),
            steps=True,
        ),
    ]
