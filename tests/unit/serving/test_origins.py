"""Host names and web pages that may reach a server."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tfexport.errors import TfexportError
from tfexport.serving.access.origins import check_host, check_origin, hosts_of, origins_of
from tfexport.serving.options import ServerOptions


def status(hosts: list[str], *, http_version: str = "1.1", **options: object) -> int:
    headers = Headers(raw=[(b"host", host.encode()) for host in hosts])
    try:
        check_host(headers, hosts_of(ServerOptions(**options)), http_version)  # type: ignore[arg-type]
    except HTTPException as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080", "a.localhost"]
)
def test_a_server_of_this_machine_answers_for_its_own_names(host: str) -> None:
    assert status([host]) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.1", "[::2]", "", "a@evil", "[::1", "x:y"]
)
def test_a_server_of_this_machine_refuses_other_names(host: str) -> None:
    assert status([host]) == 421
    assert status([host], host="0.0.0.0") == 200  # nobody but the operator knows its names
    assert status([host], allowed_hosts=("*",)) == 200


def test_operators_name_hosts() -> None:
    assert status(["Translate.example"], allowed_hosts=("translate.example",)) == 200
    assert status(["translate.example:80"], allowed_hosts=("translate.example",), host="0.0.0.0") == 200
    assert status(["evil.example"], allowed_hosts=("translate.example",), host="0.0.0.0") == 421


@pytest.mark.parametrize("name", ["API.Example.org", "api.example.org.", "api.example.org:8302"])
def test_names_of_operators_are_compared_as_browsers_write_them(name: str) -> None:
    assert status(["api.example.org"], allowed_hosts=(name,)) == 200
    assert status(["api.example.org:80"], allowed_hosts=(name,)) == 200
    assert status(["[fd00::1]:80"], allowed_hosts=("[fd00::1]",)) == 200
    with pytest.raises(TfexportError, match="is not a host name"):
        hosts_of(ServerOptions(allowed_hosts=("http://",)))


def test_origins_of_operators_are_compared_as_browsers_write_them() -> None:
    allowed = origins_of(ServerOptions(cors=("https://Example.org/",)))
    check_origin(Headers({"host": "localhost", "origin": "https://example.org"}), allowed)
    with pytest.raises(HTTPException) as refused:
        check_origin(Headers({"host": "localhost", "origin": "null"}), allowed)
    assert "--cors" not in refused.value.detail


def test_a_request_has_one_host() -> None:
    assert status(["localhost", "evil.example"]) == 400
    assert status(["localhost", "localhost"], allowed_hosts=("*",)) == 400
    assert status([]) == 400
    assert status([], http_version="1.0") == 200


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "passes"),
    [
        (None, "localhost:8080", (), True),  # no browser sent it
        ("http://localhost:8080", "localhost:8080", (), True),
        ("https://translate.example", "translate.example", (), True),
        ("https://translate.example", "translate.example:443", (), True),
        ("http://evil.example", "localhost:8080", (), False),
        ("http://localhost:9000", "localhost:8080", (), False),
        ("http://translate.example", "translate.example:443", (), False),
        ("null", "localhost:8080", (), False),  # a file, or a frame in a sandbox
        ("https://translate.example", "127.0.0.1:8080", ("https://translate.example",), True),
        ("http://evil.example", "localhost:8080", ("*",), True),
    ],
)
def test_pages_of_other_origins_are_refused(
    origin: str | None, host: str, allowed: tuple[str, ...], passes: bool
) -> None:
    headers = Headers({"host": host} | ({} if origin is None else {"origin": origin}))
    if passes:
        check_origin(headers, allowed)
        return
    with pytest.raises(HTTPException, match="may not call this server") as refused:
        check_origin(headers, allowed)
    assert refused.value.status_code == 403
