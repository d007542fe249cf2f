"""`farhop healthcheck`: whether the process beside this one is alive. For a container's HEALTHCHECK, without a shell.

Asks the admin port in a balancer's configuration, or a URL. Reads no secret of the configuration, and checks no
certificate: the process asked is the one in this container.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from farhop_cli.exits import NEGATIVE, fail, first_of, printable, warn

ANSWER_S = 3.0
ALIVE, READY = "/healthz", "/readyz"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(url: str | None, config: Path, ready: bool) -> int:
    """The exit code: 0 if it answers 200."""
    url = url or admin_url(config, READY if ready else ALIVE)
    try:
        status, body = _asked(url)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        warn(f"{url} cannot be reached: {reason}; is the process up, and is this its port?")
        return NEGATIVE
    well = status // 100 == 2
    body = printable(body.strip())
    typer.echo(body if well else f"{url}: status {status}: {body}")
    return 0 if well else NEGATIVE


def admin_url(config: Path, path: str) -> str:
    """The health URL of a balancer with that configuration. Ends the command if it has none."""
    from farhop.config import ConfigError, parsed

    try:
        document: Any = parsed(config.read_bytes(), str(config))
        admin = document["admin"]
        host, port = str(admin.get("host", "127.0.0.1")), int(admin["port"])
    except OSError as error:
        fail(f"{config}: {error.strerror or error}; name a configuration by --config, or give a URL")
    except ConfigError as error:
        fail(first_of(error))
    except (KeyError, TypeError, ValueError, AttributeError):
        fail(f"{config}: admin.port: a balancer's configuration must give it; or give a URL")
    host = _LOOPBACK.get(host, host)
    scheme = "https" if admin.get("tls") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _asked(url: str) -> tuple[int, str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL begins with http:// or https://")
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # see above: only this container's process
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        return answer.status, answer.read(65_536).decode(errors="replace")
    finally:
        connection.close()
