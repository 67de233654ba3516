"""Who may come in: keys, and what is refused before its body is read."""

from starlette.datastructures import Headers
from starlette.responses import Response

from plpkg.serving.service.http.accounts import LOCAL, Keys
from plpkg.serving.service.http.answers import error_response

MAX_BODY_BYTES = 2**22


class Door:
    """Middleware: finds each request's account, and refuses by the head alone.

    ``max_upload`` bytes may have what is sent under ``/v1/accounts/``.
    """

    def __init__(self, app, keys: Keys | None, max_upload: int) -> None:
        self.app, self.keys, self.max_upload = app, keys, max_upload

    async def __call__(self, scope, receive, send) -> None:
        response = self._refusal(scope) if scope["type"] == "http" else None
        await (response or self.app)(scope, receive, send)

    def _refusal(self, scope) -> Response | None:
        headers, account = Headers(scope=scope), LOCAL
        if self.keys:
            account = self.keys.account(headers.get("authorization"))
            if account is None and scope["path"] != "/health":
                return error_response(401, "a valid key is needed: Authorization: Bearer KEY")
        elif "origin" in headers or headers.get("host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            return error_response(403, "without keys only programs on this machine are served, no pages in a browser")
        scope.setdefault("state", {})["account"] = account
        most = self.max_upload if scope["path"].startswith("/v1/accounts/") else MAX_BODY_BYTES
        length = headers.get("content-length", "" if scope["method"] in ("POST", "PUT", "PATCH") else "0")
        if not length.isdecimal() or "transfer-encoding" in headers:
            return error_response(411, "a body needs its length: Content-Length")
        if int(length.lstrip("0")[:20] or 0) > most:
            return error_response(413, f"a body may have {most:,} bytes here, this one has {length[:20]}")
        return None
