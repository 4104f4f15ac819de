"""What people see: the live page (page/); the Grafana board, the Prometheus rules, the metric reference, generated from
telemetry's tables.

``python -m seismograd.dashboards`` writes the generated files again; ``--check`` only says whether they are up to date.
Nothing here is imported by a run.
"""
