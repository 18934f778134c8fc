"""Settings refuse on construction what nothing could run with, by name, value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import ConfigError, ModelOptions, ServerConfig


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"name": 3}, "model must be a string, got 3"),
        ({"dtype": "float16"}, "dtype must be one of auto, bfloat16, float32, got 'float16'"),
        ({"backend": "cuda"}, "backend must be one of .*triton, got 'cuda'"),
        ({"threads": -1}, "threads must be at least 0, got -1"),
        ({"threads": 10**9}, "threads must be at most 1024, got 1000000000"),
        ({"threads": True}, "threads must be an integer, got True"),
    ],
)
def test_model_options(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelOptions(**values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"port": 65536}, "port must be at most 65535, got 65536"),
        ({"tool_parser": "x"}, "tool_parser must be one of auto, .*, got 'x'"),
        ({"reasoning_parser": ""}, "reasoning_parser must be one of auto, .*, got ''"),
    ],
)
def test_server_config(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ServerConfig(**values)
