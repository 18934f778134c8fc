"""Requests that look right, with something wrong in them: what a schema would not think of."""

from __future__ import annotations

import copy
import gzip
import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.target import JSON, MODEL, Sent

NEST = 400  # below what JSON's reader refuses
MARK = "@@"  # text that `written` puts something else for

HELLO = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "look_up", "description": "Looks.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it so?", "name": "so"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]},
    {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]},
]
NAMED = {
    "so": {"type": "noul", "instructions": "Is it so?", "criteria": {"true": "yes"}},
    "which": {"type": "choice", "criteria": {"a": "the first", "b": None}},
    "much": {"type": "score", "criteria": ["low", "high"]},
}

GATES: list[dict[str, Any]] = [
    {"branch": "judge", "continue_if": ["answer", "search"], "threshold": {"search": 0.5}},
    {"branch": "codes", "question": QUESTIONS[0], "continue_if": [True]},
    {"question": QUESTIONS[1], "continue_if": ["a"]},
    {"prefix": "do: ", "options": ["write", "skip"], "continue_if": ["write", "skip"]},
]
OWN = [{"value": name} for name in ("answer", "search", "refuse")]

# Bodies that are answered, by route; a mutation starts from one.
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": MODEL, "prompt": "a b c", "max_tokens": 3}),
    ("/v1/completions", {"model": MODEL, "prompt": [[500, 501], [502]], "n": 2, "stream": True}),
    ("/v1/completions", {"model": MODEL, "prompt": "a b", "echo": True, "logprobs": 2}),
    ("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "look"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "look_up", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 4,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 3,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
            "max_tokens": 4,
        },
    ),
    *(
        (
            "/v1/chat/completions",
            {"model": MODEL, "messages": HELLO, "gate": gate, "n": 2, "max_tokens": 3},
        )
        for gate in GATES
    ),
    *(
        (
            "/v1/completions",
            {"model": MODEL, "prompt": ["a b", "c"], "gate": gate, "stream": True, "max_tokens": 3},
        )
        for gate in GATES
    ),
    ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 3}),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "found"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "stream": True,
            "metadata": {"a": "b"},
            "max_output_tokens": 4,
        },
    ),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "input": "and then",
            "previous_response_id": f"{MARK}response",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "max_output_tokens": 3,
        },
    ),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "hello"}),
    ("/v1/decisions", {"model": MODEL, "input": "some text", "questions": QUESTIONS}),
    (
        "/v1/decisions",
        {"model": "judge", "input": "text", "questions": [{**QUESTIONS[1], "choices": OWN}]},
    ),
    ("/v1/decisions", {"model": "codes", "input": HELLO, "questions": QUESTIONS[:2]}),
    ("/v1/classify", {"model": "judge", "input": ["some text", "more"]}),
    ("/classify", {"model": "judge", "messages": HELLO}),
    ("/v1/systemone", {"model": MODEL, "state": {"a": [1, "x"]}, "questions": NAMED}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/score", {"model": MODEL, "text_1": "a b", "text_2": ["c", "d"]}),
    ("/v1/score", {"model": MODEL, "context": HELLO, "options": ["c", [500]]}),
    ("/tokenize", {"model": MODEL, "messages": HELLO, "tools": [TOOL]}),
    ("/tokenize", {"prompt": "a b c", "return_token_strs": True}),
    ("/detokenize", {"tokens": [500, 501]}),
    (
        "/v1/batches",
        {
            "input_file_id": f"{MARK}file",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        },
    ),
]

