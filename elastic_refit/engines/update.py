"""The bookkeeping of one open update, the same in every engine: what may be fed, what is missing, what it is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elastic_refit.core.manifest import Manifest
from elastic_refit.engines.base import NO_VERSION
from elastic_refit.errors import PlanMismatch, TransportError

__all__ = ["UpdateLedger"]


class UpdateLedger:
    """Which tensors of the open update came, and the version that the engine's weights may be called.

    ``version`` becomes ``NO_VERSION`` with the first tensor of an update; only who finishes it sets a number again.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._missing: dict[str, None] | None = None
        self._is_spoiled = False

    @property
    def is_open(self) -> bool:
        return self._missing is not None

    def open(self, manifest: Manifest) -> None:
        """Raises PlanMismatch if an update is open already."""
        self.require_closed()
        self._missing = dict.fromkeys(spec.name for spec in manifest.tensors)

    def require_closed(self) -> None:
        """Raises PlanMismatch if an update is open."""
        if self.is_open:
            raise PlanMismatch("a weight update is open; finish it or roll it back first")

    @contextmanager
    def taking(self, names: Iterable[str]) -> Iterator[None]:
        """Around the application of ``names``, which are fed when it succeeds.

        If it raises, nobody knows how much was applied: the update can then only be closed.

        Raises:
            PlanMismatch: no update is open, or a name is not of this update or came before; nothing has changed.
        """
        missing = self._require_open()
        taken = list(names)
        wrong = [name for number, name in enumerate(taken) if name not in missing or name in taken[:number]]
        if wrong:
            raise PlanMismatch(f"fed twice, or not part of this update: {_some(wrong)}", tensors=tuple(wrong))
        if taken:
            self.version = NO_VERSION
        self._is_spoiled = True
        yield
        self._is_spoiled = False
        for name in taken:
            del missing[name]

    def require_complete(self) -> None:
        """Raises TransportError if a tensor of the open update did not come; it stays open."""
        missing = self._require_open()
        if missing:
            raise TransportError(
                f"the update is not complete: {len(missing)} tensors are missing: {_some(missing)}",
                missing=tuple(missing),
            )

    def close(self) -> None:
        """No update is open any more; ``version`` stays what it is."""
        self._missing = None
        self._is_spoiled = False

    def _require_open(self) -> dict[str, None]:
        if self._missing is None:
            raise PlanMismatch("no update is open")
        if self._is_spoiled:
            raise PlanMismatch("the update broke off inside a tensor; it can only be rolled back")
        return self._missing


def _some(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
