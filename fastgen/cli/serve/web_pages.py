"""The pages of fgserve: a chat (page.html, page.css, page.js, markdown.js, vendor/), and Swagger UI."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

FOLDER = Path(__file__).parent
SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/"

DOCS = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>fgserve</title>
<link rel="stylesheet" href="{SWAGGER}swagger-ui.css" crossorigin="anonymous"
  integrity="sha384-WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I">
<div id="docs">Swagger UI did not come from cdn.jsdelivr.net; read <a href="openapi.json">openapi.json</a>.</div>
<script src="{SWAGGER}swagger-ui-bundle.js" crossorigin="anonymous"
  integrity="sha384-gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#docs"}})</script>
</html>
"""


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
    """Return the handler of a page that connects only to this server. policy: further directives of its
    Content-Security-Policy."""
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
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
    """Return the handler of the chat page. ignore_limits: its field of the temperature has no maximum.

    The browser applies only the page's own scripts and style, and only DOMPurify can make HTML of a text.
    """
    text = _with_files("page.html")
    return _page(
        text.replace(' max="2"', "") if ignore_limits else text,
        {
            "script-src": _hashes_of("script", text),
            "style-src": _hashes_of("style", text),
            "require-trusted-types-for": "'script'",
            "trusted-types": "dompurify",
        },
    )


# The page of all routes and fields uses the script and style of one release of Swagger UI.
docs_page = _page(
    DOCS,
    {"script-src": f"{SWAGGER} {_hashes_of('script', DOCS)}", "style-src": f"{SWAGGER} 'unsafe-inline'"},
)
