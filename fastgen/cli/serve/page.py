"""The chat page of fgserve: one file, page.html."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path

from starlette.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html")


def page_response() -> HTMLResponse:
    """Return the page. Its browser runs its own script and style alone, connects to this server alone, and refuses
    scripts that would write HTML."""
    text = PAGE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash_of(tag: str, text: str) -> str:
    """Return the source expression of the one inline element of this kind."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
