"""The pages for browsers: the web page and the API documentation."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from .envelope import POLICY

STATIC = Path(__file__).parent / "static"
# The files of Swagger UI in a package that is not imported.
SWAGGER = ("fastapi_offline", "static")
DOCS_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self' {inline}; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
)


def add_pages(app: FastAPI) -> None:
    documentation = get_swagger_ui_html(
        openapi_url="openapi.json", title="bkn_zoo", swagger_favicon_url="data:,",
        swagger_js_url="static/swagger-ui-bundle.js", swagger_css_url="static/swagger-ui.css",
    )  # fmt: skip
    inline = re.findall(rb"<script>(.*?)</script>", bytes(documentation.body), re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in inline]
    documentation.headers[POLICY.decode()] = DOCS_POLICY.format(inline=" ".join(f"'sha256-{one}'" for one in hashes))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return documentation

    app.mount("/static", StaticFiles(directory=STATIC, packages=[SWAGGER]), name="static")
