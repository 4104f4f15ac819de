"""Controls act on a run. Each file is one, usable alone in any PyTorch loop, without the hook."""

from seismograd.controls.layerclip import LayerClip, LayerScales
from seismograd.controls.seqclip import mis
from seismograd.controls.tokenclip import icepop, tis

__all__ = ["LayerClip", "LayerScales", "icepop", "mis", "tis"]
