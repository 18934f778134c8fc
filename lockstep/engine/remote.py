"""The branches of an engine process, as its door knows them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace

from lockstep import messages
from lockstep.branch import Branch, BranchError, read_branch
from lockstep.config import BranchOptions
from lockstep.types import BranchLayers, LockstepError

log = logging.getLogger("lockstep.engine")

Change = messages.LoadBranch | messages.UnloadBranch


class RemoteBranches:
    """What the engine has loaded, and changes of it that are under way.

    A change counts as soon as the engine has told of it, whether somebody still waits or not.

    Attributes:
        named: the branches that requests may name.
        folders: where each of them was loaded from.
    """

    def __init__(self, load: tuple[tuple[str, str], ...]) -> None:
        self.named: dict[str, Branch] = {}
        self.folders = dict(load)
        self._layers: tuple[BranchLayers, ...] = ()  # of the first engine's first branches
        self._tickets = itertools.count()
        self._under_way: dict[int, tuple[Change, asyncio.Future[Branch | None]]] = {}

    def options(self, given: BranchOptions) -> BranchOptions:
        """For an engine that is to start with these branches, and to have room for those that
        its first predecessor was laid out for, whether they are loaded now or not."""
        layers = (*given.layers, *self._layers)
        return replace(given, load=tuple(self.folders.items()), layers=layers)

    def found(self, named: dict[str, Branch]) -> None:
        """An engine has started with these."""
        self.named = named
        if not self._layers:
            self._layers = tuple(branch.layers for branch in named.values())

    def load(self, name: str, folder: str) -> tuple[Change, asyncio.Future[Branch | None]]:
        """The message to send, and what tells the branch when that is done, or why it was not."""
        return self._begin(
            messages.LoadBranch(ticket=next(self._tickets), name=name, folder=folder)
        )

    def unload(self, name: str) -> tuple[Change, asyncio.Future[Branch | None]]:
        """As `load`; it tells None."""
        return self._begin(messages.UnloadBranch(ticket=next(self._tickets), name=name))

    def _begin(self, change: Change) -> tuple[Change, asyncio.Future[Branch | None]]:
        done: asyncio.Future[Branch | None] = asyncio.get_running_loop().create_future()
        self._under_way[change.ticket] = change, done
        return change, done

    def take(self, reply: messages.BranchReply) -> None:
        """Note what the engine has done."""
        if reply.ticket not in self._under_way:
            return
        change, done = self._under_way.pop(reply.ticket)
        if not reply.error:
            self.named.pop(change.name, None)
            self.folders.pop(change.name, None)
            if isinstance(change, messages.LoadBranch) and reply.branch is not None:
                self.named[change.name] = reply.branch
                self.folders[change.name] = change.folder
        if done.done():  # nobody waits any more
            return
        if reply.error:
            done.set_exception(BranchError(reply.error))
        else:
            done.set_result(reply.branch)

    def fail(self, error: LockstepError) -> None:
        """The engine is gone, and what it was told last with it."""
        for _, done in self._under_way.values():
            if not done.done():
                done.set_exception(error)
        self._under_way.clear()

    def forget_lost(self) -> None:
        """An engine that takes another's place starts without what is no longer there, or
        would decide otherwise: requests that name it are refused."""
        for name, folder in list(self.folders.items()):
            try:
                same = read_branch(folder).key == self.named[name].key
            except BranchError as error:
                log.error("branch %s is lost: %s", name, error)
                same = False
            else:
                if not same:
                    log.error("branch %s is lost: %s holds another one now", name, folder)
            if not same:
                del self.folders[name]
