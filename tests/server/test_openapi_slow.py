"""Requests made of the document that the server gives of itself."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.helpers.served import SMALL, Served, byte_checkpoint, served

schemathesis = pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(byte_checkpoint(tmp_path_factory.mktemp("bytes")), *SMALL) as server:
        yield server


def test_nothing_that_the_document_allows_fails_the_server(server: Served) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for operation in document.get_all_operations():

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy())
        def ask(case: Any) -> None:
            response = case.call()
            statuses[response.status_code] += 1
            assert response.status_code < 500, (response.status_code, response.text)
            if response.status_code >= 400:
                error = json.loads(response.content)["error"]
                assert set(error) == {"message", "type", "param", "code"}

        ask()
    assert statuses[200] > 10 and statuses[400] > 10, statuses
    server.await_idle()


def test_the_document_names_every_route(server: Served) -> None:
    assert set(server.json("/openapi.json")["paths"]) >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
        "/server_info",
    }
