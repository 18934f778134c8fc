"""The branches that an engine has: their names, and when one can go."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.branch import Branch, BranchError, check_branch_name
from lockstep.runner.plan import BranchHost, Executor
from lockstep.types import Request, RequestError


class Branches:
    """Names of branches that requests may ask for, on an executor that runs them.

    A branch that lost its name stays loaded until no live request uses it.

    Attributes:
        named: by the name that requests give.
    """

    def __init__(self, executor: Executor) -> None:
        self.named: dict[str, Branch] = {}
        self._host = executor if isinstance(executor, BranchHost) else None
        self._leaving: list[str] = []  # keys of what was loaded and has no name any more

    def load(self, name: str, folder: str) -> Branch:
        """Give a branch a name, in the place of the one that had it.

        Raises:
            BranchError: it cannot be used here; the one before keeps the name.
        """
        check_branch_name(name)
        if self._host is None:
            raise BranchError("this engine runs no branches")
        branch = self._host.load_branch(folder)
        self._drop(name)
        self.named[name] = branch
        return branch

    def unload(self, name: str) -> None:
        """Take a name away: requests that ask for it are refused from now on.

        Raises:
            BranchError: there is no such branch.
        """
        if name not in self.named:
            raise BranchError(f"branch {name!r} is not loaded")
        self._drop(name)

    def find(self, name: str, key: str, field: str) -> Branch:
        """The branch of that name, and of that key unless it is "".

        Raises:
            RequestError: there is none; `field` is where the request names it.
        """
        found = self.named.get(name)
        if found is None:
            known = f" (there are {', '.join(self.named)})" if self.named else ""
            raise RequestError(
                f"branch {name!r} is not loaded{known}", field=field, code="branch_not_found"
            )
        if key not in ("", found.key):
            raise RequestError(
                f"branch {name!r} was replaced while the request was made: send it again",
                field=field,
                code="branch_replaced",
            )
        return found

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to free."""
        return not self._leaving

    def free(self, used: Collection[str]) -> None:
        """Free what has no name any more, but for the keys in `used`."""
        assert self._host is not None
        for key in self._leaving:
            if key not in used:
                self._host.unload_branch(key)
        self._leaving = [key for key in self._leaving if key in used]

    def _drop(self, name: str) -> None:
        before = self.named.pop(name, None)
        if before is not None:
            self._leaving.append(before.key)


def check_reading(request: Request) -> None:
    """Refuse a request for a branch's head that makes no sense.

    Raises:
        RequestError: naming the field.
    """
    params, length = request.sampling, len(request.prompt)
    if (
        params.max_tokens != 0
        or params.n != 1
        or params.prompt_logprobs is not None
        or request.pooling
        or request.gate is not None
    ):
        raise RequestError(
            "a request that a branch reads has max_tokens 0, n 1 and no prompt_logprobs, "
            "pooling or gate",
            field="branch",
        )
    if not 0 <= request.branch_from < length:
        raise RequestError(
            f"branch_from must be in [0, {length - 1}], got {request.branch_from}",
            field="branch_from",
        )
