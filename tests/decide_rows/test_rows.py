"""Input lines as prompts and conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import ConfigError
from lockstep.decide_rows import Rows
from lockstep.decide_rows.rows import BadRow


@pytest.mark.parametrize("template", ["", "{text", "the same", "{1}", "{ text }"])
def test_a_template_without_a_field_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="template must name a field of the rows"):
        Rows(Path("x"), template=template)


def test_a_template_takes_fields_and_leaves_other_braces() -> None:
    rows = Rows(Path("x"), template='{title}: {n} {"json": true} {text}')
    row = rows.parse(3, b'{"id": 5, "title": "{text}", "n": 2.5, "text": "T", "more": null}')
    assert (row.line, row.id) == (3, 5)
    assert row.given == '{text}: 2.5 {"json": true} T'  # what a row brings along is not filled in
    with pytest.raises(BadRow, match="title is missing") as caught:
        rows.parse(1, b'{"id": "a", "text": "T", "n": 1}')
    assert (caught.value.id, caught.value.field) == ("a", "title")


def test_chats_and_rows_that_are_conversations() -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert Rows(Path("x")).parse(1, b'{"messages": [{"role": "user", "content": "hi"}]}').given == (
        talk
    )
    assert Rows(Path("x"), chat=True).parse(1, b'{"text": "hi"}').given == talk
    spoken = Rows(Path("x"), system="Be brief.").parse(1, b'{"text": "hi"}').given
    assert spoken == [{"role": "system", "content": "Be brief."}, *talk]


def test_half_a_surrogate_pair_is_called_by_its_name(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "in.jsonl")
    assert rows.parse(1, rb'{"text": "\ud83d\ude00"}').given == "\N{GRINNING FACE}"
    for text in (rb'{"text": "\ud800"}', rb'{"text": "\ud83d\ude00\udc00 and more"}'):
        with pytest.raises(BadRow, match="half of a surrogate pair") as caught:
            rows.parse(1, text)
        assert caught.value.code == "invalid_json"
    with pytest.raises(BadRow, match="not JSON: Input data was truncated"):
        rows.parse(1, rb'{"text": "\ud83d\ude00')
