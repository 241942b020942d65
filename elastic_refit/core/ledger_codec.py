"""A ledger state as plain data and back: the base that a compacted journal starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_parts import BoundedLog, PersistentMap
from elastic_refit.core.ledger_state import (
    Change,
    LedgerPolicy,
    LedgerState,
    OpenRefit,
    RefitBook,
    Rejection,
    ShardRecord,
    book_of_writers,
)
from elastic_refit.core.ledger_table import ShardState

__all__ = ["state_from_dict", "state_to_dict"]

T = TypeVar("T")


def state_to_dict(state: LedgerState) -> dict[str, Any]:
    """Plain data for JSON; everything in it, the policy included."""
    return {
        "policy": state.policy.to_dict(),
        "now_s": state.now_s,
        "shards": [[_seat(record.id), *record[1:]] for record in state.shards.values()],
        "counts": list(state.counts),
        "refits": _book_to_dict(state.refits),
        "writers": [[*key, heard_s, ranges] for key, (heard_s, ranges) in state.writers.items()],
        "history": _log_to_dict(state.history, lambda change: [change.time_s, _seat(change.shard), *change[2:]]),
        "rejections": _log_to_dict(state.rejections, list),
    }


def state_from_dict(data: dict[str, Any]) -> LedgerState:
    """The inverse of :func:`state_to_dict`.

    Raises:
        ValueError: the data is no state of this format.
    """
    try:
        records = [_record(*row) for row in data["shards"]]
        writers = [((name, number), (heard_s, _ranges(ranges))) for name, number, heard_s, ranges in data["writers"]]
        return LedgerState(
            policy=LedgerPolicy(**data["policy"]),
            now_s=data["now_s"],
            shards=PersistentMap((record.id.index, record) for record in records),
            counts=tuple(data["counts"]),
            refits=_book(data["refits"]),
            writers=book_of_writers(writers),
            history=_log(data["history"], lambda row: _change(*row)),
            rejections=_log(data["rejections"], lambda row: Rejection(*row)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a ledger state: {error!r}") from error


def _seat(shard: ShardId) -> list[int]:
    return [shard.index, shard.incarnation]


def _record(seat: list[int], state: int, *rest: Any) -> ShardRecord:
    return ShardRecord(ShardId(*seat), ShardState(state), *rest)


def _change(time_s: float, seat: list[int], before: int | None, after: int, *rest: Any) -> Change:
    return Change(time_s, ShardId(*seat), None if before is None else ShardState(before), ShardState(after), *rest)


def _ranges(plain: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((low, high) for low, high in plain)


def _book_to_dict(book: RefitBook) -> dict[str, Any]:
    plain = {each.name: getattr(book, each.name) for each in fields(book)}
    if book.open is not None:
        plain["open"] = {each.name: getattr(book.open, each.name) for each in fields(book.open)}
        plain["open"]["participants"] = [_seat(shard) for shard in sorted(book.open.participants)]
    return plain


def _book(data: dict[str, Any]) -> RefitBook:
    refit = data["open"]
    if refit is not None:
        refit = OpenRefit(**{**refit, "participants": frozenset(ShardId(*seat) for seat in refit["participants"])})
    return RefitBook(**{**data, "open": refit})


def _log_to_dict(log: BoundedLog[T], plain: Callable[[T], list[Any]]) -> dict[str, Any]:
    return {
        "limit": log.limit,
        "total": log.total,
        "older": [plain(item) for item in log.older],
        "recent": [plain(item) for item in log.recent],
    }


def _log(data: dict[str, Any], item: Callable[[list[Any]], T]) -> BoundedLog[T]:
    older, recent = (tuple(item(row) for row in data[part]) for part in ("older", "recent"))
    return BoundedLog(data["limit"], data["total"], older, recent)
