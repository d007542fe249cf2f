"""Takes out of an installed environment what no process of Farhop loads: pip, packages' own tests, C headers.

Run once while the image is built. Never touches a package's own modules beyond those folders.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

USER = 65532
# `numpy/testing` is imported by users of numpy alone; `tests` folders by nobody.
FOLDERS = ("tests", "include", "_pyinstaller")
SUFFIXES = (".pyi", ".pyx", ".pxd", ".h", ".c", ".a")


def main(root: Path, state: Path) -> None:
    """Prune the environment at `root`; make an empty folder `state` that belongs to the image's user."""
    (packages,) = (root / "lib").glob("python3.*/site-packages")
    doomed = [
        *packages.glob("pip"),
        *packages.glob("pip-*"),
        *packages.glob("setuptools*"),
        *(root / "bin").glob("pip*"),
        *(root / "bin").glob("[Aa]ctivate*"),
        *(path for path in packages.rglob("*") if path.is_dir() and path.name in FOLDERS),
        *(path for path in packages.rglob("*") if path.is_file() and path.suffix in SUFFIXES),
    ]
    for path in doomed:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.copy(Path(__file__).parent / "sbom.cdx.json", root / "sbom.cdx.json")
    state.mkdir()
    os.chown(state, USER, USER)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