# Values that fields of the generating routes take; several at once contradict each other.
OPTIONS: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1.5, 2, 1e-9, 1e6],
    "top_p": [0, 1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 5, 10**6],
    "min_p": [0, 0.5, 1],
    "n": [0, 1, 3, 128, 129],
    "seed": [0, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63)],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "stop": ["o", ["fox", "brown"], [""], ["x"] * 20, "\n"],
    "stop_token_ids": [[0], [2, 500], [49151], [49152], [-1]],
    "max_tokens": [0, 1, 5, 511, 10**9],
    "min_tokens": [0, 1, 3, 600],
    "presence_penalty": [-2, 2, 3],
    "frequency_penalty": [-2, 0.5],
    "repetition_penalty": [0, 0.1, 1.3, 1e9],
    "logit_bias": [{"500": 100}, {"500": -100}, {"01": 1, "1": 2}, {"x": 1}, {"500": "a"}, {}],
    "bad_words": [["fox"], ["", "a"], ["the quick"]],
    "logprobs": [True, False, 0, 3, 20, 21],
    "top_logprobs": [0, 20, 21],
    "prompt_logprobs": [0, 2, 100],
    "logprob_token_ids": [[0, 500], [49152], list(range(200))],
    "logprobs_mode": ["raw", "processed"],
    "return_token_ids": [True],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "echo": [True],
    "priority": [0, -5, 2**31, 2**63, -(2**70)],
    "guided_regex": ["[a-c]{1,3}", "(", "a{1000}{1000}", "(?=x)", "\\d+", ".*", "[", "\U0001f600+"],
    "guided_choice": [["yes", "no"], [], [""], ["a"] * 3, ["\x00"], ["é", "e\u0301"]],
    "guided_json": [SCHEMA, True, False, "{", {"type": "nothing"}, {"$ref": "#"}, {"$ref": "x"}],
    "guided_grammar": [
        'start: "a"+',
        'root ::= "a" root | "b"',
        "root ::= root",
        "start: start",
        "",
        "%import x",
        'start: /(/ "\\',
        "start: A\nA: /a/ B\n",
    ],
    "structured_outputs": [{"regex": "a+"}, {"choice": ["a"]}, {"json": SCHEMA}, {"x": 1}, {}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "http://x/"}}},
        {"type": "grammar", "grammar": "x"},
        {"type": "json_schema"},
    ],
    "text": [
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "n", "schema": {"pattern": "("}}},
        {"format": {"type": "json_schema", "name": "n"}},
        {"verbosity": "high"},
    ],
    "tools": [
        [TOOL],
        [],
        [{"type": "function", **FUNCTION}],
        [{"type": "web_search"}],
        [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/x"}}}],
        [{"type": "function", "function": {"name": "a", "parameters": {}, "strict": True}}],
    ],
    "tool_choice": [
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "look_up"}},
        {"type": "function", "name": "look_up"},
        {"type": "function", "function": {"name": "../x"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    ],
    "parallel_tool_calls": [True, False],
    "reasoning_effort": ["none", "high", "?"],
    "reasoning": [{"effort": "high"}, {"summary": "auto"}, {}],
    "chat_template_kwargs": [
        {"messages": []},
        {"x": "{{ 7 * 7 }}"},
        {"tools": [1]},
        {"add_generation_prompt": False},
        {"self": 1},
        {"raise_exception": "x"},
        {"strftime_now": 1},
        {"bos_token": "<|im_start|>"},
        {"": 1},
        {"range": None, "dict": 3},
    ],
    "max_completion_tokens": [0, 3],
    "max_output_tokens": [0, 1, 16],
    "previous_response_id": ["resp_x", f"{MARK}response", "../../etc/passwd", ""],
    "include": [["message.output_text.logprobs"], ["x"]],
    "metadata": [{"a": "b"}, {"a": 1}, {"k" * 65: "v"}, {"a": "\ud800"}],
    "store": [True, False],
    "background": [True, False],
    "instructions": ["", "Be brief.", "<|im_end|>\n<|im_start|>system"],
    "suffix": ["", "x"],
    "best_of": [1, 3],
    "user": ["someone", "\x00"],
    "pooling": ["mean", "max"],
    "dimensions": [0, 1, 4, 10**9],
    "refuse_below": [0, 0.5, 1, 2],
    "gate": [*GATES, {}, {"branch": "judge"}, {"continue_if": ["answer"]}],
    "add_generation_prompt": [False],
    "add_special_tokens": [True, False],
}

TRAVERSALS = [
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/x",
    "....//....//x",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "C:\\windows\\system32",
    "\\\\host\\share",
    "file-000000000000000000000000",
    "file-00000000000000000000000g",
    "batch_000000000000000000000000",
    "resp_" + "0" * 32,
    "%00",
    "x%0d%0aSet-Cookie:%20a=b",
    "%ff%fe",
    "a" * 3000,
    "'; DROP TABLE files; --",
    "*",
    "%25n%25s",
    "{{7*7}}",
    ".",
    "..",
]

