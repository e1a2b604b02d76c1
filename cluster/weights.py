"""Which weights a run samples with: a model's folder, and perhaps a LoRA adapter over it, with their fingerprints."""

from pathlib import Path

from cluster.adapters import AdapterError, check_adapter, with_adapter
from cluster.checkpoint_shape import incomplete
from cluster.failures import SettingsError
from cluster.fingerprint import weights_hash
from cluster.record import Record


class Weights(Record):
    """What every engine of a pool serves before a call may reach it."""

    path: str
    """Folder of the base model, the same on every node."""
    base: str
    """Its fingerprint."""
    adapter_path: str = ""
    adapter_files: str = ""
    """Fingerprint of the adapter's folder; empty without one."""

    @property
    def fingerprint(self) -> str:
        """Of what samples: the base, or the base with the adapter."""
        return with_adapter(self.base, self.adapter_files)

    @property
    def adapter(self) -> str:
        """The adapter's name in the engines; empty without one."""
        return Path(self.adapter_path).name if self.adapter_path else ""


def read_weights(path: Path, adapter: Path | None) -> Weights:
    """Fingerprints of what lies there. Raises SettingsError if a folder cannot be what it should be, DataError for a file that cannot be
    read."""
    if not (path / "config.json").is_file():
        raise SettingsError(f"{path} is not a model folder (no config.json); run `make setup` or set model.path")
    if lack := incomplete(path):
        raise SettingsError(f"{path}: {lack}; copy or save the model again")
    weights = Weights(path=str(path), base=weights_hash(path))
    if adapter is None:
        return weights
    try:
        check_adapter(adapter)
    except AdapterError as error:
        raise SettingsError(f"model.adapter: {error}") from None
    # Absolute: engines on other nodes have another working directory.
    folder = adapter.resolve()
    return weights.model_copy(update={"adapter_path": str(folder), "adapter_files": weights_hash(folder)})
