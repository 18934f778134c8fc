"""API keys: made here, kept as hashes, compared in constant time.

A key has 256 random bits, so one SHA-256 is enough: there is nothing to guess, which
is what salts and slow hashes are for. The file is TOML, a table a key:

    [[key]]
    name = "search-team"
    sha256 = "9f86d0..."
    admin = false                # may call /admin
    requests_per_minute = 600    # in place of the server's own limits
    tokens_per_minute = 100000
    max_concurrent = 16
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError

log = logging.getLogger("lockstep.server")

PREFIX = "sk-lockstep-"
RELOAD_SECONDS = 1.0
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")


@dataclass(frozen=True, slots=True)
class Key:
    """Who may call, and how much.

    Attributes:
        name: in logs and metrics; letters, digits and ._@-
        sha256: of the key, in hexadecimal.
        admin: may call /admin.
        requests_per_minute, tokens_per_minute, max_concurrent: None takes the server's own;
            0 is no limit.
    """

    name: str
    sha256: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


def fingerprint(secret: str) -> str:
    """SHA-256 of a key, in hexadecimal; what the file holds."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Keyring:
    """All keys of a server; the file is read again when it changes.

    Args:
        path: of the file; None for none.
        plain, admins: further keys in plain text, named "env-1", "env-2", ... and "admin-1", ...

    Raises:
        ConfigError: a file that cannot be read, or a key twice.
    """

    def __init__(
        self, path: Path | None, plain: Iterable[str] = (), admins: Iterable[str] = ()
    ) -> None:
        self._path = path
        self._given = [
            *(Key(f"env-{i}", fingerprint(key)) for i, key in enumerate(plain, 1)),
            *(Key(f"admin-{i}", fingerprint(key), admin=True) for i, key in enumerate(admins, 1)),
        ]
        self._stamp = self._stat()
        self._looked = time.monotonic()
        self._keys = _distinct([*self._given, *(read_keys(path) if path else [])])

    @property
    def needed(self) -> bool:
        """Whether callers must show a key. With a file they must, even while it is empty."""
        return bool(self._given) or self._path is not None

    def find(self, secret: str) -> Key | None:
        """The key that `secret` is. Takes as long whichever it is, or none."""
        self._reload()
        digest = fingerprint(secret)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _reload(self) -> None:
        """Take in a changed file; one that cannot be read changes nothing."""
        now = time.monotonic()
        if self._path is None or now - self._looked < RELOAD_SECONDS:
            return
        self._looked = now
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _distinct([*self._given, *read_keys(self._path)])
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("%s has changed; %d keys", self._path, len(self._keys))

    def _stat(self) -> tuple[int, int, int]:
        if self._path is None:
            return (0, 0, 0)
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_keys(path: Path) -> list[Key]:
    """The keys of a file.

    Raises:
        ConfigError: naming the file and the table at fault.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"the keys file {path} cannot be read: there is none; "
            f"`lockstep keys new NAME --file {path}` makes it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the keys file {path} cannot be read: {error}") from None
    if set(tables) - {"key"} or not isinstance(tables.get("key", []), list):
        raise ConfigError(f"the keys file {path} holds other things than [[key]] tables")
    return [
        _key(table, f"{path}, key {number}")
        for number, table in enumerate(tables.get("key", []), 1)
    ]


def _key(table: object, where: str) -> Key:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is no [[key]] table")
    unknown = set(table) - {"name", "sha256", "admin", *_LIMITS}
    if unknown:
        raise ConfigError(f"{where}: unknown entries {', '.join(sorted(unknown))}")
    name, digest, admin = table.get("name"), table.get("sha256"), table.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: name must be 1 to 64 of letters, digits and ._@-, got {name!r}"
        )
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ConfigError(f"{where} ({name}): sha256 must be 64 hexadecimal digits")
    if not isinstance(admin, bool):
        raise ConfigError(f"{where} ({name}): admin must be true or false, got {admin!r}")
    for limit in _LIMITS:
        value = table.get(limit, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{where} ({name}): {limit} must be an integer from 0, got {value!r}")
    return Key(
        name,
        digest,
        admin,
        table.get("requests_per_minute"),
        table.get("tokens_per_minute"),
        table.get("max_concurrent"),
    )


def _distinct(keys: list[Key]) -> list[Key]:
    for attribute in ("name", "sha256"):
        seen: set[str] = set()
        for key in keys:
            value = getattr(key, attribute)
            if value in seen:
                raise ConfigError(f"two keys have the same {attribute} (one is {key.name!r})")
            seen.add(value)
    return keys


def new_key(path: Path, name: str, **entries: bool | int | None) -> str:
    """Make a key, append its hash to the file (made with mode 0600), return the key itself.

    Raises:
        ConfigError: a name that is taken or not allowed; a file that cannot be read.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    table: dict[str, Any] = {"name": name, "sha256": fingerprint(secret)}
    table.update(
        {key: value for key, value in entries.items() if value is not None and value is not False}
    )
    _distinct([*(read_keys(path) if path.exists() else []), _key(table, "the new key")])
    # JSON's strings, numbers and booleans are TOML's as well.
    lines = ["[[key]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(("\n" if file.tell() else "") + "\n".join(lines) + "\n")
    return secret


def shown_secret(headers: Mapping[bytes, bytes]) -> str | None:
    """The key that a request carries: `Authorization: Bearer ...`, else `x-api-key`."""
    value = headers.get(b"authorization", b"").decode("latin-1").strip()
    scheme, _, secret = value.partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    other = headers.get(b"x-api-key", b"").decode("latin-1").strip()
    return other or None
