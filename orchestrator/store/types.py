"""Column types with the same Python values on SQLite and Postgres."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import DateTime, Dialect, Enum, TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime in UTC. SQLite stores no zone: it is removed on writing and added on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def enum_type(cls: type[StrEnum]) -> Enum:
    """A column type that stores an enum member's value as text."""
    return Enum(
        cls,
        native_enum=False,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )
