"""A noise floor as figures for its record and a report for people."""

from __future__ import annotations

from typing import Any

from lockstep.verify.noise import Condition, Noise
from lockstep.verify.report import Plot, Report, Section, shares_plot, shortened, steps_plot
from lockstep.verify.statistics import clopper_pearson, percent, quantile

LISTED = 40


def figures(found: Noise) -> dict[str, Any]:
    """What goes on record, as JSON values."""
    return {
        "requests": len(found.plan.items),
        "differ": found.differ,
        "unread": found.unread,
        "fingerprints": sorted({one.fingerprint for one in found.alone if one.fingerprint}),
        "conditions": {one.name: _figures(one) for one in found.conditions},
    }


def _figures(condition: Condition) -> dict[str, Any]:
    bounds = clopper_pearson(len(condition.differ), len(condition.asked))
    moved = [value for value in condition.moved if value is not None]
    return {
        "requests": len(condition.asked),
        "answers": condition.answers,
        "differ": {"count": len(condition.differ), "low": bounds.low, "high": bounds.high},
        "logprobs_moved": len(condition.shifted),
        "logprobs_reported": len(moved),
        "largest_gap": max(moved, default=None),
        "median_gap": quantile(moved, 0.5) if moved else None,
        "cached_tokens": condition.cached,
        "failures": dict(condition.failures),
        "prefills": list(condition.prefills),
    }


def reason_of(found: Noise) -> str:
    """One line for people."""
    count = len(found.plan.items)
    if found.differ:
        worst = max(found.conditions, key=lambda one: len(one.differ))
        return (
            f"{found.differ} of {count} requests do not repeat to the bit; their text differs on "
            f"{len(worst.differ)} of {len(worst.asked)} at worst ({worst.name})"
        )
    if found.unread:
        return f"no difference was seen, but {found.unread} answers failed"
    answers = sum(one.answers for one in found.conditions)
    bits = "no logprob and no token" if _reports(found) else "no text (logprobs are not reported)"
    return f"{bits} of {answers} answers differs from the request alone"


def _reports(found: Noise) -> bool:
    return any(value is not None for one in found.conditions for value in one.moved)


def report_of(found: Noise, name: str) -> Report:
    """The report of one deployment's noise."""
    return Report(
        title="Noise floor",
        lead=f"Of {name}.",
        verdict=found.verdict,
        reason=reason_of(found),
        sections=[
            section
            for section in (_conditions(found), _gap_plot(found), _listed(found), _covered(found))
            if section is not None
        ],
        footer=f"Plan {found.plan.hash}, fixed before the first request.",
    )


def _conditions(found: Noise) -> Section:
    rows = []
    for one in found.conditions:
        known = _figures(one)
        positions = [seen.position for seen in one.partings if seen is not None]
        units = {seen.unit for seen in one.partings if seen is not None}
        unit = units.pop() if len(units) == 1 else "place"
        rows.append(
            (
                one.name,
                f"{len(one.differ)} of {len(one.asked)}",
                f"{percent(known['differ']['low'])} to {percent(known['differ']['high'])}",
                f"{unit} {min(positions)}, {quantile(positions, 0.5):g}" if positions else "-",
                f"{len(one.shifted)} of {known['logprobs_reported']}",
                "-" if known["largest_gap"] is None else f"{known['largest_gap']:.3g}",
                one.failures.total(),
            )
        )
    head = (
        "asked",
        "texts that differ",
        "95% interval",
        "first at: least, median",
        "logprobs moved",
        "largest, nats",
        "failed",
    )
    plot = shares_plot(
        [one.name for one in found.conditions],
        [len(one.differ) / max(1, len(one.asked)) for one in found.conditions],
        [
            (known["differ"]["low"], known["differ"]["high"])
            for known in map(_figures, found.conditions)
        ],
    )
    text = ["Counted are requests that differ from themselves alone in any of the repeats."]
    failures = {why for one in found.conditions for why in one.failures}
    failures |= {one.error for one in found.alone if not one.ok}
    text += [f"Failed: {shortened(why, 200)}" for why in sorted(failures)]
    caption = "Intervals are exact (Clopper and Pearson) for requests drawn as these were."
    return Section(
        "How many requests differ from themselves alone", text, head, rows, [Plot(plot, caption)]
    )


def _gap_plot(found: Noise) -> Section | None:
    series = {
        one.name: values
        for one in found.conditions
        if (values := [value for value in one.moved if value is not None])
    }
    if not any(value > 0 for values in series.values() for value in values):
        return None
    plot = steps_plot(series, "nats; 0 stands at the left edge", log=True)
    caption = "Largest difference of a reported logprob in each request, up to where texts part."
    return Section("How far logprobs move", plots=[Plot(plot, caption)])


def _listed(found: Noise) -> Section | None:
    rows = []
    for one in found.conditions:
        for place in one.differ:
            seen = one.partings[place]
            if seen is not None:
                where = f"{seen.unit} {seen.position}"
                texts = [repr(shortened(text, 40)) for text in (seen.one, seen.other)]
                rows.append((found.plan.items[place].id, one.name, where, *texts))
    if not rows:
        return None
    text = [] if len(rows) <= LISTED else [f"The first {LISTED} of {len(rows)}."]
    head = ("request", "asked", "parts at", "alone", "here")
    return Section("Where texts part", text, head, rows[:LISTED], verbatim=frozenset({3, 4}))


def _covered(found: Noise) -> Section:
    plan = found.plan
    rows: list[tuple[str, object]] = [
        ("requests", len(plan.items)),
        ("repeats of each condition", plan.repeats),
        ("requests at once", plan.concurrency),
        ("fingerprint", ", ".join(figures(found)["fingerprints"]) or "none reported"),
    ]
    for one in found.conditions:
        if one.prefills != (0, 0):
            done, refused = one.prefills
            rows.append(
                (
                    f"long prompts of {plan.prefill_words} words beside it",
                    f"{done} answered, {refused} refused",
                )
            )
        if "warm" in one.name or "cold" in one.name:
            said = "the server reports none" if one.cached is None else f"{one.cached}"
            rows.append((f"prompt tokens from the cache, {one.name}", said))
    if not plan.fresh:
        rows.append(("cold", "only if nobody had asked these prompts before"))
    return Section("What was done", (), (), rows)
