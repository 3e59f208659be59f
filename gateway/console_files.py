"""The console's files, served from a folder of the package at `/`."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

CONSOLE_FOLDER = Path(__file__).parent / "console"

# Nothing but this server's own files runs or is loaded, and nobody may frame the page.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "worker-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

# A machine's own type table may know better or worse; a wrong type of a script stops it.
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}


class ConsoleFiles(StaticFiles):
    """Static files with the console's security headers; folders are not listed."""

    def __init__(self, folder: Path = CONSOLE_FOLDER) -> None:
        for suffix, media_type in TYPES.items():
            mimetypes.add_type(media_type, suffix)
        super().__init__(directory=folder, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The response for a path below the folder."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
