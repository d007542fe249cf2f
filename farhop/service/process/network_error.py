"""Network errors in a few words for operators: messages of logs, `/status` and the command line.

aiohttp's own texts contain the memory address of a TLS context, and asyncio's "Connect call failed" names no cause.
Never raises, and never includes what was sent.
"""

from __future__ import annotations

import os
import ssl


def in_words(error: BaseException) -> str:
    """The cause, such as "connection refused", "timed out" or the reason why a certificate is not trusted."""
    if isinstance(error, TimeoutError):
        return "timed out"
    for cause in (getattr(error, "certificate_error", None), getattr(error, "os_error", None), error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({getattr(cause, 'verify_message', '') or type(cause).__name__})"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {getattr(cause, 'reason', '') or type(cause).__name__}"
    number = getattr(getattr(error, "os_error", error), "errno", None)
    if isinstance(number, int) and number > 0:  # of a name that does not resolve it is negative
        return os.strerror(number).lower()
    return str(error) or type(error).__name__
