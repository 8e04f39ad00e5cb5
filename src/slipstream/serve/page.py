"""The page at ``/``: a playground and a dashboard in one static file."""

from __future__ import annotations

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> Response:
    """The page."""
    return Response(_html(), media_type="text/html", headers=headers())


@cache
def _html() -> bytes:
    return files("slipstream.serve").joinpath("static", "index.html").read_bytes()


@cache
def headers() -> dict[str, str]:
    """What a browser may do with the page: run what is in it, and ask this server, nothing else."""
    policy = (
        "default-src 'none'; "
        f"script-src {_hash('script')}; style-src {_hash('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(tag: str) -> str:
    """The hash by which a policy knows what is between ``<tag>`` and ``</tag>``."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), _html(), re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(content).digest()).decode()}'"
