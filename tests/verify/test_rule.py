"""A rule's hash is over what it means, and a rule that makes no sense names the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.verify.rule import Exact, RuleError, load, parse

RULE = """
name: candidate
endpoints:
  a: {url: "http://localhost:8000/v1"}
  b: {url: "http://localhost:8001/v1", model: m, api_key_env: B_KEY, extra: {top_k: 1}}
defaults: {max_tokens: 8, logprobs: 1}
requests:
  - prompt: Why is the sky blue?
  - {id: two, messages: [{role: user, content: Hi}], temperature: 1, seed: 4}
criterion: {kind: exact}
"""


def with_(old: str, new: str) -> str:
    assert old in RULE
    return RULE.replace(old, new)


def test_what_is_left_out_has_its_default() -> None:
    rule = parse(RULE)
    assert [item.id for item in rule.items] == ["1", "two"]
    first, second = (item.request for item in rule.items)
    assert (first.max_tokens, first.logprobs, first.temperature) == (8, 1, 0.0)
    assert (second.temperature, second.seed) == (1.0, 4)
    assert rule.criterion == Exact(allow=0, confirm=4)
    assert rule.rounds == rule.concurrency == 1


@pytest.mark.parametrize(
    "text",
    [
        "# a comment\n" + RULE,
        with_("max_tokens: 8, logprobs: 1", "logprobs: 1, max_tokens: 8, temperature: 0.0"),
        with_("{kind: exact}", "{kind: exact, allow: 0}\nrounds: 1\ndifference: {kind: token}"),
        with_("- prompt: Why is the sky blue?", "- {id: '1', prompt: 'Why is the sky blue?'}"),
        with_("temperature: 1,", "temperature: 1.0, max_tokens: 8,"),
    ],
)
def test_another_spelling_has_the_same_hash(text: str) -> None:
    assert parse(text).hash == parse(RULE).hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: candidate", "name: other"),
        ("8000", "8002"),
        ("max_tokens: 8", "max_tokens: 9"),
        ("sky", "sea"),
        ("{kind: exact}", "{kind: exact, allow: 1}"),
        ("{kind: exact}", "{kind: exact, confirm: 0}"),
        ("{kind: exact}", "{kind: relative, margin: 0}"),
        ("{kind: exact}", "{kind: exact}\ndifference: {kind: probability, above: 0.01}"),
        ("{kind: exact}", "{kind: exact}\nrounds: 2"),
        ("{kind: exact}", "{kind: exact}\nconcurrency: 2"),
        ("{kind: exact}", "{kind: exact}\nseed: 2"),
        ("{kind: exact}", "{kind: exact}\ntimeout: 2"),
        ("B_KEY", "C_KEY"),
        ("top_k: 1", "top_k: 2"),
        ("id: two", "id: three"),
    ],
)
def test_whatever_could_move_the_verdict_moves_the_hash(old: str, new: str) -> None:
    assert parse(with_(old, new)).hash != parse(RULE).hash


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{kind: exact}", "{kind: exact, alow: 1}", "unknown field `alow` - at `$.criterion`"),
        ("{kind: exact}", "{kind: close}", "Invalid value 'close' - at `$.criterion.kind`"),
        ("{kind: exact}", "{kind: relative}", "missing required field `margin`"),
        ("{kind: exact}", "{kind: relative, margin: 1}", "`$.criterion.margin`"),
        ("{kind: exact}", "{kind: exact, allow: -1}", "`$.criterion.allow`"),
        ("{kind: exact}", "{kind: exact}\nrounds: 0", "`$.rounds`"),
        ("{kind: exact}", "{kind: exact}\nname: twice", "the key 'name' is there twice"),
        ("{kind: exact}", "{<<: {kind: exact}}", "line 10: merge keys (<<) are not read"),
        ("{kind: exact}", "{kind: exact}\ndifference: {kind: decision}", "options or a pattern"),
        (
            "{kind: exact}",
            "{kind: exact}\ndifference: {kind: decision, options: [yes, no]}",
            "Expected `str`, got `bool` - at `$.difference.options[0]`",
        ),
        (
            "{kind: exact}",
            "{kind: exact}\ndifference: {kind: decision, pattern: '('}",
            "no regular expression",
        ),
        (
            "{kind: exact}",
            "{kind: exact}\ndifference: {kind: decision, pattern: 'yes'}",
            "needs a group",
        ),
        ("{kind: exact}", "{kind: exact}\ndifference: {kind: score}", "score needs expect in requ"),
        ("max_tokens: 8", "max_tokens: 0", "requests: 1: max_tokens must be in"),
        ("max_tokens: 8", "max_token: 8", "unknown field `max_token` - at `$.defaults`"),
        ("id: two", "id: '1'", "the id '1' is there twice"),
        ("prompt: Why", "expect: {}\n    prompt: Why", "must say what is expected"),
        ("- prompt: Why is the sky blue?", "- {id: none}", "requests: none: give messages or a"),
        ("temperature: 1,", "extra: {seed: 1},", "requests: two: extra may not set seed"),
        ("top_k: 1", "seed: 1", "endpoints.b.extra may not set seed: request two does"),
        ("name: candidate", "- a list", "not YAML"),
        ("name: candidate", "name: !!python/name:os.system", "not YAML"),
        (RULE, "3", "Expected `object`, got `int`"),
    ],
)
def test_a_rule_that_makes_no_sense_says_where(old: str, new: str, said: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(with_(old, new))
    assert said in str(caught.value)


def test_probabilities_need_logprobs() -> None:
    text = with_("max_tokens: 8, logprobs: 1", "max_tokens: 8")
    with pytest.raises(RuleError, match="probability needs logprobs in request 1"):
        parse(text + "difference: {kind: probability, above: 0.1}\n")


def test_requests_may_lie_in_a_file(tmp_path: Path) -> None:
    head, tail = RULE.split("requests:")[0], "criterion: {kind: exact}\n"
    (tmp_path / "rule.yaml").write_text(head + "requests: {file: some.jsonl}\n" + tail)
    with pytest.raises(RuleError, match=r"rule\.yaml: requests: .*some\.jsonl cannot be read"):
        load(tmp_path / "rule.yaml")
    lines = [
        '{"prompt": "Why is the sky blue?"}',
        "",
        '{"id": "two", "messages": [{"role": "user", "content": "Hi"}],'
        ' "temperature": 1, "seed": 4}',
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    assert load(tmp_path / "rule.yaml").hash == parse(RULE).hash
    (tmp_path / "some.jsonl").write_text('{"prompt": "x"}\n{"promt": "y"}')
    with pytest.raises(RuleError, match=r"line 2: .*unknown field `promt`"):
        load(tmp_path / "rule.yaml")
    (tmp_path / "some.jsonl").write_text("\n\n")
    with pytest.raises(RuleError, match="holds none"):
        load(tmp_path / "rule.yaml")


def test_the_rules_of_the_guide_and_of_the_example_are_rules(repository: Path) -> None:
    example = load(repository / "examples" / "verify" / "rule.yaml")
    assert len(example.items) == 32
    guide = (repository / "docs" / "verify.md").read_text(encoding="utf-8")
    blocks = [
        block
        for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
        if "endpoints" in block
    ]
    assert blocks
    for block in blocks:
        assert len(parse(block, repository / "examples" / "verify").items) == 32
    for kind in re.findall(r"`(token|decision|probability|score)`", guide):
        assert f'tag="{kind}"' in (repository / "lockstep/verify/difference.py").read_text()
