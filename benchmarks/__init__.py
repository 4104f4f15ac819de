"""Every figure that a document names comes from here: ``python -m benchmarks.NAME`` in a checkout."""
