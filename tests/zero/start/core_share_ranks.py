"""Report this rank's share of the cores.

The argument is the config's block; ``--pretend`` emulates a node with GPUs.
"""

from __future__ import annotations

import argparse
import json
import os

import torch.distributed as dist

from deep_opt_states.config import ConfigError, parse_config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.machine import Core
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import node_share as cores
from deep_opt_states.zero.start.devices import AcceleratorChoice, choose_device
from deep_opt_states.zero.start.node_share import share_cores
from tests.launch import answer
from tests.zero.process_group import process_group


def main(block: str, pretend: bool) -> None:
    config = parse_config({CONFIG_KEY: json.loads(block)})
    assert config is not None
    accelerator = choose_device()
    if pretend:
        accelerator = AcceleratorChoice(HostDevice(), slots_on_host=False)
        node = tuple(Core(cpus=(cpu, cpu + 16), node=cpu // 8) for cpu in range(16))
        cores.cores_of = lambda allowed: node
        # Rank 0's GPU is on the last NUMA node.
        cores.gpu_node = lambda: dist.get_world_size() - 1 - dist.get_rank()
    try:
        share = share_cores(config, accelerator)
    except (ConfigError, RanksDisagree) as error:
        answer(f"{type(error).__name__}: {error}")
    else:
        omp = os.environ.get("OMP_NUM_THREADS")
        answer([dist.get_rank(), omp, share.threads, share.cores, share.launch_cores])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("block")
    parser.add_argument("--pretend", action="store_true")
    arguments = parser.parse_args()
    with process_group():
        main(arguments.block, arguments.pretend)
