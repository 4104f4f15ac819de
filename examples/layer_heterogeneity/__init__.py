"""Experiment 2: a shallow layer explodes now and then; the global clip against LayerClip, ZClip and AdaGC."""
