"""The parts of examples/phantom_clipping.py."""
