"""A picker's configuration: its listener for gateways, how callers are identified, and gateways' failure mode.

Never opens a listener.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from farhop.config import rule
from farhop.service.config.endpoints import Listen

if TYPE_CHECKING:
    from collections.abc import Iterator

FailureMode = Literal["FailClose", "FailOpen"]


class PickerConfig(Listen):
    """The gRPC listener for gateways, and how it is used.

    `callers`: how a request's caller is identified: by the client's API key, by the gateway in `tenant_header` (which
    clients must not be able to send: the gateway sets it), or by a global balancer's hop token. `fallbacks` is the
    number of endpoints named after the chosen one. `failure_mode` is what gateways do while no picker answers.
    """

    callers: Literal["keys", "gateway", "hop"] = "keys"
    tenant_header: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")] = "x-farhop-tenant"
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2
    failure_mode: FailureMode = "FailClose"

    @rule
    def _believable(self) -> Iterator[str]:
        certified = self.tls is not None and self.tls.client_ca_file is not None
        if self.callers == "gateway" and self.exposed and not certified:
            yield (
                "callers: gateway trusts every client; give tls.client_ca_file, the authority of your gateways' "
                "certificates, or say insecure: true"
            )
