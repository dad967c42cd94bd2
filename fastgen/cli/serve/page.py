"""The pages of fgserve: a chat (page.html), and Swagger UI for /openapi.json."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
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


def _hash_of(tag: str, text: str) -> str:
    """Return the CSP hash of the only inline element with this tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


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


# The browser applies only the chat page's own script and style, and keeps scripts from writing HTML.
chat_page = _page(
    PAGE,
    {
        "script-src": _hash_of("script", PAGE),
        "style-src": _hash_of("style", PAGE),
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    },
)
# The page of all routes and fields uses the script and style of one release of Swagger UI.
docs_page = _page(
    DOCS,
    {"script-src": f"{SWAGGER} {_hash_of('script', DOCS)}", "style-src": f"{SWAGGER} 'unsafe-inline'"},
)
