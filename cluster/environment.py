"""The environment of an engine's process: what vLLM needs, and nothing of the launcher's.

A run is started from batch systems, torchrun, notebooks and other engines' shells; their thread counts, ranks, device lists and
vLLM settings are inherited by Ray's processes and would silently size, place or break the engines. What an engine
is to see besides is said by `engine.environment`, which is part of the run's settings.
"""

import os
from collections.abc import Mapping, Sequence

from cluster.config import EngineSettings

_FOREIGN_PREFIXES = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "TORCHELASTIC_",
    "VLLM_",
)
_FOREIGN_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
    }
)


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """The variables that every engine's process is given."""
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CONFIGURE_LOGGING": "1",
        # Where StandardError finds why a process of vLLM failed.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if settings.gpus == 0:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment | settings.environment


def process_environment(
    inherited: Mapping[str, str], settings: EngineSettings, cores: int, devices: Sequence[str]
) -> dict[str, str]:
    """What an engine's process keeps of what it inherited, and what it is given.

    `cores` are those of its node, shared among the replicas where `engine.threads` does not say; `devices` are the
    GPUs that Ray assigned to it.
    """
    kept = {name: value for name, value in inherited.items() if not foreign(name)}
    if settings.gpus == 0:
        # Ray would set it to the actor's cores, rounded down to 1; the engine's own process inherits it at its start.
        kept["OMP_NUM_THREADS"] = str(settings.threads or max(1, cores // settings.replicas))
    elif devices:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return kept | engine_environment(settings)


def foreign(name: str) -> bool:
    """Whether a variable is a launcher's word about threads, devices, ranks or vLLM."""
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)


def take_environment(wanted: Mapping[str, str]) -> None:
    """Makes it this process's whole environment: before vLLM is imported and before its processes are started, for both inherit."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
