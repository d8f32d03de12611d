"""Read the device's memory on the host, which ends this process."""

import ctypes

import torch

from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE


def read_on_the_host() -> None:
    tensor = torch.ones(10, device=DEVICE_TYPE)
    device.synchronize()
    print(ctypes.c_float.from_address(tensor.data_ptr()).value)  # this line is in the traceback


if __name__ == "__main__":
    device.register()
    read_on_the_host()
