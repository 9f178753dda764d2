"""The names that a request may have in its Host header.

A web page can make its own host name resolve to 127.0.0.1, and then read the answers of a server on
the user's machine (DNS rebinding). The browser still sends the page's name as Host.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

from mtpc.server.options import ServerOptions

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\\\s]+)(:\d{0,5})?")


class AllowedHosts:
    """Checks the Host header of requests by `allowed_hosts`. None means loopback names for a server
    on a loopback address without an API key, and any name otherwise."""

    def __init__(self, options: ServerOptions):
        names = options.allowed_hosts
        self._names = frozenset(name.lower() for name in names or ())
        self._takes_local = names is None
        is_open = options.api_key is not None or not is_local(options.host.lower())
        self._takes_all = is_open if names is None else "*" in self._names

    def allows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether all Host headers name this server. HTTP/1.0 requests may have none."""
        given = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        return self._takes_all or all(self._is_known(value) for value in given)

    def _is_known(self, value: str) -> bool:
        match = _HOST.fullmatch(value)
        if match is None:
            return False
        return match[1] in self._names or (self._takes_local and is_local(match[1]))


def is_local(name: str) -> bool:
    """Whether a name in lower case is `localhost`, below it, or a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
