"""deploy/nginx.conf in front of the service; skipped where nginx is not installed."""

import shutil

import attackers
import pytest
from attackers import encoded, picture
from http_client import head, send
from service_process import nginx
from watch import Watch

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
IMAGE = encoded(picture())


@pytest.fixture(scope="module")
def proxy(service):
    with nginx(service) as running:
        yield running


def test_nginx_passes_requests_and_errors_on(proxy):
    assert proxy.ask(body=IMAGE).status == 200
    assert proxy.ask(body=b"hello").error == (415, "unsupported_format")
    assert proxy.ask("/v1/models").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (head("POST", "/v1/classify", "Content-Length: 20000000"), (413, "too_large")),
        (head("GET", "/metrics"), (404, "not_found")),
        (head("GET", "/", "X: " + "a" * 20_000), (400, "malformed_request")),
        (b"GET / HTTP/9.1\r\n\r\n", (505, "malformed_request")),
    ],
)
def test_errors_of_nginx_look_like_those_of_the_service(proxy, data, error):
    assert send(proxy.port, data).error == error


@pytest.mark.parametrize("name", ["stalled head", "stalled body", "8 form in punycode", "10 TIFF of one shared strip"])
def test_attack_through_nginx_disturbs_no_healthy_client(proxy, name):
    attack = attackers.begin(proxy.port, 4, "--name", name, "--clients", 24)
    with Watch(proxy.url, IMAGE) as watch:
        attack.communicate(timeout=120)
    watch.check(name)
