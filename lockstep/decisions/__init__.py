"""Decisions: typed questions about an input, answered with a probability for every option.

Where things go:
- `questions.py`: `Predicate`, `Choice`, `Score`, checked when they are made.
- `render.py`: inputs and questions as prompts: one context, a suffix a question.
- `paths.py`: token sequences of options, and the few rows that score them all.
- `sources.py`: `Source`, from a question to engine requests and back to scores.
- `decision.py`: normalisation, thresholds, confidence, mass.
- `inquiry.py`: one call, from input and questions to decisions.

Pure: no clock, no engine, no torch; a door runs the requests.
"""

from __future__ import annotations

from lockstep.decisions.decision import Decision
from lockstep.decisions.inquiry import Inquiry, inquire, inquire_prefix
from lockstep.decisions.questions import Choice, Option, Predicate, Question, Score

__all__ = [
    "Choice",
    "Decision",
    "Inquiry",
    "Option",
    "Predicate",
    "Question",
    "Score",
    "inquire",
    "inquire_prefix",
]
