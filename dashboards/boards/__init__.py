"""Grafana boards: a builder each, with its generated JSON beside it."""
