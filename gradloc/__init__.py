"""GradLoc explains a gradient spike: which token, which layer, what kind of fault, what to do.

`localize` does it for any loop; see its docstring. Each file beside it is one method.
"""

from seismograd.gradloc.bisection import Bisection
from seismograd.gradloc.localisation import METHODS, Method, localize
from seismograd.gradloc.replay import ModelReplay, Replay
from seismograd.gradloc.verdict import Thresholds
from seismograd.telemetry.incidents import Culprit, Incident, SequenceShares
from seismograd.telemetry.ranks import Alone, Group, Ranks

__all__ = [
    "METHODS",
    "Alone",
    "Bisection",
    "Culprit",
    "Group",
    "Incident",
    "Method",
    "ModelReplay",
    "Ranks",
    "Replay",
    "SequenceShares",
    "Thresholds",
    "localize",
]
