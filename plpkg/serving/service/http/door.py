"""Who may come in: keys, and what is refused before its body is read."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plpkg.serving.service.http.accounts import LOCAL, Keys
from plpkg.serving.service.http.answers import error_response

MAX_BODY_BYTES = 2**20
OPEN = ("/health", "/ping")
"""Answered without a key."""


class Door:
    """Middleware: finds each request's account, refuses by the head alone, and stops a body that grows too long.

    ``max_upload`` bytes may have what is sent under ``/v1/accounts/``; pages of ``origins`` may come in without a key.
    """

    def __init__(self, app, keys: Keys | None, max_upload: int, origins: Collection[str] = ()) -> None:
        self.app = app
        self.keys = keys
        self.max_upload = max_upload
        self.origins = origins

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        most = self.max_upload if scope["path"].startswith("/v1/accounts/") else MAX_BODY_BYTES
        left = most

        async def bounded():  # a chunked body does not say its length
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, _too_long(most, "more"))
            return message

        refused = self._refusal(scope, most)
        if refused is not None:
            return await refused(scope, receive, send)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server sends no body after a HEAD
        return await self.app(scope | {"method": method}, bounded, send)

    def _refusal(self, scope, most: int) -> Response | None:
        """The answer to who may not come in, if a head tells so; it notes the account of who may."""
        headers = Headers(scope=scope)
        account = LOCAL
        if self.keys:
            account = self.keys.account(headers.get("authorization"))
            if account is None and scope["path"] not in OPEN:
                return error_response(401, "a valid key is needed: Authorization: Bearer KEY")
        elif not self._from_here(headers):
            return error_response(403, "without keys only programs on this machine are served, no pages in a browser")
        scope.setdefault("state", {})["account"] = account
        needs_length = scope["method"] in ("POST", "PUT", "PATCH") and "transfer-encoding" not in headers
        length = headers.get("content-length", "" if needs_length else "0")
        if not length.isdecimal():
            return error_response(411, "a body needs its length, Content-Length, or chunks")
        if int(length.lstrip("0")[:20] or 0) > most:
            return error_response(413, _too_long(most, length[:20]))
        return None

    def _from_here(self, headers: Headers) -> bool:
        """Whether no page asks, or one that may. Browsers say so in ``Origin``, or else in ``Sec-Fetch-Site``."""
        host = (headers.get("host") or "localhost").partition(":")[0].lower().removesuffix(".")
        origins = headers.getlist("origin")
        if host not in ("127.0.0.1", "localhost"):
            return False
        if origins:
            return all(each in self.origins for each in origins)
        return headers.get("sec-fetch-site", "none") == "none"  # an address that somebody typed


def _too_long(most: int, length: str) -> str:
    return f"a body may have {most:,} bytes here, this one has {length}"
