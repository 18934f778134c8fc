"""What a decision branch is, and its description on disk: a leaf that every room may import.

A branch leaves the trunk at the entrance of layer `fork`, runs trunk layers [fork, exit) with
low-rank adapters of its own, and ends in a small head. Its folder holds `branch.json`, which is
read and written here, and `branch.safetensors`, which `weights` reads.

Tensors: `layers.{i}.{target}.lora_A` [rank, K] and `.lora_B` [N, rank] for every i in
[fork, exit) and every target, `norm.weight` [D] (by which the head's normed row is multiplied,
in every family), `head.weight` [outputs, D], and `head.bias` [outputs]; float32. A weight's
delta is B A times `scale` (Hu et al. 2021).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lockstep.types import BranchLayers, LockstepError

FORMAT = 1
DESCRIPTION = "branch.json"
TENSORS = "branch.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_RANK = 256
MAX_OUTPUTS = 1024
MAX_NUMBER = 1e30  # of a scale or a temperature
MAX_DESCRIPTION = 1 << 20  # bytes of branch.json
TRUNK_SOURCES = ("labels", "prefix")  # where decisions come from that are no branch's
_LOADED = "weight_bytes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

Adapt = Literal["suffix", "context"]
HeadKind = Literal["options", "codes", "value"]


class BranchError(LockstepError, ValueError):
    """A branch that cannot be used: names the file, key or tensor at fault."""


def check_branch_name(name: object) -> None:
    """Refuse what no branch can be called: clients write the name where a model's stands.

    Raises:
        BranchError: not 1 to 64 of letters, digits and ._@-, the first a letter or digit; or
            what decisions without a branch say of themselves.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in TRUNK_SOURCES:
        raise BranchError(
            "a branch's name must be 1 to 64 of letters, digits and ._@-, the first a letter or "
            f"digit, and neither 'labels' nor 'prefix', got {str(name)[:100]!r}"
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """A trained branch, as `branch.json` describes it.

    Attributes:
        base: hash of the weights that it was trained on (`EngineInfo.weights_hash`).
        base_name: what that model was called, for people.
        fork, exit: half-open range of trunk layers that it runs with its adapters.
        adapt: whose rows the adapters touch: those of the question behind the context, which
            read the trunk's own keys and values ("suffix"), or every row ("context").
        rank, scale: of the adapters. targets: the linears that have one, of `TARGETS`.
        head: "options": one output for each of `options`, always asked alike. "codes": one
            output for each of `options`, which are the labels that a rendered question answers
            with ("A", "B", "Yes", ...), so that any question can be asked. "value": one number.
        options: names of the head's outputs, in their order; ("value",) of a value.
        suffix: text behind the context, before the answer; of "codes" with the placeholder
            `{question}`.
        instructions: what it decides, for people.
        thresholds: option -> probability from which it wins, in the order of `options`.
        temperature: outputs are divided by it before they are normalised (Guo et al. 2017).
        calibration: figures of the file on which thresholds and temperature were chosen.
        training: seed, data hash, versions: what it takes to train it again.
        tensors: SHA-256 of the tensor file; set by `write`.
        weight_bytes: of a loaded branch, what it holds of the device's memory beside the
            trunk; not part of the description on disk.
    """

    base: str
    base_name: str
    fork: int
    exit: int
    adapt: Adapt
    rank: int
    scale: float
    targets: tuple[str, ...]
    head: HeadKind
    options: tuple[str, ...]
    suffix: str
    instructions: str = ""
    thresholds: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    calibration: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    tensors: str = ""
    weight_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name in ("fork", "exit", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise BranchError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.fork < self.exit:
            raise BranchError(f"fork ({self.fork}) must be in [0, exit), exit is {self.exit}")
        if not 1 <= self.rank <= MAX_RANK:
            raise BranchError(f"rank must be in [1, {MAX_RANK}], got {self.rank}")
        for name in ("scale", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BranchError(f"{name} must be a number, got {value!r}")
            if not -MAX_NUMBER <= value <= MAX_NUMBER or (name == "temperature" and value <= 0):
                raise BranchError(
                    f"{name} must be at most 1e30 in size, a temperature above 0, got {value!r}"
                )
        for name, known in (
            ("adapt", ("suffix", "context")),
            ("head", ("options", "codes", "value")),
        ):
            if getattr(self, name) not in known:
                raise BranchError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            raise BranchError(
                f"targets must be distinct names of {', '.join(TARGETS)}, got {list(self.targets)}"
            )
        if len(set(self.options)) != len(self.options) or not all(
            isinstance(name, str) and name for name in self.options
        ):
            raise BranchError(f"options must be distinct texts, got {list(self.options)}")
        if self.head == "value" and len(self.options) != 1:
            raise BranchError(f"a value head has one option, got {list(self.options)}")
        if self.head != "value" and not 2 <= len(self.options) <= MAX_OUTPUTS:
            raise BranchError(f"options must be 2 to {MAX_OUTPUTS} names, got {len(self.options)}")
        if not self.suffix:
            raise BranchError("suffix must not be empty: its last row is what the head reads")
        if (self.head == "codes") != ("{question}" in self.suffix):
            raise BranchError(
                "suffix has the placeholder {question} if, and only if, head is codes"
            )
        for name, value in self.thresholds.items():
            if name not in self.options or self.head != "options":
                raise BranchError(f"thresholds: {name!r} is no option of an options head")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BranchError(f"thresholds[{name!r}] must be in [0, 1], got {value!r}")

    @property
    def layers(self) -> BranchLayers:
        """Where it runs."""
        return BranchLayers(self.fork, self.exit, self.adapt)

    @property
    def stop(self) -> int:
        """As `BranchLayers.stop`."""
        return self.layers.stop

    @property
    def key(self) -> str:
        """16 hex digits that tell apart any two branches that may decide differently."""
        text = json.dumps(
            [self.base, self.fork, self.exit, self.adapt, self.scale, self.tensors], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def threshold_of(self, option: str) -> float | None:
        """The probability from which an option wins, if it has one."""
        return self.thresholds.get(option)


def read_branch(folder: str | Path) -> Branch:
    """The description in a branch's folder.

    Raises:
        BranchError: no such folder, not JSON, an unknown format or key, or a value out of range.
    """
    path = Path(folder) / DESCRIPTION
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > MAX_DESCRIPTION):
            raise BranchError(f"{path}: not a file of at most {MAX_DESCRIPTION} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BranchError(f"{path}: {error.strerror or error}") from None
    except BranchError:
        raise
    except (ValueError, RecursionError) as error:
        raise BranchError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise BranchError(f"{path}: format must be {FORMAT}")
    known = {entry.name for entry in fields(Branch)} - {_LOADED}
    for name in found:
        if name not in known:
            raise BranchError(f"{path}: unknown key {name!r}")
    for name in ("targets", "options"):
        if not isinstance(found.get(name), list):
            raise BranchError(f"{path}: {name} must be a list, got {found.get(name)!r}")
        found[name] = tuple(found[name])
    for name in ("thresholds", "calibration", "training"):
        if not isinstance(found.get(name, {}), dict):
            raise BranchError(f"{path}: {name} must be an object, got {found[name]!r}")
    for name in ("base", "base_name", "suffix", "instructions", "tensors"):
        if not isinstance(found.get(name, ""), str):
            raise BranchError(f"{path}: {name} must be a text, got {found[name]!r}")
    try:
        return Branch(**found)
    except TypeError as error:  # a key that is missing
        raise BranchError(f"{path}: {str(error).partition(') ')[2] or error}") from None
    except BranchError as error:
        raise BranchError(f"{path}: {error}") from None


def write_branch(branch: Branch, folder: str | Path) -> None:
    """Write the description; the folder must exist."""
    described = {name: value for name, value in asdict(branch).items() if name != _LOADED}
    text = json.dumps({"format": FORMAT, **described}, indent=2, ensure_ascii=False)
    (Path(folder) / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
