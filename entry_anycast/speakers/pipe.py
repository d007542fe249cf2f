"""The helper that ExaBGP starts: it passes lines between ExaBGP and the socket of `farhop anycast`, both ways.

Run as a script, by an interpreter that loads nothing else: `pipe.py SOCKET`. It interprets and decides nothing; it ends
when either side ends.
"""

from __future__ import annotations

import os
import select
import socket
import sys


def main(socket_path: str) -> int:
    """Until one side ends."""
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(socket_path)
        while True:
            ready, _, _ = select.select([0, way.fileno()], [], [])
            for one in ready:
                data = os.read(0, 65536) if one == 0 else way.recv(65536)
                if not data:
                    return 0
                if one == 0:
                    way.sendall(data)
                else:
                    while data:
                        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
