"""A comparison as figures for its record, details for its file, and a report for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

from lockstep.verify.compare import Comparison, Pair, Row
from lockstep.verify.difference import Gaps, Parting, gaps, parting
from lockstep.verify.endpoint import Reading
from lockstep.verify.report import Plot, Report, Section, shares_plot, shortened, steps_plot
from lockstep.verify.rule import Relative
from lockstep.verify.statistics import (
    CONFIDENCE,
    clopper_pearson,
    percent,
    quantile,
    sign_test,
)

LISTED = 40  # requests in a report's table


def figures(found: Comparison) -> dict[str, Any]:
    """What goes on record, as JSON values."""
    tally = found.tally
    confidence = _confidence(found)
    excess = tally.excess(confidence)
    partings = [p for row in found.rows if (p := first_parting(cross_pairs(row))) is not None]
    return {
        "requests": tally.requests,
        "rounds": found.rule.rounds,
        "own": _share(tally.own, tally.requests),
        "cross": _share(tally.cross, tally.requests),
        "b_own": _share(sum(bool(row.b_own) for row in found.rows), tally.requests),
        "unread": tally.unread,
        "failures": dict(Counter(row.unread for row in found.rows if row.unread)),
        "more": tally.more,
        "less": tally.less,
        "excess": {"low": excess.low, "high": excess.high, "confidence": confidence},
        "sign_test": sign_test(tally.more, tally.less),
        "first_difference": _places(partings),
        "logprob_gap": {
            "own": _spread(worst_gaps(found.rows, own_pairs)),
            "cross": _spread(worst_gaps(found.rows, cross_pairs)),
        },
        "fingerprints": {name: _fingerprints(found.rows, name) for name in ("a", "b")},
        "median_seconds": {name: _seconds(found.rows, name) for name in ("a", "b")},
    }


def details(found: Comparison) -> dict[str, Any]:
    """Everything that was read, for whoever wants to look again."""
    return {
        "rule": found.rule.canonical(),
        "requests": [
            {
                "id": row.item.id,
                "own": row.own,
                "cross": row.cross,
                "unread": row.unread,
                "a": [_kept(reading) for reading in row.a],
                "b": [_kept(reading) for reading in row.b],
            }
            for row in found.rows
        ],
    }


def _kept(reading: Reading) -> dict[str, Any]:
    """A reading without its alternatives; infinities, which JSON lacks, as null."""
    if not reading.ok:
        return {"error": reading.error}
    return {
        "text": reading.text,
        "tokens": list(reading.tokens),
        "logprobs": [value if value > -1e300 else None for value in reading.logprobs],
        "finish": reading.finish,
        "calls": [[call.name, call.arguments] for call in reading.tool_calls],
        "fingerprint": reading.fingerprint,
        "seconds": round(reading.seconds, 4),
    }


def own_pairs(row: Row) -> Iterable[Pair]:
    """Every two answers of A."""
    return combinations(row.a, 2)


def cross_pairs(row: Row) -> Iterable[Pair]:
    """Every answer of A with every one of B."""
    return product(row.a, row.b)


def first_parting(pairs: Iterable[Pair]) -> Parting | None:
    """Where the first pair that parts does so."""
    found = (parting(one, other) for one, other in pairs if one.ok and other.ok)
    return next((each for each in found if each is not None), None)


def worst_gaps(rows: Sequence[Row], pairs_of: Any) -> list[Gaps]:
    """The largest gap of each request that reports logprobs."""
    found = []
    for row in rows:
        seen = [
            each
            for one, other in pairs_of(row)
            if one.ok and other.ok and (each := gaps(one, other)) is not None
        ]
        if seen:
            found.append(max(seen, key=lambda each: each.logprob))
    return found


def _confidence(found: Comparison) -> float:
    criterion = found.rule.criterion
    return criterion.confidence if isinstance(criterion, Relative) else CONFIDENCE


def _share(count: int, of: int) -> dict[str, float]:
    bounds = clopper_pearson(count, of)
    return {"count": count, "low": bounds.low, "high": bounds.high}


def _places(partings: Sequence[Parting]) -> dict[str, Any] | None:
    positions = [each.position for each in partings]
    if not positions:
        return None
    units = sorted({each.unit for each in partings})
    return {
        "smallest": min(positions),
        "median": quantile(positions, 0.5),
        "largest": max(positions),
        "units": units,
    }


def _spread(found: Sequence[Gaps]) -> dict[str, float] | None:
    values = [each.logprob for each in found]
    if not values:
        return None
    return {"median": quantile(values, 0.5), "p95": quantile(values, 0.95), "largest": max(values)}


def _fingerprints(rows: Sequence[Row], side: str) -> list[str]:
    readings = (reading for row in rows for reading in (row.a if side == "a" else row.b))
    return sorted({reading.fingerprint for reading in readings if reading.fingerprint})


def _seconds(rows: Sequence[Row], side: str) -> float | None:
    readings = [reading for row in rows for reading in (row.a if side == "a" else row.b)]
    values = [reading.seconds for reading in readings if reading.ok]
    return round(quantile(values, 0.5), 4) if values else None


def report_of(found: Comparison, a: str, b: str) -> Report:
    """The report of a comparison between deployments of these names."""
    rule, known = found.rule, figures(found)
    return Report(
        title=f"Comparison: {rule.name}",
        lead=f"A is {a}. B is {b}.",
        verdict=found.verdict.value,
        reason=found.reason,
        sections=[
            section
            for section in (
                _counts(found, known),
                _where(found),
                _gap_section(found),
                _listed(found),
            )
            if section is not None
        ]
        + [_rule_section(found, known)],
        footer=f"Rule {rule.hash}, fixed before the first request.",
    )


def _counts(found: Comparison, known: dict[str, Any]) -> Section:
    of = found.tally.requests
    names = ("A against itself", "A against B", "B against itself")
    keys = ("own", "cross", "b_own")
    rows = [
        (
            name,
            f"{known[key]['count']} of {of}",
            percent(known[key]["count"] / of),
            _bounds(known, key),
        )
        for name, key in zip(names, keys, strict=True)
    ]
    more, less = found.tally.more, found.tally.less
    text = [_sides(more, less, known["sign_test"])]
    if found.tally.unread:
        failures = "; ".join(f"{why} ({count})" for why, count in known["failures"].items())
        text.append(
            f"{found.tally.unread} requests could not be compared: {shortened(failures, 400)}."
        )
        if any(why.endswith(": timeout") for why in known["failures"]):
            text.append(
                "An answer's time includes its wait in the server's queue: a server that answers "
                "one request after the other wants a longer `timeout` in the rule, or a lower "
                "`concurrency`."
            )
    plot = shares_plot(
        names,
        [known[key]["count"] / of for key in keys],
        [(known[key]["low"], known[key]["high"]) for key in keys],
    )
    caption = "Intervals are exact (Clopper and Pearson) for requests drawn as these were."
    head = ("", "requests that differ", "share", "95% interval")
    return Section("How many differ", text, head, rows, [Plot(plot, caption)])


def _sides(more: int, less: int, p_value: float) -> str:
    """The paired counts behind the sign test, in words."""
    if more + less == 0:
        return "Held against A's first answer, the second ones of A and B never differ one-sidedly."
    return (
        f"Held against A's first answer, B's second differs and A's second does not on {more} "
        f"requests; the reverse holds on {less}. If B were the same as A, both would be equally "
        f"likely on each request: {more} or more of {more + less} would come with probability "
        f"{p_value:.2g}."
    )


def _bounds(known: dict[str, Any], key: str) -> str:
    return f"{percent(known[key]['low'])} to {percent(known[key]['high'])}"


def _where(found: Comparison) -> Section | None:
    series: dict[str, list[float]] = {}
    for name, pairs_of in (("A against itself", own_pairs), ("A against B", cross_pairs)):
        places = [p.position for row in found.rows if (p := first_parting(pairs_of(row)))]
        if places:
            series[name] = [float(place) for place in places]
    if not series:
        return None
    plot = steps_plot(series, "first position that differs")
    caption = "Behind the first difference two answers have read different texts."
    return Section("Where answers part", (), (), (), [Plot(plot, caption)])


def _gap_section(found: Comparison) -> Section | None:
    series, rows = {}, []
    for name, pairs_of in (("A against itself", own_pairs), ("A against B", cross_pairs)):
        values = worst_gaps(found.rows, pairs_of)
        spread = _spread(values)
        if spread is not None:
            series[name] = [each.logprob for each in values]
            largest = max(each.probability for each in values)
            numbers = (f"{spread[key]:.3g}" for key in ("median", "p95", "largest"))
            rows.append((name, *numbers, f"{largest:.3g}"))
    if not rows:
        return None
    plots = []
    if any(value > 0 for values in series.values() for value in values):
        caption = (
            "Largest difference of a reported logprob in each request, up to where answers part."
        )
        plots.append(Plot(steps_plot(series, "nats; 0 stands at the left edge", log=True), caption))
    head = ("", "median, nats", "95%", "largest", "largest of a probability")
    return Section("How far logprobs lie apart", (), head, rows, plots)


def _listed(found: Comparison) -> Section | None:
    rows = []
    for row in found.rows:
        if not row.cross and not row.own:
            continue
        own, cross = first_parting(own_pairs(row)), first_parting(cross_pairs(row))
        shown = cross or own
        if shown is None:  # equal texts whose probabilities moved
            rows.append((row.item.id, "-", "-", "", ""))
            continue
        rows.append(
            (
                row.item.id,
                "-" if own is None else f"{own.unit} {own.position}",
                "-" if cross is None else f"{cross.unit} {cross.position}",
                repr(shortened(shown.one, 40)),
                repr(shortened(shown.other, 40)),
            )
        )
    if not rows:
        return None
    text = [] if len(rows) <= LISTED else [f"The first {LISTED} of {len(rows)}."]
    head = ("request", "A from itself at", "B from A at", "A says", "the other says")
    return Section("Requests that differ", text, head, rows[:LISTED], verbatim=frozenset({3, 4}))


def _rule_section(found: Comparison, known: dict[str, Any]) -> Section:
    rule = found.rule
    rows = [
        ("requests", len(rule.items)),
        ("a difference is", _spelled(rule.canonical()["difference"])),
        ("criterion", _spelled(rule.canonical()["criterion"])),
        ("rounds, each twice of A and of B", rule.rounds),
        ("requests at once", rule.concurrency),
        ("order drawn from seed", rule.seed),
        ("seconds allowed for an answer", f"{rule.timeout:g}"),
    ]
    for name in ("a", "b"):
        rows.append(
            (f"fingerprint of {name.upper()}", ", ".join(known["fingerprints"][name]) or "none")
        )
        rows.append((f"median seconds of {name.upper()}", known["median_seconds"][name]))
    return Section("The rule", (), (), rows)


def _spelled(fields: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in fields.items() if name != "kind")
    return f"{fields['kind']} ({rest})" if rest else str(fields["kind"])
