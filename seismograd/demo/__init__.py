"""`seismograd demo`: a real language model under GRPO, watched, with one planted fault. Needs ``seismograd[demo]``.

`options` declares the command's options, `run` runs it; nothing here is imported by the rest of seismograd.
"""
