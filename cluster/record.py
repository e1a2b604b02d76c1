"""What every record of the project is: immutable, and strict about its fields.

A record refuses unknown fields, so that a misspelt or foreign field is an error at the boundary and not a silent loss.
"""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen pydantic model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
