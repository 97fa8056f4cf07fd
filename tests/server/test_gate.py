"""Keys and sizes, before a request is read."""

import asyncio
import base64
from typing import Any

import httpx
import pytest
from tests.helpers.fake_engine import FakeEngine, ask, fake_app

PATH = "/v1/completions"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_a_key_covers_every_route_but_health() -> None:
    app = fake_app(FakeEngine(), api_keys=("secret", "other"))
    paths = set(ask(app, "/openapi.json", headers=bearer("other")).json()["paths"])
    for path in {*paths, "/", "/openapi.json", "/nope"} - {"/health"}:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            reply = ask(app, path.replace("{name}", "m"), method=method)
            assert reply.status_code == 401, (method, path)
    reply = ask(app, PATH, {"prompt": "A"})
    assert reply.json()["error"]["type"] == "authentication_error"
    assert "Bearer" in reply.headers["www-authenticate"]
    assert ask(app, "/health").status_code == 200


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer secret", 200),
        ("bearer  secret ", 200),
        ("Bearer other", 200),
        ("Bearer secre", 401),
        ("Bearer ", 401),
        ("secret", 401),
        ("Basic secret", 401),
        ("Basic ÿ", 401),
        (basic("anyone", "secret"), 200),
        (basic("secret", ""), 401),
    ],
)
def test_a_key_is_a_bearer_or_a_password(value: str, status: int) -> None:
    app = fake_app(FakeEngine(), api_keys=("secret", "other"))
    reply = ask(app, "/v1/models", headers={"authorization": value.encode("latin-1")})
    assert reply.status_code == status


def test_a_body_above_the_limit_is_refused() -> None:
    engine = FakeEngine()
    app = fake_app(engine, max_body_bytes=100)
    assert ask(app, PATH, {"prompt": "A"}).status_code == 200
    reply = ask(app, PATH, {"prompt": "A" * 100})
    assert reply.status_code == 413
    assert "100 bytes" in reply.json()["error"]["message"]


def test_a_body_that_does_not_say_its_size_is_counted() -> None:
    sent = 0

    async def body() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * 50

    async def post() -> httpx.Response:
        app = fake_app(FakeEngine(), max_body_bytes=100)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            json_type = {"content-type": "application/json"}
            return await client.post(PATH, content=body(), headers=json_type)

    reply = asyncio.run(post())
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert sent < 10
