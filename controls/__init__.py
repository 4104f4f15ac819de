"""Controls act on a run. Each file is one, usable alone in any PyTorch loop, without the hook."""

from seismograd.controls.cleanratio import (
    WIDE,
    clean_log_ratio,
    clean_old_logp,
    clipped_loss,
    reinforce_loss,
    unit_ratio_loss,
)
from seismograd.controls.layerclip import LayerClip, LayerScales
from seismograd.controls.seqclip import mis
from seismograd.controls.tokenclip import icepop, tis

__all__ = [
    "WIDE",
    "LayerClip",
    "LayerScales",
    "clean_log_ratio",
    "clean_old_logp",
    "clipped_loss",
    "icepop",
    "mis",
    "reinforce_loss",
    "tis",
    "unit_ratio_loss",
]
