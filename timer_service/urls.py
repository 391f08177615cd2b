"""URLs as they may be shown in logs, reasons and errors: without what is secret in them."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_NEXT = re.compile(r",(?=[a-z+]+://)", re.IGNORECASE)
# To the last @, wherever it is: a password that should have been escaped (a / or an @ in it) is no less secret.
_USERINFO = re.compile(r"(?<=:)(//)?([^:]*)(:?)(.*)@", re.DOTALL)
_PARAMETER = re.compile(r"(?<=[?&;])([^=&;]*(?:password|passwd|token|secret|key)[^=&;]*)=[^&;]*", re.IGNORECASE)
_NAMED = ("postgres", "mongodb")
"""Where a user without a password is a name. For NATS it is a token."""
_FILES = "sqlite:"


def shown_url(urls: str) -> str:
    """``urls`` (one, or several with commas) with passwords and tokens replaced by ``***``."""
    return ",".join(_shown(url) for url in _NEXT.split(urls))


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """``text`` without any of ``secrets``, should it quote one."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _shown(url: str) -> str:
    named = url.lower().startswith(_NAMED)
    if not url.startswith(_FILES):
        url = _USERINFO.sub(lambda found: _userinfo(*found.groups(""), named=named), url)
    return _PARAMETER.sub(rf"\1={HIDDEN}", url)


def _userinfo(slashes: str, name: str, colon: str, _password: str, *, named: bool) -> str:
    if colon:
        return f"{slashes}{name}:{HIDDEN}@"
    return f"{slashes}{name if named else HIDDEN}@"
