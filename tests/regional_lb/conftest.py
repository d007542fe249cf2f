from __future__ import annotations

import sys
from pathlib import Path

# The worlds and the referee of the playbooks serve here, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
# Answers of real engines.
sys.path.insert(0, str(Path(__file__).parents[1] / "pages"))
