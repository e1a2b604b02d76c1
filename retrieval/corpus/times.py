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

        Raises ValueError for everything else, a bare year included.
        """
        try:
            instant = self._instant(value)
            if instant.tzinfo is None:
                aware = instant.replace(tzinfo=self._zone).astimezone(dt.UTC)
                self.naive_times += 1
                return aware
            return instant.astimezone(dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(f"{value!r} is not a time that can be read ({error})") from error

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
    return dt.datetime(
        year,
        month,
        day,
        int(part["hour"] or 0),
        int(part["minute"] or 0),
        int(part["second"] or 0),
        int((part["fraction"] or "0")[:6].ljust(6, "0")),
        tzinfo=zone,
    )
