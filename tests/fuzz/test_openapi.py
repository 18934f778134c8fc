"""Requests made by schemathesis from the application's own OpenAPI document, right and wrong,
and replies held against what the document says of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.fuzz.target import MODEL, Answer, Sent, Target

PER_EXAMPLE = 10
SHARE = 0.1  # of all requests: one of these takes ten times as long to make as others
COMPONENTS = "#/components/schemas/"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target(
        key="key",
        max_body_bytes=200_000,
        max_file_bytes=50_000,
        api_keys=("key",),
        admin_keys=("admin",),
        stored_responses=50,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def document(target: Target) -> dict[str, Any]:
    (answer,) = target.send([Sent("GET", "/openapi.json", headers=(BEARER,))])
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


BEARER = (b"authorization", b"Bearer admin")


def test_the_document_is_one_and_names_every_route(
    target: Target, document: dict[str, Any]
) -> None:
    schemathesis.openapi.from_dict(document).validate()
    paths = document["paths"]
    described = {(path, method) for path, methods in paths.items() for method in methods}
    for route in target.app.routes:
        if isinstance(route, APIRoute) and route.path.startswith(("/v1", "/admin", "/token")):
            path = route.path.replace(":path", "")
            for method in route.methods:
                assert (path, method.lower()) in described
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["responses"]["4XX"]["content"]["application/json"]["schema"] == {
                "$ref": f"{COMPONENTS}reply.ErrorReply"
            }
            assert "422" not in operation["responses"], (path, method)
            for response in operation["responses"].values():
                for content in response["content"].values():
                    assert content["schema"], (path, method)


def test_the_document_asks_for_the_key_that_the_server_asks_for(
    target: Target, document: dict[str, Any]
) -> None:
    assert document["security"] == [{"key": []}]
    (answer,) = target.send([Sent("GET", "/openapi.json")])
    assert answer.status == 401


class Judge:
    """Holds replies against the document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[str, jsonschema_rs.Validator] = {}

    def check(self, path: str, method: str, answer: Answer) -> None:
        operation = self._document["paths"][path][method.lower()]
        responses = operation["responses"]
        status = str(answer.status)
        found = responses.get(status) or responses.get(f"{status[0]}XX")
        assert found is not None, f"{method} {path} has no {status}"
        kind = answer.header("content-type").partition(";")[0]
        assert kind in found["content"], f"{method} {path} {status} has no {kind}"
        schema = found["content"][kind]["schema"]
        if kind == "application/json":
            self._validate(schema, answer.json())
        elif kind == "text/event-stream":
            for frame in answer.body.split(b"\n\n"):
                data = frame.rpartition(b"data: ")[2]
                if data and data != b"[DONE]" and not data.startswith(b'{"error"'):
                    self._validate(schema["x-event"], json.loads(data))

    def _validate(self, schema: dict[str, Any], reply: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        error = next(self._validators[key].iter_errors(reply), None)
        assert error is None, f"{reply} is not {key}: {error}"


def with_the_model(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a client who knows the model's name, which no schema says."""
    changed = copy.deepcopy(document)
    for name, schema in changed["components"]["schemas"].items():
        if not name.startswith("reply.") and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": MODEL}
    return changed


@pytest.mark.slow
@pytest.mark.timeout(1800)  # `--fuzz-requests` may be large
def test_requests_made_from_the_document(
    target: Target, document: dict[str, Any], fuzz_requests: int
) -> None:
    """Every reply is as the document says; the rest as for all requests."""
    schema = schemathesis.openapi.from_dict(with_the_model(document))
    judge = Judge(document)
    operations = [
        found.ok()
        for found in schema.get_all_operations()
        if found.ok().path not in ("/admin/drain", "/admin/undrain")  # of a server of their own
    ]
    cases = st.one_of(
        [
            operation.as_strategy(generation_mode=mode)
            for operation in operations
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            if mode is GenerationMode.POSITIVE or operation.body
        ]
    )
    done = 0

    @settings(
        max_examples=max(1, int(fuzz_requests * SHARE) // PER_EXAMPLE),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def fuzz(made: list[schemathesis.Case]) -> None:
        nonlocal done
        answers = target.send(map(sent, made))
        for case, answer in zip(made, answers, strict=True):
            if case.method == case.operation.method.upper():
                judge.check(case.operation.path, case.method, answer)
        done += 1
        if done % 100 == 0:
            target.check_health()

    fuzz()
    target.check_health()
    assert target.statuses[200] > target.sent // 20  # it is no use to be refused each time


def sent(case: schemathesis.Case) -> Sent:
    """A case as it goes over the wire."""
    made = requests.Request(**case.as_transport_kwargs(base_url="http://fuzz")).prepare()
    body = made.body or b""
    headers = [
        (name.lower().encode("latin-1"), value if isinstance(value, bytes) else value.encode())
        for name, value in made.headers.items()
    ]
    return Sent(
        case.method,
        made.path_url,
        (body.encode() if isinstance(body, str) else body,),
        (*(header for header in headers if header[0] != b"authorization"), BEARER),
    )
