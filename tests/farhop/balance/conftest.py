from __future__ import annotations

import sys
from pathlib import Path

# Under --import-mode=importlib test files do not see their neighbours: trie_checks is found by path.
sys.path.insert(0, str(Path(__file__).parent))
