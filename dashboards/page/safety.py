"""What the server refuses, and what its pages may do.

The page shows texts of models and users, on a machine that may hold secrets, to a browser that also visits other
sites. So: only requests that name this machine (a foreign Host is DNS rebinding, a foreign Origin another site's
script), only GET and HEAD, no script but the page's own files, nothing loaded from elsewhere; and beyond loopback a
token.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "seismograd_token"

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
INCIDENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox"
)
"""Incident files are self-contained: no script, no request, and nothing of the page's own rights."""

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Args:
        host: that the server listens on.
        token: that a request has to bring, or None.

    Raises:
        ValueError: a host beyond loopback without a token, or a token that is easily guessed or that a cookie cannot
            hold; the message says why and what to do.
    """

    host: str
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and len(self.token) >= 16):
            raise ValueError(
                "--token: needs at least 16 characters, all of them ASCII; python -c 'import secrets; "
                "print(secrets.token_urlsafe())'"
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host}: others on the network could read all runs, with the texts of their tokens; give "
                "--token SECRET too, or stay on 127.0.0.1 and use a tunnel: ssh -L 8686:localhost:8686 THIS-MACHINE"
            )

    def names(self, host: str | None) -> bool:
        """Whether a Host header means this machine. Its port may be a tunnel's."""
        name = _hostname(host)
        if name is None:
            return False
        if is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        # An address cannot be rebound; of names only those that are known to be ours.
        return _is_address(name) or name in {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _hostname(host: str | None) -> str | None:
    if not host or any(c in host for c in "/@?#\\ "):
        return None
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises where it is none
    except ValueError:
        return None
    return parts.hostname


class Guard:
    """The middleware around everything."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            refusal.headers["Content-Security-Policy"] = PAGE_POLICY
            await refusal(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", PAGE_POLICY)
                headers.setdefault("Cache-Control", "no-cache")
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._access.names(hosts[0]):
            return PlainTextResponse("This Host is not served here: use 127.0.0.1 or localhost.\n", 421)
        for origin in headers.getlist("origin"):
            if urlsplit(origin).netloc.lower() != hosts[0].lower():
                return PlainTextResponse("Requests from other sites are refused.\n", 403)
        # An image or a script of another site brings no Origin. A link from there may be followed.
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Everything here is read-only.\n", 405, {"Allow": "GET, HEAD"})
        return self._without_token(scope, headers) if self._access.token is not None else None

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """A token comes as a header, as a cookie, or once in the address, which then becomes the cookie."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._right(bearer) or self._right(_cookie(headers.getlist("cookie"))):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(key == "token" and self._right(value) for key, value in query):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            # One slash: two would lead to another host.
            raw = scope["raw_path"].decode("latin-1")
            path = "/" + raw.lstrip("/\\")
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(COOKIE, str(self._access.token), httponly=True, samesite="strict")
            return response
        return PlainTextResponse(
            "A token is needed: open /?token=TOKEN once, or send the header Authorization: Bearer TOKEN.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(self._access.token).encode())


def _cookie(headers: Sequence[str]) -> str:
    for header in headers:
        try:
            morsel = SimpleCookie(header).get(COOKIE)
        except CookieError:
            continue
        if morsel is not None:
            return morsel.value
    return ""
