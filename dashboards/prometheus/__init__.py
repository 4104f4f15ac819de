"""Prometheus alert rules, generated from the rule table, and their promtool tests."""
