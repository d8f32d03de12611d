"""Train a job of the benchmark ``gpu`` on the device, and write its records. The argument is the job as JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.gpu.arms import ArmJob
from benchmarks.gpu.train import train
from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group

if __name__ == "__main__":
    with software_process_group(), plugged():
        for record in train(ArmJob(**json.loads(sys.argv[1]))):
            answer(record)
