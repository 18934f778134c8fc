"""What the fuzzers have found once, each as a test of the right behaviour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.target import MODEL, Sent, Target, post


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target(max_body_bytes=200_000)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "x" * 60_000, "prompt": "x"}),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "x" * 60_000: 1}),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "x", "response_format": {"type": [1] * 9999}},
        ),
        ("/v1/systemone", {"state": "x", "questions": {"a": {"type": "y" * 60_000}}}),
        ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b", "z" * 60_000: 1}),
    ],
)
def test_an_error_does_not_say_megabytes_back(target: Target, path: str, body: object) -> None:
    (answer,) = target.send([post(path, body)])
    assert answer.status in (400, 404)
    assert len(answer.body) < 4000
    assert "…" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score", "/v1/responses"])
def test_a_field_without_a_name_is_refused_by_name(target: Target, path: str) -> None:
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/responses": {"input": "x"},
    }
    (answer,) = target.send([post(path, {"model": MODEL, "": 1, **bodies[path]})])
    assert answer.json()["error"] == {
        "message": "unknown parameter: ''",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_parameter",
    }


def test_errors_of_libraries_have_the_shape(target: Target) -> None:
    head = b"Content-Disposition: form-data; name="
    form = (
        b"--b\r\n" + head + b'"purpose"\r\n\r\nbatch\r\n'
        b"--b\r\n" + head + b'"file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
    )
    kind = (b"content-type", b"multipart/form-data; boundary=b")
    (file,) = target.send([Sent("POST", "/v1/files", (form,), (kind,))])
    path = f"/v1/files/{file.json()['id']}/content"
    whole, part, beyond, odd = target.send(
        Sent("GET", path, headers=((b"range", value),) if value else ())
        for value in (b"", b"bytes=1-", b"bytes=9-", b"bytes=x")
    )
    assert (whole.status, whole.body) == (200, b"{}")
    assert (part.status, part.body) == (206, b"}")
    assert beyond.status == 416
    assert beyond.json()["error"]["code"] == "range_not_satisfiable"
    assert beyond.header("content-range") == "bytes */2"
    assert odd.status == 400
    assert "range" in odd.json()["error"]["message"].lower()
    (missing,) = target.send([Sent("GET", "/page/nothing.js")])
    assert missing.json()["error"]["code"] == "not_found"


def test_methods_that_nobody_knows_fill_no_table(target: Target) -> None:
    target.send(Sent(f"METHOD{number}", "/v1/models") for number in range(50))
    methods = {method for method, _, _ in target.app.state.operations.metrics.http}
    assert methods <= {"", "GET", "POST", "DELETE", "HEAD"}


def test_nobody_is_sent_to_where_the_host_header_says(target: Target) -> None:
    host = (b"host", b"evil.example")
    for path in ("/v1/completions/", "/health/", "/v1/files/", "//evil.example/v1/models"):
        (answer,) = target.send([Sent("GET", path, headers=(host,))])
        assert answer.status == 404
        assert not answer.header("location")


def test_no_page_runs_scripts_from_elsewhere(target: Target) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        (answer,) = target.send([Sent("GET", path)])
        assert answer.status == 404