# Text that stands for itself in no JSON writer: replaced behind it.
WRITTEN = {
    f"{MARK}deep": "[" * NEST + "]" * NEST,
    f"{MARK}deeper": '{"a":' * 5_000 + "1" + "}" * 5_000,
    f"{MARK}digits": "9" * 5_000,
    f"{MARK}long": "9" * 4_000,
    f"{MARK}big": "1e400",
    f"{MARK}tiny": "-1e-400",
    f"{MARK}point": "1." + "0" * 500 + "1",
    f"{MARK}many": "[" + ",".join(["1"] * 20_000) + "]",
    f"{MARK}objects": "[" + ",".join(['{"a":{}}'] * 3_000) + "]",
    f"{MARK}keys": "{" + ",".join(f'"k{i}":{i}' for i in range(3_000)) + "}",
    f"{MARK}text": '"' + "ab " * 20_000 + '"',
    f"{MARK}line": '"' + "a" * 60_000 + '"',
    f"{MARK}escapes": '"' + "\\u0001\\ud83d\\ude00" * 500 + '"',
    f"{MARK}half": '"\\ud83d"',
    f"{MARK}twice": '{"a": 1, "a": 2}',
    f"{MARK}comment": "1 // one",
    f"{MARK}single": "'x'",
    f"{MARK}hex": "0x10",
    f"{MARK}zero": "01",
    f"{MARK}none": "None",
}

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1.0, 3.7, 1e308, 5e-324, -1e308),
    *(2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 2**128, 10**300),
    *(float("nan"), float("inf"), -float("inf")),
    *("", " ", "\x00", "x", "1", "true", "null", "NaN", "\ud800", "\udfff\ud800", "a\ud83d"),
    *("é", "e\u0301", "\u202e\u200d\ufeff", "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
    *("\U0010ffff", "\x1b[31m", "\r\nX-Evil: 1", "{{ 7*7 }}", "{% raw %}", "<script>", "%s%n"),
    *("<|im_end|>", "<|endoftext|>", "../../etc/passwd", "file:///etc/passwd", "http://x/y"),
    *("x" * 300, "\n" * 100),
    *([], {}, [None], [[]], [{}], [""], ["\ud800"], [0], [2**63], [-1], [1.5], [True], ["a", 1]),
    *({"": ""}, {"type": None}, {"type": "text"}, {"type": "x"}, {"a": float("nan")}),
    *({"\ud800": 1}, {"__class__": "x"}, {"$ref": "#"}, {"type": "object"}),
    *WRITTEN,
]

NAMES = ["", "x", "__class__", "\ud800", "model", "type", "a.b", "a[0]", "\x00", "x" * 300, "self"]

_scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
)
tree = st.recursive(
    _scalar,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
value = st.one_of(*[st.sampled_from(VALUES)] * 4, tree)


def written(body: Any) -> bytes:
    """A body as JSON, or nearly; what no writer would write included."""
    text = json.dumps(body)
    for name, instead in WRITTEN.items():
        text = text.replace(f'"{name}"', instead)
    return text.encode()


def places(body: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a body."""
    found: list[tuple[Any, Any]] = []
    keys: list[Any] = []
    if isinstance(body, dict):
        keys = list(body)
    elif isinstance(body, list):
        keys = list(range(len(body)))
    for key in keys:
        found.append((body, key))
        found.extend(places(body[key]))
    return found


_CHANGES = ["value"] * 5 + ["option"] * 4 + ["drop", "add", "wrap", "more"]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any]:
    """A route and a good body with one to three things changed."""
    path, seed = draw(st.sampled_from(SEEDS))
    body = copy.deepcopy(seed)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        found = places(body) or [({"x": 0}, "x")]
        container, key = found[draw(st.integers(0, len(found) - 1))]
        match draw(st.sampled_from(_CHANGES)):
            case "value":
                container[key] = copy.deepcopy(draw(value))
            case "option":
                name = draw(st.sampled_from(list(OPTIONS)))
                body[name] = copy.deepcopy(draw(st.sampled_from(OPTIONS[name])))
            case "drop":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(st.sampled_from(NAMES))] = copy.deepcopy(draw(value))
            case "wrap":
                container[key] = [container[key]]
            case "more":
                inner = container[key]
                if isinstance(inner, list) and inner:
                    container[key] = inner * draw(st.sampled_from([2, 50, 300]))
    return path, body


_CONTENT_TYPES = [
    *(b"application/json", b"application/json; charset=utf-8", b"application/json; charset=utf-16"),
    *(b"application/vnd.api+json", b"text/plain", b"application/x-www-form-urlencoded", b""),
    *(b"multipart/form-data", b"multipart/form-data; boundary=x", b"application/octet-stream"),
    *(b"application/json; charset=\xff", b"application/", b"/", b"\x80", b"image/png" * 200),
    *(b"application/json;" * 100,),
]
_HEADERS: list[tuple[bytes, list[bytes]]] = [
    (b"x-request-id", [b"mine-1", b"a b", b"x" * 129, b"\xff", b"a\tb", b"", b"../x", b"{}"]),
    (
        b"traceparent",
        [b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"x", b"\xff" * 60, b"", b"00-" * 99],
    ),
    (b"tracestate", [b"a=b", b"=" * 600, b"\xff"]),
    (
        b"authorization",
        [b"Bearer x", b"Bearer", b"Basic eDp5", b"\xff\xfe", b"bearer " + b"k" * 5000],
    ),
    (b"x-api-key", [b"", b"x", b"\xe9"]),
    (b"content-length", [b"0", b"5", b"-1", b"x", b"9" * 30, b"1e3", b"\xb2"]),
    (b"content-encoding", [b"gzip", b"br", b"x"]),
    (b"accept", [b"*/*", b"text/event-stream", b"application/xml", b"\xff"]),
    (b"accept-encoding", [b"gzip", b"identity;q=0"]),
    (b"x-forwarded-for", [b"1.2.3.4", b"::1, x", b"\r"]),
    (b"host", [b"evil.example", b"", b"\xff", b"a" * 1000]),
    (b"origin", [b"http://evil.example", b"null"]),
    (b"range", [b"bytes=0-0", b"bytes=5-1", b"bytes=x", b"bytes=0-,0-,0-", b"bytes=99999-", b"x"]),
    (b"if-range", [b'"x"', b"Mon"]),
    (b"expect", [b"100-continue", b"x"]),
    (b"transfer-encoding", [b"chunked", b"x"]),
    (b"upgrade", [b"websocket", b"h2c"]),
    (b"cookie", [b"a=b; " * 50, b"\xff"]),
    (b"openai-organization", [b"x"]),
    (b"x-http-method-override", [b"DELETE"]),
]


@st.composite
def headers(draw: st.DrawFn) -> tuple[tuple[bytes, bytes], ...]:
    """Mostly the plain one, else a few that mean something somewhere."""
    if draw(st.integers(0, 9)) < 6:
        return (JSON,)
    found = [(b"content-type", draw(st.sampled_from([JSON[1]] * 4 + _CONTENT_TYPES)))]
    for _ in range(draw(st.integers(0, 3))):
        name, values = draw(st.sampled_from(_HEADERS))
        found.append((name, draw(st.sampled_from(values) | st.binary(max_size=6))))
    return tuple(found)


@st.composite
def bytes_of(draw: st.DrawFn, body: Any) -> bytes:
    """A body on the wire, whole or hurt."""
    content = written(body)
    match draw(st.sampled_from(["whole"] * 12 + _HURT)):
        case "cut":
            return content[: draw(st.integers(0, len(content)))]
        case "flip":
            at = draw(st.integers(0, max(0, len(content) - 1)))
            return content[:at] + draw(st.binary(min_size=1, max_size=2)) + content[at + 1 :]
        case "twice":
            return content + content
        case "again":  # every key once more, with another value
            return content[:-1] + b', "model": null, "stream": 3, ' + content[1:]
        case "utf-16" | "utf-32" | "utf-8-sig" | "utf-7" as encoding:
            return content.decode().encode(encoding)
        case "gzip":
            return gzip.compress(content)
        case "junk":
            return draw(st.binary(max_size=40))
    return content


_HURT = ["cut", "flip", "twice", "again", "utf-16", "utf-32", "utf-8-sig", "utf-7", "gzip", "junk"]


@st.composite
def json_requests(draw: st.DrawFn) -> Sent:
    """A request to a route that takes JSON."""
    path, body = draw(mutated())
    content = draw(bytes_of(body))
    pieces: tuple[bytes, ...] = (content,)
    leaves, breaks = None, False
    match draw(st.sampled_from(["all"] * 12 + ["pieces", "breaks", "leaves"])):
        case "pieces":
            size = max(1, len(content) // draw(st.integers(1, 5)))
            pieces = tuple(content[at : at + size] for at in range(0, len(content), size)) or (b"",)
        case "breaks":
            pieces, breaks = (content[: len(content) // 2], b""), True
        case "leaves":
            leaves = draw(st.integers(0, 4))
    return Sent("POST", path, pieces, draw(headers()), leaves, breaks)


_PATHS = [
    *("/v1/models/{}", "/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"),
    *("/v1/batches/{}/cancel", "/v1/responses/{}", "/v1/responses/{}/input_items"),
    *("/v1/responses/{}/cancel", "/page/{}", "/v1/{}", "/{}", "/admin/cancel/{}", "/admin/{}"),
    "/admin/branches/{}",
    *("/v1/files", "/v1/batches", "/v1/models", "/health", "/ready", "/stats", "/metrics"),
    *("/", "/openapi.json", "/docs", "/redoc", "/v1/models/", "/v1/completions/", "//v1/models"),
    *("/v1/responses", "/v1/responses/", "/v1/chat/completions"),
]
_QUERIES = [
    *("", "", "?limit={}", "?after={}", "?order={}", "?purpose={}", "?stream={}", "?{}"),
    *("?limit=1&limit={}", "?limit=1&after={}", "?limit={}&order=asc&after={}"),
]
_ASKED = [
    *("0", "1", "-1", "10000", "10001", "9" * 40, "1e3", "x", "", "asc", "true", "%00", "%ff"),
    *("%ed%a0%80", "%u0041", "a" * 5000, "&=&=", "%F0%9F%98%80", "1;2", "+1", "0x1", "1_0"),
    *("file-0123456789abcdef01234567", "batch_0123456789abcdef01234567", "resp_x"),
    *(f"{MARK}file", f"{MARK}response"),
]
_METHODS = [
    *(*["GET"] * 12, *["DELETE"] * 4, *["POST"] * 4, "HEAD", "OPTIONS", "PUT", "PATCH"),
    *("TRACE", "CONNECT", "PROPFIND", "X" * 50),
]


@st.composite
def path_requests(draw: st.DrawFn) -> Sent:
    """A request that says all that it has to say in its path."""
    name = draw(st.sampled_from(TRAVERSALS + _ASKED) | st.text("abc./%20-_~", max_size=9))
    path = draw(st.sampled_from(_PATHS)).format(name)
    path += draw(st.sampled_from(_QUERIES)).format(*[draw(st.sampled_from(_ASKED))] * 2)
    method = draw(st.sampled_from(_METHODS))
    return Sent(method, path, (draw(st.sampled_from([b"", b"", b"{}", b"x"])),), draw(headers()))


@st.composite
def uploads(draw: st.DrawFn) -> Sent:
    """A form for `/v1/files`, with one thing or two that forms do not have."""
    boundary = draw(st.sampled_from([b"xyz", b"x" * 70, b"x" * 300, b"--", b"a b", b"\xff"]))
    line = written({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}})
    content = draw(st.sampled_from([line, b"", b"\x00\xff", line * 100, b"\r\n--xyz", b"{"]))
    name = draw(
        st.sampled_from(
            [
                *(b"a.jsonl", b"../../etc/passwd", b"..", b"", b"\xff.jsonl", b"a\r\nX-Evil: 1"),
                *(b"C:\\x.jsonl", b"a" * 4000, b'a"b', b"a%22b", "é\U0001f600".encode(), b"%00"),
            ]
        )
    )
    field = draw(st.sampled_from([b"file"] * 6 + [b"File", b"", b"x", b"file\x00", b"a" * 9000]))
    parts = [
        b'Content-Disposition: form-data; name="' + field + b'"; filename="' + name + b'"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n" + content,
        b'Content-Disposition: form-data; name="purpose"\r\n\r\n'
        + draw(st.sampled_from([b"batch"] * 5 + [b"fine-tune", b"", b"\xff", b"x" * 5000])),
    ]
    for extra in draw(st.lists(st.sampled_from(_PARTS), max_size=2)):
        parts.append(extra)
    if draw(st.booleans()):
        parts.reverse()
    body = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts)
    body += b"--" + boundary + b"--\r\n"
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "flip", "twice", "breaks"])):
        case "cut":
            body = body[: draw(st.integers(0, len(body)))]
        case "flip":
            at = draw(st.integers(0, len(body) - 1))
            body = body[:at] + draw(st.binary(min_size=1, max_size=3)) + body[at + 1 :]
        case "twice":
            body += body
        case "breaks":
            half = len(body) // 2
            pieces = (body[:half], body[half:])
            return Sent("POST", "/v1/files", pieces, _form(boundary), breaks=True)
    half = draw(st.integers(0, len(body)))
    return Sent("POST", "/v1/files", (body[:half], body[half:]), _form(boundary))


_PARTS = [
    b'Content-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at',
    b'Content-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600',
    b'Content-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n\xd9\xa3',
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
    b'Content-Disposition: form-data; name="file"\r\n\r\nx',
    b"Content-Disposition: form-data\r\n\r\nx",
    b"\r\n\r\nx",
    b"x" * 20_000,
    b'Content-Disposition: form-data; name="\xff"\r\n\r\n\xff',
    b'Content-Disposition: form-data; name="a"' + b"\r\nX: y" * 500 + b"\r\n\r\nx",
]


def _form(boundary: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"content-type", b"multipart/form-data; boundary=" + boundary),)


requests = st.one_of(*[json_requests()] * 8, path_requests(), path_requests(), uploads())
