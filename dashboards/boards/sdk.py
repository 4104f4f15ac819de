"""grafana-foundation-sdk, imported in one place. Only those need it who generate boards: their JSON is committed."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # It recommends the dashboard schema v2, which Grafana 12 does not provision from files by default.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as dashboard_model
from grafana_foundation_sdk.models import heatmap as heatmap_model

__all__ = [
    "Builder",
    "JSONEncoder",
    "common",
    "common_model",
    "dashboard",
    "dashboard_model",
    "heatmap",
    "heatmap_model",
    "prometheus",
    "stat",
    "timeseries",
]
