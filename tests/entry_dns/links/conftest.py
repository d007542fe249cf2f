from __future__ import annotations

import sys
from pathlib import Path

# A region's gRPC side, as it is told to be, serves here, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "flows"))
