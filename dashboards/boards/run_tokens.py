"""Rows of the run board about tokens: where the run stands, the log-ratio and its parts, clipping, loss weights."""

from __future__ import annotations

from seismograd.dashboards.boards.panels import Panel, lines, number
from seismograd.dashboards.boards.queries import ALL_LAYERS, PEAK, Query, largest, series, smallest
from seismograd.telemetry.baselines import Above, Below
from seismograd.telemetry.rules import RULES

_SILENT_SECONDS = 900
"""After which the time since the last step is marked."""


def now() -> list[Panel]:
    phantom = series("clip_fraction", 'cell="phantom"')
    return [
        number("Step", Query(series("step")), decimals=0, unit="none"),
        number("Step time", Query(series("step_seconds"))),
        number("|G|", Query(series("grad_norm", *ALL_LAYERS))),
        number("SNR", Query(series("snr")), decimals=2, bound=[(_bound("snr"), "green")], below="orange"),
        number("Phantom clipping", Query(f"max({phantom})"), bound=[(_bound("phantom_fraction"), "orange")]),
        number("Spikes", Query(f"sum({series('spikes_total')})"), decimals=0, bound=[(1, "orange")]),
        number("Overhead", Query(series("overhead_ratio")), bound=[(0.02, "orange")]),
        number(
            "Last step ended",
            Query(f"time() - {series('last_step_timestamp_seconds')}"),
            note="Seconds ago.",
            decimals=0,
            bound=[(_SILENT_SECONDS, "orange")],
        ),
    ]


def ratio() -> list[Panel]:
    def extremes(metric: str) -> list[Query]:
        return [
            Query(largest(series(metric, 'stat="max"')), "max"),
            Query(series(metric, 'stat="mean"'), "mean"),
            Query(series(metric, 'stat="std"'), "std"),
            Query(smallest(series(metric, 'stat="min"')), "min"),
        ]

    return [
        lines(
            "Size of alpha and beta",
            Query(series("alpha_abs_mean"), "mean |alpha|"),
            Query(series("beta_abs_mean"), "mean |beta|"),
            Query(series("alpha_floor"), "floor of |alpha|"),
            width=12,
            low=0,
        ),
        lines("SNR", Query(series("snr"), "SNR"), width=12, low=0, bound=[(_bound("snr"), "orange")]),
        lines(
            "Mean of alpha and beta, with sign",
            Query(series("alpha_mean"), "alpha"),
            Query(series("beta_mean"), "beta"),
            width=6,
        ),
        lines(
            "Spread of beta",
            Query(series("beta_std"), "std"),
            Query(largest(series("beta_abs_max")), "largest |beta|"),
            width=6,
            low=0,
        ),
        lines("|beta| by rarity of the token", Query(series("beta_abs_mean_by_rarity"), "{{rarity}}"), width=6, low=0),
        lines(
            "Correlation of beta with the advantage",
            Query(series("beta_advantage_correlation"), "correlation"),
            width=6,
            low=-1,
            high=1,
        ),
        lines("Log-ratio of a token", *extremes("log_ratio"), note=PEAK),
        lines("Log-ratio of a sequence", *extremes("sequence_log_ratio"), note=PEAK),
        lines("KL to the rollout policy", Query(series("kl"), "{{estimator}}")),
        lines("Mean log-ratio of a sequence", *extremes("sequence_mean_log_ratio"), note=PEAK),
        lines(
            "Effective sample size over the number",
            Query(series("effective_sample_size_ratio"), "{{level}}"),
            low=0,
            high=1,
        ),
        lines("Surrogate objective", Query(series("surrogate_objective"), "{{ratio}}"), bound=[(0, "green")]),
    ]


def clipping() -> list[Panel]:
    def cells(title: str, metric: str) -> Panel:
        panel = lines(
            title,
            Query(series(metric, 'ratio=~"$ratio"'), "{{cell}}"),
            note="The cells add up to 1; open is in the legend only.",
            width=24,
            low=0,
            stacked=True,
            hidden="open",
        )
        return panel.repeat("ratio").repeat_direction("h").max_per_row(2)

    return [
        cells("Clipped tokens: $ratio ratio", "clip_fraction"),
        cells("Clip region, whatever the advantage's sign: $ratio ratio", "clip_region_fraction"),
        lines(
            "Gradient taken away, by reason",
            Query(series("gradient_taken_fraction"), "{{reason}}"),
            width=12,
            low=0,
        ),
        lines(
            "Sequences clipped by a clip of sequences",
            Query(series("sequence_clip_fraction"), "{{bounds}}, {{ratio}}"),
            width=12,
            low=0,
        ),
    ]


def weight() -> list[Panel]:
    return [
        lines(
            "dL/dlogp",
            Query(largest(series("loss_weight")), "{{stat}}"),
            note=PEAK,
            unit="sci",
            log=True,
        ),
        lines(
            "Largest pull of a sequence",
            Query(largest(series("sequence_loss_weight")), "|sum w logp|"),
            note=PEAK,
            unit="sci",
            log=True,
        ),
        lines("Trained tokens", Query(series("trained_tokens"), "tokens"), low=0),
    ]


def _bound(signal: str) -> float:
    """The absolute bound of a rule of the rule table."""
    baseline = next(rule.baseline for rule in RULES if rule.signal == signal)
    assert isinstance(baseline, (Above, Below))
    return baseline.bound
