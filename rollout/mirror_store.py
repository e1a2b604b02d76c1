"""A folder of objects at any fsspec address, as the mirror needs it: put, get, names.

An object store has no rename and no append; a put may fail before, within or after it. So nothing here relies on a put
being whole: what was put is named after its hash by the callers, and confirmed by a second, empty object.
"""

import fsspec

from cluster.failures import DataError, InfrastructureError, SettingsError

CONFIRMATION = ".committed"


class MirrorUnreachable(InfrastructureError):
    """The store failed or could not be reached; trying again later may help."""


class MirrorStore:
    """The objects below one address. Every method raises MirrorUnreachable when the store does not do what it was asked."""

    def __init__(self, address: str) -> None:
        """Raises SettingsError for an address of which no installed package knows the protocol."""
        self.address = address.rstrip("/")
        try:
            # Listings are looked at again and again, and a cached one would hide what another driver wrote.
            self._fs, self._root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"run.mirror {address!r} is no address that can be opened here: {error}. It is an fsspec address such as "
                "file:///shared/mirror or s3://bucket/run; its package (s3fs, gcsfs, adlfs) must be installed"
            ) from error

    def put(self, path: str, data: bytes) -> None:
        """Write one object."""
        where = self._path(path)
        try:
            self._fs.makedirs(where.rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(where, data)
        except Exception as error:
            raise self._unreachable("writing", path, error) from error

    def put_confirmed(self, path: str, data: bytes) -> None:
        """Write one object, and then the empty one that says that it is whole."""
        self.put(path, data)
        # Not of no bytes: some stores do not keep such an object.
        self.put(path + CONFIRMATION, b"\n")

    def get(self, path: str) -> bytes:
        """The bytes of one object. Raises DataError if the store has none of that name."""
        try:
            return bytes(self._fs.cat_file(self._path(path)))
        except FileNotFoundError as error:
            raise DataError(f"mirror {self.address}: {path} is missing; bring it back from a copy") from error
        except Exception as error:
            raise self._unreachable("reading", path, error) from error

    def names(self, folder: str) -> list[str]:
        """The names of what lies directly in a folder; none if there is no such folder."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreachable("listing", folder, error) from error
        return [str(f).rstrip("/").rsplit("/", 1)[-1] for f in found]

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _unreachable(self, doing: str, path: str, error: Exception) -> MirrorUnreachable:
        # Every implementation raises errors of its own, and any of them may pass.
        return MirrorUnreachable(
            "mirror-unreachable", f"{doing} {self.address}/{path} failed: {type(error).__name__}: {error}"
        )
