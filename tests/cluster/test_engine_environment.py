"""What a launcher set for itself does not reach an engine."""

from cluster.config import EngineSettings
from cluster.environment import process_environment

LAUNCHER = {
    "OMP_NUM_THREADS": "97",
    "MKL_NUM_THREADS": "97",
    "CUDA_VISIBLE_DEVICES": "6,7",
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "64",
    "MASTER_ADDR": "10.255.255.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "WORLD_SIZE": "64",
    "LOCAL_RANK": "3",
    "VLLM_USE_MODELSCOPE": "1",
    "VLLM_HOST_IP": "10.255.255.1",
}


def test_nothing_of_the_launcher_stays_and_everything_else_does():
    inherited = {**LAUNCHER, "PATH": "/bin", "RAY_JOB_ID": "5", "NCCL_SOCKET_IFNAME": "eth1"}
    found = process_environment(inherited, EngineSettings(replicas=2), cores=8, devices=[])
    assert {k: v for k, v in found.items() if k in LAUNCHER} == {"OMP_NUM_THREADS": "4"}
    assert found.items() >= {"PATH": "/bin", "RAY_JOB_ID": "5", "NCCL_SOCKET_IFNAME": "eth1"}.items()


def test_a_gpu_engine_sees_the_devices_that_ray_gave_it_and_no_others():
    settings = EngineSettings(gpus=2, tensor_parallel=2)
    found = process_environment(LAUNCHER, settings, cores=8, devices=["1", "4"])
    assert {k: v for k, v in found.items() if k in LAUNCHER} == {"CUDA_VISIBLE_DEVICES": "1,4"}


def test_a_variable_that_the_settings_ask_for_is_given():
    settings = EngineSettings(environment={"VLLM_USE_MODELSCOPE": "0", "OMP_NUM_THREADS": "3"})
    found = process_environment(LAUNCHER, settings, cores=8, devices=[])
    assert (found["VLLM_USE_MODELSCOPE"], found["OMP_NUM_THREADS"]) == ("0", "3")
