"""``python -m seismograd``."""

import sys

from seismograd.cli import main

sys.exit(main())
