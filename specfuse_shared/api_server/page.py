"""The page at "/": four packaged files, with a Content-Security-Policy that allows no other content."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src data:"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"),
        "trusted-types report",
    )
)
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/each.js": ("each.js", "text/javascript"),
}


def routes() -> list[Route]:
    return [Route(path, _page, methods=["GET"]) for path in FILES]


async def _page(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    return Response(_read(name), media_type=kind, headers=HEADERS)


@cache
def _read(name: str) -> str:
    return files("specfuse_shared.api_server").joinpath("static", name).read_text("utf-8")
