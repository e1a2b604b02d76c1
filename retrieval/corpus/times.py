"""Instants as foreign data writes them, made UTC.

A time without an offset is taken in the zone that the settings name, and counted: whoever brings the data should know
how many days rest on that guess. What does not name a full calendar day is refused, never completed.
"""

import datetime as dt
import re
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cluster.failures import SettingsError

_ISO = re.compile(
    r"(?:(\d{4})-(\d{1,2})-(\d{1,2})|(\d{4})(\d{2})(\d{2}))"
    r"(?:[Tt ]\s*(?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:[.,](?P<fraction>\d+))?)?"
    r"\s*(?P<zone>[Zz]|UTC|GMT|(?P<sign>[+-])(?P<zone_hour>\d{2}):?(?P<zone_minute>\d{2})?)?)?",
    re.ASCII,
)
_EARLIEST_UNIX_SECONDS = 1e8
"""March 1973: a smaller number is more likely a year or a count than an instant."""
_EARLIEST_UNIX_MILLISECONDS = 1e11

_DAY = dt.timedelta(days=1)


class TimeReader:
    """Reads times with one zone for those without an offset, and counts those. Raises SettingsError for an unknown zone."""

    def __init__(self, time_zone: str) -> None:
        try:
            self._zone = ZoneInfo(time_zone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise SettingsError(
                f"time_zone {time_zone!r} is unknown; use a name such as UTC or Europe/Paris"
            ) from error
        self.naive_times = 0

    def read(self, value: Any) -> dt.datetime:
        """A UTC instant from an ISO 8601 variant, a date (its midnight), or Unix seconds or milliseconds.

        A leap second, 23:59:60 UTC, is the last microsecond of the day that it ends. Raises ValueError for everything else, a bare
        year included.
        """
        return self._read(value, dt.timedelta())

    def read_latest(self, value: Any) -> dt.datetime:
        """As `read`, but what names only a day is the end of that day: the last instant that the value can mean."""
        return self._read(value, _DAY - dt.timedelta(microseconds=1) if _names_a_day(value) else dt.timedelta())

    def _read(self, value: Any, later: dt.timedelta) -> dt.datetime:
        try:
            instant = self._instant(value)
            naive = instant.tzinfo is None
            utc = (instant.replace(tzinfo=self._zone) if naive else instant).astimezone(dt.UTC) + later
            if _has_second_60(value) and (utc.hour, utc.minute) != (23, 59):
                raise ValueError("only the last minute of a UTC day can have a second 60")
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(f"{value!r} is not a time that can be read ({error})") from error
        self.naive_times += naive
        return utc

    def _instant(self, value: Any) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        if isinstance(value, dt.date):
            return _from_iso(value.isoformat())
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value < _EARLIEST_UNIX_SECONDS:
                raise ValueError("too small for Unix seconds")
            seconds = value / 1000 if value >= _EARLIEST_UNIX_MILLISECONDS else value
            return dt.datetime.fromtimestamp(seconds, dt.UTC)
        if isinstance(value, str):
            return _from_iso(value.strip())
        raise ValueError(f"a {type(value).__name__}")


def _from_iso(text: str) -> dt.datetime:
    match = _ISO.fullmatch(text)
    if match is None:
        raise ValueError("not an ISO 8601 date or time")
    year, month, day = (int(digits) for digits in match.groups()[:6] if digits is not None)
    part = match.groupdict()
    zone: dt.tzinfo | None = None
    if part["sign"]:
        offset = dt.timedelta(hours=int(part["zone_hour"]), minutes=int(part["zone_minute"] or 0))
        zone = dt.timezone(-offset if part["sign"] == "-" else offset)
    elif part["zone"]:
        zone = dt.UTC
    second, microsecond = int(part["second"] or 0), int((part["fraction"] or "0")[:6].ljust(6, "0"))
    if second == 60:
        second, microsecond = 59, 999_999
    return dt.datetime(
        year, month, day, int(part["hour"] or 0), int(part["minute"] or 0), second, microsecond, tzinfo=zone
    )


def _names_a_day(value: Any) -> bool:
    """Whether no time of day is stated."""
    if isinstance(value, str):
        match = _ISO.fullmatch(value.strip())
        return match is not None and match["hour"] is None
    return isinstance(value, dt.date) and not isinstance(value, dt.datetime)


def _has_second_60(value: Any) -> bool:
    match = _ISO.fullmatch(value.strip()) if isinstance(value, str) else None
    return match is not None and match["second"] == "60"
