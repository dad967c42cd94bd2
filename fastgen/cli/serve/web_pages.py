"""The pages of fgserve: a chat (page.html, with its scripts and vendor/), and all routes (docs.html)."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

FOLDER = Path(__file__).parent


def _with_files(name: str) -> str:
    """Return a page with the style sheets and scripts that it names inside, so that it is one file for the browser."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for match in re.finditer(r'<link rel="stylesheet" href="(\S+)">|<script src="(\S+)"></script>', text):
        style, script = match.groups()
        tag, content = "style" if style else "script", (FOLDER / (style or script)).read_text(encoding="utf-8")
        text = text.replace(match[0], f"<{tag}>{content}</{tag}>")
    return text


def _hashes_of(tag: str, text: str) -> str:
    """Return the CSP hashes of the inline elements with this tag."""
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" for content in contents)


def _page(text: str, policy: dict[str, str]) -> Callable[[Request], HTMLResponse]:
    """Return the handler of a page. The browser runs only the page's own scripts and style, and connects only to this
    server. policy: further directives of its Content-Security-Policy."""
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "script-src": _hashes_of("script", text),
        "style-src": _hashes_of("style", text),
        "require-trusted-types-for": "'script'",
        **policy,
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return lambda request: HTMLResponse(text, headers=headers)


def chat_page(ignore_limits: bool) -> Callable[[Request], HTMLResponse]:
    """Return the handler of the chat page. ignore_limits: True: its temperature has no maximum."""
    text = _with_files("page.html")
    policy = {"trusted-types": "dompurify"}  # only DOMPurify can turn text into HTML
    return _page(text.replace(' max="2"', "") if ignore_limits else text, policy)


docs_page = _page(_with_files("docs.html"), {"trusted-types": "'none'"})
