"""Decisions: typed questions about an input, answered with a probability for every option.

Where things go:
- `questions.py`: `Predicate`, `Choice`, `Score`, checked when they are made.
- `render.py`: inputs and questions as prompts: one context, a suffix a question.
- `sources.py`: `Source`, from a question to engine requests and back to scores; labels.
- `branches.py`: the source that is a branch's head.
- `gates.py`: decide first, write only if; the engine opens or closes by itself.
- `decision.py`: normalisation, thresholds, confidence, mass.
- `inquiry.py`: one call, from input and questions to decisions.

Pure: no clock, no engine, no torch; a door runs the requests.
"""

from __future__ import annotations

from lockstep.decisions.branches import BranchSource, find_branch, own_question
from lockstep.decisions.decision import Decision
from lockstep.decisions.gates import Gated, GatedCompletion, GateSpec, gate_chat, gate_prompt
from lockstep.decisions.inquiry import Inquiry, inquire, inquire_prefix
from lockstep.decisions.questions import Choice, Option, Predicate, Question, Score

__all__ = [
    "BranchSource",
    "Choice",
    "Decision",
    "GateSpec",
    "Gated",
    "GatedCompletion",
    "Inquiry",
    "Option",
    "Predicate",
    "Question",
    "Score",
    "find_branch",
    "gate_chat",
    "gate_prompt",
    "inquire",
    "inquire_prefix",
    "own_question",
]
