"""All checks of two endpoints, in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.verify.endpoint import Source
from lockstep.verify.provider import conformance, context, fingerprint, sampling, template
from lockstep.verify.provider.findings import Finding, overall
from lockstep.verify.report import Report

ALPHA = 0.01
TESTS = 4  # with a p-value: the distributions, the calls, the draws of either side


async def check_provider(
    a: Source,
    b: Source,
    *,
    alpha: float = ALPHA,
    tolerance: float = fingerprint.TOLERANCE,
    longest: int = context.LONGEST,
    draws: int = sampling.DRAWS,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Finding]:
    """Every check's finding, in the order of the report.

    Args:
        alpha: the chance that any test rejects though both sides are one and the same; each
            of the four gets a quarter (Bonferroni).
        tolerance: nats; a smaller difference is put down to other arithmetic.
        longest: words of the longest prompt.
        draws: of one token, a side.
    """
    progress("next-token distributions")
    compared = await fingerprint.compare_distributions(a, b)
    findings = [fingerprint.judge(compared, alpha / TESTS, tolerance)]
    progress("template and tokenizer")
    findings.append(template.judge(await template.count_tokens(a, b)))
    progress("context length")
    findings.append(context.judge(await context.compare_contexts(a, b, longest)))
    progress("function calls")
    findings.append(conformance.judge(await conformance.call_functions(a, b), alpha / TESTS))
    for side, source in (("A", a), ("B", b)):
        progress(f"sampling of {side}")
        findings.append(sampling.judge(side, await sampling.sample(source, draws), alpha / TESTS))
    return findings


def report_of(findings: Sequence[Finding], a: str, b: str) -> Report:
    """A report that can be sent to either side."""
    verdict, decisive = overall(findings)
    return Report(
        title="Is it the same model?",
        lead=f"A: {a}. B: {b}.",
        verdict=verdict.value,
        reason=decisive,
        sections=[finding.section for finding in findings],
    )
