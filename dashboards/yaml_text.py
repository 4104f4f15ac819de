"""Generated YAML: deterministic, in the order of the source, with a line that says where it comes from."""

from __future__ import annotations

from typing import Any


def header(source: str) -> str:
    """The first line of a generated file."""
    return f"# Generated from {source} by `python -m seismograd.dashboards`. Do not edit."


def yaml_text(data: Any, source: str) -> str:
    """`data` as YAML. PyYAML is imported here, as only those who regenerate need it."""
    import yaml

    # Lines are not folded: a PromQL expression or a sentence stays greppable.
    body = yaml.safe_dump(data, sort_keys=False, width=10_000, allow_unicode=True)
    return f"{header(source)}\n{body}"
